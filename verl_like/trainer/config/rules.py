"""Rules that join several keys. Each is a function that is named after what it demands, and yields
what is wrong.

They are checked after the chosen algorithms are imported, whose needs decide which roles there are.
"""

import difflib
import math
import re
from collections.abc import Iterator
from operator import attrgetter

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.trainer.config.actor_rules import (
    a_reference_in_the_actor_computes_as_the_actor,
    balanced_routers_are_trained,
    ptx_rows_have_a_weight,
    replayed_routing_is_recorded,
    the_engines_experts_are_distributed_on_gpus,
)
from verl_like.trainer.config.roles import OWN_PROCESS, Role
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.config.supervised import distributed_experts


def broken_rules(config: PPOConfig) -> Iterator[str]:
    """Yields one sentence for each broken rule.

    A placement rule is checked only if those before it hold, and batch sizes only if all placement
    rules do.
    """
    rules = [*BATCH_RULES, *OTHER_RULES]
    for placement_rule in PLACEMENT_RULES:
        problems = list(placement_rule(config))
        if problems:
            yield from problems
            rules = list(OTHER_RULES)
            break
    for rule in rules:
        yield from rule(config)


def pools_are_not_empty(config: PPOConfig) -> Iterator[str]:
    for pool, processes_per_node in config.resource_pool_spec.items():
        if not processes_per_node:
            yield f"resource_pool_spec.{pool}=[]: a pool needs at least one process, e.g. [1]"


def every_role_has_a_worker(config: PPOConfig) -> Iterator[str]:
    built_in = [role.value for role in Role]
    for role in config.role_mapping:
        if role not in (*built_in, *config.worker_classes, *config.reward_models):
            yield (
                f"role_mapping.{role}: the built-in roles are {', '.join(built_in)}; a custom "
                f"role also needs worker_classes.{role}=package.module.Class, a reward model "
                f"reward_models.{role}.path{_nearest(role, built_in)}"
            )
    for role, path in config.worker_classes.items():
        if role not in config.role_mapping:
            yield (
                f"worker_classes.{role}={path}: the role has no pool; add "
                f"role_mapping.{role}=<pool>"
            )
        if role == Role.Teacher and not config.plan.needs_teacher:
            yield (
                f"worker_classes.{role}={path}: teacher is the built-in role of a policy loss "
                "with teacher_path, and this run has no such loss; give a custom role another name"
            )
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", path):
            yield f"worker_classes.{role}={path}: expected an import path, package.module.Class"


def reward_models_have_names_of_their_own(config: PPOConfig) -> Iterator[str]:
    for name in config.reward_models:
        if name in (*Role, *config.worker_classes):
            yield (
                f"reward_models.{name}: {name} is a role already, built-in or of worker_classes; "
                "give the reward model another name"
            )


def every_role_has_a_pool(config: PPOConfig) -> Iterator[str]:
    pools = list(config.resource_pool_spec)
    reasons: dict[str, str] = {
        Role.RefPolicy: "a KL term or the algorithm compares the policy with the reference policy",
        Role.Teacher: "the policy loss learns from a teacher",
        Role.Agent: f"agent.{config.agent.way} says who acts",
        Role.Critic: "the advantage estimator needs values",
        Role.RewardModel: "reward_model.enable is true",
    }
    for name in config.reward_models:
        reasons[name] = f"reward_models.{name} is a reward model of this run"
    for role in config.plan.active_roles:
        pool = config.role_mapping.get(role)
        if pool is None:
            reason = reasons.get(role, "every run needs it")
            yield (
                f"role_mapping.{role} is not set, but {reason}; set it to one of the pools {pools}"
            )
        elif pool not in pools:
            yield (
                f"role_mapping.{role}={pool}: there is no such pool, only {pools}; size it, e.g. "
                f"resource_pool_spec.{pool}=[4]{_nearest(pool, pools)}"
            )


def every_pool_has_a_role(config: PPOConfig) -> Iterator[str]:
    used = {config.role_mapping.get(role) for role in config.plan.active_roles}
    for pool, processes_per_node in config.resource_pool_spec.items():
        if pool not in used:
            yield (
                f"resource_pool_spec.{pool}={list(processes_per_node)} has none of this run's "
                f"roles, which are {', '.join(config.plan.active_roles)}; remove it with "
                f"'~resource_pool_spec.{pool}', or use placement=colocated, which has one pool"
            )


