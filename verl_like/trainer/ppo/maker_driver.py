"""What drives a maker: it starts the worker groups, builds the maker on them, and validates with
it."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from transformers import PreTrainedTokenizerBase

from verl_like.algorithms.kl import get_kl_controller
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.protocol import metric_values
from verl_like.single_controller.ray.resource_pool import ResourcePoolManager
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs, RayWorkerGroup
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.loop.recorder import Recorder
from verl_like.trainer.ppo.display import generation_of_row
from verl_like.trainer.ppo.experience_maker import ExperienceMaker
from verl_like.trainer.ppo.inputs import PPOInputs
from verl_like.trainer.ppo.metrics import validation_metrics
from verl_like.trainer.ppo.scoring import RuleScorer, reward_columns
from verl_like.trainer.ppo.workers import build_resource_pools, start_groups
from verl_like.workers.models.pretrained import load_hf_config
from verl_like.workers.planning.flops import ModelCost

RecorderT = TypeVar("RecorderT", bound=Recorder)


@dataclass(eq=False)
class MakerDriver(Generic[RecorderT]):
    """The driver of a maker. It trains nothing: a maker of detached training has this, and
    `RayPPOTrainer` is one.

    A subclass makes its own maker in `build_maker`; for detached training a plugin registers it
    with `register_maker_driver`.

    `role_worker_mapping` says which worker class plays each role, `resource_pool_manager` where it
    runs. A custom role takes part through its registered method `annotate`. It is called with the
    generated batch, next to the reference and the critic, and the columns it writes join the batch.
    Those in its class's `reward_columns` are added to the reward, in validation too.
    """

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    role_worker_mapping: dict[str, RayClassWithInitArgs]
    resource_pool_manager: ResourcePoolManager | None
    """None for a subclass whose `start_groups` needs no pools, as in one process."""
    train_dataset: PromptDataset
    val_dataset: PromptDataset
    rule_scorer: RuleScorer | None
    recorder: RecorderT

    @classmethod
    def of(
        cls, inputs: PPOInputs, recorder: RecorderT, pools: ResourcePoolManager | None = None
    ) -> Self:
        """Of checked inputs, on the pools of their configuration unless others are given."""
        mapping = inputs.role_worker_mapping
        pools = pools or build_resource_pools(inputs.config, list(mapping))
        data = inputs.train_dataset, inputs.val_dataset, inputs.scorer
        return cls(inputs.config, inputs.tokenizer, mapping, pools, *data, recorder)

    def __post_init__(self) -> None:
        if self.rule_scorer:
            self.rule_scorer.on_call = self.recorder.record
        self.global_step = 0
        """Training steps behind the weights that generate."""
        self.groups: dict[str, WorkerGroup] = {}
        self.placement: list[tuple[str, list[str], RayWorkerGroup]] = []
        self.maker: ExperienceMaker
        """What `build_maker` returned, once the groups have started."""

    def start_groups(self) -> dict[str, WorkerGroup]:
        """A worker group for each role; training roles of one pool share their processes."""
        assert self.resource_pool_manager is not None
        groups, self.placement = start_groups(
            self.config, self.role_worker_mapping, self.resource_pool_manager, self.recorder.record
        )
        return groups

    def build_maker(self) -> ExperienceMaker:
        """The maker on `groups`."""
        config = self.config
        worker_classes = {role: built.cls for role, built in self.role_worker_mapping.items()}
        model = load_hf_config(config.actor_rollout_ref.model, key="actor_rollout_ref.model")
        return ExperienceMaker(
            config=config,
            groups=self.groups,
            rule_scorer=self.rule_scorer,
            reward_columns=reward_columns(
                worker_classes, config.plan.reward_models_by_role, self.rule_scorer is not None
            ),
            kl_controller=get_kl_controller(config.algorithm.kl_ctrl),
            model_cost=ModelCost.of(model),
            timer=self.recorder.timer,
        )

    def validate(self) -> dict[str, float]:
        """Scores the validation set with `rollout.val_kwargs` and shows a few generations;
        `val-core/...` metrics."""
        prompts = self.val_dataset.collate(list(self.val_dataset), epoch=0)
        prompts.meta_info |= {"validate": True, "global_steps": self.global_step}
        num_samples = self.config.actor_rollout_ref.rollout.val_kwargs.n
        batch, scores_B, metrics = self.maker.generate_and_score(prompts, num_samples)
        shown = partial(generation_of_row, batch=batch, scores_B=scores_B, tokenizer=self.tokenizer)
        num_shown = self.config.trainer.log_val_generations
        self.recorder.show_generations(self.global_step, len(batch), shown, num_shown)
        counts = {
            name.replace("reward/", "val-aux/"): n
            for name, n in metric_values(metrics).items()
            if name.startswith("reward/num_")
        }
        return validation_metrics(batch, scores_B) | counts


_DRIVERS: list[type[MakerDriver[Any]]] = [MakerDriver]


def register_maker_driver(driver: type[MakerDriver[Any]]) -> type[MakerDriver[Any]]:
    """Decorator of a plugin: its subclass of MakerDriver drives the makers of detached training.
    Raises ValueError for a second one."""
    if len(_DRIVERS) > 1:
        raise ValueError(
            f"{driver} cannot drive makers, for {_DRIVERS[-1]} is registered: name one such plugin"
        )
    _DRIVERS.append(driver)
    return driver


def get_maker_driver() -> type[MakerDriver[Any]]:
    """The class that drives a maker of detached training: that of a plugin, or MakerDriver."""
    return _DRIVERS[-1]
