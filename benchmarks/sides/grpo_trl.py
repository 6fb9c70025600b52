"""TRL's side of `grpo_step` and `grpo_reward_curve`: its GRPOTrainer with transformers' generate,
step by step."""

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.serve import serve
from benchmarks.sides import grpo_world
from benchmarks.sides.grpo_gate import Gate
from benchmarks.sides.grpo_world import SAMPLES_PER_PROMPT, lengths_of_step

gate = Gate()
so_far = {"generation": 0.0, "tokens": 0.0}


class EndAtLength(LogitsProcessor):
    """The end token, and only it, where a response has reached its length."""

    def __init__(self, lengths: list[int], prompt_length: int, end: int) -> None:
        self.last = torch.tensor(lengths) - 1
        self.prompt_length = prompt_length
        self.end = end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends_B = self.last == input_ids.size(1) - self.prompt_length
        scores[:, self.end] = -torch.inf
        scores[ends_B] = -torch.inf
        scores[ends_B, self.end] = 0.0
        return scores


class Stepping(TrainerCallback):
    """The first process waits for the gate, the others for the first."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            gate.wait()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero and "reward" in logs:
            gate.finished(dict(logs))


def start(processes: int, **arguments: Any) -> dict[str, Any]:
    """Loads everything in this process and, with data parallelism, in others; returns when the
    first step may begin."""
    start_other_ranks(processes, __file__, arguments)
    trainer = make_trainer(rank=0, processes=processes, **arguments)
    gate.start(trainer.train)
    return {}


def start_other_ranks(processes: int, script: str, arguments: dict[str, Any]) -> None:
    """Starts the other processes of a data-parallel run, with the same arguments, and says in the
    environment that this one is rank 0."""
    if processes == 1:
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
    }
    for rank in reversed(range(processes)):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank > 0:
            subprocess.Popen([sys.executable, script, json.dumps(arguments)])


def settings(lr: float, steps: int, batch: int) -> dict[str, Any]:
    """What both benchmarks set of `GRPOConfig`. `batch` samples of a process go into a pass."""
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": batch,
        "num_generations": SAMPLES_PER_PROMPT,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "num_iterations": 1,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "mask_truncated_completions": False,
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def make_trainer(
    rank: int,
    processes: int,
    model: str,
    prompts: list[str],
    reward: str,
    response_length: int,
    lr: float,
    steps: int,
    seed: int,
    batch: int,
    forced: bool,
) -> GRPOTrainer:
    """The trainer of one process.

    `batch` samples, over all processes, go into a forward and backward pass. `forced`: responses
    end where `lengths_of_step` says; otherwise all have `response_length` tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    score = getattr(grpo_world, reward)
    num_samples = len(prompts) * SAMPLES_PER_PROMPT
    generate = policy.generate
    generations = iter(range(steps))

    def timed_generate(**arguments: Any) -> torch.Tensor:
        started = time.perf_counter()
        if forced:
            drawn = lengths_of_step(next(generations))[rank::processes]
            arguments["logits_processor"] = [
                EndAtLength(drawn, arguments["input_ids"].size(1), tokenizer.eos_token_id)
            ]
        output = generate(**arguments)
        so_far["generation"] += time.perf_counter() - started
        return output

    policy.generate = timed_generate

    def rewards(completions: list[str], truth: list[str], **_: Any) -> list[float]:
        return [
            score("", text, ground_truth)
            for text, ground_truth in zip(completions, truth, strict=True)
        ]

    return GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=rewards,
        train_dataset=Dataset.from_dict(
            {"prompt": prompts, "truth": [prompt.split()[-1] for prompt in prompts]}
        ),
        callbacks=[Stepping()],
        args=GRPOConfig(
            **settings(lr, steps, batch // processes),
            output_dir=f"{model}_trl",
            gradient_accumulation_steps=num_samples // batch,
            max_completion_length=response_length,
            generation_kwargs={} if forced else {"min_new_tokens": response_length},
            seed=seed,
        ),
    )


def step() -> dict[str, Any]:
    """One step: its seconds, phases, tokens and reward."""
    before = dict(so_far)
    seconds, logs = gate.step()
    so_far["tokens"] = logs["num_tokens"]
    generation = so_far["generation"] - before["generation"]
    return {
        "seconds": seconds,
        "tokens": so_far["tokens"] - before["tokens"],
        "longest": logs["completions/max_length"],
        "reward": logs["reward"],
        "phases": {"gen": generation, "rest": seconds - generation},
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:  # one of the other processes of a data-parallel run
        environment = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
        make_trainer(
            environment["RANK"], environment["WORLD_SIZE"], **json.loads(sys.argv[1])
        ).train()
    else:
        serve(start, step)
