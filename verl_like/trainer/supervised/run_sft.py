"""Supervised fine-tuning for the run shell: what is its own of a run."""

import contextlib
from dataclasses import dataclass
from functools import partial

from verl_like.data.conversations import ConversationDataset
from verl_like.data.sampler import EpochSampler
from verl_like.single_controller.ray.resource_pool import RayResourcePool
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from verl_like.trainer.display import Display
from verl_like.trainer.run import run
from verl_like.trainer.run_recorder import RunRecorder, placement_rows
from verl_like.trainer.supervised.config import SFTConfig
from verl_like.trainer.supervised.trainer import SupervisedTrainer
from verl_like.trainer.worker_template import WorkerTemplate
from verl_like.workers.models.pretrained import load_hf_config, load_tokenizer
from verl_like.workers.supervised import SFTWorker

DISPLAY = Display(
    step_line=(
        ("loss", ("sft/loss",), "{:.4f}"),
        ("lr", ("sft/lr",), "{:.1e}"),
        ("grad", ("sft/grad_norm",), "{:.2f}"),
        ("tok/s", ("perf/total_throughput",), "{:,.0f}"),
    ),
    phases=("update_model", "testing", "save_checkpoint"),
    stages=(("update_model",), ()),
    charts=(
        ("Validation", ("val-core/",), "loss"),
        ("Loss", ("sft/loss",), "nats per learned token"),
        ("Gradient norm", ("sft/grad_norm",), ""),
        ("Seconds a step", ("timing_s/step",), "s"),
    ),
)


@dataclass(frozen=True)
class SFTInputs:
    """What fine-tuning needs, checked."""

    config: SFTConfig
    train_dataset: ConversationDataset
    val_dataset: ConversationDataset | None
    notes: tuple[str, ...]


def run_sft(config: SFTConfig, template: WorkerTemplate | None = None) -> int:
    """Runs supervised fine-tuning; returns the exit code."""
    return run(config, check_inputs, fit, DISPLAY, template)


def check_inputs(config: SFTConfig, cleanup: contextlib.ExitStack) -> SFTInputs:
    """Checks model and data and fills in the number of training steps; raises ValueError."""
    load_hf_config(config.model, key="model")
    data = config.data
    load = partial(
        ConversationDataset,
        tokenizer=load_tokenizer(config.model),
        max_length=data.max_length,
        overlong=data.overlong,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    train = load(data.train_files, max_samples=data.train_max_samples)
    val = load(data.val_files, max_samples=data.val_max_samples) if data.val_files else None
    sampler = EpochSampler(len(train), data.train_batch_size, config.trainer.seed, data.shuffle)
    if config.trainer.total_training_steps is None:
        steps = sampler.num_batches_per_epoch * config.trainer.total_epochs
        config = config.updated({"trainer.total_training_steps": steps})
    too_long = f" ({train.num_dropped} too long and left out, {train.num_truncated} cut)"
    notes = [f"{len(train):,} training conversations{too_long if train.num_dropped or train.num_truncated else ''}"]
    notes += [f"{len(val):,} validation conversations"] if val else []
    return SFTInputs(config, train, val, tuple(notes))


def fit(inputs: SFTInputs, recorder: RunRecorder) -> None:
    """Starts the workers and trains to the end."""
    config, trainer = inputs.config, inputs.config.trainer
    worker = RayClassWithInitArgs(
        SFTWorker, config.model, config.training, config.data.train_batch_size, config.num_steps_of_run
    )
    pool = RayResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, trainer.device == "cuda", "model_pool")
    group = RayWorkerGroup(
        pool, worker, role="model", deadline_s=trainer.call_timeout_s, on_call=recorder.timeline.record
    )
    recorder.show_placement(placement_rows([("model_pool", ["model"], group)]))
    sft = SupervisedTrainer(config, inputs.train_dataset, inputs.val_dataset, group, recorder)
    sft.init_workers()
    sft.fit()
