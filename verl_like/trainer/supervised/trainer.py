"""Trains one model on examples: the loop around one worker group."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verl_like.data.sampler import EpochSampler
from verl_like.protocol import DataProto, Metric, merge_metrics, metric_values
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.balancing import RowWork
from verl_like.trainer.checkpoint import begin
from verl_like.trainer.run_recorder import RunRecorder
from verl_like.trainer.supervised.config import SFTConfig
from verl_like.workers.models.pretrained import load_hf_config
from verl_like.workers.planning.flops import ModelCost


class Dataset(Protocol):
    """Examples that become batches."""

    def __len__(self) -> int: ...

    def collate(self, indices: Sequence[int]) -> DataProto:
        """The batch of these examples."""


@dataclass(eq=False)
class SupervisedTrainer:
    """Minimises the loss of the worker on batches of examples; each training step is one optimizer step.

    `group` has the methods `init_model`, `update_model`, `compute_log_prob`, `save_hf`, `save_checkpoint` and
    `load_checkpoint`.
    """

    config: SFTConfig
    train_dataset: Dataset
    val_dataset: Dataset | None
    group: WorkerGroup
    recorder: RunRecorder
    global_step: int = 0

    def __post_init__(self) -> None:
        data, trainer = self.config.data, self.config.trainer
        self.sampler = EpochSampler(len(self.train_dataset), data.train_batch_size, trainer.seed, data.shuffle)
        self.model_cost = ModelCost.of(load_hf_config(self.config.model, key="model"))

    def init_workers(self) -> None:
        """Loads the model, of a resumed run with the weights of its checkpoint."""
        self.group.init_model()
        if resumed := self.recorder.resumed:
            self.global_step = resumed.checkpoint.state["global_step"]
            self.group.load_checkpoint(str(resumed.checkpoint.folder / "model" / "checkpoint"))

    def fit(self) -> None:
        """Trains for the configured number of steps, validating before and every `test_freq`, and saves the end."""
        trainer, total_steps = self.config.trainer, self.config.num_steps_of_run
        if self.val_dataset and trainer.val_before_train and not self.recorder.resumed:
            with self.recorder.validation():
                metrics = self.validate()
            self.recorder.log_validation(metrics)
        self.recorder.saves_when_ended = True
        while self.global_step < total_steps:
            self.global_step += 1
            epoch, rows = self.sampler.batch(self.global_step - 1)
            with self.recorder.step(self.global_step, epoch, total_steps) as log:
                is_last = self.global_step == total_steps
                log(self.step(self.train_dataset.collate(rows)))
                is_due = is_last or (trainer.test_freq > 0 and self.global_step % trainer.test_freq == 0)
                saves = is_last or (trainer.save_freq > 0 and self.global_step % trainer.save_freq == 0)
                if self.val_dataset and is_due:
                    with self.recorder.validation():
                        metrics = self.validate()
                    log(metrics)
                    saves |= self.recorder.is_best(self.global_step, metrics)
                saves |= self.recorder.is_ending
                if saves:
                    with self.recorder.timer("save_checkpoint"):
                        partial = self.save()
                        if is_last or self.recorder.is_ending:
                            self.group.save_hf(str(partial / "model" / "huggingface"))
            if self.recorder.is_ending and not saves:  # SIGTERM came after the step's end
                saves, partial = True, self.save()
            if saves:
                self.recorder.commit_checkpoint(partial, self.global_step, {"global_step": self.global_step})
                if self.recorder.is_ending and not is_last:
                    raise KeyboardInterrupt

    def step(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on (B,) examples; returns its metrics."""
        work = RowWork.of(batch, self.model_cost, balance=self.config.trainer.balance_batch)
        update = work.submit(self.group.update_model, batch, self.config.data.train_batch_size)
        own = {"perf/total_num_tokens": Metric.sum(work.tokens_B.sum())}
        own |= work.metrics(self.group.update_model, self.config.data.train_batch_size)
        return metric_values(merge_metrics([own, update.get().meta_info["metrics"]]))

    def validate(self) -> dict[str, float]:
        """`val-core/loss`: mean of -log p over the learned tokens of the validation set."""
        assert self.val_dataset
        total, num_tokens, size = 0.0, 0.0, self.config.data.train_batch_size
        for start in range(0, len(self.val_dataset), size):
            batch = self.val_dataset.collate(range(start, min(start + size, len(self.val_dataset))))
            log_probs_BR = self.group.compute_log_prob(batch).get().tensors()["log_probs"]
            total -= log_probs_BR.double().sum().item()
            num_tokens += batch.tensors()["response_mask"].sum().item()
        return {"val-core/loss": total / num_tokens}

    def save(self) -> Path:
        """Writes the training state; returns the folder of a checkpoint."""
        folder = begin(self.recorder.run_dir, self.global_step)
        self.group.save_checkpoint(str(folder / "model" / "checkpoint"))
        return folder
