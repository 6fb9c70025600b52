"""The configuration of detached training: that of PPO and a few keys more, and what of it each side
reads."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import ClassVar, Literal, Self

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.config_model import ConfigModel, FromZeroToOne, NonNegativeInt, PositiveInt
from verl_like.trainer.config.roles import Role
from verl_like.trainer.config.rules import broken_rules
from verl_like.trainer.config.schema import PPOConfig, PPOPlan, plan_of_ppo

TRAINED = (Role.Actor, Role.Critic)
DIVIDED = (
    "data.train_batch_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "critic.ppo_mini_batch_size",
    "data.ptx_batch_size",
)
"""Numbers of prompts, or of other rows, of which each trainer has an equal part."""


class DetachedBlock(ConfigModel):
    """Makers, which generate and score, beside trainers, which learn."""

    num_makers: PositiveInt = 1
    """Experience makers. Each has pools of its own, of the sizes of the pool of rollout and of
    every other role that is not trained."""
    num_trainers: PositiveInt = 1
    """Trainers of the one model. Each has pools of its own, of the sizes of the pools of actor and
    critic, and an equal part of every batch."""
    experience_batch_size: PositiveInt | None = None
    """PROMPTS that a maker has in flight; null means an equal part of data.train_batch_size for
    each maker."""
    update_steps: PositiveInt = 1
    """Training steps between two pushes of the weights to the makers, at most trainer.max_staleness
    + 1."""
    update_in_flight: bool = False
    """Whether a maker sends the responses to a prompt when they have ended, begins others in their
    place, and loads newer weights in mid-response; otherwise it takes and sends the prompts of a
    step together."""
    restart_below: NonNegativeInt = 0
    """Responses that began fewer steps of the engine ago when newer weights are loaded in
    mid-response are begun again, once, so that they may take a step longer; 0 never. Short
    responses are then trained a little more often."""
    min_effective_sample_size: FromZeroToOne = 0.0
    """Brake: after a step whose actor/eff_sample_size was below this share in any trainer, makers
    start nothing that would be older than update_steps - 1, until a step is above it again; 0 never
    brakes."""
    routing: Literal["round_robin", "least_loaded"] = "round_robin"
    """Which trainer the samples of the next prompt go to: each in turn, or the one with the
    fewest."""
    max_attempts: PositiveInt = 3
    """Times that a prompt is given out; it is dropped when that many makers died over it."""
    max_restarts: NonNegativeInt = 3
    """Times that each maker is started again after it failed."""

    @property
    def maker_names(self) -> list[str]:
        return [f"maker_{index}" for index in range(self.num_makers)]

    @property
    def trainer_names(self) -> list[str]:
        return [f"trainer_{index}" for index in range(self.num_trainers)]


@dataclass(frozen=True)
class DetachedPlan(PPOPlan):
    """What follows from the configuration of detached training."""

    maker_roles: tuple[str, ...]
    """Roles of a maker: all but the actor, unless that computes its own or the reference's
    log-probabilities."""
    trainer_roles: tuple[str, ...]
    """Roles of a trainer: those that are trained."""
    num_prompts_at_a_time: int
    """Most prompts that a maker has in flight."""
    num_parts_of_step: int
    """In how many parts a trainer takes a step: its mini-batches where `max_staleness` says so,
    else 1. Where makers load weights between two steps alone, none waits for the end of a step that
    waits for its samples."""


class DetachedConfig(PPOConfig):
    """The whole configuration of detached training."""

    base_name: ClassVar[str] = "detached_trainer"
    presets: ClassVar[dict[str, str]] = {"placement": "detached", "device": "cuda"}
    has_makers: ClassVar[bool] = True

    detached: DetachedBlock

    @cached_property
    def plan(self) -> DetachedPlan:
        """What follows from the configuration. Imports the files of the chosen algorithms."""
        ppo = plan_of_ppo(self)
        roles = ppo.active_roles
        makers_need_actor = ppo.needs_old_log_probs or ppo.role_of_reference == Role.Actor
        roles_of_makers = [role for role in roles if role != Role.Actor or makers_need_actor]
        part_of_batch = math.ceil(self.data.train_batch_size / self.detached.num_makers)
        return DetachedPlan(
            **vars(ppo),
            maker_roles=tuple(roles_of_makers),
            trainer_roles=tuple(role for role in roles if role in TRAINED),
            num_prompts_at_a_time=self.detached.experience_batch_size or part_of_batch,
            num_parts_of_step=_num_parts_of_step(self, ppo.needs_critic),
        )

    def of_maker(self, name: str) -> Self:
        """Returns the configuration that this maker gets. It has pools of its own, copies of actor
        and critic run on the rollout's pool, and the engine never sleeps."""
        pool_of_copies = dict.fromkeys(TRAINED, self.role_mapping[Role.Rollout])
        config = self.updated(
            {
                "role_mapping": self.role_mapping | pool_of_copies,
                "actor_rollout_ref.rollout.free_cache_engine": False,
            }
        )
        return config._with_own_pools(name, self.plan.maker_roles)

    def of_trainer(self, name: str) -> Self:
        """Returns the configuration that this trainer gets: with pools of its own, and with its
        part of every batch."""
        num_trainers = self.detached.num_trainers
        parts = {key: attrgetter(key)(self) // num_trainers for key in DIVIDED}
        config = self.updated(parts)
        return config._with_own_pools(name, self.plan.trainer_roles)

    def with_all_pools(self) -> Self:
        """With the pools of all makers and trainers, by which they are checked against a
        machine."""
        sides = [self.of_maker(name) for name in self.detached.maker_names]
        sides += [self.of_trainer(name) for name in self.detached.trainer_names]
        pools = {}
        for side in sides:
            pools.update(side.resource_pool_spec)
        mapping = {}
        for role, pool in self.role_mapping.items():
            first = "trainer_0" if role in TRAINED else "maker_0"
            mapping[role] = f"{first} {pool}"
        return self.updated({"resource_pool_spec": pools, "role_mapping": mapping})

    def _with_own_pools(self, side: str, roles: Sequence[str]) -> Self:
        """With the pools of these roles alone, each under a name of its own."""
        mapping = {role: f"{side} {pool}" for role, pool in self.role_mapping.items()}
        own = {mapping[role]: self.resource_pool_spec[self.role_mapping[role]] for role in roles}
        return self.updated({"role_mapping": mapping, "resource_pool_spec": own})


def _num_parts_of_step(config: DetachedConfig, needs_critic: bool) -> int:
    actor = config.actor_rollout_ref.actor
    critic = config.critic
    if config.actor_rollout_ref.rollout.sends_directly or not config.trainer.max_staleness:
        return 1
    critic_has_the_same_parts = (
        critic.ppo_mini_batch_size == actor.ppo_mini_batch_size and critic.ppo_epochs == 1
    )
    if actor.ppo_epochs > 1 or (needs_critic and not critic_has_the_same_parts):
        return 1
    return config.data.train_batch_size // actor.ppo_mini_batch_size


def broken_detached_rules(config: DetachedConfig) -> Iterator[str]:
    """A sentence for each rule that the configuration breaks."""
    # Before a rule that advises to share a pool
    if config.actor_rollout_ref.rollout.weight_transport == "ipc":
        yield (
            "actor_rollout_ref.rollout.weight_transport=ipc opens memory of one GPU, but makers "
            "and trainers have GPUs of their own; set nccl, gloo or shared_memory"
        )
        return
    problems = list(broken_rules(config))
    if problems:
        yield from problems
        return
    yield from makers_can_follow(config)
    yield from updates_in_flight_fit(config)
    yield from makers_have_the_trained_model(config)
    yield from a_maker_validates_while_trainers_train(config)
    yield from pushes_fit_the_staleness(config)
    yield from makers_and_trainers_are_apart(config)
    yield from makers_compute_as_trainers_do(config)
    yield from trainers_have_equal_parts(config)


def makers_can_follow(config: DetachedConfig) -> Iterator[str]:
    algorithm = config.algorithm
    max_staleness = config.trainer.max_staleness
    if config.trainer.best_ckpt_metric is not None:
        yield (
            "trainer.best_ckpt_metric is of the synchronous trainer: here validations come after "
            "saves; set null"
        )
    if algorithm.filter_groups.enable:
        yield (
            "algorithm.filter_groups.enable=true replaces prompts, which detached makers cannot "
            "yet; set it to false"
        )
    correction = algorithm.rollout_correction
    if max_staleness and not (correction.rollout_is or correction.bypass_mode):
        yield (
            f"trainer.max_staleness={max_staleness} trains on responses that older weights drew, "
            "and nothing accounts for the difference; set "
            "algorithm.rollout_correction.rollout_is=token, or bypass_mode=true"
        )


def makers_have_the_trained_model(config: DetachedConfig) -> Iterator[str]:
    for role in {*TRAINED} & config.worker_classes.keys():
        yield (
            f"worker_classes.{role}: makers run a copy of the built-in worker, which would "
            "compute other numbers"
        )
    if (
        config.actor_rollout_ref.rollout.weight_transport == "nccl"
        and Role.Actor in config.plan.maker_roles
    ):
        yield (
            "actor_rollout_ref.rollout.weight_transport=nccl loads engines alone, but a maker has "
            "a copy of the actor for old log-probabilities; set "
            "algorithm.rollout_correction.bypass_mode=true, as many prompts in "
            "actor_rollout_ref.actor.ppo_mini_batch_size as in data.train_batch_size, or gloo"
        )


def a_maker_validates_while_trainers_train(config: DetachedConfig) -> Iterator[str]:
    """A sentence if the run is only to validate, which main_ppo does."""
    if config.trainer.val_only:
        yield (
            "trainer.val_only=true: in detached training a maker validates while trainers train; "
            "run verl_like.trainer.main_ppo with it, or remove it"
        )


def pushes_fit_the_staleness(config: DetachedConfig) -> Iterator[str]:
    """A sentence for each broken rule on pushes. Weights are pushed every `update_steps` steps.

    With more than max_staleness + 1 steps no weights would be new enough before the next push, and
    makers would wait for ever. With exactly as many, makers use weights that are at most
    update_steps - 1 steps old. The brake asks for no newer ones, so it has no effect.
    """
    detached = config.detached
    max_staleness = config.trainer.max_staleness
    if detached.update_steps > max_staleness + 1:
        yield (
            f"detached.update_steps={detached.update_steps} pushes too rarely for "
            f"trainer.max_staleness={max_staleness}: makers would wait for weights for ever; set "
            f"update_steps to at most {max_staleness + 1}"
        )
    if detached.min_effective_sample_size and detached.update_steps == max_staleness + 1:
        yield (
            f"detached.min_effective_sample_size={detached.min_effective_sample_size} has no "
            f"effect: with trainer.max_staleness={max_staleness} and "
            f"detached.update_steps={detached.update_steps} makers wait for the newest weights "
            "anyway; set it to 0, or max_staleness higher"
        )


def makers_and_trainers_are_apart(config: DetachedConfig) -> Iterator[str]:
    pools_of_trained = {config.role_mapping[role] for role in config.plan.trainer_roles}
    others = [role for role in config.plan.active_roles if role not in TRAINED]
    shared = [role for role in others if config.role_mapping[role] in pools_of_trained]
    if shared:
        yield (
            f"{', '.join(sorted(shared))} and a trained role share a pool, but makers and "
            "trainers are apart: give actor and critic pools of their own, e.g. placement=detached"
        )


def makers_compute_as_trainers_do(config: DetachedConfig) -> Iterator[str]:
    algorithm = config.algorithm
    dtype = config.actor_rollout_ref.actor.fsdp_config.dtype
    rollout_dtype = config.actor_rollout_ref.rollout.dtype
    if Role.Actor in config.plan.maker_roles and rollout_dtype != dtype:
        yield (
            f"actor_rollout_ref.rollout.dtype={rollout_dtype}, in which weights travel, is not "
            f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}: a maker's copy of the actor would "
            "compute other log-probabilities; give both the same"
        )
    if (
        algorithm.use_kl_in_reward
        and algorithm.kl_ctrl.type == "adaptive"
        and config.detached.num_makers > 1
    ):
        yield (
            "algorithm.kl_ctrl.type=adaptive follows the KL of all samples, and a maker sees "
            "only its own; set fixed"
        )


