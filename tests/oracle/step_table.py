"""Which key is exercised where: runs whose settings are not the defaults, and every key's place in
them.

Imports nothing from `verl_like`.
"""

from pathlib import Path
from typing import Any

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
FSDP, CRITIC_FSDP = f"{ACTOR}.fsdp_config", "critic.model.fsdp_config"

COMMON: dict[str, Any] = {
    "data.train_files": "{folder}/data.parquet",
    "data.val_files": "{folder}/data.parquet",
    "data.max_prompt_length": 6,
    "data.max_response_length": 7,
    "data.train_batch_size": 4,
    "data.shuffle": False,
    "actor_rollout_ref.model.path": "{folder}/policy",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    "critic.model.path": "{folder}/critic",
    "critic.ppo_micro_batch_size_per_gpu": 1,
    "custom_reward_function.path": "{folder}/reward.py",
    "custom_reward_function.name": "grade",
    "reward.on_error": "skip",
    "trainer.total_training_steps": 5,
    "trainer.default_local_dir": "{folder}/runs",
    "worker_classes.rollout": "step_runs.FixedRollout",
}

# Each is a training run with many settings that are not the defaults.
RUNS: dict[str, dict[str, Any]] = {
    # PPO with both KL terms; the critic has settings of its own.
    "gae": {
        "algorithm.gamma": 0.9,
        "algorithm.lam": 0.8,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "abs",
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.kl_coef": 0.4,
        "algorithm.kl_ctrl.target_kl": 2.0,
        f"{ROLLOUT}.temperature": 0.7,
        f"{ROLLOUT}.n": 2,
        "actor_rollout_ref.model.override_config": {"rms_norm_eps": 0.1},
        f"{ACTOR}.ppo_mini_batch_size": 2,
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.clip_ratio_low": 0.1,
        f"{ACTOR}.clip_ratio_high": 0.4,
        f"{ACTOR}.clip_ratio_c": 1.6,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ACTOR}.entropy_coeff": 0.05,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.3,
        f"{ACTOR}.kl_loss_type": "mse",
        f"{ACTOR}.grad_clip": 0.4,
        f"{ACTOR}.optim.lr": 1e-3,
        f"{ACTOR}.optim.weight_decay": 0.3,
        f"{ACTOR}.optim.lr_warmup_steps": 3,
        "critic.model.override_config": {"rms_norm_eps": 0.2},
        "critic.ppo_mini_batch_size": 1,
        "critic.ppo_epochs": 1,
        "critic.loss_agg_mode": "token-sum",
        "critic.grad_clip": 40.0,
        "critic.cliprange_value": 0.3,
        "critic.optim.lr": 1e-3,
        "critic.optim.weight_decay": 0.2,
        "critic.optim.lr_scheduler_type": "cosine",
    },
    # PPO whose first step trains the critic alone, with a loss of its own; in another layout than
    # the others.
    "warm-up": {
        "trainer.critic_warmup": 1,
        "algorithm.lam": 0.95,
        f"{ROLLOUT}.n": 2,
        f"{ROLLOUT}.response_length": 9,
        f"{ACTOR}.ppo_mini_batch_size": 2,
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.policy_loss.loss_mode": "twice",
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}.grad_clip": 10.0,
        f"{ACTOR}.optim.lr": 2e-3,
        f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.6,
        "critic.grad_clip": 10.0,
        "critic.optim.lr": 3e-3,
        "critic.optim.lr_warmup_steps": 2,
        "critic.optim.lr_scheduler_type": "linear",
        "actor_rollout_ref.model.enable_activation_offload": True,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 20,
        f"{FSDP}.param_offload": True,
        f"{FSDP}.optimizer_offload": True,
        f"{FSDP}.strategy": "zero3",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 25,
        "critic.model.enable_activation_offload": True,
        "critic.use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": 30,
        "critic.forward_max_token_len_per_gpu": 35,
        f"{CRITIC_FSDP}.param_offload": True,
        f"{CRITIC_FSDP}.optimizer_offload": True,
        f"{CRITIC_FSDP}.strategy": "zero2",
        "trainer.balance_batch": False,
    },
    # GRPO with groups of four, two reward models beside the rule, and prompts in random order.
    "grpo": {
        "data.shuffle": True,
        "data.train_max_samples": 7,
        "trainer.seed": 5,
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "reward_model.enable": True,
        "reward_model.model.path": "{folder}/reward",
        "reward_model.model.override_config": {"rms_norm_eps": 0.1},
        "reward_model.weight": 0.6,
        "reward_models": {"strict": {"path": "{folder}/other_reward", "weight": -1.7}},
        "role_mapping": {"strict": "global_pool"},
        "custom_reward_function.reward_kwargs": {"scale": 0.5},
        f"{ROLLOUT}.n": 4,
        f"{ROLLOUT}.temperature": 1.3,
        f"{ACTOR}.ppo_mini_batch_size": 2,
        f"{ACTOR}.clip_ratio": 0.15,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum",
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.2,
        f"{ACTOR}.kl_loss_type": "k3+",
        f"{ACTOR}.ptx_coef": 0.7,
        "data.ptx_files": "{folder}/texts.jsonl",
        "data.ptx_batch_size": 4,
        f"{ACTOR}.grad_clip": 100.0,
        f"{ACTOR}.optim.lr": 2e-3,
        f"{ACTOR}.optim.lr_scheduler_type": "linear",
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.ref.fsdp_config.param_offload": True,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 3,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 5,
        "reward_model.model.fsdp_config.param_offload": True,
        "reward_model.micro_batch_size_per_gpu": 3,
    },
    # GRPO whose batch is one optimizer step, so that nothing is computed before it; a critic learns
    # beside it. A response that cannot be scored counts 0.
    "one step": {
        "algorithm.adv_estimator": "grpo",
        "critic.enable": True,
        "reward.on_error": "score",
        "trainer.total_training_steps": None,
        "trainer.total_epochs": 3,
        f"{ROLLOUT}.n": 2,
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.entropy_coeff": -0.02,
        f"{ACTOR}.optim.lr": 2e-3,
        f"{ACTOR}.optim.lr_scheduler_type": "cosine",
        "critic.model.enable_gradient_checkpointing": True,
        "critic.ppo_mini_batch_size": 2,
        "critic.forward_micro_batch_size_per_gpu": 3,
        "critic.optim.lr": 3e-3,
        "critic.optim.lr_warmup_steps_ratio": 0.4,
    },
    # GRPO whose losses are weighted, and some tokens left out, by how far the rollout is from the
    # trainer.
    "corrected": {
        "algorithm.adv_estimator": "grpo",
        f"{CORRECTION}.rollout_is": "sequence",
        f"{CORRECTION}.rollout_is_threshold": "0.001_20.0",
        f"{CORRECTION}.rollout_is_batch_normalize": True,
        f"{CORRECTION}.rollout_rs": "token_k1,seq_mean_k3",
        f"{CORRECTION}.rollout_rs_threshold": "0.05_20.0,1.2",
        f"{ROLLOUT}.n": 4,
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.optim.lr": 2e-3,
    },
    # GRPO that takes the rollout's log-probabilities for the trainer's.
    "bypass": {
        "algorithm.adv_estimator": "grpo",
        f"{CORRECTION}.bypass_mode": True,
        f"{ROLLOUT}.n": 4,
        f"{ACTOR}.ppo_mini_batch_size": 2,
        f"{ACTOR}.optim.lr": 2e-3,
    },
}

