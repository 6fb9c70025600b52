"""The whole configuration of a PPO run: what the trainer reads, around what the workers read
(workers/config); and the plan, which follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Strict

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.algorithms.corrections import RolloutCorrectionConfig
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.registry import AlgorithmRegistry
from verl_like.config_model import (
    ConfigModel,
    Follows,
    FromZeroToOne,
    MinusOneOrPositive,
    NonNegativeFloat,
    NonNegativeInt,
    OpenConfigModel,
    PositiveFloat,
    PositiveInt,
)
from verl_like.trainer.config.roles import Role
from verl_like.trainer.config.run_config import LoopConfig, Paths, RunConfig, Strings
from verl_like.workers.config.agent import AgentConfig
from verl_like.workers.config.roles import (
    ActorRolloutRefConfig,
    CriticConfig,
    FurtherRewardModelConfig,
    KlPenalty,
    RewardModelConfig,
)


class DataConfig(ConfigModel):
    """Prompts: where they are and how they become batches."""

    train_files: Paths
    """Training prompts: one file or a list of files (parquet, JSON, JSONL) in verl's schema."""
    val_files: Paths
    """Validation prompts: one file or a list of files."""
    prompt_key: str = "prompt"
    """Column that holds the prompt, a list of chat messages."""
    reward_fn_key: str = "data_source"
    """Column that names the data source, by which a reward function is chosen."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens; where prompts are padded, to it."""
    max_response_length: PositiveInt = 512
    """Longest response in tokens; generation stops there."""
    train_batch_size: PositiveInt = 1024
    """PROMPTS of one training step; each brings actor_rollout_ref.rollout.n responses."""
    shuffle: bool = True
    """Draw the training prompts of an epoch in random order, a function of trainer.seed and the
    epoch."""
    train_max_samples: MinusOneOrPositive = -1
    """Use only the first training prompts; -1 means all."""
    val_max_samples: MinusOneOrPositive = -1
    """Use only the first validation prompts; -1 means all."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length; how many is reported."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a longer prompt that is not dropped: error, or tokens are cut left, right or
    in the middle."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default={})
    """Further arguments of the tokenizer's chat template, e.g. {enable_thinking: false}."""
    ptx_files: Strings = ()
    """Rows for the loss of actor.ptx_coef: one file or a list of files (parquet, JSON, JSONL),
    whose rows have text, of which all is learned, or conversations as those of main_sft. What is
    longer than the longest prompt and response together is cut at its end."""
    ptx_batch_size: Annotated[
        PositiveInt, Follows("${actor_rollout_ref.actor.ppo_mini_batch_size}")
    ]
    """Rows of data.ptx_files in each optimizer step of the actor, over all ranks."""


class CustomRewardFunctionConfig(ConfigModel):
    """A custom reward function."""

    path: str | None = None
    """Python file, or pkg://package.module, that holds the function; or the URL of a reward server;
    null means the built-in rewards by data source."""
    name: str = "compute_score"
    """Name of the function: name(data_source, solution_str, ground_truth, extra_info)."""
    reward_kwargs: dict[str, Any] = Field(default={})
    """Further keyword arguments of the function."""


class OverlongBufferConfig(ConfigModel):
    """Soft overlong punishment (DAPO, arXiv:2503.14476) of responses close to
    data.max_response_length; of a sample of several rows the tokens of all count."""

    enable: bool = False
    """Add the penalty to the score of every training response."""
    len: NonNegativeInt = 0
    """Tokens below data.max_response_length over which the penalty grows from 0."""
    penalty_factor: NonNegativeFloat = 1.0
    """The penalty at data.max_response_length."""


class RewardConfig(ConfigModel):
    """How rule rewards are computed, and what is added to them."""

    num_workers: PositiveInt = 2
    """Processes that score responses."""
    timeout_s: PositiveFloat = 30.0
    """Seconds one response may take to score; a process that takes longer is replaced."""
    max_memory_gb: PositiveFloat = 4.0
    """Memory of one such process with the programs that it starts, in 10^9 bytes; one that uses
    more is replaced."""
    on_error: Literal["fail", "skip", "score"] = "fail"
    """What an exception, a timeout or a process that ends does: fail the run, skip the response, or
    score it 0."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


class KlControlConfig(ConfigModel):
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive: kl_coef moves until the measured KL is target_kl (arXiv:1909.08593)."""
    kl_coef: NonNegativeFloat = 0.001
    """The coefficient; with adaptive, its first value."""
    target_kl: PositiveFloat = 0.1
    """KL divergence the adaptive coefficient aims at, per token."""


