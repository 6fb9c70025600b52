"""Runs the steps of training on examples in this process, and says what they did."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import examples_world as examples
import step_world as world
import torch
from safetensors.torch import save_file
from step_reference import Settings, Trained
from step_runs import Recording, as_override
from transformers import PreTrainedTokenizerFast

from verl_like.protocol import metric_values
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.trainer.config import supervised as schemas
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.supervised import run_supervised
from verl_like.trainer.supervised.trainer import SupervisedTrainer
from verl_like.workers.supervised import DPOWorker, ILQLWorker, RMWorker, SFTWorker


class RecordingSFT(Recording, SFTWorker): ...


class RecordingRM(Recording, RMWorker): ...


class RecordingDPO(Recording, DPOWorker): ...


class RecordingILQL(Recording, ILQLWorker): ...


KINDS = {
    "sft": (schemas.SFTConfig, RecordingSFT),
    "rm": (schemas.RMConfig, RecordingRM),
    "dpo": (schemas.DPOConfig, RecordingDPO),
    "ilql": (schemas.ILQLConfig, RecordingILQL),
}
ARGUMENTS = ("model", "training", "batch_size", "total_training_steps", "seed")


def write_examples(folder: Path) -> None:
    """Rows, a tokenizer whose template marks turns, and models with heads, in a folder that has the
    world."""
    for name, rows in (("talks", examples.TALKS), ("pairs", examples.PAIRS)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "policy")
    tokenizer.chat_template = examples.TEMPLATE
    tokenizer.save_pretrained(folder / "talk")
    size, num_tokens = 16, len(world.VOCABULARY)
    for seed, kind in enumerate(("", "other_")):
        shutil.copytree(folder / f"{kind}policy", folder / f"{kind}valued")
        generator, heads = torch.Generator().manual_seed(seed), {}
        for name, outputs in (("q1", num_tokens), ("q2", num_tokens), ("value", 1)):
            shapes = {
                "0.weight": (2 * size, size),
                "0.bias": (2 * size,),
                "2.weight": (outputs, 2 * size),
            }
            heads |= {
                f"{name}.{part}": 0.3 * torch.randn(s, generator=generator)
                for part, s in shapes.items()
            }
        targets = {
            f"target_{name}": head + 0.1
            for name, head in heads.items()
            if not name.startswith("value")
        }
        (folder / f"{kind}valued/heads").mkdir()
        save_file(heads | targets, folder / f"{kind}valued/heads/model.safetensors")


def train(kind: str, settings: Settings, steps: int) -> Trained:
    """What the trainer's own steps do under a configuration, and a validation after them where
    there are rows."""
    schema, worker_class = KINDS[kind]
    overrides = [f"{key}={as_override(value)}" for key, value in settings.items()]
    config: Any = load_config(schema, schemas.broken_supervised_rules, overrides)
    with contextlib.ExitStack() as cleanup:
        inputs = run_supervised.check_inputs(config, cleanup)
        display = run_supervised.KINDS[schema].display
        recorder = RunRecorder(inputs.config, display)
        cleanup.callback(recorder.timeline_file.close)
        arguments = dict(
            zip(ARGUMENTS, run_supervised.worker_arguments(inputs.config), strict=True)
        )
        group = LocalWorkerGroup(RayClassWithInitArgs(worker_class, **arguments), role="model")
        trainer = SupervisedTrainer(
            inputs.config, inputs.train_dataset, inputs.val_dataset, group, recorder
        )
        trainer.init_workers()
        metrics = []
        for trainer.global_step in range(1, steps + 1):
            metrics.append(metric_values(trainer.step()))
        if inputs.val_dataset:
            metrics.append(trainer.validate())
        ((gradients, parameters),) = group.learned()
    return Trained(metrics, {"model": gradients}, {"model": parameters})