# What further differs on two ranks; none of it reaches a number.
ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    "gae": {
        f"{FSDP}.strategy": "ddp",
        f"{CRITIC_FSDP}.strategy": "ddp",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 40,
    },
    "warm-up": {f"{FSDP}.fsdp_size": 2, f"{CRITIC_FSDP}.fsdp_size": 2},
    "grpo": {
        "reward_model.use_dynamic_bsz": True,
        "reward_model.forward_max_token_len_per_gpu": 30,
        f"{ACTOR}.use_prefix_grouper": True,  # also of the reference policy
    },
    "corrected": {f"{ACTOR}.use_prefix_grouper": True, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4},
    "bypass": {},
    "one step": {
        f"{ACTOR}.use_prefix_grouper": True,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3,
        f"{ACTOR}.ulysses_sequence_parallel_size": 2,
        "critic.ulysses_sequence_parallel_size": 2,
    },
}

DEFAULT = "the default"

# The keys that reach a formula: in which run, and with which other value that run would compute
# something else. That is the default, or where the default computes the same or cannot run, a value
# that does and can.
REACHES_A_FORMULA: dict[str, tuple[str, Any]] = {
    **dict.fromkeys([key for key in RUNS["gae"] if key.startswith("algorithm.")], ("gae", DEFAULT)),
    "algorithm.adv_estimator": ("one step", DEFAULT),
    "algorithm.norm_adv_by_std_in_grpo": ("grpo", DEFAULT),
    **dict.fromkeys(
        [key for key in RUNS["corrected"] if key.startswith(CORRECTION)], ("corrected", DEFAULT)
    ),
    f"{CORRECTION}.rollout_rs_threshold": ("corrected", "0.5_2.0,1.2"),
    f"{CORRECTION}.bypass_mode": ("bypass", DEFAULT),
    **{
        f"{ACTOR}.{name}": ("gae", DEFAULT)
        for name in (
            *(
                "clip_ratio_low",
                "clip_ratio_high",
                "clip_ratio_c",
                "loss_agg_mode",
                "entropy_coeff",
                "use_kl_loss",
            ),
            *("kl_loss_coef", "kl_loss_type", "ppo_epochs", "grad_clip"),
            *("optim.lr", "optim.weight_decay", "optim.lr_warmup_steps"),
        )
    },
    f"{ACTOR}.ppo_mini_batch_size": ("gae", 4),
    f"{ACTOR}.clip_ratio": ("grpo", DEFAULT),
    f"{ACTOR}.ptx_coef": ("grpo", DEFAULT),
    "data.ptx_batch_size": ("grpo", 2),
    f"{ACTOR}.policy_loss.loss_mode": ("warm-up", DEFAULT),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": ("warm-up", DEFAULT),
    f"{ACTOR}.optim.lr_scheduler_type": ("grpo", DEFAULT),
    "actor_rollout_ref.model.path": ("gae", "{folder}/other_policy"),
    "actor_rollout_ref.model.override_config": ("gae", DEFAULT),
    f"{ROLLOUT}.temperature": ("gae", DEFAULT),
    f"{ROLLOUT}.n": ("grpo", 2),
    f"{ROLLOUT}.response_length": ("warm-up", DEFAULT),
    **{
        f"critic.{name}": ("gae", DEFAULT)
        for name in (
            *("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode", "grad_clip", "cliprange_value"),
            *("model.override_config", "optim.lr", "optim.weight_decay", "optim.lr_scheduler_type"),
        )
    },
    "critic.enable": ("one step", DEFAULT),
    "critic.model.path": ("gae", "{folder}/other_critic"),
    "critic.optim.lr_warmup_steps": ("warm-up", DEFAULT),
    "critic.optim.lr_warmup_steps_ratio": ("one step", DEFAULT),
    "reward_model.enable": ("grpo", DEFAULT),
    "reward_model.weight": ("grpo", DEFAULT),
    "reward_model.model.path": ("grpo", "{folder}/other_reward"),
    "reward_models": ("grpo", DEFAULT),
    "reward_model.model.override_config": ("grpo", DEFAULT),
    "custom_reward_function.name": ("gae", DEFAULT),
    "custom_reward_function.reward_kwargs": ("grpo", DEFAULT),
    "reward.on_error": ("one step", "skip"),
    "data.max_prompt_length": ("gae", DEFAULT),
    "data.max_response_length": ("grpo", DEFAULT),
    "data.train_batch_size": ("gae", 2),
    "data.train_max_samples": ("grpo", DEFAULT),
    "data.shuffle": ("gae", DEFAULT),
    "trainer.seed": ("grpo", DEFAULT),
    "trainer.critic_warmup": ("warm-up", DEFAULT),
    "trainer.total_training_steps": ("grpo", DEFAULT),
    "trainer.total_epochs": ("one step", DEFAULT),
}

