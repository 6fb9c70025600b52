"""TRL's side of `training_on_examples`: its SFTTrainer, RewardTrainer and DPOTrainer, one step at a
time."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.serve import serve
from benchmarks.sides.grpo_gate import Gate

KINDS = {
    "sft": (SFTTrainer, SFTConfig),
    "rm": (RewardTrainer, RewardConfig),
    "dpo": (DPOTrainer, DPOConfig),
}
gate = Gate()
trainers: list[Any] = []
tokens_before = [0.0]


class Stepping(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        gate.wait()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            gate.finished(dict(logs))


def start(
    kind: str, model: str, rows: str, rows_per_pass: int, passes: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Loads data and model. A step has `passes` forward and backward passes; `settings` are of
    TRL's configuration."""
    trainer_class, config_class = KINDS[kind]
    auto = AutoModelForSequenceClassification if kind == "rm" else AutoModelForCausalLM
    reference = (
        {"ref_model": auto.from_pretrained(model, dtype=torch.float32)} if kind == "dpo" else {}
    )
    trainers[:] = [
        trainer_class(
            model=auto.from_pretrained(model, dtype=torch.float32),
            **reference,
            processing_class=AutoTokenizer.from_pretrained(model),
            train_dataset=Dataset.from_list(
                [json.loads(line) for line in Path(rows).read_text().splitlines()]
            ),
            callbacks=[Stepping()],
            args=config_class(
                output_dir=f"{model}_trl",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=rows_per_pass,
                gradient_accumulation_steps=passes,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                adam_beta1=0.9,
                adam_beta2=0.999,
                adam_epsilon=1e-8,
                max_grad_norm=1.0,
                max_steps=1000,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                **{"train_sampling_strategy": "sequential", "max_length": 1024} | settings,
            ),
        )
    ]
    return {}


def sum_of_losses() -> dict[str, Any]:
    """-log p of all learned tokens of all rows, as the SFTTrainer's batches give it, before the
    first step."""
    (trainer,) = trainers
    with torch.no_grad():
        losses = [
            trainer.compute_loss(trainer.model, inputs, num_items_in_batch=1).item()
            for inputs in trainer.get_train_dataloader()
        ]
    return {"sum": sum(losses)}


def begin() -> dict[str, Any]:
    """Returns when the first step may begin."""
    gate.start(trainers[0].train)
    return {}


def step() -> dict[str, Any]:
    """One step, with the collation of the next one: its seconds, tokens without padding, and
    loss."""
    started = time.perf_counter()
    _, logs = gate.step()
    seconds = time.perf_counter() - started
    num_tokens = logs["num_tokens"] - tokens_before[0]
    tokens_before[0] = logs["num_tokens"]
    return {"seconds": seconds, "tokens": num_tokens, "loss": logs["loss"]}


if __name__ == "__main__":
    serve(start, sum_of_losses, begin, step)