def sizes_divide_the_pool(config: PPOConfig) -> Iterator[str]:
    """Checks that the sizes of engines, of shards of parameters, and of groups of ranks that share
    a sequence divide the number of processes of the role's pool.

    Only trained models have a size of shards. The reference is sharded over all ranks of its pool.
    """
    key_of_role = {
        Role.Rollout: "actor_rollout_ref.rollout.tensor_model_parallel_size",
        Role.Actor: "actor_rollout_ref.actor.fsdp_config.fsdp_size",
        Role.Critic: "critic.model.fsdp_config.fsdp_size",
    }
    for role, key in key_of_role.items():
        size: int = attrgetter(key)(config)
        if role in config.plan.active_roles and size > 0:  # -1: all ranks
            yield from _a_size_divides_the_pool(config, role, key, size, "")
    for active_role in config.plan.active_roles:
        key, size = sequence_parallel(config, active_role)
        yield from _a_size_divides_the_pool(config, active_role, key, size, f" ({active_role})")


def trained_models(config: PPOConfig) -> Iterator[tuple[Role, str, str]]:
    """Yields the role, the key of the `fsdp_config` and the key of the model of each model that is
    trained."""
    yield Role.Actor, "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.model"
    if config.plan.needs_critic:
        yield Role.Critic, "critic.model.fsdp_config", "critic.model"


def experts_are_distributed_among_the_shards(config: PPOConfig) -> Iterator[str]:
    for role, key, model_key in trained_models(config):
        fsdp = attrgetter(key)(config)
        model = attrgetter(model_key)(config)
        yield from distributed_experts(
            fsdp, model, config.num_processes(role), key=key, model_key=model_key
        )


def _a_size_divides_the_pool(
    config: PPOConfig, role: str, key: str, size: int, shown_role: str
) -> Iterator[str]:
    num_processes = config.num_processes(role)
    if num_processes % size:
        yield (
            f"{key}={size} does not divide the {num_processes} processes of the pool "
            f"{config.role_mapping[role]}{shown_role}; possible are {_divisors(num_processes)}"
        )


def a_single_device_is_one_process(config: PPOConfig) -> Iterator[str]:
    for role, key, _model_key in trained_models(config):
        num_processes = config.num_processes(role)
        if attrgetter(key)(config).strategy == "single" and num_processes > 1:
            yield (
                f"{key}.strategy=single is for one process, and the pool "
                f"{config.role_mapping[role]} has {num_processes}; set ddp for a whole copy on "
                "each, or zero1, zero2 or zero3 to shard"
            )


def mini_batches_divide_the_batch(config: PPOConfig) -> Iterator[str]:
    """Checks that all optimizer steps on a batch have the same number of prompts, because the last
    one would otherwise have fewer. Ranks may get different numbers of responses."""
    batch = config.data.train_batch_size
    actor = config.actor_rollout_ref.actor
    critic = config.critic
    sizes = {"actor_rollout_ref.actor": actor.ppo_mini_batch_size}
    if config.plan.needs_critic and critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:
        sizes["critic"] = critic.ppo_mini_batch_size
    for key, size in sizes.items():
        if batch % size:
            yield (
                f"{key}.ppo_mini_batch_size={size} does not divide data.train_batch_size={batch} "
                f"(both count prompts); nearest possible values: {_around(size, _divisors(batch))}"
            )


TOKEN_BUDGETS = (
    ("actor_rollout_ref.actor", "ppo_max_token_len_per_gpu", "use_dynamic_bsz", Role.Actor),
    (
        "actor_rollout_ref.rollout",
        "log_prob_max_token_len_per_gpu",
        "log_prob_use_dynamic_bsz",
        Role.Actor,
    ),
    (
        "actor_rollout_ref.ref",
        "log_prob_max_token_len_per_gpu",
        "log_prob_use_dynamic_bsz",
        Role.RefPolicy,
    ),
    (
        "actor_rollout_ref.ref",
        "log_prob_max_token_len_per_gpu",
        "log_prob_use_dynamic_bsz",
        Role.Teacher,
    ),
    ("critic", "ppo_max_token_len_per_gpu", "use_dynamic_bsz", Role.Critic),
    ("critic", "forward_max_token_len_per_gpu", "use_dynamic_bsz", Role.Critic),
    ("reward_model", "forward_max_token_len_per_gpu", "use_dynamic_bsz", Role.RewardModel),
)
"""For each largest number of tokens of a micro-batch: its block, its key there, the key beside it
that switches it on, and the role."""