# The keys that only change how the numbers are computed; the runs set them all, and have the same
# numbers.
LOG_PROB = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
LAYOUT = [
    "actor_rollout_ref.model.enable_activation_offload",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.use_prefix_grouper",
    f"{FSDP}.param_offload",
    f"{FSDP}.optimizer_offload",
    f"{FSDP}.fsdp_size",
    f"{FSDP}.strategy",
    *(f"actor_rollout_ref.ref.log_prob_{name}" for name in LOG_PROB),
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    *(f"{ROLLOUT}.log_prob_{name}" for name in LOG_PROB),
    "critic.model.enable_activation_offload",
    "critic.model.enable_gradient_checkpointing",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu",
    "critic.use_dynamic_bsz",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size",
    f"{CRITIC_FSDP}.param_offload",
    f"{CRITIC_FSDP}.optimizer_offload",
    f"{CRITIC_FSDP}.fsdp_size",
    f"{CRITIC_FSDP}.strategy",
    "reward_model.micro_batch_size_per_gpu",
    "reward_model.use_dynamic_bsz",
    "reward_model.forward_max_token_len_per_gpu",
    "reward_model.model.fsdp_config.param_offload",
    "trainer.balance_batch",
]

# The keys that round numbers: in which run, a metric that is another one in bfloat16, and one that
# stays.
PRECISION: dict[str, tuple[str, str, str]] = {
    f"{FSDP}.dtype": ("gae", "actor/entropy", "critic/values/mean"),
    f"{FSDP}.model_dtype": ("gae", "actor/entropy", "critic/values/mean"),
    "actor_rollout_ref.ref.fsdp_config.dtype": ("gae", "actor/reward_kl_penalty", "actor/entropy"),
    f"{CRITIC_FSDP}.dtype": ("gae", "critic/values/mean", "actor/entropy"),
    f"{CRITIC_FSDP}.model_dtype": ("gae", "critic/values/mean", "actor/entropy"),
    "reward_model.model.fsdp_config.dtype": ("grpo", "critic/score/mean", "actor/entropy"),
}

