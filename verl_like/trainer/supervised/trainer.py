"""The trainer on examples: it trains one model with one worker group."""

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
    """Minimises a loss on batches of examples. A training step is one optimizer step. The workers
    of `group` are of a subclass of `SupervisedWorker`, which says what the loss is."""

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
        with_head = not isinstance(self.config, RMConfig)
        self.model_cost = ModelCost.of(hf_config, with_head=with_head)

    def init_workers(self) -> None:
        """Loads the model. A resumed run continues after the step of its checkpoint."""
        self.group.init_model()
        resumed = self.recorder.resumed
        if resumed is None:
            return
        checkpoint = resumed.checkpoint
        self.global_step = checkpoint.state["global_step"]
        folder = checkpoint.folder / "model" / "checkpoint"
        notes_of_ranks = self.group.load_checkpoint(str(folder))
        for note in notes_of_ranks[0]:  # every rank returns the same
            self.recorder.say(note)

    def take(self) -> Iterator[Experience]:
        """Yields the (B,) examples of the present step."""
        epoch, rows = self.sampler.batch(self.global_step - 1)
        batch = self.train_dataset.collate(rows)
        balance = self.config.trainer.balance_batch
        work = RowWork.of(batch, self.model_cost, balance=balance)
        num_tokens = work.tokens_B.sum()
        metrics = {
            "training/epoch": Metric(epoch, "max"),
            "perf/total_num_tokens": Metric.sum(num_tokens),
        }
        yield Experience(batch, work, metrics)

    def learn(self, experience: Experience) -> Update:
        """Submits one optimizer step."""
        work = experience.work
        method = self.group.update_model
        num_examples = self.config.data.train_batch_size
        update = work.submit(method, experience.batch, num_examples)
        metrics = work.metrics(method, num_examples)
        return Update([update], metrics)

    def validation_is_due(self, is_last: bool) -> bool:
        """Returns whether a validation follows this step. The last step always has one."""
        return is_last or super().validation_is_due(is_last)

    def validate(self) -> dict[str, float]:
        """Computes the means of what `evaluate` measures over the validation set. Loss and accuracy
        are called `val-core/...`, other metrics `val-aux/...`."""
        assert self.val_dataset
        config = self.config
        size = config.data.train_batch_size
        num_rows = len(self.val_dataset)
        parts = []
        for start in range(0, num_rows, size):
            rows = range(num_rows)[start : start + size]
            batch = self.val_dataset.collate(rows)
            work = RowWork.of(batch, self.model_cost, balance=config.trainer.balance_batch)
            evaluated = work.submit(self.group.evaluate, batch).get()
            parts.append(evaluated.meta_info["metrics"])
        values = metric_values(merge_metrics(parts))
        metrics = {}
        for name, value in values.items():
            prefix = "val-aux"
            if name in ("loss", "accuracy"):
                prefix = "val-core"
            metrics[f"{prefix}/{name}"] = value
        return metrics
