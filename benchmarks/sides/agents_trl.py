"""TRL's side of `agents_step`: its GRPOTrainer with `environment_factory` and transformers'
generate, step by step."""

import json
import os
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_schema

from benchmarks.serve import serve
from benchmarks.sides import agents_step_world as world
from benchmarks.sides.grpo_trl import Stepping, gate, settings, start_other_ranks
from examples.agents.calculator import Calculator

so_far = {"generation": 0.0, "tokens": 0.0, "inserted": 0.0}
"""Seconds and drawn and prompt tokens of all steps, and the tokens that a call of the tool
inserts."""


def start(processes: int, **arguments: Any) -> dict[str, Any]:
    """Loads everything in this process and, with data parallelism, in others; returns when the
    first step may begin."""
    start_other_ranks(processes, __file__, arguments)
    gate.start(make_trainer(processes, **arguments).train)
    return {}


def make_trainer(processes: int, folder: str, lr: float, steps: int, batch: int) -> GRPOTrainer:
    """The trainer of one process. `batch` samples, over all processes, go into a forward and
    backward pass."""
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
    so_far["inserted"] = world.num_inserted(tokenizer)
    tokenizer.response_schema = qwen3_schema  # the form of the calls is that of Hermes, as Qwen's
    policy = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    generate = policy.generate

    def timed_generate(**arguments: Any) -> torch.Tensor:
        started = time.perf_counter()
        output = generate(**arguments)
        so_far["generation"] += time.perf_counter() - started
        return output

    policy.generate = timed_generate
    return GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        environment_factory=Calculator,
        train_dataset=Dataset.from_parquet(
            f"{folder}/prompts.parquet", cache_dir=f"{folder}/trl_data"
        ),
        callbacks=[Stepping()],
        args=GRPOConfig(
            **settings(lr, steps, batch // processes),
            output_dir=f"{folder}/trl",
            gradient_accumulation_steps=world.NUM_SAMPLES // batch,
            max_completion_length=world.RESPONSE_LENGTH,
            max_tool_calling_iterations=world.NUM_TURNS - 1,
            seed=1,
        ),
    )


def step() -> dict[str, Any]:
    """One step: its seconds, phases, tokens and reward."""
    before = dict(so_far)
    seconds, logs = gate.step()
    so_far["tokens"] = logs["num_tokens"]
    generation = so_far["generation"] - before["generation"]
    # TRL counts what the model has drawn, and not what its tools returned.
    num_calls = logs["tools/call_frequency"] * world.NUM_SAMPLES
    inserted = num_calls * so_far["inserted"]
    return {
        "seconds": seconds,
        "tokens": so_far["tokens"] - before["tokens"] + inserted,
        "reward": logs["reward"],
        "tool_calls": logs["tools/call_frequency"],
        "phases": {"gen": generation, "rest": seconds - generation},
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:  # one of the other processes of a data-parallel run
        make_trainer(int(os.environ["WORLD_SIZE"]), **json.loads(sys.argv[1])).train()
    else:
        serve(start, step)
