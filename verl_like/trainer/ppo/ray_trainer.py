"""The PPO trainer: it has a maker and a learner on worker groups, and runs its steps with both."""

from collections.abc import Iterator
from contextlib import contextmanager
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
from verl_like.trainer.loop.recorder import Recorder
from verl_like.trainer.loop.training_loop import TrainingLoop
from verl_like.trainer.ppo import compared_prompts, engine_check
from verl_like.trainer.ppo.choice_of_replay import has_experts, hf_config_of_policy
from verl_like.trainer.ppo.experience_maker import Generated, Weights
from verl_like.trainer.ppo.inputs import PPOInputs, prompt_sampler
from verl_like.trainer.ppo.learner import Learner
from verl_like.trainer.ppo.maker_driver import OF_PLUGIN, MakerDriver, get_maker_driver
from verl_like.trainer.ppo.metrics import batch_metrics
from verl_like.trainer.ppo.workers import load_models
from verl_like.trainer.run.run_recorder import RunRecorder, placement_rows
from verl_like.trainer.state.checkpoint import Checkpoint
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS

_GENERATED = "generated.safetensors"
"""The file of a checkpoint with the responses that were generated ahead, for the next step."""
_METRICS = "metrics_of_generation"
"""The entry of that file's meta_info with the metrics of the generation."""