# Other keys: they reach no formula of a training step. Under one word why.
REACHES_NO_FORMULA: dict[str, list[str]] = {
    "input": [
        *(
            "data.train_files",
            "data.val_files",
            "data.ptx_files",
            "data.val_max_samples",
            "data.prompt_key",
            "data.reward_fn_key",
        ),
        *("data.filter_overlong_prompts", "data.truncation", "data.apply_chat_template_kwargs"),
        *(
            "actor_rollout_ref.model.tokenizer_path",
            f"{ROLLOUT}.prompt_length",
            "custom_reward_function.path",
        ),
    ],
    "trust": [
        f"{model}.trust_remote_code"
        for model in ("actor_rollout_ref.model", "critic.model", "reward_model.model")
    ],
    "precision": [*PRECISION, f"{ROLLOUT}.dtype", f"{ROLLOUT}.quantization"],
    "compiled": ["actor_rollout_ref.model.use_torch_compile", "critic.model.use_torch_compile"],
    "adapter": [
        f"{model}.{name}"
        for model in ("actor_rollout_ref.model", "critic.model")
        for name in ("lora_rank", "lora_alpha", "target_modules")
    ],
    "sampling": [
        *(f"{ROLLOUT}.{name}" for name in ("top_k", "top_p", "ignore_eos")),
        *(f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_k", "top_p", "n")),
    ],
    "engine": [
        f"{ROLLOUT}.{name}"
        for name in (
            *(
                "name",
                "tensor_model_parallel_size",
                "expert_parallel_size",
                "gpu_memory_utilization",
                "enforce_eager",
                "free_cache_engine",
            ),
            *(
                "max_num_batched_tokens",
                "max_num_seqs",
                "kv_after_update",
                "weight_transport",
                "routing",
            ),
        )
    ],
    "option": [
        *(
            f"algorithm.filter_groups.{name}"
            for name in ("enable", "metric", "max_num_gen_batches")
        ),
        *(f"reward.overlong_buffer.{name}" for name in ("enable", "len", "penalty_factor")),
    ],
    "average": [f"{ACTOR}.ema_decay"],
    "experts": [
        *(f"{ACTOR}.{name}" for name in ("router_replay.mode", "router_aux_loss_coef")),
        *(f"{ACTOR}.freeze_router", "actor_rollout_ref.ref.router_replay.mode"),
        *(f"{FSDP}.expert_parallel_size", f"{CRITIC_FSDP}.expert_parallel_size"),
    ],
    "agents": [
        *(f"{ROLLOUT}.multi_turn.{name}" for name in ("format", "max_assistant_turns")),
        *(f"agent.{name}" for name in ("environment", "harness", "server", "port")),
        *(f"agent.{name}" for name in ("reasoning_parser", "keep_reasoning", "num_attempts")),
        *(f"agent.{name}" for name in ("num_processes", "max_episodes", "max_memory_gb")),
        *(f"agent.{name}_timeout_s" for name in ("reset", "call", "tool", "reward", "episode")),
    ],
    "pipeline": ["trainer.max_staleness"],
    "limit": [
        "reward.num_workers",
        "reward.timeout_s",
        "reward.max_memory_gb",
        "trainer.call_timeout_s",
    ],
    "placement": [
        *(
            "trainer.device",
            "trainer.nnodes",
            "trainer.n_gpus_per_node",
            "resource_pool_spec",
            "role_mapping",
        ),
        *(
            "worker_classes",
            "plugins",
            "ray_kwargs.ray_init.num_cpus",
            "ray_kwargs.ray_init.address",
        ),
    ],
    "report": [
        f"trainer.{name}"
        for name in (
            *(
                "project_name",
                "experiment_name",
                "logger",
                "val_before_train",
                "val_only",
                "test_freq",
                "save_freq",
            ),
            *("log_val_generations", "default_local_dir"),
            *(
                "resume_mode",
                "resume_from_path",
                "damaged_ckpt",
                "max_ckpt_to_keep",
                "best_ckpt_metric",
            ),
        )
    ],
}


# Under the same words, the tests that show what these keys do.
PLACES: dict[str, tuple[str, ...]] = {
    "input": (
        *(
            "tests/unit/test_trainer_wiring.py",
            "tests/unit/test_ptx.py",
            "tests/unit/test_ppo_data.py",
        ),
        *("tests/unit/test_supervised.py", "tests/unit/test_rollout_requests.py"),
    ),
    "trust": ("tests/unit/test_trust_remote_code.py",),
    "precision": (
        "tests/oracle/test_step_numbers.py",
        "tests/unit/test_workers_lora.py",
        "tests/unit/test_config_rules.py",
    ),
    "compiled": ("tests/unit/test_workers_memory_and_compile.py",),
    "adapter": ("tests/unit/test_workers_lora.py",),
    "sampling": ("tests/unit/test_rollout_hf.py",),
    "engine": (
        *("tests/end_to_end/test_vllm_async.py", "tests/end_to_end/test_vllm_rollout.py"),
        "tests/unit/test_config_rules.py",
        *("tests/unit/test_detached_config.py", "tests/end_to_end/test_toy_job.py"),
        "tests/unit/test_rollout_routing.py",
    ),
    "option": ("tests/unit/test_trainer_dynamic_sampling.py", "tests/unit/test_skipped_samples.py"),
    "average": ("tests/unit/test_ema.py",),
    "experts": (
        *("tests/unit/test_workers_router_replay.py", "tests/unit/test_workers_router_load.py"),
        "tests/unit/test_distributed_experts.py",
    ),
    "agents": (
        *("tests/unit/test_agents_chat.py", "tests/unit/test_agents_hosts.py"),
        *("tests/unit/test_agents_endpoint.py", "tests/unit/test_agents_openenv_server.py"),
        *("tests/unit/test_agents_tool_loop.py", "tests/end_to_end/agent_faults.py"),
    ),
    "pipeline": ("tests/end_to_end/test_pipeline.py",),
    "limit": ("tests/unit/test_rewards_processes.py", "tests/end_to_end/test_detached_faults.py"),
    "placement": (
        *(
            "tests/end_to_end/test_checked_inputs.py",
            "tests/unit/test_supervised.py",
            "tests/end_to_end/test_nodes.py",
        ),
    ),
    "report": (
        *("tests/end_to_end/test_which_run_is_resumed.py", "tests/unit/test_config_composition.py"),
        "tests/end_to_end/test_fit_schedule.py",
    ),
}


def settings_of(run: str, folder: Path, **further: Any) -> dict[str, Any]:
    """The settings of a run on the world in `folder`."""
    return {key: filled(value, folder) for key, value in (COMMON | RUNS[run] | further).items()}


def filled(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: filled(part, folder) for name, part in value.items()}
    return value.replace("{folder}", str(folder)) if isinstance(value, str) else value
