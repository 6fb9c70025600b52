"""The PPO trainer: a maker and a learner on worker groups, and the step that they make together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from verl_like.data.conversations import ConversationDataset
from verl_like.protocol import DataProto, Metric, merge_metrics
from verl_like.protocol.padded import without_padding
from verl_like.protocol.row_ops import is_jagged
from verl_like.registry import Registry
from verl_like.single_controller.ray.resource_pool import ResourcePoolManager
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.roles import Role
from verl_like.trainer.loop.experience import Experience, Update
from verl_like.trainer.loop.training_loop import TrainingLoop
from verl_like.trainer.ppo import engine_check
from verl_like.trainer.ppo.experience_maker import Generated, Weights
from verl_like.trainer.ppo.inputs import PPOInputs, prompt_sampler
from verl_like.trainer.ppo.learner import Learner
from verl_like.trainer.ppo.maker_driver import OF_PLUGIN, MakerDriver, get_maker_driver
from verl_like.trainer.ppo.metrics import batch_metrics
from verl_like.trainer.ppo.workers import load_models
from verl_like.trainer.run.run_recorder import RunRecorder, placement_rows
from verl_like.trainer.state.checkpoint import Checkpoint
from verl_like.workers.actor import ScoringWorker

_GENERATED = "generated.safetensors"
"""File of a checkpoint with the responses of the next step, and the entry of its meta_info with
their metrics."""
_METRICS = "metrics_of_generation"


@dataclass(eq=False)
class RayPPOTrainer(MakerDriver[RunRecorder], TrainingLoop):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) of a language model,
    for every placement.

    It drives its maker and its learner in one process. A custom role with a state of its own
    registers `save_checkpoint` and `load_checkpoint`. A subclass changes a phase by making its own
    maker or learner in `build_maker` or `build_learner`.
    """

    recorder: RunRecorder
    ptx_dataset: ConversationDataset | None = None

    @classmethod
    def of(
        cls, inputs: PPOInputs, recorder: RunRecorder, pools: ResourcePoolManager | None = None
    ) -> Self:
        """Of checked inputs, on the pools of their configuration unless others are given."""
        trainer = super().of(inputs, recorder, pools)
        trainer.ptx_dataset = inputs.ptx_dataset
        return trainer

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampler = prompt_sampler(self.config, self.train_dataset)
        self.num_prompt_batches = 0
        """Batches of prompts that were taken so far: one a step, and more with dynamic sampling."""
        self.generated: Generated | None = None
        """The responses of the next step, with `trainer.max_staleness=1`."""
        self.upcoming_batch = 0
        """The number of their batch of prompts."""
        self.exported: Weights | None = None
        """The weights of the present step, until they are handed on."""

    def init_workers(self) -> None:
        """Starts the processes of every pool and loads the models."""
        self.groups = self.start_groups()
        self.maker, self.learner = self.build_maker(), self.build_learner()
        self.trained = self.learner.trained
        self.recorder.show_placement(placement_rows(self.placement))  # waits for the processes
        load_models(self.groups, self.config.trainer.device)
        if self.recorder.resumed:
            self.restore(self.recorder.resumed.checkpoint)
        self.load_weights(self.learner.export_weights())
        self.compare_engines()

    def compare_engines(self) -> None:
        """Raises EngineMismatch unless every replica computes the actor's model with the weights
        that it was given."""
        config = self.config
        actor = self.groups[Role.Actor]
        if not hasattr(actor, ScoringWorker.score_greedy.__name__):
            self.recorder.say(engine_check.UNKNOWN_ACTOR)
            return
        drawn = engine_check.draw(self.groups[Role.Rollout], self.train_dataset)
        if not drawn:
            self.recorder.say(engine_check.UNKNOWN_ROLLOUT)
            return
        # On a GPU that they share, the actor computes when the engine sleeps, which then has no
        # weights.
        is_shared = config.trainer.device == "cuda" and not config.trainer.max_staleness
        sleeps = is_shared and config.actor_rollout_ref.rollout.free_cache_engine
        if sleeps:
            self.groups[Role.Rollout].sleep()
        log_probs = engine_check.log_probs_of(actor, drawn)
        engine_check.require_one_model(config, "", drawn, log_probs)
        if sleeps:
            self.load_weights(self.learner.export_weights())

    def build_learner(self) -> Learner:
        return Learner(self.config, self.groups, self.ptx_dataset)

    def take(self) -> Iterator[Experience]:
        """Experience of the next batch of prompts, made with the newest weights.

        With `trainer.max_staleness=1` the responses of the next step are generated beside it, with
        the same weights.
        """
        prompts = self.prompts_of(self.upcoming_batch) if self.generated else self.next_prompts()
        self.upcoming_batch = self.num_prompt_batches
        is_ahead = self.config.trainer.max_staleness and self.global_step < self.last_step
        upcoming = of_step(self.next_prompts(), self.global_step + 1) if is_ahead else None
        epoch = {"training/epoch": Metric(prompts.meta_info["epoch"], "max")}

        prompts = of_step(prompts, self.global_step)
        generated = self.generated or self.maker.sample(prompts, self.next_prompts)
        # The generation of the next step runs while the rest of this one does.
        generation = self.maker.begin(upcoming) if upcoming else None
        experience = self.maker.complete(generated)
        yield replace(experience, metrics=merge_metrics([experience.metrics, epoch]))
        self.generated = None
        if upcoming:
            self.generated = self.maker.sample(upcoming, self.next_prompts, generation)

    def learn(self, experience: Experience) -> Update:
        """Submits the updates of critic and actor, and the export behind the actor's.

        On pools of their own they overlap, on a shared one they queue, and the numbers are the
        same.
        """
        update = self.learner.learn(experience)
        self.exported = self.learner.export_weights()
        return update

    def metrics_of(self, experience: Experience) -> dict[str, Metric]:
        data = self.config.data
        return batch_metrics(experience.batch, data.max_prompt_length, data.max_response_length)

    def hand_on(self) -> None:
        """Takes the weights to the maker."""
        assert self.exported, "they are exported behind the update"
        weights = self.exported
        # Else the host memory that they are in would stay until the next ones are there
        self.exported = None
        with self.recorder.timer("update_weights"):
            self.load_weights(weights)

    def next_prompts(self) -> DataProto:
        """The next batch of prompts."""
        self.num_prompt_batches += 1
        return self.prompts_of(self.num_prompt_batches - 1)

    def prompts_of(self, number: int) -> DataProto:
        """The batch of prompts with that number; they count from 0."""
        epoch, rows = self.sampler.batch(number)
        prompts = self.train_dataset.collate([self.train_dataset[i] for i in rows], epoch)
        prompts.meta_info["epoch"] = epoch
        return prompts

    def load_weights(self, weights: Weights) -> None:
        """Takes the learner's weights to the maker.

        Also during the critic's warm-up: an engine that slept has no weights.
        """
        # Where other weights arrived the run ends, so that none need be kept.
        self.maker.load_weights(weights, checks_first=False)
        self.learner.actor.report_finished_calls()  # no call waits for the export itself

    def save(self) -> Path:
        """`TrainingLoop.save`, with the state of other roles and the responses that are ahead."""
        folder = super().save()
        for role, group in self.groups_with_state.items():
            group.save_checkpoint(str(folder / role / "checkpoint"))
        if self.generated:
            self.generated = self.maker.with_scores(self.generated)
            saved = self.generated.batch.select()
            saved.meta_info |= {_METRICS: self.generated.metrics}
            saved.save_to_disk(folder / _GENERATED)
        return folder

    @property
    def groups_with_state(self) -> dict[str, WorkerGroup]:
        """Those of roles that are not trained here and save a state of their own."""
        others = {role: group for role, group in self.groups.items() if role not in self.trained}
        return {role: group for role, group in others.items() if hasattr(group, "save_checkpoint")}

    def state(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("num_prompt_batches", "upcoming_batch")}
        return (
            super().state()
            | counts
            | {"version": self.learner.version, "kl_coef": self.maker.kl_controller.value}
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on after the step of a checkpoint."""
        state = checkpoint.state
        for name in ("global_step", "num_prompt_batches", "upcoming_batch"):
            setattr(self, name, state[name])
        for note in self.learner.restore(checkpoint.folder, state["version"]):
            self.recorder.say(note)
        for role, group in self.groups_with_state.items():
            group.load_checkpoint(str(checkpoint.folder / role / "checkpoint"))
        self.maker.kl_controller.value = state["kl_coef"]
        if (generated := checkpoint.folder / _GENERATED).exists():
            self.generated = read_generated(generated, self.train_dataset.pad_token_id)


def of_step(prompts: DataProto, step: int) -> DataProto:
    """The same prompts with the number of a training step, which seeds the sampling."""
    numbered = prompts.select()
    numbered.meta_info["global_steps"] = step
    return numbered


def read_generated(path: Path, pad_token_id: int) -> Generated:
    """Responses that a checkpoint holds, also one of an earlier version, whose batches were
    padded."""
    batch = DataProto.load_from_disk(path)
    if not is_jagged(batch.tensors()["prompts"]):
        batch = without_padding(batch, pad_token_id)
    metrics = batch.meta_info.pop(_METRICS)
    return Generated(batch, None, metrics)


TRAINERS: Registry[type[RayPPOTrainer]] = Registry(
    "trainer",
    "register_trainer",
    taken="{refused} cannot train, for {present} is registered: name one such plugin",
)
"""At most one: that of a plugin, under the name OF_PLUGIN."""


def register_trainer(trainer: type[RayPPOTrainer]) -> type[RayPPOTrainer]:
    """Decorator of a plugin: its subclass of RayPPOTrainer trains. Raises ValueError for a second
    one."""
    TRAINERS.add(OF_PLUGIN, trainer)
    return trainer


def get_trainer() -> type[RayPPOTrainer]:
    """Returns the class that trains: that of a plugin, or RayPPOTrainer."""
    return TRAINERS.entries.get(OF_PLUGIN, RayPPOTrainer)


def require_trainer_of_driver() -> None:
    """Raises ValueError for a plugin that has a driver of makers alone, which only detached
    training would call."""
    driver = get_maker_driver()
    if driver is not MakerDriver and get_trainer() is RayPPOTrainer:
        raise ValueError(
            f"the plugin's {driver.__name__} drives makers of detached training, and here nothing "
            "would call it: give its methods to a subclass of RayPPOTrainer, too, and register "
            "that with register_trainer of verl_like.trainer.ppo.ray_trainer"
        )
