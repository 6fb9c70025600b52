"""The driver of a maker: it starts the worker groups, builds the maker on them, and validates."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedTokenizerBase

from verl_like.algorithms.kl import get_kl_controller
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.protocol import DataProto
from verl_like.registry import Registry
from verl_like.single_controller.ray.resource_pool import ResourcePoolManager
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.loop.recorder import Recorder
from verl_like.trainer.ppo.choice_of_replay import hf_config_of_policy
from verl_like.trainer.ppo.display import generation_of_row
from verl_like.trainer.ppo.episode_records import EpisodeRecords
from verl_like.trainer.ppo.experience_maker import ExperienceMaker
from verl_like.trainer.ppo.inputs import PPOInputs
from verl_like.trainer.ppo.metrics import validation_metrics
from verl_like.trainer.ppo.scoring import COUNT_PREFIX, RuleScorer, reward_columns
from verl_like.trainer.ppo.workers import PlacedGroup, build_resource_pools, start_groups
from verl_like.workers.agents.episode import Episode
from verl_like.workers.planning.flops import ModelCost


@dataclass(eq=False)
class MakerDriver:
    """Drives a maker and trains nothing. Each maker of detached training has such a driver;
    `RayPPOTrainer` is a subclass that trains too.

    A subclass makes its own maker in `build_maker`. For detached training a plugin registers the
    subclass with `register_maker_driver`.

    A custom role takes part through the method `annotate` that its worker class registers. The
    method is called with the generated batch, while reference and critic compute, and the columns
    that it writes join the batch. Those in the class's `reward_columns` are added to the reward, in
    validation too.
    """

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    role_worker_mapping: dict[str, RayClassWithInitArgs]
    """The worker class of each role."""
    resource_pool_manager: ResourcePoolManager | None
    """Where the workers run. None for a subclass whose `start_groups` needs no pools, because all
    is in one process."""
    train_dataset: PromptDataset
    val_dataset: PromptDataset
    rule_scorer: RuleScorer | None
    recorder: Recorder

    @classmethod
    def of(
        cls, inputs: PPOInputs, recorder: Recorder, pools: ResourcePoolManager | None = None
    ) -> Self:
        """Makes a driver of checked inputs. It runs on the pools of their configuration, unless
        others are given."""
        if pools is None:
            roles = list(inputs.role_worker_mapping)
            pools = build_resource_pools(inputs.config, roles)
        return cls(
            config=inputs.config,
            tokenizer=inputs.tokenizer,
            role_worker_mapping=inputs.role_worker_mapping,
            resource_pool_manager=pools,
            train_dataset=inputs.train_dataset,
            val_dataset=inputs.val_dataset,
            rule_scorer=inputs.scorer,
            recorder=recorder,
        )

    def __post_init__(self) -> None:
        if self.rule_scorer:
            self.rule_scorer.on_call = self.recorder.record
        self.global_step = 0
        """How many training steps the weights that generate have had."""
        self.groups: dict[str, WorkerGroup] = {}
        self.placement: list[PlacedGroup] = []
        """Each group of processes that was started."""
        self.maker: ExperienceMaker
        """The maker that `build_maker` returned. It is there once the groups have started."""
        self.episode_records = EpisodeRecords(
            self.tokenizer, self.config.trainer.log_val_generations
        )

    def start_groups(self) -> dict[str, WorkerGroup]:
        """Starts a worker group for each role. Training roles on one pool share their processes."""
        assert self.resource_pool_manager is not None
        groups, self.placement = start_groups(
            self.config, self.role_worker_mapping, self.resource_pool_manager, self.recorder.record
        )
        return groups

    def build_maker(self) -> ExperienceMaker:
        """Builds the maker on `groups`."""
        config = self.config
        columns = reward_columns(
            self.role_worker_mapping,
            config.plan.reward_models_by_role,
            with_rules=self.rule_scorer is not None,
        )
        return ExperienceMaker(
            config=config,
            groups=self.groups,
            rule_scorer=self.rule_scorer,
            reward_columns=columns,
            kl_controller=get_kl_controller(config.algorithm.kl_ctrl),
            model_cost=ModelCost.of(hf_config_of_policy(config)),
            timer=self.recorder.timer,
        )

    def show_episodes(self, prompts: DataProto, episodes: Sequence[Episode]) -> None:
        """Gives the records of some of the episodes of (B,) prompts to the recorder."""
        has_rewards = "episode_scores" in self.maker.reward_columns
        records = self.episode_records.of(prompts, episodes, has_rewards)
        self.recorder.show_episodes(records)

    def validate(self) -> dict[str, float]:
        """Generates responses to the validation set with the sampling of `rollout.val_kwargs`,
        scores them, and shows a few of them.

        Returns the metrics `val-core/...` and `val-aux/...`. A response that could not be scored
        counts as 0 in the mean of the reward, see `generate_and_score`. The latter count these
        responses in num_skipped, num_errors and num_timeouts.
        """
        rows = list(self.val_dataset)
        prompts = self.val_dataset.collate(rows, epoch=0)
        prompts.meta_info |= {"validate": True, "global_steps": self.global_step}
        num_samples = self.config.actor_rollout_ref.rollout.val_kwargs.n
        batch, scores_B, metrics = self.maker.generate_and_score(prompts, num_samples)
        found = {}
        if "is_failed" in batch.tensors():
            # Episodes of agents that failed are no responses, and count in no mean.
            is_left = ~batch.tensors()["is_failed"]
            found["val-aux/agent/num_failed"] = float((~is_left).sum())
            found["val-aux/agent/num_episodes"] = float(is_left.sum())
            batch = batch.select_idxs(is_left)
            scores_B = scores_B[is_left]
        shown = functools.partial(
            generation_of_row, batch=batch, scores_B=scores_B, tokenizer=self.tokenizer
        )
        num_shown = self.config.trainer.log_val_generations
        self.recorder.show_generations(self.global_step, len(batch), shown, num_shown)
        found |= validation_metrics(batch, scores_B, num_samples)
        for name, count in metrics.items():
            if name.startswith(COUNT_PREFIX):
                shown_name = name.replace("reward/", "val-aux/")
                found[shown_name] = count.value
        return found


DRIVERS: Registry[type[MakerDriver]] = Registry(
    "maker driver",
    "register_maker_driver",
    taken="{refused} cannot drive makers, for {present} is registered: name one such plugin",
)
"""At most one: that of a plugin, under the name OF_PLUGIN."""
OF_PLUGIN = "of_plugin"


def register_maker_driver(driver: type[MakerDriver]) -> type[MakerDriver]:
    """Decorator of a plugin: its subclass of MakerDriver drives the makers of detached training.
    Raises ValueError for a second one."""
    DRIVERS.add(OF_PLUGIN, driver)
    return driver


def get_maker_driver() -> type[MakerDriver]:
    """Returns the class that drives a maker of detached training: that of a plugin, or
    MakerDriver."""
    return DRIVERS.entries.get(OF_PLUGIN, MakerDriver)