def token_budgets_hold_the_longest_sequence(config: PPOConfig) -> Iterator[str]:
    """Checks the budgets. Those that follow one another are reported once."""
    prompt = config.data.max_prompt_length
    response = config.data.max_response_length
    longest = prompt + response
    reported: set[tuple[int, int]] = set()
    for block_key, key, switch, role in TOKEN_BUDGETS:
        block = attrgetter(block_key)(config)
        is_active = role in config.plan.active_roles
        if role == Role.RewardModel:
            is_active = bool(config.plan.reward_models_by_role)
        if not (is_active and getattr(block, switch)):
            continue
        num_tokens: int = getattr(block, key)
        sharing_key, num_sharing = sequence_parallel(config, role)
        size = (num_tokens, num_sharing)
        if num_tokens * num_sharing >= longest or size in reported:
            continue
        reported.add(size)
        shown = f"{block_key}.{key}={num_tokens}"
        if num_sharing > 1:
            shown += f" x {sharing_key}={num_sharing} = {num_tokens * num_sharing}"
        yield (
            f"{shown} tokens cannot hold the longest sequence, "
            f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = "
            f"{longest}; set it to at least {math.ceil(longest / num_sharing)}"
        )


def groups_have_several_responses(config: PPOConfig) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.n > 1:
        return
    comparing = []
    if "index" in config.plan.estimator_needs:
        comparing.append(f"algorithm.adv_estimator={config.algorithm.adv_estimator}")
    if config.algorithm.filter_groups.enable:
        comparing.append("algorithm.filter_groups.enable=true")
    for key in comparing:
        yield (
            f"{key} compares the responses to one prompt, but actor_rollout_ref.rollout.n=1; set n "
            "to 2 or more"
        )


def agents_have_an_estimator_for_inserted_tokens(config: PPOConfig) -> Iterator[str]:
    name = config.algorithm.adv_estimator
    if config.agent.way and ADVANTAGE_ESTIMATORS.facts(name).by_position:
        yield (
            f"algorithm.adv_estimator={name} compares tokens by their position, which the results "
            f"of tools move in episodes of agent.{config.agent.way}; set tir_{name}"
        )


def attempts_at_an_episode_end_before_its_call(config: PPOConfig) -> Iterator[str]:
    agent = config.agent
    longest_s = agent.num_attempts * agent.episode_timeout_s
    call_timeout_s = config.trainer.call_timeout_s
    if agent.way and longest_s >= call_timeout_s:
        yield (
            f"agent.num_attempts={agent.num_attempts} attempts of "
            f"agent.episode_timeout_s={agent.episode_timeout_s:g} s each may take longer than "
            f"trainer.call_timeout_s={call_timeout_s:g} s, after which the run ends; lower one of "
            "the first two, or raise the last"
        )


def needed_values_have_a_critic(config: PPOConfig) -> Iterator[str]:
    name = config.algorithm.adv_estimator
    if "values" in config.plan.estimator_needs and config.critic.enable is False:
        yield (
            f"critic.enable=false, but algorithm.adv_estimator={name} needs values; set null or "
            "another estimator"
        )


def dynamic_sampling_compares_what_rules_score(config: PPOConfig) -> Iterator[str]:
    if config.algorithm.filter_groups.enable and config.plan.reward_models_by_role:
        yield (
            "algorithm.filter_groups.enable=true drops prompts before the reward model scores the "
            "batch, so it would not see those scores; set filter_groups.enable=false, or "
            "reward_model.enable=false and no reward_models"
        )


def the_overlong_buffer_lies_within_the_response(config: PPOConfig) -> Iterator[str]:
    buffer = config.reward.overlong_buffer
    longest = config.data.max_response_length
    if buffer.enable and not 1 <= buffer.len <= longest:
        yield (
            f"reward.overlong_buffer.len={buffer.len} must be between 1 and "
            f"data.max_response_length={longest}"
        )


