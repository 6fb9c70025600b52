"""Trains one model on examples, with one worker group."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl_like.data.conversations import ConversationDataset
from verl_like.data.sampler import EpochSampler
from verl_like.protocol import Metric, merge_metrics, metric_values
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.supervised import RMConfig, SupervisedConfig
from verl_like.trainer.loop.balancing import RowWork
from verl_like.trainer.loop.experience import Experience, Update
from verl_like.trainer.loop.training_loop import TrainingLoop
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.workers.models.pretrained import load_hf_config
from verl_like.workers.planning.flops import ModelCost


@dataclass(eq=False)
class SupervisedTrainer(TrainingLoop):
    """Minimises the loss of the worker on batches of examples; each training step is one optimizer
    step.

    `group` has the methods `init_model`, `update_model`, `evaluate`, `save_hf`, `save_checkpoint`,
    `save_result` and `load_checkpoint`.
    """

    config: SupervisedConfig
    train_dataset: ConversationDataset
    val_dataset: ConversationDataset | None
    group: WorkerGroup
    recorder: RunRecorder

    def __post_init__(self) -> None:
        data = self.config.data
        seed = self.config.trainer.seed
        num_rows = len(self.train_dataset)
        self.sampler = EpochSampler(num_rows, data.train_batch_size, seed, data.shuffle)
        self.trained = {"model": self.group}
        hf_config = load_hf_config(self.config.model, key="model")
        self.model_cost = ModelCost.of(hf_config, with_head=not isinstance(self.config, RMConfig))

    def init_workers(self) -> None:
        """Loads the model, of a resumed run with the weights of its checkpoint."""
        self.group.init_model()
        if resumed := self.recorder.resumed:
            self.global_step = resumed.checkpoint.state["global_step"]
            for note in self.group.load_checkpoint(
                str(resumed.checkpoint.folder / "model" / "checkpoint")
            )[0]:
                self.recorder.say(note)

    def take(self) -> Iterator[Experience]:
        """The (B,) examples of the present step."""
        epoch, rows = self.sampler.batch(self.global_step - 1)
        batch = self.train_dataset.collate(rows)
        work = RowWork.of(batch, self.model_cost, balance=self.config.trainer.balance_batch)
        num_tokens = Metric.sum(work.tokens_B.sum())
        yield Experience(
            batch,
            work,
            {"training/epoch": Metric(epoch, "max"), "perf/total_num_tokens": num_tokens},
        )

    def learn(self, experience: Experience) -> Update:
        """Submits one optimizer step."""
        work = experience.work
        num_examples = self.config.data.train_batch_size
        update = work.submit(self.group.update_model, experience.batch, num_examples)
        return Update([update], work.metrics(self.group.update_model, num_examples))

    def validation_is_due(self, is_last: bool) -> bool:
        return is_last or super().validation_is_due(is_last)

    def validate(self) -> dict[str, float]:
        """The means of `evaluate` over the validation set: loss and accuracy as `val-core/`, others
        as `val-aux/`."""
        assert self.val_dataset
        size = self.config.data.train_batch_size
        num_rows = len(self.val_dataset)
        parts = []
        for start in range(0, num_rows, size):
            batch = self.val_dataset.collate(range(start, min(start + size, num_rows)))
            work = RowWork.of(batch, self.model_cost, balance=self.config.trainer.balance_batch)
            parts.append(work.submit(self.group.evaluate, batch).get().meta_info["metrics"])
        merged = metric_values(merge_metrics(parts))
        return {
            f"val-{'core' if name in ('loss', 'accuracy') else 'aux'}/{name}": merged[name]
            for name in merged
        }
