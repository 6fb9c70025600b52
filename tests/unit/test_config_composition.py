"""Presets, overrides and YAML files compose into one typed configuration, or are refused by
name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.trainer.config import ConfigError, PPOConfig, load_ppo_config, to_yaml
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.rules import broken_rules
from verl_like.trainer.config.supervised import SFTConfig, broken_supervised_rules

REQUIRED = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "actor_rollout_ref.model.path=my/model",
]


def refusal(*overrides: str, **source: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_ppo_config([*REQUIRED, *overrides], **source)
    return str(error.value)


def test_the_split_placement_script_of_verl_is_accepted():
    config = load_ppo_config(
        [
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=False",
            "data.train_files=/data/gsm8k/train.parquet",
            "data.val_files=/data/gsm8k/test.parquet",
            "data.train_batch_size=1024",
            "data.max_prompt_length=512",
            "data.max_response_length=256",
            "data.filter_overlong_prompts=True",
            "data.truncation='error'",
            "actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.ppo_mini_batch_size=256",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.actor.fsdp_config.param_offload=False",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
            "actor_rollout_ref.actor.use_kl_loss=False",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
            "critic.optim.lr=2e-5",
            "critic.model.path=deepseek-ai/other",
            "critic.model.enable_gradient_checkpointing=False",
            "critic.ppo_micro_batch_size_per_gpu=8",
            "critic.model.fsdp_config.param_offload=False",
            "critic.model.fsdp_config.optimizer_offload=False",
            "trainer.critic_warmup=0",
            'trainer.logger=["console","wandb"]',
            "trainer.project_name=verl_example_gsm8k",
            "trainer.experiment_name=deepseek_llm_7b",
            "trainer.n_gpus_per_node=8",
            "trainer.nnodes=1",
            "trainer.save_freq=-1",
            "trainer.total_epochs=15",
            "placement=split",
        ]
    )
    assert config.critic.optim.lr == 2e-5
    assert config.critic.model.path == "deepseek-ai/other"
    assert config.trainer.logger == ("console", "wandb")
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": (4,), "critic_pool": (4,)}
    assert config.role_mapping["critic"] == "critic_pool"
    assert config.plan.active_roles == ("actor", "rollout", "critic")


def test_keys_follow_the_keys_they_belong_to():
    config = load_ppo_config(
        [
            *REQUIRED,
            "data.max_prompt_length=100",
            "data.max_response_length=30",
            "actor_rollout_ref.actor.clip_ratio=0.1",
            "actor_rollout_ref.actor.ppo_epochs=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=512",
            "actor_rollout_ref.actor.loss_agg_mode=token-sum",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=5",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=900",
            "critic.ppo_max_token_len_per_gpu=800",
            "critic.ppo_micro_batch_size_per_gpu=4",
            "trainer.project_name=a",
            "trainer.experiment_name=b",
        ]
    )
    policy, critic = config.actor_rollout_ref, config.critic
    assert (policy.rollout.prompt_length, policy.rollout.response_length) == (100, 30)
    assert (policy.actor.clip_ratio_low, policy.actor.clip_ratio_high) == (0.1, 0.1)
    assert policy.ref.log_prob_micro_batch_size_per_gpu == 5
    assert (critic.model.path, critic.forward_micro_batch_size_per_gpu) == ("my/model", 4)
    assert (critic.ppo_epochs, critic.ppo_mini_batch_size, critic.loss_agg_mode) == (
        3,
        512,
        "token-sum",
    )
    for part in (policy.rollout, policy.ref):
        assert (part.log_prob_use_dynamic_bsz, part.log_prob_max_token_len_per_gpu) == (True, 900)
    reward_model = config.reward_model
    assert (critic.use_dynamic_bsz, reward_model.use_dynamic_bsz) == (True, True)
    assert (critic.forward_max_token_len_per_gpu, reward_model.forward_max_token_len_per_gpu) == (
        800,
        800,
    )
    assert config.trainer.default_local_dir == "outputs/a/b"


def test_a_following_key_can_be_set_itself():
    config = load_ppo_config(
        [
            *REQUIRED,
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "critic.ppo_mini_batch_size=128",
        ]
    )
    assert (
        config.actor_rollout_ref.actor.clip_ratio_low,
        config.actor_rollout_ref.actor.clip_ratio_high,
    ) == (0.2, 0.28)
    assert (
        config.actor_rollout_ref.actor.ppo_mini_batch_size,
        config.critic.ppo_mini_batch_size,
    ) == (256, 128)


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_an_unknown_key_is_refused_however_it_is_written(prefix: str):
    message = refusal(f"{prefix}trainer.save_frq=5")
    assert message == "trainer.save_frq: there is no such key; did you mean trainer.save_freq?"


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("actor_rollout_ref.modle.path=x", "actor_rollout_ref.model.path"),
        ("actor_rollout_ref.actor.lr=1e-6", "actor_rollout_ref.actor.optim.lr"),
        ("train_batch_size=8", "data.train_batch_size"),
        ("placment=split", "placement"),
        # By their words: the letters alone are more like those of total_epochs.
        ("trainer.total_step=5", "trainer.total_training_steps"),
    ],
)
def test_the_nearest_key_is_suggested(override: str, suggestion: str):
    assert refusal(override).endswith(f"did you mean {suggestion}?")


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.model.use_remove_padding", "critic.tis_imp_ratio_cap"]
)
def test_a_key_unlike_any_other_gets_no_suggestion(key: str):
    assert refusal(f"{key}=true") == f"{key}: there is no such key; docs/config.md lists all keys"


def test_a_comma_that_is_not_quoted_is_refused_with_the_ways_to_write_it():
    message = refusal("trainer.experiment_name=a,b")
    assert message.startswith(
        "trainer.experiment_name=a,b: a comma separates several values and this key takes one"
    )
    assert (
        "'trainer.experiment_name=\"a,b\"'" in message
        and "'trainer.experiment_name=[a,b]'" in message
    )


def test_every_unknown_key_is_named_at_once():
    message = refusal("trainer.save_frq=5", "data.train_batch_sise=1")
    assert "trainer.save_frq:" in message and "data.train_batch_sise:" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.total_epochs=two", 'trainer.total_epochs="two": expected a valid integer'),
        ("trainer.seed=1.5", "trainer.seed=1.5: expected a valid integer"),
        ("trainer.seed=4294967296", "trainer.seed=4294967296: expected less than 4294967296"),
        (
            "trainer.seed=36893488147419103232",
            "trainer.seed=36893488147419103232: expected less than 4294967296",
        ),
        ("trainer.nnodes=true", "trainer.nnodes=True: expected a positive integer"),
        ("trainer.val_before_train=1", "trainer.val_before_train=1: expected a valid boolean"),
        (
            "trainer.project_name=7",
            "trainer.project_name=7: expected a valid string; put it in quotes",
        ),
        (
            "reward.on_error=ignore",
            "reward.on_error=\"ignore\": expected 'fail', 'skip' or 'score'",
        ),
        ("data.train_batch_size=0", "data.train_batch_size=0: expected greater than 0"),
        ("data.train_files=null", "data.train_files=null: expected a valid list"),
        (
            "trainer.save_freq=0",
            "trainer.save_freq=0: expected -1 (no limit, all, or never) or a positive number",
        ),
        ("trainer=3", "trainer=3: expected keys, such as trainer.project_name"),
        ("critic.optim.lr=nan", "critic.optim.lr=NaN: expected a finite number"),
        (
            "resource_pool_spec.global_pool=[2,0]",
            "resource_pool_spec.global_pool.1=0: expected greater than 0",
        ),
        (
            "critic.model.override_config.attn_implementation=eager",
            "critic.model.override_config: attn_implementation=eager: expected sdpa, varlen, "
            "flash_attention_2 or none",
        ),
        (
            "critic.model.override_config.experts_implementation=batched_mm",
            "critic.model.override_config: experts_implementation=batched_mm: expected "
            "grouped_mm, eager or none",
        ),
        (
            "placement=halves",
            "placement=halves: expected one of colocated, detached, pairs, separate, split",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_was_expected(override: str, message: str):
    assert refusal(override) == message


def test_keys_without_a_default_are_named_together():
    with pytest.raises(ConfigError) as error:
        load_ppo_config([])
    named = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert named == ["data.train_files", "data.val_files", "actor_rollout_ref.model.path"]


def test_hydras_own_settings_and_sweeps_are_refused():
    assert "no effect" in refusal("hydra.run.dir=elsewhere")
    assert "this key takes one" in refusal("trainer.seed=1,2")


@pytest.mark.parametrize(
    "override", ["trainer.seed", "data.train_files=~/a", "data.train_files=a=b"]
)
def test_an_override_that_cannot_be_read_says_how_to_write_it(override: str):
    assert refusal(override).startswith(f"{override}: expected key=value")


def test_an_interpolation_to_nowhere_is_refused_in_one_line_with_the_key():
    message = refusal("data.train_batch_size=${nowhere}")
    assert message == "data.train_batch_size: Interpolation key 'nowhere' not found"
    variable = refusal("custom_reward_function.reward_kwargs.judge=${oc.env:NO_SUCH_JUDGE}")
    assert (
        variable.startswith("custom_reward_function.reward_kwargs.judge: ") and "\n" not in variable
    )
    assert "'NO_SUCH_JUDGE' not found" in variable


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_preset_of_ppo_is_no_key_of_a_trainer_that_has_none(plus: str):
    def message(override: str) -> str:
        with pytest.raises(ConfigError) as error:
            load_config(
                SFTConfig, broken_supervised_rules, ["data.train_files=a", "model.path=b", override]
            )
        return str(error.value)

    assert (
        message(f"{plus}device=cpu")
        == f"{plus}device=cpu: there is no such key; did you mean trainer.device?"
    )
    assert message(f"{plus}placement=split").startswith(
        f"{plus}placement=split: there is no such key"
    )


def test_a_preset_that_a_users_yaml_misspells_is_answered_with_those_that_there_are(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(USER_YAML.replace("placement: split", "placement: half"))
    message = refusal(config_name="mine", config_dir=str(tmp_path))
    assert "'placement/half'" in message and message.endswith("split")


def test_a_key_that_was_set_before_can_be_deleted_and_one_that_is_not_there_cannot():
    unused = "resource_pool_spec.unused_pool=[1]"
    assert "~resource_pool_spec.unused_pool" in refusal(unused)
    deleted = load_ppo_config([*REQUIRED, unused, "~resource_pool_spec.unused_pool"])
    assert deleted == load_ppo_config(REQUIRED)
    for override in ("~resource_pool_spec.unused_pool", "~no.such.key", "~trainer.nnodes.one"):
        assert refusal(override) == f"{override}: there is no such key to delete"
    assert refusal("~trainer.nnodes=3").startswith("~trainer.nnodes: it has another value")


@pytest.mark.parametrize("override", ["trainer.nnodes@foo=2", "~trainer.nnodes@foo"])
def test_a_key_with_a_package_is_refused(override: str):
    assert refusal(override) == f"{override}: there is no such key, since keys have no @"


def test_presets_of_a_users_folder_are_chosen_and_deleted(tmp_path: Path):
    text = "defaults: [ppo_trainer, {size: two}, _self_]\n"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "size").mkdir()
    for name, number in {"two": 2, "four": 4}.items():
        text = f"# @package _global_\ntrainer: {{nnodes: {number}}}\n"
        (tmp_path / "size" / f"{name}.yaml").write_text(text)

    def nodes(*overrides: str) -> int:
        return load_ppo_config([*REQUIRED, *overrides], "mine", str(tmp_path)).trainer.nnodes

    assert nodes() == 2
    assert nodes("size=four") == 4
    assert nodes("size=four", "trainer.nnodes=3") == 3
    assert nodes("~size") == 1


def test_a_derived_schema_has_its_own_keys_before_and_after_the_one_it_is_derived_from():
    class Derived(PPOConfig):
        num_racks: int = 7

    before = load_ppo_config(REQUIRED)
    overrides = [*REQUIRED, "trainer.nnodes='${num_racks}'"]
    assert load_config(Derived, broken_rules, overrides).trainer.nnodes == 7
    assert load_ppo_config(REQUIRED) == before


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("trainer={null:1}", "key type"),
        ("trainer.logger.a=jsonl", "invalid literal"),
        ("reward.reward_kwargs.api_key='${canary7'", ""),
    ],
)
def test_a_value_that_a_key_cannot_have_is_refused_in_one_line(override: str, why: str):
    message = refusal(override)
    assert (
        message.startswith(override.partition("=")[0]) and "cannot be set to this value" in message
    )
    assert why in message and "\n" not in message and "canary7" not in message


def test_a_section_that_is_set_keeps_the_keys_that_were_set_before():
    optim = "actor_rollout_ref.actor.optim"
    config = load_ppo_config([*REQUIRED, f"{optim}.weight_decay=0.5", f"{optim}={{lr: 0.25}}"])
    found = config.actor_rollout_ref.actor.optim
    assert (found.weight_decay, found.lr) == (0.5, 0.25)


def test_without_a_preset_its_keys_are_not_set():
    assert refusal("~placement").startswith("role_mapping.actor is not set")


def test_what_one_run_sets_or_deletes_is_not_seen_by_the_next():
    before = load_ppo_config(REQUIRED)
    changes = ["trainer.n_gpus_per_node=2", "role_mapping.critic=own", "resource_pool_spec.own=[2]"]
    changed = load_ppo_config([*REQUIRED, *changes, "~plugins"])
    assert changed.role_mapping != before.role_mapping
    assert load_ppo_config(REQUIRED) == before


def test_a_preset_of_hydra_is_no_key():
    message = refusal("hydra/job_logging=none")
    assert message.startswith("hydra/job_logging=none: there is no such key")


def test_one_file_and_several_files_are_both_lists():
    assert load_ppo_config(REQUIRED).data.train_files == ("train.parquet",)
    assert load_ppo_config([*REQUIRED, "data.train_files=[a,'~/b']"]).data.train_files == (
        "a",
        "~/b",
    )


def test_the_device_preset_switches_every_data_type():
    cpu, cuda = (
        load_ppo_config([*REQUIRED, "device=cpu"]),
        load_ppo_config([*REQUIRED, "device=cuda"]),
    )
    for config, dtype in ((cpu, "float32"), (cuda, "bfloat16")):
        policy = config.actor_rollout_ref
        used = [
            policy.actor.fsdp_config.dtype,
            policy.ref.fsdp_config.dtype,
            policy.rollout.dtype,
            config.critic.model.fsdp_config.dtype,
            config.reward_model.model.fsdp_config.dtype,
        ]
        assert used == [dtype] * 5
    assert (cpu.trainer.device, cuda.trainer.device) == ("cpu", "cuda")


def test_short_data_type_names_mean_the_long_ones():
    config = load_ppo_config(
        [*REQUIRED, "critic.model.fsdp_config.dtype=fp32", "actor_rollout_ref.rollout.dtype=bf16"]
    )
    assert (config.critic.model.fsdp_config.dtype, config.actor_rollout_ref.rollout.dtype) == (
        "float32",
        "bfloat16",
    )


def test_the_resolved_configuration_reads_back_from_its_yaml(tmp_path: Path):
    config = load_ppo_config(
        [*REQUIRED, "placement=split", "trainer.nnodes=2", "trainer.experiment_name=001"]
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_ppo_config([], "config", str(tmp_path)) == config
    assert load_ppo_config(["trainer.seed=7"], "config", str(tmp_path)).trainer.seed == 7


def test_the_configuration_cannot_be_changed():
    config = load_ppo_config(REQUIRED)
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.seed = 1


USER_YAML = """
defaults:
  - ppo_trainer
  - override placement: split
  - _self_
