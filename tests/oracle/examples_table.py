"""Training on examples, key by key: runs whose settings are not the defaults, and every key's place
in them.

Imports nothing from `verl_like`.
"""

from pathlib import Path
from typing import Any

from step_table import DEFAULT, filled

KINDS = ("sft", "rm", "dpo", "ilql")

COMMON: dict[str, Any] = {
    "data.train_batch_size": 2,
    "model.tokenizer_path": "{folder}/talk",
    "trainer.device": "cpu",
    "trainer.default_local_dir": "{folder}/runs",
    "training.optim.lr": 1e-3,
}

# What a kind's runs begin with.
OF_KIND: dict[str, dict[str, Any]] = {
    "sft": {"model.path": "{folder}/policy", "data.train_files": "{folder}/talks.jsonl"},
    "rm": {"model.path": "{folder}/reward", "data.train_files": "{folder}/pairs.jsonl"},
    "dpo": {"model.path": "{folder}/policy", "data.train_files": "{folder}/pairs.jsonl"},
    "ilql": {"model.path": "{folder}/valued", "data.train_files": "{folder}/talks.jsonl"},
}

# Each run is made by every kind, with settings of its own beside these.
RUNS: dict[str, dict[str, Any]] = {
    "in order": {
        "data.shuffle": False,
        "data.max_length": 9,
        "data.overlong": "truncate",
        "data.apply_chat_template_kwargs": {"mark": "-"},
        "trainer.total_training_steps": 5,
        "model.override_config": {"rms_norm_eps": 0.1},
        "training.optim.lr_warmup_steps": 2,
        "training.optim.weight_decay": 0.3,
        "training.use_dynamic_bsz": False,
        "training.micro_batch_size_per_gpu": 1,
        "model.enable_gradient_checkpointing": False,
        "model.enable_activation_offload": True,
        "model.fsdp_config.strategy": "zero2",
        "model.fsdp_config.param_offload": True,
    },
    "in random order": {
        "data.train_max_samples": 5,
        "data.val_files": "{validation}",
        "data.val_max_samples": 3,
        "trainer.seed": 5,
        "trainer.total_epochs": 3,
        "trainer.balance_batch": False,
        "training.grad_clip": 100.0,
        "training.optim.lr": 3e-3,
        "training.optim.lr_scheduler_type": "linear",
        "training.max_token_len_per_gpu": 48,
        "model.fsdp_config.strategy": "ddp",
        "model.fsdp_config.optimizer_offload": True,
    },
    "warmed up": {
        "data.overlong": "drop",
        "data.max_length": 10,
        "trainer.total_epochs": 2,
        "training.optim.lr": 2e-3,
        "training.optim.lr_scheduler_type": "cosine",
        "training.optim.lr_warmup_steps_ratio": 0.4,
        "model.fsdp_config.strategy": "single",
    },
    "in order, decaying": {
        "data.shuffle": False,
        "trainer.total_training_steps": 6,
        "training.optim.lr_scheduler_type": "linear",
    },
}
# AdamW sees no common factor of all gradients: some steps of a run are clipped, and some are not.
OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("sft", "in order"): {"training.grad_clip": 7.0},
    ("rm", "in order"): {"training.grad_clip": 3.0},
    ("dpo", "in order"): {
        "training.grad_clip": 5.0,
        "training.beta": 0.7,
        "training.label_smoothing": 0.2,
    },
    ("dpo", "in random order"): {"training.beta": 0.3, "training.loss_type": "ipo"},
    ("dpo", "warmed up"): {"training.beta": 2.0},
    ("ilql", "in order"): {
        "training.grad_clip": 60.0,
        "training.gamma": 0.6,
        "training.cql_coef": 0.4,
        "training.lm_coef": 0.3,
    },
    ("ilql", "in random order"): {"training.expectile": 0.9, "training.polyak": 0.2},
    ("ilql", "warmed up"): {"training.awac_beta": 1.5},
}