class FilterGroupsConfig(ConfigModel):
    """Dynamic sampling (DAPO, arXiv:2503.14476): prompts whose responses are all equally good are
    replaced."""

    enable: bool = False
    """Generate for further prompts until the batch is full of prompts whose responses differ in the
    metric."""
    metric: str = "reward"
    """What has to differ: reward (the rules' score), or a number that the reward function returns
    beside it."""
    max_num_gen_batches: PositiveInt = 10
    """Most batches of prompts that one step generates for; what is missing then is filled with
    replaced prompts."""


class EstimatorOptions(OpenConfigModel):
    """The chosen advantage estimator's own options."""


class AlgorithmConfig(OpenConfigModel):
    """From scores to advantages."""

    adv_estimator: str = "gae"
    """Advantage estimator: one of docs/algorithms.md, or of a plugin. Critic, reference and groups
    follow from it."""
    gamma: FromZeroToOne = 1.0
    """Discount per token."""
    lam: FromZeroToOne = 1.0
    """Lambda of GAE: 0 is low variance, 1 low bias."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the standard deviation of the group; false is Dr.GRPO
    (arXiv:2503.20783)."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence to the reference policy from the reward (PPO), with or without
    actor.use_kl_loss."""
    kl_penalty: KlPenalty = "kl"
    """Per-token KL estimator in the reward: kl (k1), abs, mse (k2) or low_var_kl (k3)."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    options: EstimatorOptions = EstimatorOptions()


class TrainerConfig(LoopConfig):
    """The run."""

    n_gpus_per_node: PositiveInt = 8
    """GPUs per node, one training process each; with device cpu, processes per node."""
    total_epochs: PositiveInt = 30
    """Passes over the training prompts."""
    critic_warmup: NonNegativeInt = 0
    """First training steps in which only the critic is updated; the actor's schedule counts the
    others."""
    max_staleness: NonNegativeInt = 0
    """Most training steps between the weights that drew a token and those that are trained on it.
    With 0 a batch is drawn with the weights that it trains. With 1 main_ppo generates the next
    responses while a step trains; the rollout then needs a pool of its own. main_detached takes any
    number, and above 0 its trainers train each mini-batch as it arrives, where ppo_epochs is 1 and
    the mini-batches of actor and critic are equally large."""
    log_val_generations: NonNegativeInt = 3
    """Validation responses that are shown with their scores."""


@dataclass(frozen=True)
class PPOPlan:
    """What follows from the configuration of a PPO run."""

    estimator_needs: frozenset[str]
    """Inputs that the advantage estimator cannot do without."""
    loss_needs: frozenset[str]
    """Inputs that the policy loss cannot do without."""
    needs_critic: bool
    """Values are estimated: `critic.enable` says so, or where that is null the estimator needs
    them."""
    role_of_reference: str | None
    """The role that computes the log-probabilities of the reference policy, with which a KL term,
    the estimator or the loss compares the policy: the actor, if it has an adapter to take off. None
    where no reference is needed."""
    needs_teacher: bool
    """The loss learns from the model `teacher_path`. A custom role may be the teacher instead."""
    needs_old_log_probs: bool
    """Log-probabilities are computed before the update. If a batch is one optimizer step of the
    actor, its forward pass gives them, unless the KL penalty in the reward, rollout corrections, an
    algorithm or a custom actor class needs them before. With `bypass_mode` those of the rollout
    engine take their place. The mode R2 of router replay needs that pass."""
    reward_models_by_role: dict[str, RewardModelConfig]
    """The reward models of this run, with all their settings."""
    custom_roles: tuple[str, ...]
    """Roles of `worker_classes` that are new: they annotate the batch."""
    active_roles: tuple[str, ...]
    """Roles that this run starts, built-in ones first. `role_mapping` may also hold built-in roles
    that it does not start."""


class PPOConfig(RunConfig):
    """The whole configuration of a PPO run."""

    base_name: ClassVar[str] = "ppo_trainer"
    presets: ClassVar[dict[str, str]] = {"placement": "colocated", "device": "cuda"}
    keys_are_listed_by: ClassVar[str] = "docs/config.md"
    replaced_keys: ClassVar[dict[str, str]] = {
        "trainer.pipeline_depth": "trainer.max_staleness",
        "detached.max_staleness": "trainer.max_staleness",
    }
    has_makers: ClassVar[bool] = False
    """Whether experience is made by others than the driver."""
    algorithm_keys: ClassVar[dict[str, AlgorithmRegistry]] = {
        "algorithm.adv_estimator": ADVANTAGE_ESTIMATORS,
        "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES,
    }

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    agent: AgentConfig = AgentConfig()
    critic: CriticConfig
    reward_model: RewardModelConfig
    reward_models: dict[str, FurtherRewardModelConfig] = Field(default={})
    """Further reward models by name, each a role with a place in role_mapping:
    reward_models.<name>.path and .weight, 1 by default. Their other settings are those of
    reward_model, which may be off."""
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig
    resource_pool_spec: dict[str, Annotated[tuple[PositiveInt, ...], Strict(False)]] = Field(
        default={}
    )
    """Pools by name, each a list of processes per node, e.g. {actor_pool: [8, 8]}. The placement
    preset fills it."""
    role_mapping: dict[str, str] = Field(default={})
    """Pool of each role, those of worker_classes included. The placement preset fills it for the
    built-in roles."""
    worker_classes: dict[str, str] = Field(default={})
    """Import path, package.module.Class, of the worker of a new role, or of a subclass that
    replaces a built-in one."""

    @cached_property
    def plan(self) -> PPOPlan:
        """What follows from the configuration."""
        return plan_of_ppo(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy without the plan, which would be that of the values before `update`."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("plan", None)
        return copied

    @property
    def num_processes_of_run(self) -> int:
        return sum(sum(processes) for processes in self.resource_pool_spec.values())

    def num_processes(self, role: str) -> int:
        """Size of the pool that `role` is mapped to."""
        return sum(self.resource_pool_spec[self.role_mapping[role]])


def plan_of_ppo(config: PPOConfig) -> PPOPlan:
    """What follows from the configuration. Imports no file of an algorithm of the library."""
    actor = config.actor_rollout_ref.actor
    algorithm = config.algorithm
    estimator_needs = ADVANTAGE_ESTIMATORS.facts(algorithm.adv_estimator).needs
    loss_needs = POLICY_LOSSES.facts(actor.policy_loss.loss_mode).needs
    algorithm_needs = estimator_needs | loss_needs

    needs_critic = config.critic.enable
    if needs_critic is None:
        needs_critic = "values" in estimator_needs

    uses_kl = algorithm.use_kl_in_reward or actor.use_kl_loss
    has_own_reference = Role.RefPolicy in config.worker_classes
    role_of_reference = None
    if uses_kl or "ref_log_prob" in algorithm_needs:
        is_in_actor = config.actor_rollout_ref.model.lora_rank and not has_own_reference
        role_of_reference = Role.Actor if is_in_actor else Role.RefPolicy

    has_teacher = config.actor_rollout_ref.teacher_model is not None
    needs_teacher = has_teacher and "teacher_log_prob" in loss_needs

    built_in = {
        Role.Actor: True,
        Role.Rollout: True,
        Role.Agent: config.agent.way is not None,
        Role.RefPolicy: role_of_reference == Role.RefPolicy,
        Role.Teacher: needs_teacher,
        Role.Critic: needs_critic,
    }
    reward_models = _reward_models_by_role(config)
    known_roles = {*Role, *config.reward_models}
    custom_roles = tuple(role for role in config.role_mapping if role not in known_roles)
    built_in_roles = (role.value for role, is_needed in built_in.items() if is_needed)
    return PPOPlan(
        estimator_needs=estimator_needs,
        loss_needs=loss_needs,
        needs_critic=needs_critic,
        role_of_reference=role_of_reference,
        needs_teacher=needs_teacher,
        needs_old_log_probs=_needs_old_log_probs(config, algorithm_needs),
        reward_models_by_role=reward_models,
        custom_roles=custom_roles,
        active_roles=(*built_in_roles, *reward_models, *custom_roles),
    )


def _needs_old_log_probs(config: PPOConfig, algorithm_needs: frozenset[str]) -> bool:
    actor = config.actor_rollout_ref.actor
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode:
        return False
    is_one_step = (
        actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    )
    is_corrected = bool(correction.rollout_is or correction.rollout_rs)
    made_before_the_update = {"old_log_probs", "sum_pi_squared", "selected_tokens"}
    return (
        not is_one_step
        or config.algorithm.use_kl_in_reward
        or is_corrected
        or actor.router_replay.chosen == "R2"
        or not algorithm_needs.isdisjoint(made_before_the_update)
        or Role.Actor in config.worker_classes
    )


def _reward_models_by_role(config: PPOConfig) -> dict[str, RewardModelConfig]:
    first = config.reward_model
    models = {Role.RewardModel.value: first} if first.enable else {}
    for name, own in config.reward_models.items():
        models[name] = first.updated({"model.path": own.path, "weight": own.weight})
    return models