data: {train_files: a.parquet, val_files: b.parquet, train_batch_size: 512}
actor_rollout_ref: {model: {path: my/model}}
"""


def test_a_users_yaml_starts_from_ours_and_overrides_win(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(USER_YAML)
    config = load_ppo_config(["trainer.nnodes=2"], "mine", str(tmp_path))
    assert config.data.train_batch_size == 512
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": (8,), "critic_pool": (8,)}
    colocated = load_ppo_config(
        ["placement=colocated", "data.train_batch_size=256"], "mine", str(tmp_path)
    )
    assert colocated.resource_pool_spec == {"global_pool": (8,)}
    assert colocated.data.train_batch_size == 256


def test_a_users_yaml_may_describe_the_placement_in_full(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        USER_YAML.replace("split", "null")
        + "resource_pool_spec: {a: [8, 4], b: [2]}\nrole_mapping: {actor: a, rollout: a, critic: "
        "b}\n" + "critic: {ppo_micro_batch_size_per_gpu: 4}\ntrainer: {device: cpu}\n"
    )
    config = load_ppo_config(
        ["data.train_batch_size=384", "actor_rollout_ref.actor.ppo_mini_batch_size=96"],
        "mine",
        str(tmp_path),
    )
    assert config.resource_pool_spec == {"a": (8, 4), "b": (2,)}
    assert config.num_processes("actor") == 12


def test_an_unknown_key_in_a_users_yaml_is_refused(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(USER_YAML + "trainer: {save_frq: 5}\n")
    assert "did you mean trainer.save_freq?" in refusal(
        config_name="mine", config_dir=str(tmp_path)
    )


def test_a_users_yaml_that_forgets_our_defaults_is_told_so(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("trainer: {nnodes: 1}\n")
    assert "defaults: [ppo_trainer, _self_]" in refusal(
        config_name="mine", config_dir=str(tmp_path)
    )


def test_a_missing_or_misnamed_yaml_is_refused(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(USER_YAML)
    assert "it has mine" in refusal(config_name="mien", config_dir=str(tmp_path))
    assert "no such folder" in refusal(config_name="mine", config_dir=str(tmp_path / "nowhere"))
    assert "--config-dir" in refusal(config_name="mine")
    (tmp_path / "ppo_trainer.yaml").write_text(USER_YAML)
    assert "another name" in refusal(config_name="mine", config_dir=str(tmp_path))
    (tmp_path / "ppo_trainer.yaml").unlink()
    (tmp_path / "mine.yaml").write_text("trainer: {nnodes: 1, nnodes: 2}\n")
    assert "duplicate key" in refusal(config_name="mine", config_dir=str(tmp_path))


def run_main(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "verl_like.trainer.main_ppo", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_entry_point_refuses_a_wrong_configuration_with_exit_code_2():
    result = run_main("trainer.save_frq=5")
    assert result.returncode == 2
    assert "did you mean trainer.save_freq?" in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_the_entry_point_prints_the_resolved_configuration(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(USER_YAML)
    result = run_main(
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "mine.yaml",
        "trainer.seed=3",
        "--print-config",
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == to_yaml(load_ppo_config(["trainer.seed=3"], "mine", str(tmp_path)))


def test_a_configuration_is_refused_before_torch_ray_or_vllm_are_imported():
    program = (
        "import json, sys\n"
        "from verl_like.trainer.config.command_line import config_from_command_line\n"
        "from verl_like.trainer.main_ppo import PPOConfig, broken_rules\n"
        "try:\n"
        "    config_from_command_line(PPOConfig, broken_rules, ['trainer.save_frq=5'])\n"
        "except SystemExit as end:\n"
        "    heavy = [m for m in ('torch', 'ray', 'vllm') if m in sys.modules]\n"
        "    print(json.dumps([end.code, heavy]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(result.stdout) == [2, []]
