"""Combinations of keys that cannot run are refused with the sum that does not come out."""

from copy import deepcopy
from pathlib import Path

import pytest

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.algorithms.corrections import read_band, rejection_bounds
from verl_like.trainer.config import ConfigError, PPOConfig, load_ppo_config
from verl_like.trainer.config.compose import to_yaml

ROOT = Path(__file__).parents[2]
REQUIRED = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "actor_rollout_ref.model.path=my/model",
]
# 4 processes, 16 prompts a step, 8 a mini-batch: 2 responses a process, one pass.
OWN_ESTIMATOR = ["algorithm.adv_estimator=my_own"]
SMALL = [
    "trainer.n_gpus_per_node=4",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
]


def small(*overrides: str) -> PPOConfig:
    return load_ppo_config([*REQUIRED, *SMALL, *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        small(*overrides)
    return str(error.value)


def test_the_small_configuration_itself_is_accepted():
    assert small().num_processes("actor") == 4


def test_what_follows_from_a_configuration_is_computed_once_and_anew_for_other_values():
    config = small()
    settings = config.model_dump()
    assert config.plan is config.plan and config.plan.needs_critic
    assert config.model_dump() == settings and config == small()
    grpo = config.updated({"algorithm.adv_estimator": "grpo"})
    assert not grpo.plan.needs_critic and config.plan.needs_critic
    assert deepcopy(config).plan == config.plan


@pytest.mark.parametrize(
    ("nnodes", "gpus", "half"),
    [(1, 2, (1,)), (1, 8, (4,)), (2, 8, (8,)), (4, 8, (8, 8)), (2, 1, (1,))],
)
def test_split_placement_halves_a_node_or_the_nodes(nnodes: int, gpus: int, half: tuple[int, ...]):
    config = small(
        "placement=split", f"trainer.nnodes={nnodes}", f"trainer.n_gpus_per_node={gpus}", *EVEN
    )
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": half, "critic_pool": half}
    assert {role for role, pool in config.role_mapping.items() if pool == "critic_pool"} == {
        "critic",
        "reward_model",
    }


EVEN = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
]


@pytest.mark.parametrize(
    ("nnodes", "gpus", "fix"),
    [
        (1, 1, "Set trainer.n_gpus_per_node=2 or more, or placement=colocated"),
        (1, 3, "Set trainer.n_gpus_per_node=2 or trainer.n_gpus_per_node=4"),
        (3, 8, "Set trainer.nnodes=2 or trainer.nnodes=4"),
        (
            3,
            1,
            "'resource_pool_spec.actor_rollout_ref_pool=[1, 1]' "
            "'resource_pool_spec.critic_pool=[1]'",
        ),
    ],
)
def test_a_split_that_leaves_a_device_over_is_refused_with_the_fix(
    nnodes: int, gpus: int, fix: str
):
    message = refusal(
        "placement=split", f"trainer.nnodes={nnodes}", f"trainer.n_gpus_per_node={gpus}"
    )
    assert (
        f"trainer.nnodes={nnodes} x trainer.n_gpus_per_node={gpus} has no two equal halves"
        in message
    )
    assert fix in message


def test_pools_sized_by_hand_replace_the_halves():
    config = small(
        "placement=split",
        "trainer.n_gpus_per_node=3",
        "resource_pool_spec.actor_rollout_ref_pool=[2]",
        "resource_pool_spec.critic_pool=[1]",
    )
    assert (config.num_processes("actor"), config.num_processes("critic")) == (2, 1)


def test_the_critic_gets_a_pool_of_its_own_by_overrides():
    config = small("resource_pool_spec.critic_pool=[4]", "role_mapping.critic=critic_pool")
    assert config.resource_pool_spec == {"global_pool": (4,), "critic_pool": (4,)}


def test_a_new_role_needs_a_pool_and_a_worker_class():
    new_pool, new_role = "resource_pool_spec.judge_pool=[1]", "role_mapping.judge=judge_pool"
    new_class = "worker_classes.judge=my_pkg.mod.Judge"
    assert small(new_pool, new_role, new_class).plan.active_roles == (
        "actor",
        "rollout",
        "critic",
        "judge",
    )
    assert "worker_classes.judge=package.module.Class" in refusal(new_pool, new_role)
    assert "role_mapping.judge=<pool>" in refusal(new_class)
    assert "expected an import path" in refusal(new_pool, new_role, "worker_classes.judge=Judge")


def test_a_role_on_a_missing_pool_names_role_pools_and_the_nearest_one():
    message = refusal("resource_pool_spec.critic_pool=[4]", "role_mapping.critic=critc_pool")
    assert message == (
        "role_mapping.critic=critc_pool: there is no such pool, only ['global_pool', "
        "'critic_pool']; size it, e.g. resource_pool_spec.critc_pool=[4]; did you mean "
        "critic_pool?"
    )


def test_a_misspelt_role_is_refused_with_the_nearest_one():
    assert refusal("role_mapping.critc=global_pool").endswith("did you mean critic?")


def test_a_needed_role_without_a_pool_is_refused_with_the_reason():
    assert "role_mapping.critic is not set, but the advantage estimator needs values" in refusal(
        "~role_mapping.critic"
    )
    kl = refusal("~role_mapping.ref", "algorithm.use_kl_in_reward=true")
    assert "role_mapping.ref is not set, but a KL term" in kl
    reward = refusal(
        "~role_mapping.reward_model", "reward_model.enable=true", "reward_model.model.path=rm"
    )
    assert "role_mapping.reward_model is not set, but reward_model.enable is true" in reward


def test_roles_that_do_not_run_need_no_pool():
    assert small("~role_mapping.ref", "~role_mapping.reward_model").plan.active_roles == (
        "actor",
        "rollout",
        "critic",
    )


def test_an_empty_pool_is_refused():
    assert "resource_pool_spec.p=[]" in refusal("resource_pool_spec.p=[]", "role_mapping.critic=p")


def test_a_pool_that_no_running_role_uses_is_refused():
    assert "resource_pool_spec.spare=[2]" in refusal("resource_pool_spec.spare=[2]")
    grpo = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    assert "resource_pool_spec.critic_pool=[2]" in refusal("placement=split", *grpo)
    assert small("placement=split", *grpo, "~resource_pool_spec.critic_pool").plan.active_roles == (
        "actor",
        "rollout",
    )


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ([], ("actor", "rollout", "critic")),
        (["algorithm.use_kl_in_reward=true"], ("actor", "rollout", "ref", "critic")),
        (["actor_rollout_ref.actor.use_kl_loss=true"], ("actor", "rollout", "ref", "critic")),
        (
            ["algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=true"],
            ("actor", "rollout", "ref", "critic"),
        ),
        (OWN_ESTIMATOR, ("actor", "rollout")),
        ([*OWN_ESTIMATOR, "critic.enable=true"], ("actor", "rollout", "critic")),
        (
            ["reward_model.enable=true", "reward_model.model.path=x"],
            ("actor", "rollout", "critic", "reward_model"),
        ),
    ],
)
def test_the_roles_that_run_follow_from_the_algorithm(
    overrides: list[str], roles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(
        ADVANTAGE_ESTIMATORS.entries, "my_own", lambda token_level_rewards, values=None: None
    )
    assert small(*overrides).plan.active_roles == roles


def test_a_mini_batch_that_does_not_divide_the_batch_shows_the_nearest_sizes():
    message = refusal("actor_rollout_ref.actor.ppo_mini_batch_size=6")
    assert message == (
        "actor_rollout_ref.actor.ppo_mini_batch_size=6 does not divide data.train_batch_size=16 "
        "(both count prompts); nearest possible values: 4 and 8"
    )


def test_a_mini_batch_larger_than_the_batch_is_refused():
    assert "nearest possible values: 16" in refusal(
        "actor_rollout_ref.actor.ppo_mini_batch_size=32"
    )


def test_mini_batches_and_micro_batches_need_not_divide_over_the_ranks():
    # 7 prompts x 3 responses over 4 processes, in passes of 5.
    sizes = [
        "data.train_batch_size=7",
        "actor_rollout_ref.actor.ppo_mini_batch_size=7",
        "critic.ppo_mini_batch_size=7",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5",
    ]
    assert small(*sizes).actor_rollout_ref.actor.ppo_mini_batch_size == 7


ACTOR_BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
SHARED_BY = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
BY_TOKENS = ["actor_rollout_ref.actor.use_dynamic_bsz=true", "algorithm.use_kl_in_reward=true"]


def test_a_run_has_a_teacher_where_the_loss_needs_one_and_its_model_is_named():
    loss = f"{ACTOR_KEY}.policy_loss"
    teacher = [f"{loss}.loss_mode=distillation", f"{loss}.teacher_path=x"]
    assert small(*teacher).plan.active_roles == ("actor", "rollout", "teacher", "critic")
    assert small(*teacher).role_mapping["teacher"] == "global_pool"
    assert "teacher" not in small(teacher[0]).plan.active_roles
    assert "give a custom role another name" in refusal("worker_classes.teacher=my.Teacher")
    assert "role_mapping.teacher is not set, but the policy loss learns" in refusal(
        *teacher, "~role_mapping.teacher"
    )
    own_pool = ["resource_pool_spec.teacher_pool=[3]", "role_mapping.teacher=teacher_pool"]
    assert "3 processes of the pool teacher_pool (teacher)" in refusal(
        *teacher, *own_pool, f"{SHARED_BY}=2"
    )
    by_tokens = ["actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true"]
    budget = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=1023"
    assert budget in refusal(*teacher, *by_tokens, budget)
    small(*by_tokens, budget)  # without a teacher or reference


def test_a_reference_that_is_the_actor_without_its_adapter_computes_as_the_actor():
    dtype, adapter = (
        "actor_rollout_ref.ref.fsdp_config.dtype=float32",
        "actor_rollout_ref.model.lora_rank=6",
    )
    uses_it = "algorithm.use_kl_in_reward=true"
    assert f"{dtype}: with model.lora_rank=6 the reference is the actor" in refusal(
        dtype, adapter, uses_it
    )
    for accepted in (
        [dtype, adapter],
        [dtype, uses_it],
        [dtype, adapter, uses_it, "worker_classes.ref=my.Reference"],
    ):
        small(*accepted)


def test_a_token_budget_holds_the_longest_sequence():
    # 512 + 512 tokens. The budgets of the log-probabilities follow the actor's: it is told once.
    assert refusal(*BY_TOKENS, f"{ACTOR_BUDGET}=1023") == (
        f"{ACTOR_BUDGET}=1023 tokens cannot hold the longest sequence, data.max_prompt_length + "
        "data.max_response_length = 512 + 512 = 1024; set it to at least 1024"
    )
    small(*BY_TOKENS, f"{ACTOR_BUDGET}=1024")
    small(f"{ACTOR_BUDGET}=1")  # without use_dynamic_bsz no pass has this budget
    reward = [
        "reward_model.enable=true",
        "reward_model.model.path=x",
        "reward_model.forward_max_token_len_per_gpu=9",
    ]
    assert "reward_model.forward_max_token_len_per_gpu=9 tokens" in refusal(*BY_TOKENS, *reward)
    for key in ("critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"):
        assert f"{key}=9 tokens" in refusal(*BY_TOKENS, f"{key}=9")
    for part in ("ref", "rollout"):
        key = f"actor_rollout_ref.{part}.log_prob_max_token_len_per_gpu"
        assert f"{key}=9 tokens" in refusal(*BY_TOKENS, f"{key}=9")


def test_the_ranks_that_share_a_sequence_share_the_budget():
    message = refusal(*BY_TOKENS, f"{ACTOR_BUDGET}=500", f"{SHARED_BY}=2")
    assert (
        f"{ACTOR_BUDGET}=500 x {SHARED_BY}=2 = 1000 tokens" in message and "at least 512" in message
    )
    small(*BY_TOKENS, f"{ACTOR_BUDGET}=512", f"{SHARED_BY}=2")


def test_groups_that_share_sequences_fill_the_pool():
    message = refusal(f"{SHARED_BY}=3")
    assert (
        message
        == f"{SHARED_BY}=3 does not divide the 4 processes of the pool global_pool (actor); "
        "possible are [1, 2, 4]"
    )
    assert "(critic); possible are [1, 2, 4]" in refusal("critic.ulysses_sequence_parallel_size=3")
    # The reference policy follows the actor, also on a pool of its own.
    own_pool = [
        "resource_pool_spec.ref_pool=[3]",
        "role_mapping.ref=ref_pool",
        "algorithm.use_kl_in_reward=true",
    ]
    assert "3 processes of the pool ref_pool (ref)" in refusal(*own_pool, f"{SHARED_BY}=2")


def test_the_mini_batches_of_the_critic_are_judged_by_themselves():
    assert refusal("critic.ppo_mini_batch_size=6").startswith(
        "critic.ppo_mini_batch_size=6 does not divide data.train"
    )
    own_pool = ["resource_pool_spec.critic_pool=[3]", "role_mapping.critic=critic_pool"]
    assert small(*own_pool).num_processes("critic") == 3


def test_a_critic_that_does_not_run_is_not_judged():
    grpo = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    assert not small(*grpo, "critic.ppo_mini_batch_size=5").plan.needs_critic


def test_the_rollout_pool_holds_whole_engines():
    message = refusal("actor_rollout_ref.rollout.tensor_model_parallel_size=3")
    assert (
        "does not divide the 4 processes of the pool global_pool; possible are [1, 2, 4]" in message
    )


def test_parameter_shards_divide_the_pool():
    assert "fsdp_size=3" in refusal("actor_rollout_ref.actor.fsdp_config.fsdp_size=3")
    assert "critic.model.fsdp_config.fsdp_size=3" in refusal("critic.model.fsdp_config.fsdp_size=3")
    assert small("critic.model.fsdp_config.fsdp_size=2").critic.model.fsdp_config.fsdp_size == 2


@pytest.mark.parametrize(
    "fsdp", ["actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config"]
)
def test_a_strategy_goes_with_its_pool_and_its_shards(fsdp: str):
    message = refusal(f"{fsdp}.strategy=single")
    assert (
        f"{fsdp}.strategy=single is for one process, and the pool global_pool has 4; set ddp"
        in message
    )
    assert small(f"{fsdp}.strategy=single", "trainer.n_gpus_per_node=1")
    assert "strategy=ddp with fsdp_size=2: single and ddp have" in refusal(
        f"{fsdp}.strategy=ddp", f"{fsdp}.fsdp_size=2"
    )
    assert "strategy=zero3 with fsdp_size=1: " in refusal(f"{fsdp}.fsdp_size=1")
    assert "zero1" in refusal(f"{fsdp}.strategy=zero4")


def test_grpo_needs_several_responses_to_a_prompt():
    assert "rollout.n=1" in refusal("algorithm.adv_estimator=grpo")


def test_gae_needs_its_critic():
    assert "critic.enable=false" in refusal("critic.enable=false")


CORRECTION = "algorithm.rollout_correction"
ACTOR_KEY = "actor_rollout_ref.actor"


def test_an_episode_that_hangs_fails_before_the_run_does():
    harness = "agent.harness=my_agent:run"
    config = small(harness)
    longest_s = config.agent.num_attempts * config.agent.episode_timeout_s
    assert longest_s < config.trainer.call_timeout_s, "the defaults leave time for all attempts"
    text = "agent.num_attempts=2 attempts of agent.episode_timeout_s=50 s each may take longer"
    settings = ["agent.num_attempts=2", "agent.episode_timeout_s=50", "trainer.call_timeout_s=100"]
    assert text in refusal(harness, *settings)
    small(*settings)  # without agents


@pytest.mark.parametrize(
    ("fsdp", "model"),
    [
        ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.model"),
        ("critic.model.fsdp_config", "critic.model"),
    ],
)
def test_experts_are_distributed_among_ranks_that_share_the_parameters(fsdp: str, model: str):
    distributed = f"{fsdp}.expert_parallel_size"
    small(f"{distributed}=4")
    small(f"{distributed}=2", f"{fsdp}.fsdp_size=2")
    assert f"{distributed}=3 does not divide the 4 processes that share the" in refusal(
        f"{distributed}=3"
    )
    assert f"{distributed}=4 does not divide the 2 processes" in refusal(
        f"{distributed}=4", f"{fsdp}.fsdp_size=2"
    )
    assert f"{distributed}=2 with {model}.use_torch_compile=true: how many tokens" in refusal(
        f"{distributed}=2", f"{model}.use_torch_compile=true"
    )
    assert "strategy=ddp, which has all experts on every rank" in refusal(
        f"{distributed}=2", f"{fsdp}.strategy=ddp"
    )


def test_the_engines_experts_are_distributed_over_all_of_its_processes_or_none():
    rollout = "actor_rollout_ref.rollout"
    shared = f"{rollout}.tensor_model_parallel_size=4"
    assert small(shared, f"{rollout}.expert_parallel_size=4")
    assert "set it to 1, or to tensor_model_parallel_size=4" in refusal(
        shared, f"{rollout}.expert_parallel_size=2"
    )
    assert "name=hf has a whole model in each process" in refusal(
        shared, f"{rollout}.expert_parallel_size=4", f"{rollout}.name=hf"
    )
    assert "cpu_fused_moe) ends with a segmentation fault" in refusal(
        shared, f"{rollout}.expert_parallel_size=4", "trainer.device=cpu"
    )


def test_routing_is_replayed_only_where_it_is_recorded_and_the_router_runs_as_it_is_written():
    mode = "actor_rollout_ref.actor.router_replay.mode"
    one_step = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert not small(*one_step).plan.needs_old_log_probs
    assert small(*one_step, f"{mode}=R2").plan.needs_old_log_probs
    assert f"{CORRECTION}.bypass_mode=true leaves out; set bypass_mode=false" in refusal(
        f"{mode}=R2", f"{CORRECTION}.bypass_mode=true"
    )
    assert "set actor_rollout_ref.model.use_torch_compile=false, or mode=disabled" in refusal(
        f"{mode}=R2", "actor_rollout_ref.model.use_torch_compile=true"
    )
    on_cpu = "trainer.device=cpu"
    small(on_cpu, f"{mode}=R3", "actor_rollout_ref.ref.router_replay.mode=R3")
    assert "rollout.name=hf does not record it; set name=vllm, or mode=R2" in refusal(
        on_cpu, f"{mode}=R3", "actor_rollout_ref.rollout.name=hf"
    )
    small(f"{mode}=R3")
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    assert f"{size} has each process of it schedule for itself; set that to 1" in refusal(
        f"{mode}=R3", size
    )
    small(on_cpu, f"{mode}=R3", size)
    assert "only with actor_rollout_ref.actor.router_replay.mode=R3; set that" in refusal(
        f"{mode}=R2", "actor_rollout_ref.ref.router_replay.mode=R3"
    )


def test_experts_are_balanced_only_where_their_routers_are_trained_and_seen():
    actor = "actor_rollout_ref.actor"
    balanced = f"{actor}.router_aux_loss_coef=0.1"
    small(balanced)
    frozen = f"{actor}.freeze_router=true"
    assert f"{frozen} leaves them as they are: set one of the two" in refusal(balanced, frozen)
    text = "which an adapter leaves as they are; set actor_rollout_ref.model.lora_rank=0, or"
    assert text in refusal(balanced, "actor_rollout_ref.model.lora_rank=4")
    text = "do not tell; set actor_rollout_ref.model.use_torch_compile=false, or the coefficient"
    assert text in refusal(balanced, "actor_rollout_ref.model.use_torch_compile=true")
    text = "ema_decay=0.5 averages the whole model: set ema_decay=null, or freeze_router=false"
    assert text in refusal(frozen, f"{actor}.ema_decay=0.5")


def test_bypass_leaves_out_nothing_that_is_needed():
    bypass = f"{CORRECTION}.bypass_mode=true"
    assert "set actor_rollout_ref.actor.use_kl_loss=true instead" in refusal(
        bypass, "algorithm.use_kl_in_reward=true"
    )
    assert f"{CORRECTION}: bypass_mode=true computes no" in refusal(
        bypass, f"{CORRECTION}.rollout_is=token"
    )
    assert small().plan.needs_old_log_probs and not small(bypass).plan.needs_old_log_probs
    for estimator in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        chosen = [f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=4"]
        assert small(*chosen).plan.needs_old_log_probs
        assert f"adv_estimator={estimator} gets sum_pi_squared; set bypass_mode=false" in refusal(
            *chosen, bypass
        )


def test_corrections_and_selected_tokens_need_log_probabilities_before_a_single_step():
    one_step = [f"{ACTOR_KEY}.ppo_mini_batch_size=16"]
    assert not small(*one_step).plan.needs_old_log_probs
    for correction in (
        ["rollout_is=sequence"],
        ["rollout_rs=token_k1", "rollout_rs_threshold=0.5_2.0"],
    ):
        assert small(
            *one_step, *(f"{CORRECTION}.{setting}" for setting in correction)
        ).plan.needs_old_log_probs
    assert small(*one_step, f"{ACTOR_KEY}.policy_loss.loss_mode=kl_cov").plan.needs_old_log_probs


def test_a_band_of_the_command_line_is_read_as_two_numbers():
    config = small(f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0")
    assert config.algorithm.rollout_correction.rollout_is_threshold == "0.5_5.0"


@pytest.mark.parametrize(
    ("text", "bounds"), [("0.5_5", (0.5, 5.0)), ("0.25_3.0", (0.25, 3.0)), ("1_5", (1.0, 5.0))]
)
def test_an_underscore_between_the_bounds_of_a_band_is_not_one_within_a_number(
    text: str, bounds: tuple[float, float], tmp_path: Path
):
    settings = ["rollout_is=token", f"rollout_is_threshold={text}", "rollout_rs=token_k1"]
    config = small(
        *(f"{CORRECTION}.{setting}" for setting in [*settings, f"rollout_rs_threshold= {text}"])
    )
    (tmp_path / "printed.yaml").write_text("defaults: [ppo_trainer, _self_]\n" + to_yaml(config))
    for read in (config, load_ppo_config([], "printed", str(tmp_path))):
        correction = read.algorithm.rollout_correction
        assert read_band(correction.rollout_is_threshold, "rollout_is_threshold") == bounds
        assert rejection_bounds("token_k1", correction.rollout_rs_threshold) == {"token_k1": bounds}


def test_a_band_with_the_larger_bound_first_is_refused_as_it_was_written():
    assert "rollout_is_threshold=5_0.5: expected" in refusal(
        f"{CORRECTION}.rollout_is_threshold=5_0.5"
    )


def test_an_underscore_within_a_number_is_read_where_a_key_takes_only_numbers():
    assert small("trainer.total_training_steps=1_000").trainer.total_training_steps == 1000


def test_a_clip_ratio_without_effect_is_refused():
    actor = "actor_rollout_ref.actor"
    both = [f"{actor}.clip_ratio_low=0.2", f"{actor}.clip_ratio_high=0.28"]
    assert "clip_ratio=0.1 has no effect" in refusal(f"{actor}.clip_ratio=0.1", *both)
    assert small(*both, f"{actor}.clip_ratio=0.28").actor_rollout_ref.actor.clip_ratio_low == 0.2


def test_warm_up_is_given_once():
    optim = "actor_rollout_ref.actor.optim"
    assert "both set the warm-up" in refusal(
        f"{optim}.lr_warmup_steps=5", f"{optim}.lr_warmup_steps_ratio=0.1"
    )


def test_generation_ahead_needs_a_pool_of_its_own_and_a_correction():
    corrected = "algorithm.rollout_correction.rollout_is=token"
    own_pool = ["+resource_pool_spec.rollout_pool=[2]", "role_mapping.rollout=rollout_pool"]
    assert small("trainer.max_staleness=1", corrected, *own_pool).trainer.max_staleness == 1
    assert small(
        "trainer.max_staleness=1", "algorithm.rollout_correction.bypass_mode=true", *own_pool
    )
    shared = refusal("trainer.max_staleness=1", corrected)
    assert (
        "actor, critic and rollout share the pool global_pool" in shared
        and "rollout_is=token" not in shared
    )
    assert "weights one version older drew" in refusal("trainer.max_staleness=1", *own_pool)
    too_old = refusal("trainer.max_staleness=2", corrected, *own_pool)
    assert (
        "trainer.max_staleness=2 is of main_detached" in too_old
        and "main_ppo takes 0 or 1" in too_old
    )


@pytest.mark.parametrize("key", ["trainer.pipeline_depth", "detached.max_staleness"])
def test_a_key_of_an_earlier_version_is_refused_with_its_successor(key):
    assert f"{key}: there is no such key; set trainer.max_staleness, which replaces it" in refusal(
        f"{key}=1"
    )


def test_a_quantised_engine_is_vllm_with_a_form_that_takes_updates_and_a_correction():
    engine = "actor_rollout_ref.rollout"
    fp8, corrected = (
        f"{engine}.quantization=fp8_per_channel",
        "algorithm.rollout_correction.rollout_is=token",
    )
    assert small(fp8, corrected).actor_rollout_ref.rollout.quantization == "fp8_per_channel"
    assert small(fp8, "algorithm.rollout_correction.bypass_mode=true")
    assert "quantization=fp8_per_channel draws responses from another distribution" in refusal(fp8)
    assert "does not quantise actor_rollout_ref.rollout.dtype=float32" in refusal(
        fp8, corrected, f"{engine}.dtype=fp32"
    )
    assert "is of vLLM, but actor_rollout_ref.rollout.name=hf" in refusal(
        fp8, corrected, f"{engine}.name=hf"
    )
    for other in ("int8_per_channel_weight_only", "compressed-tensors", "fp8"):
        assert "only fp8_per_channel takes new weights" in refusal(
            f"{engine}.quantization={other}", corrected
        )


def test_critic_warm_up_needs_a_critic_and_ends_before_the_run():
    grpo = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    assert "has no critic" in refusal(*grpo, "trainer.critic_warmup=1")
    assert "never be updated" in refusal(
        "trainer.critic_warmup=2", "trainer.total_training_steps=2"
    )


def test_a_best_checkpoint_needs_validations_after_steps():
    metric = "trainer.best_ckpt_metric=val-core/openai/gsm8k/acc/mean@1"
    assert "with trainer.test_freq=-1 no step is followed by one" in refusal(
        metric, "trainer.test_freq=-1"
    )
    assert (
        small(metric, "trainer.test_freq=7").trainer.best_ckpt_metric
        == "val-core/openai/gsm8k/acc/mean@1"
    )


def test_several_greedy_validation_responses_are_refused():
    values = "actor_rollout_ref.rollout.val_kwargs"
    assert "all the same" in refusal(f"{values}.n=4")
    assert (
        small(f"{values}.n=4", f"{values}.temperature=0.6").actor_rollout_ref.rollout.val_kwargs.n
        == 4
    )


def test_reward_settings_without_effect_are_refused():
    assert "custom_reward_function.path" in refusal("custom_reward_function.reward_kwargs={a: 1}")
    assert "reward_model.model.path" in refusal("reward_model.enable=true")


SAFETY = ["reward_models.safety.path=my/safety", "role_mapping.safety=global_pool"]


def test_a_further_reward_model_is_a_role_with_the_settings_of_the_first():
    first = ["reward_model.enable=true", "reward_model.model.path=x", "reward_model.weight=0.5"]
    settings = [
        "reward_model.micro_batch_size_per_gpu=3",
        "reward_model.model.fsdp_config.param_offload=true",
    ]
    own_pool = ["role_mapping.safety=safety_pool", "resource_pool_spec.safety_pool=[3]"]
    config = small(*SAFETY, *own_pool, "reward_models.safety.weight=-2", *settings, *first)
    assert config.plan.active_roles == ("actor", "rollout", "critic", "reward_model", "safety")
    assert config.num_processes("safety") == 3 and config.plan.custom_roles == ()
    one, safety = config.plan.reward_models_by_role.values()
    assert one is config.reward_model and (one.model.path, one.weight) == ("x", 0.5)
    assert (safety.model.path, safety.weight, safety.micro_batch_size_per_gpu) == (
        "my/safety",
        -2.0,
        3,
    )
    assert safety.model.fsdp_config.param_offload
    alone = small(*SAFETY, "worker_classes.judge=a.Judge", "role_mapping.judge=global_pool")
    assert alone.plan.active_roles == ("actor", "rollout", "critic", "safety", "judge")
    assert list(alone.plan.reward_models_by_role) == ["safety"] and alone.plan.custom_roles == (
        "judge",
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["reward_models.safety.weight=2", SAFETY[1]],
            "reward_models.safety.path: this key is not set; set it",
        ),
        (["reward_models.safety.path=", SAFETY[1]], 'reward_models.safety.path="": '),
        (
            [*SAFETY, "reward_models.safety.wieght=2"],
            "reward_models.safety.wieght: there is no such key",
        ),
        (
            [*SAFETY, "reward_models.safety.weight=nan"],
            "reward_models.safety.weight=NaN: expected a finite number",
        ),
        (["reward_model.weight=-inf"], "reward_model.weight=-Infinity: expected a finite number"),
        (
            [SAFETY[0]],
            "role_mapping.safety is not set, but reward_models.safety is a reward model of this "
            "run",
        ),
        (
            [SAFETY[0], "role_mapping.safety=safe"],
            "role_mapping.safety=safe: there is no such pool",
        ),
        ([SAFETY[1]], "a reward model reward_models.safety.path"),
        (["reward_models.critic.path=x"], "reward_models.critic: critic is a role already"),
        (
            [*SAFETY, "worker_classes.safety=a.Judge"],
            "reward_models.safety: safety is a role already",
        ),
        (
            [*SAFETY, "algorithm.filter_groups.enable=true"],
            "before the reward model scores the batch",
        ),
        (
            [*SAFETY, *BY_TOKENS, "reward_model.forward_max_token_len_per_gpu=9"],
            "reward_model.forward_max_token_len_per_gpu=9 tokens",
        ),
    ],
)
def test_a_further_reward_model_that_cannot_score_is_refused(overrides: list[str], expected: str):
    assert expected in refusal(*overrides)


def test_a_logger_is_known_and_named_once():
    assert "expected 'console'" in refusal("trainer.logger=[console,wndb]")
    assert "names a logger twice" in refusal("trainer.logger=[console,console]")


def test_all_broken_rules_are_named_at_once():
    message = refusal(
        "critic.enable=false",
        "trainer.critic_warmup=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
    )
    assert len(message.splitlines()) == 3


def test_a_misspelt_estimator_is_named_before_the_pools_it_would_leave_empty():
    with pytest.raises(
        ConfigError, match=r"adv_estimator=gro: unknown.*did you mean grpo"
    ) as caught:
        load_ppo_config([*REQUIRED, "algorithm.adv_estimator=gro", "placement=split"])
    assert "critic_pool" not in str(caught.value)


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_the_toy_job_runs_in_every_placement(placement: str):
    load_ppo_config(
        [f"placement={placement}"], "toy", str(ROOT / "examples/split_placement/config")
    )