def the_estimator_reads_the_sum_that_a_penalty_is_in(config: PPOConfig) -> Iterator[str]:
    ignored = []
    if config.algorithm.use_kl_in_reward:
        ignored.append("algorithm.use_kl_in_reward")
    if config.reward.overlong_buffer.enable:
        ignored.append("reward.overlong_buffer.enable")
    if ignored and "token_level_rewards" not in config.plan.estimator_needs:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads each reward by "
            f"itself and would not see the penalty of {', '.join(ignored)}; set it to false, or "
            "choose an estimator of their sum, such as grpo"
        )


def bypass_leaves_out_nothing_that_is_needed(config: PPOConfig) -> Iterator[str]:
    if not config.algorithm.rollout_correction.bypass_mode:
        return
    if config.algorithm.use_kl_in_reward:
        yield (
            "algorithm.rollout_correction.bypass_mode=true has only the rollout engine's "
            "log-probabilities: with algorithm.use_kl_in_reward=true their rounding would count "
            "as distance from the reference; set actor_rollout_ref.actor.use_kl_loss=true "
            "instead, or bypass_mode=false"
        )
    if "sum_pi_squared" in config.plan.estimator_needs:
        yield (
            "algorithm.rollout_correction.bypass_mode=true leaves out the actor's pass before the "
            f"update, in which algorithm.adv_estimator={config.algorithm.adv_estimator} gets "
            "sum_pi_squared; set bypass_mode=false or another estimator"
        )


def generation_ahead_has_its_own_pool_and_a_correction(config: PPOConfig) -> Iterator[str]:
    if config.has_makers or not config.trainer.max_staleness:
        return
    if config.trainer.max_staleness > 1:
        yield (
            f"trainer.max_staleness={config.trainer.max_staleness} is of main_detached, where "
            "makers run several steps ahead; main_ppo takes 0 or 1"
        )
    pool = config.role_mapping.get(Role.Rollout)
    correction = config.algorithm.rollout_correction
    others = [role for role in config.plan.active_roles if role not in OWN_PROCESS]
    sharing = [role for role in others if config.role_mapping.get(role) == pool]
    if sharing:
        yield (
            "trainer.max_staleness=1 generates while other roles compute, but "
            f"{', '.join(sharing)} and rollout share the pool {pool}; give rollout a pool of its "
            "own, e.g. +resource_pool_spec.rollout_pool=[1] role_mapping.rollout=rollout_pool"
        )
    if not (correction.rollout_is or correction.bypass_mode):
        yield (
            "trainer.max_staleness=1 trains on responses that weights one version older drew, and "
            "nothing accounts for the difference; set "
            "algorithm.rollout_correction.rollout_is=token, or bypass_mode=true"
        )