def trainers_have_equal_parts(config: DetachedConfig) -> Iterator[str]:
    num_trainers = config.detached.num_trainers
    is_used = {
        "critic.ppo_mini_batch_size": config.plan.needs_critic,
        "data.ptx_batch_size": bool(config.data.ptx_files),
    }
    for key in DIVIDED:
        number = attrgetter(key)(config)
        if is_used.get(key, True) and number % num_trainers:
            yield (
                f"{key}={number} does not divide by detached.num_trainers={num_trainers}; "
                "make it a multiple"
            )


def updates_in_flight_fit(config: DetachedConfig) -> Iterator[str]:
    detached = config.detached
    algorithm = config.algorithm
    max_staleness = config.trainer.max_staleness
    if detached.update_in_flight and not (
        max_staleness and algorithm.rollout_correction.bypass_mode
    ):
        yield (
            "detached.update_in_flight=true makes responses of which each token may be of other "
            "weights: it needs algorithm.rollout_correction.bypass_mode=true, since only the "
            "engine knows the log-probabilities that they were drawn with, and "
            "trainer.max_staleness of at least 1"
        )
    if detached.restart_below and not detached.update_in_flight:
        yield (
            f"detached.restart_below={detached.restart_below} has no effect without "
            "detached.update_in_flight=true"
        )
    if detached.update_in_flight and "reward_baselines" in config.plan.estimator_needs:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares with a greedy response "
            "of the same weights, which there is not with detached.update_in_flight=true; set it "
            "to false"
        )
    over_batch = {}
    if ADVANTAGE_ESTIMATORS.facts(algorithm.adv_estimator).over_batch:
        over_batch["algorithm.adv_estimator"] = algorithm.adv_estimator
    if "selected_tokens" in config.plan.loss_needs:
        loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
        over_batch["actor_rollout_ref.actor.policy_loss.loss_mode"] = loss
    for key, name in over_batch.items():
        if detached.update_in_flight:
            yield (
                f"{key}={name} compares the rows of a batch, and with "
                "detached.update_in_flight=true a maker has only the few that ended together; set "
                "it to false, or take one that compares the responses to a prompt"
            )
    if detached.restart_below and config.agent.way:
        yield (
            f"detached.restart_below={detached.restart_below} begins single responses again, and "
            f"agent.{config.agent.way} has episodes of several; set restart_below=0"
        )
    if detached.restart_below and config.actor_rollout_ref.rollout.name == "vllm_async":
        yield (
            f"detached.restart_below={detached.restart_below} counts steps of the engine, and "
            "those of actor_rollout_ref.rollout.name=vllm_async are no tokens; set "
            "rollout.name=vllm, or restart_below=0"
        )
    if detached.update_in_flight and config.actor_rollout_ref.rollout.routing == "fixed":
        yield (
            "actor_rollout_ref.rollout.routing=fixed divides the prompts of a call, and with "
            "detached.update_in_flight=true a call has one prompt, which the first engine would "
            "get each time; set least_loaded"
        )