SHARED_PLACES: dict[str, tuple[str, Any]] = {
    "data.train_batch_size": ("in random order", 1),
    "data.shuffle": ("in order", DEFAULT),
    "data.max_length": ("in order", DEFAULT),
    "data.overlong": ("in order", "drop"),
    "data.apply_chat_template_kwargs": ("in order", DEFAULT),
    "data.train_max_samples": ("in random order", DEFAULT),
    "data.val_files": ("in random order", DEFAULT),
    "data.val_max_samples": ("in random order", DEFAULT),
    "trainer.total_training_steps": ("in order, decaying", 4),
    "trainer.total_epochs": ("in random order", 1),
    "trainer.seed": ("in random order", DEFAULT),
    "model.override_config": ("in order", DEFAULT),
    "training.grad_clip": ("in order", DEFAULT),
    "training.optim.lr": ("in order", DEFAULT),
    "training.optim.weight_decay": ("in order", DEFAULT),
    "training.optim.lr_warmup_steps": ("in order", DEFAULT),
    "training.optim.lr_warmup_steps_ratio": ("warmed up", DEFAULT),
    "training.optim.lr_scheduler_type": ("in random order", DEFAULT),
    "model.path": ("in order", "{folder}/other_{model}"),
}
# The keys that reach a formula: in which run, and with which other value that run would compute
# something else.
REACHES_A_FORMULA: dict[str, dict[str, tuple[str, Any]]] = {
    "sft": SHARED_PLACES,
    "rm": SHARED_PLACES,
    "dpo": SHARED_PLACES
    | {
        "training.beta": ("in order", DEFAULT),
        "training.label_smoothing": ("in order", DEFAULT),
        "training.loss_type": ("in random order", DEFAULT),
    },
    "ilql": SHARED_PLACES
    | {
        "training.gamma": ("in order", DEFAULT),
        "training.cql_coef": ("in order", DEFAULT),
        "training.lm_coef": ("in order", DEFAULT),
        "training.expectile": ("in random order", DEFAULT),
        "training.polyak": ("in random order", DEFAULT),
        "training.awac_beta": ("warmed up", DEFAULT),
    },
}

# The keys that only change how the numbers are computed; the runs set them, and have the numbers of
# the reference.
LAYOUT = (
    *(
        "model.enable_gradient_checkpointing",
        "model.enable_activation_offload",
        "model.fsdp_config.strategy",
    ),
    *(
        "model.fsdp_config.param_offload",
        "model.fsdp_config.optimizer_offload",
        "trainer.balance_batch",
    ),
    *(
        "training.use_dynamic_bsz",
        "training.micro_batch_size_per_gpu",
        "training.max_token_len_per_gpu",
    ),
)

# Every other key, under the test that shows what it does.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "tests/unit/test_supervised.py": (
        *("data.train_files", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.device"),
        "ray_kwargs.ray_init.num_cpus",
    ),
    "tests/unit/test_workers_tokenizer.py": ("model.tokenizer_path",),
    "tests/unit/test_trust_remote_code.py": ("model.trust_remote_code",),
    "tests/unit/test_workers_memory_and_compile.py": ("model.use_torch_compile",),
    "tests/unit/test_workers_lora.py": (
        "model.lora_rank",
        "model.lora_alpha",
        "model.target_modules",
    ),
    "tests/unit/test_ilql.py": ("model.fsdp_config.dtype", "model.fsdp_config.model_dtype"),
    "tests/unit/test_distributed_experts.py": ("model.fsdp_config.expert_parallel_size",),
    "tests/unit/test_workers_equality.py": (
        *("model.fsdp_config.fsdp_size", "training.ulysses_sequence_parallel_size"),
    ),
    "tests/end_to_end/test_fit_schedule.py": (
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.val_before_train",
    ),
    "tests/unit/test_training_loop.py": ("trainer.val_only",),
    "tests/end_to_end/test_best_checkpoint.py": (
        "trainer.best_ckpt_metric",
        "trainer.max_ckpt_to_keep",
    ),
    "tests/end_to_end/test_which_run_is_resumed.py": (
        *("trainer.resume_mode", "trainer.resume_from_path", "trainer.damaged_ckpt"),
    ),
    "tests/end_to_end/test_nodes.py": ("ray_kwargs.ray_init.address",),
    "tests/end_to_end/test_detached_faults.py": ("trainer.call_timeout_s",),
    "tests/unit/test_config_composition.py": ("trainer.project_name", "trainer.experiment_name"),
    "tests/unit/test_trainer_record.py": ("trainer.logger", "trainer.default_local_dir"),
    "tests/unit/test_config_algorithms.py": ("plugins",),
}

# The keys of one kind alone that reach no formula of the models of the runs, which have no experts.
OWN_ELSEWHERE: dict[str, dict[str, tuple[str, ...]]] = {
    "sft": {"tests/unit/test_workers_router_load.py": ("training.router_aux_loss_coef",)}
}

# The keys that detached training has beside those of PPO, whose places are in step_table.py.
DETACHED_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "tests/unit/test_detached_config.py": ("detached.num_makers",),
    "tests/end_to_end/test_detached.py": (
        *(
            "detached.num_trainers",
            "detached.update_steps",
            "detached.update_in_flight",
            "detached.routing",
        ),
        *("detached.experience_batch_size", "detached.max_restarts"),
    ),
    "tests/unit/test_detached_ledger.py": (
        "detached.max_attempts",
        "detached.min_effective_sample_size",
    ),
    "tests/unit/test_detached_maker.py": ("detached.restart_below",),
}


def settings_of(kind: str, run: str, folder: Path) -> dict[str, Any]:
    """The settings of a kind's run on the world in `folder`."""
    settings = COMMON | OF_KIND[kind] | RUNS[run] | OWN.get((kind, run), {})
    if settings.get("data.val_files") == "{validation}":
        settings["data.val_files"] = settings["data.train_files"]
    return {key: filled(value, folder) for key, value in settings.items()}