@dataclass(eq=False)
class RayPPOTrainer(MakerDriver, TrainingLoop):
    """Trains a language model by proximal policy optimisation (Schulman et al. 2017,
    arXiv:1707.06347), in any placement.

    The trainer drives its maker and its learner in one process. A subclass changes a phase by
    making its own maker or learner in `build_maker` or `build_learner`. A custom role whose worker
    has a state registers `save_checkpoint` and `load_checkpoint` to have it in checkpoints.
    """

    recorder: RunRecorder
    ptx_dataset: ConversationDataset | None = None
    """The rows of `data.ptx_files`, or None without them."""
    unknown_parameters: tuple[str, ...] = ()
    """The engine's parameters whose arrival log-probabilities show after each update."""
    compared_prompts: list[int] | None = None
    """The numbers of the prompts for these comparisons, or None for the first ones."""

    @classmethod
    def of(
        cls, inputs: PPOInputs, recorder: Recorder, pools: ResourcePoolManager | None = None
    ) -> Self:
        """Makes a trainer of checked inputs. It runs on the pools of their configuration, unless
        others are given."""
        trainer = super().of(inputs, recorder, pools)
        trainer.ptx_dataset = inputs.ptx_dataset
        return trainer

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampler = prompt_sampler(self.config, self.train_dataset)
        # In a resumed run `restore` reads the next three from the checkpoint.
        self.num_prompt_batches = 0
        """How many batches of prompts were taken so far: one a step, and more with dynamic
        sampling."""
        self.generated: Generated | None = None
        """Responses that were generated a step ahead, with `trainer.max_staleness=1`."""
        self.upcoming_batch = 0
        """The number, from 0, of the batch of prompts that `generated` answers. The batch is one of
        the `num_prompt_batches` that were taken. Without `generated` the number has no meaning."""
        self.exported: Weights | None = None
        """The weights after the present step, until they are handed on."""

    def init_workers(self) -> None:
        """Starts the processes of every pool, loads the models, and gives the weights to the
        rollout engines. A resumed run continues from its checkpoint."""
        self.groups = self.start_groups()
        self.maker = self.build_maker()
        self.learner = self.build_learner()
        self.trained = self.learner.trained
        rows = placement_rows(self.placement)  # waits for the processes
        self.recorder.show_placement(rows)
        load_models(self.groups, self.config.trainer.device, self.show_episodes)
        resumed = self.recorder.resumed
        if resumed:
            self.restore(resumed.checkpoint)
        weights = self.learner.export_weights()
        self.load_weights(weights)
        self.unknown_parameters = engine_check.unknown_parameters(self.groups[Role.Rollout])
        if self.unknown_parameters:
            note = engine_check.by_numbers(self.unknown_parameters)
            self.recorder.say(note, in_report=True)
            self.choose_compared_prompts()
        self.compare_engines()

    def choose_compared_prompts(self) -> None:
        """Chooses prompts for the comparisons after each update whose tokens reach all experts of a
        mixture, and says which experts they do not reach.

        Nothing is chosen for a model without experts.
        """
        actor = self.groups[Role.Actor]
        if not has_experts(hf_config_of_policy(self.config)):
            return
        shape = actor.router_shape()[0] if hasattr(actor, "router_shape") else None
        if shape is None:
            self.recorder.say(compared_prompts.UNKNOWN_ROUTERS, in_report=True)
            return
        num_candidates = min(compared_prompts.NUM_CANDIDATES, len(self.train_dataset))
        candidates = range(num_candidates)
        drawn = engine_check.draw(self.groups[Role.Rollout], self.train_dataset, candidates)
        if not drawn:
            return
        routed = drawn
        if ROUTED_EXPERTS not in drawn[0].tensors():
            # The engine does not record its routing, and the actor's is as good as the same.
            with self.engine_asleep():
                routed = engine_check.score(actor, drawn, with_experts=True)
        num_drawn = len(engine_check.of_tokens(drawn[0], "rollout_log_probs")) // len(drawn[0])
        chosen, reached = compared_prompts.prompts_that_reach(routed, num_drawn, shape)
        self.compared_prompts = chosen
        note = compared_prompts.said_of_experts(len(chosen), reached)
        self.recorder.say(note, in_report=True)

    @contextmanager
    def engine_asleep(self) -> Iterator[None]:
        """A context in which the actor computes after the engine has.

        On a GPU that they share, the engine sleeps meanwhile and loses its weights, so it gets them
        again. If the actor raises, it does not.
        """
        config = self.config
        on_gpu = config.trainer.device == "cuda"
        shares_gpu = on_gpu and not config.trainer.max_staleness
        sleeps = shares_gpu and config.actor_rollout_ref.rollout.free_cache_engine
        if sleeps:
            self.groups[Role.Rollout].sleep()
        yield
        if sleeps:
            weights = self.learner.export_weights()
            self.load_weights(weights)

    def compare_engines(self) -> None:
        """Raises EngineMismatch unless every replica of the rollout engine computes the same model
        as the actor.

        The replicas draw responses, and the actor computes the log-probabilities of their tokens. A
        custom actor or rollout without the methods for this is not checked; a note says so.
        """
        actor = self.groups[Role.Actor]
        rollout = self.groups[Role.Rollout]
        if not hasattr(actor, "score_greedy"):
            self.recorder.say(engine_check.UNKNOWN_ACTOR)
            return
        drawn = engine_check.draw(rollout, self.train_dataset, self.compared_prompts)
        if not drawn:
            self.recorder.say(engine_check.UNKNOWN_ROLLOUT)
            return
        with self.engine_asleep():
            log_probs = engine_check.log_probs_of(actor, drawn)
            engine_check.require_one_model(self.config, "", drawn, log_probs)

    def build_learner(self) -> Learner:
        return Learner(self.config, self.groups, self.ptx_dataset)

    def take(self) -> Iterator[Experience]:
        """Yields the experience of one batch of prompts, made with the newest weights.

        With `trainer.max_staleness=1` training is one step behind generation: the responses of this
        step were generated during the previous one, and those of the next step are generated during
        this one, with the same weights. The last step has no next one.
        """
        if self.generated:
            prompts = self.prompts_of(self.upcoming_batch)
        else:
            prompts = self.next_prompts()
        upcoming = None
        self.upcoming_batch = self.num_prompt_batches
        has_next_step = self.global_step < self.last_step
        if self.config.trainer.max_staleness and has_next_step:
            next_prompts = self.next_prompts()
            upcoming = of_step(next_prompts, self.global_step + 1)

        epoch = Metric(prompts.meta_info["epoch"], "max")
        prompts = of_step(prompts, self.global_step)
        generated = self.generated or self.maker.sample(prompts, self.next_prompts)
        # The next step's responses are generated during the rest of this step.
        generation = self.maker.begin(upcoming) if upcoming else None
        experience = self.maker.complete(generated)
        metrics = merge_metrics([experience.metrics, {"training/epoch": epoch}])
        yield replace(experience, metrics=metrics)
        self.generated = None
        if upcoming:
            self.generated = self.maker.sample(upcoming, self.next_prompts, generation)

    def learn(self, experience: Experience) -> Update:
        """Submits the updates of critic and actor, and after the actor's the export of its weights.

        On separate pools the updates run at the same time, on a shared one they queue. The numbers
        are the same.
        """
        update = self.learner.learn(experience)
        self.exported = self.learner.export_weights()
        return update

    def metrics_of(self, experience: Experience) -> dict[str, Metric]:
        data = self.config.data
        return batch_metrics(experience.batch, data.max_prompt_length, data.max_response_length)

    def hand_on(self) -> None:
        """Gives the weights that `learn` exported to the maker."""
        assert self.exported, "they are exported behind the update"
        weights = self.exported
        # A reference kept here would hold their host memory until the next weights are exported.
        self.exported = None
        with self.recorder.timer("update_weights"):
            self.load_weights(weights)
            if self.unknown_parameters:
                self.compare_engines()

    def next_prompts(self) -> DataProto:
        """Takes the next batch of prompts."""
        number = self.num_prompt_batches
        self.num_prompt_batches += 1
        return self.prompts_of(number)

    def prompts_of(self, number: int) -> DataProto:
        """Returns the batch of prompts with a number. The first batch of the run has number 0."""
        epoch, numbers = self.sampler.batch(number)
        rows = [self.train_dataset[i] for i in numbers]
        prompts = self.train_dataset.collate(rows, epoch)
        prompts.meta_info["epoch"] = epoch
        return prompts

    def load_weights(self, weights: Weights) -> None:
        """Gives the learner's weights to the maker.

        This is needed during the critic's warm-up too, in which the weights stay the same: an
        engine that slept has lost them.
        """
        # If wrong weights arrive the run ends, so the engines need not keep the ones they have.
        self.maker.load_weights(weights, checks_first=False)
        self.learner.actor.report_finished_calls()  # no call waits for the export itself

    def save(self) -> Path:
        """Saves as `TrainingLoop.save` does, with the state of other roles and the responses that
        were generated ahead."""
        folder = super().save()
        for role, group in self.groups_with_state.items():
            path = str(folder / role / "checkpoint")
            group.save_checkpoint(path)
        if self.generated:
            # Scores that are still computed cannot be saved.
            self.generated = self.maker.with_scores(self.generated)
            saved = self.generated.batch.select()
            saved.meta_info[_METRICS] = self.generated.metrics
            saved.save_to_disk(folder / _GENERATED)
        return folder

    @property
    def groups_with_state(self) -> dict[str, WorkerGroup]:
        """The groups of roles that are not trained here, but have a state in checkpoints."""
        return {
            role: group
            for role, group in self.groups.items()
            if hasattr(group, "save_checkpoint") and role not in self.trained
        }

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "num_prompt_batches": self.num_prompt_batches,
            "upcoming_batch": self.upcoming_batch,
            "version": self.learner.version,
            "kl_coef": self.maker.kl_controller.value,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Reads the state of a checkpoint, so that the run continues after its step."""
        state = checkpoint.state
        self.global_step = state["global_step"]
        self.num_prompt_batches = state["num_prompt_batches"]
        self.upcoming_batch = state["upcoming_batch"]
        self.maker.kl_controller.value = state["kl_coef"]
        for note in self.learner.restore(checkpoint.folder, state["version"]):
            self.recorder.say(note)
        for role, group in self.groups_with_state.items():
            path = str(checkpoint.folder / role / "checkpoint")
            group.load_checkpoint(path)
        generated = checkpoint.folder / _GENERATED
        if generated.exists():
            self.generated = read_generated(generated, self.train_dataset.pad_token_id)


def of_step(prompts: DataProto, step: int) -> DataProto:
    """Returns the same prompts with the number of a training step, which seeds the sampling."""
    numbered = prompts.select()
    numbered.meta_info["global_steps"] = step
    return numbered


def read_generated(path: Path, pad_token_id: int) -> Generated:
    """Reads the responses that a checkpoint holds. Earlier versions wrote padded batches, which
    lose their padding here."""
    batch = DataProto.load_from_disk(path)
    prompts = batch.tensors()["prompts"]
    if not is_jagged(prompts):
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
    """Raises ValueError if a plugin registered a driver of makers but no trainer. Only detached
    training would call such a driver."""
    driver = get_maker_driver()
    if driver is not MakerDriver and get_trainer() is RayPPOTrainer:
        raise ValueError(
            f"the plugin's {driver.__name__} drives makers of detached training, and here nothing "
            "would call it: give its methods to a subclass of RayPPOTrainer, too, and register "
            "that with register_trainer of verl_like.trainer.ppo.ray_trainer"
        )