def a_quantised_engine_is_corrected(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    correction = config.algorithm.rollout_correction
    if rollout.quantization is None:
        return
    key = f"actor_rollout_ref.rollout.quantization={rollout.quantization}"
    if rollout.name == "hf":
        yield (
            f"{key} is of vLLM, but actor_rollout_ref.rollout.name=hf; set name=vllm, or "
            "quantization=null"
        )
    if rollout.dtype == "float32":
        yield (
            f"{key}: vLLM does not quantise actor_rollout_ref.rollout.dtype=float32; set "
            "bfloat16 or float16"
        )
    if not (correction.rollout_is or correction.bypass_mode):
        yield (
            f"{key} draws responses from another distribution than the trainer's, and nothing "
            "accounts for the difference; set algorithm.rollout_correction.rollout_is=token, or "
            "bypass_mode=true"
        )


def nccl_joins_gpus_of_two_pools_and_ipc_processes_of_one(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    key = f"actor_rollout_ref.rollout.weight_transport={rollout.weight_transport}"
    if not rollout.sends_directly:
        return
    if config.trainer.device != "cuda":
        yield (
            f"{key} is of GPUs, but trainer.device={config.trainer.device}; set shared_memory or "
            "object_store"
        )
    if rollout.name != "vllm":
        yield (
            f"{key} is of vLLM, but actor_rollout_ref.rollout.name={rollout.name}; set "
            "name=vllm, or gloo"
        )
    pool = config.role_mapping.get(Role.Rollout)
    actor_pool = config.role_mapping.get(Role.Actor)
    if rollout.weight_transport == "ipc" and pool != actor_pool:
        yield (
            f"{key} opens memory of the same GPU, but actor is on the pool {actor_pool} and "
            f"rollout on {pool}; set role_mapping.rollout={actor_pool}, or weight_transport=gloo"
        )
    if rollout.weight_transport == "nccl" and pool == actor_pool:
        yield (
            f"{key}, which takes no two processes of one GPU, but actor and rollout share the "
            f"pool {pool}; set shared_memory, or a pool for rollout: "
            "+resource_pool_spec.rollout_pool=[1] role_mapping.rollout=rollout_pool"
        )


def critic_warmup_leaves_steps_for_the_actor(config: PPOConfig) -> Iterator[str]:
    warmup = config.trainer.critic_warmup
    total = config.trainer.total_training_steps
    if warmup and not config.plan.needs_critic:
        yield (
            f"trainer.critic_warmup={warmup} would hold the actor back, but this run has no "
            "critic; set it to 0"
        )
    elif total is not None and warmup >= total:
        yield (
            f"trainer.critic_warmup={warmup} is not less than the {total} training steps: the "
            "actor would never be updated; lower it, or train for longer"
        )


def the_best_checkpoint_has_validations(config: PPOConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.best_ckpt_metric is not None and trainer.test_freq == -1:
        yield (
            f"trainer.best_ckpt_metric={trainer.best_ckpt_metric} is a metric of the validation, "
            "and with trainer.test_freq=-1 no step is followed by one; set test_freq to 1 or "
            "more, or best_ckpt_metric=null"
        )


def reward_settings_have_a_model_or_a_function(config: PPOConfig) -> Iterator[str]:
    model = config.reward_model
    function = config.custom_reward_function
    if model.enable and model.model.path is None:
        yield "reward_model.enable=true needs reward_model.model.path"
    if function.path is None and function.reward_kwargs:
        yield (
            f"custom_reward_function.reward_kwargs={function.reward_kwargs} needs "
            "custom_reward_function.path"
        )


def loggers_are_named_once(config: PPOConfig) -> Iterator[str]:
    loggers = list(config.trainer.logger)
    if len(set(loggers)) < len(loggers):
        yield f"trainer.logger={loggers} names a logger twice"


PLACEMENT_RULES = (
    pools_are_not_empty,
    every_role_has_a_worker,
    reward_models_have_names_of_their_own,
    every_role_has_a_pool,
    every_pool_has_a_role,
)
BATCH_RULES = (
    sizes_divide_the_pool,
    experts_are_distributed_among_the_shards,
    a_single_device_is_one_process,
    mini_batches_divide_the_batch,
    token_budgets_hold_the_longest_sequence,
    ptx_rows_have_a_weight,
)
OTHER_RULES = (
    a_reference_in_the_actor_computes_as_the_actor,
    replayed_routing_is_recorded,
    the_engines_experts_are_distributed_on_gpus,
    balanced_routers_are_trained,
    groups_have_several_responses,
    agents_have_an_estimator_for_inserted_tokens,
    attempts_at_an_episode_end_before_its_call,
    needed_values_have_a_critic,
    dynamic_sampling_compares_what_rules_score,
    the_overlong_buffer_lies_within_the_response,
    the_estimator_reads_the_sum_that_a_penalty_is_in,
    bypass_leaves_out_nothing_that_is_needed,
    generation_ahead_has_its_own_pool_and_a_correction,
    a_quantised_engine_is_corrected,
    nccl_joins_gpus_of_two_pools_and_ipc_processes_of_one,
    critic_warmup_leaves_steps_for_the_actor,
    the_best_checkpoint_has_validations,
    reward_settings_have_a_model_or_a_function,
    loggers_are_named_once,
)


def sequence_parallel(config: PPOConfig, role: str) -> tuple[str, int]:
    """Returns the key that sets how many ranks of a role share a sequence, and that number. For
    other roles than the critic, the actor, the reference and the teacher the number is 1."""
    if role == Role.Critic:
        return "critic.ulysses_sequence_parallel_size", config.critic.ulysses_sequence_parallel_size
    size = 1
    if role in (Role.Actor, Role.RefPolicy, Role.Teacher):
        size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    return "actor_rollout_ref.actor.ulysses_sequence_parallel_size", size


def _nearest(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, 1, cutoff=0.7)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _around(value: int, possible: list[int]) -> str:
    """Returns the nearest possible values below and above `value`."""
    below = [str(each) for each in possible if each < value]
    above = [str(each) for each in possible if each > value]
    nearest = below[-1:] + above[:1]
    return " and ".join(nearest)
