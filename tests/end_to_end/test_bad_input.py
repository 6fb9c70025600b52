"""Bad input is refused before Ray starts, with what, value, why and fix, and loses nothing."""

import contextlib
import importlib.metadata
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
from runs import data_row, tiny_run_settings
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cohere2Config,
    Cohere2ForCausalLM,
    DogeConfig,
    LlamaConfig,
    StableLmConfig,
)

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.inputs import check_engine_reads, check_inputs, require_vllm_for
from verl_like.trainer.ppo.run_ppo import run_ppo
from verl_like.trainer.run import tracking

Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Changes a good run by overrides, asserts that it was refused before Ray, returns the
    message."""
    settings = tiny_run_settings(tmp_path, tiny_llama)

    def run(*overrides: str) -> str:
        assert run_ppo(load_ppo_config([*settings, *overrides])) == 2
        assert not ray.is_initialized()
        assert not (tmp_path / "runs").exists()
        return capsys.readouterr().err

    return run


def test_a_missing_data_file_is_named(refusal: Refusal, tmp_path: Path):
    assert str(tmp_path / "nothing.parquet") in refusal(
        f"data.train_files={tmp_path / 'nothing.parquet'}"
    )


def test_a_cluster_that_is_not_there_is_refused(refusal: Refusal, monkeypatch: pytest.MonkeyPatch):
    assert "no Ray cluster can be joined at 127.0.0.1:1" in refusal(
        "ray_kwargs.ray_init.address=127.0.0.1:1"
    )
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "no Ray cluster can be joined at 127.0.0.1:1" in refusal()


def test_an_empty_dataset_is_refused(refusal: Refusal, tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in refusal(f"data.val_files={tmp_path / 'empty.jsonl'}")


def test_fewer_rows_than_a_batch_are_refused_with_both_numbers(refusal: Refusal):
    message = refusal("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    assert "data.train_files has 8 rows, fewer than data.train_batch_size=16" in message


def test_a_malformed_row_is_named_by_file_row_and_field(refusal: Refusal, tmp_path: Path):
    rows = [data_row(0), data_row(1) | {"prompt": "not a list of messages"}]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    message = refusal(f"data.train_files={tmp_path / 'bad.jsonl'}")
    assert "bad.jsonl" in message and "row 1" in message and "prompt" in message


def test_an_overlong_prompt_is_an_error_that_says_how_to_go_on(refusal: Refusal, tmp_path: Path):
    (tmp_path / "long.jsonl").write_text(json.dumps(data_row(0, prompt="1+" * 30)))
    message = refusal(f"data.train_files={tmp_path / 'long.jsonl'}")
    assert (
        "max_prompt_length" in message
        and "filter_overlong_prompts" in message
        and "truncation" in message
    )


def test_a_model_path_that_does_not_exist_names_the_key(refusal: Refusal, tmp_path: Path):
    message = refusal(f"actor_rollout_ref.model.path={tmp_path / 'no_model'}")
    assert "actor_rollout_ref.model.path" in message and "no_model" in message


def test_a_further_reward_model_is_checked_as_the_first_and_named_by_its_keys(
    refusal: Refusal, tmp_path: Path, tiny_llama: Callable
):
    policy, _ = tiny_llama()
    other = LlamaConfig.from_pretrained(policy)
    other.vocab_size += 1
    other.save_pretrained(tmp_path / "other")
    placed = "role_mapping.safety=global_pool"
    message = refusal(placed, f"reward_models.safety.path={tmp_path / 'no_model'}")
    assert f"reward_models.safety.path={tmp_path / 'no_model'}: there is no model" in message
    message = refusal(placed, f"reward_models.safety.path={tmp_path / 'other'}")
    assert (
        f"reward_models.safety.path={tmp_path / 'other'} has {other.vocab_size} token ids, the "
        "policy" in message
    )
    settings = [
        "reward_model.model.override_config={misspelt: 1}",
        f"reward_models.safety.path={policy}",
    ]
    assert "reward_model.model.override_config.misspelt=1: LlamaConfig has no" in refusal(
        placed, *settings
    )


def test_weights_that_do_not_fit_the_configuration_name_both_shapes(refusal: Refusal):
    message = refusal("+actor_rollout_ref.model.override_config.intermediate_size=80")
    assert (
        "actor_rollout_ref.model.path=" in message
        and "down_proj.weight is [64, 96] in its files, and [64, 80]" in message
    )


def test_a_model_that_packed_attention_would_compute_wrongly_is_refused(
    refusal: Refusal, tmp_path: Path
):
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 96,
    }
    for config_class in (StableLmConfig, DogeConfig):
        config = config_class(vocab_size=68, max_position_embeddings=256, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / config.model_type)
    message = refusal(f"critic.model.path={tmp_path / 'stablelm'}")
    assert (
        f"critic.model.path={tmp_path / 'stablelm'}: StableLmAttention is not told where sequences "
        "begin" in message
    )
    message = refusal(f"critic.model.path={tmp_path / 'doge'}")
    assert (
        f"critic.model.path={tmp_path / 'doge'} is a doge, of which transformers has no model for"
        in message
    )


def test_prompts_of_tokens_that_the_model_does_not_have_are_refused(
    refusal: Refusal, tmp_path: Path, tiny_llama: Callable
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama()[0])
    tokenizer.add_tokens(["##"])
    tokenizer.save_pretrained(tmp_path / "larger")
    rows = [data_row(i) for i in range(8)]
    rows[5] = data_row(5, prompt="1+##")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [f"actor_rollout_ref.model.tokenizer_path={tmp_path / 'larger'}"]
    message = refusal(*settings, f"data.train_files={tmp_path / 'rows.jsonl'}")
    assert (
        "rows.jsonl, row 5: token 68 ('##') is none of the 68 of the model at "
        "actor_rollout_ref.model.path=" in message
    )


def test_an_override_that_the_model_does_not_have_names_the_key(refusal: Refusal):
    message = refusal("+actor_rollout_ref.model.override_config.attention_dropuot=0.0")
    assert (
        "actor_rollout_ref.model.override_config.attention_dropuot" in message
        and "attention_dropout" in message
    )


def test_a_reward_file_that_does_not_exist_is_named(refusal: Refusal, tmp_path: Path):
    assert "no_reward.py" in refusal(f"custom_reward_function.path={tmp_path / 'no_reward.py'}")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise KeyError('ground truth')", "KeyError"),
        ("return float('nan')", "nan"),
        ("return 'good'", "good"),
        ("import time; time.sleep(60)", "reward.timeout_s"),
    ],
)
def test_a_reward_function_that_cannot_work_is_found_on_row_0(
    refusal: Refusal, tmp_path: Path, body: str, expected: str
):
    (tmp_path / "reward.py").write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
    )
    message = refusal(
        f"custom_reward_function.path={tmp_path / 'reward.py'}", "reward.timeout_s=1.0"
    )
    assert expected in message


def two_data_sources(folder: Path) -> list[str]:
    """Rows that the built-in rewards score, and, behind them, rows of a data source that none
    scores."""
    rows = [
        data_row(i) | {"data_source": source}
        for i, source in enumerate(["exact_match"] * 6 + ["unheard/of"] * 2)
    ]
    (folder / "two.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"data.train_files={folder / 'two.jsonl'}", "custom_reward_function.path=null"]


@pytest.mark.parametrize("on_error", ["fail", "score"])
def test_a_data_source_without_a_reward_is_refused_wherever_its_rows_are(
    refusal: Refusal, tmp_path: Path, on_error: str
):
    message = refusal(*two_data_sources(tmp_path), f"reward.on_error={on_error}")
    assert (
        "the reward of row 6 (" in message
        and "no reward is registered for data_source 'unheard/of'" in message
    )
    assert ".py:" not in message


def test_a_data_source_without_a_reward_is_a_warning_where_the_run_skips_its_rows(
    tmp_path: Path, tiny_llama: Callable, caplog: pytest.LogCaptureFixture
):
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *two_data_sources(tmp_path),
        "reward.on_error=skip",
    ]
    with contextlib.ExitStack() as cleanup:
        assert check_inputs(load_ppo_config(settings), cleanup).scorer is not None
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if "check of the reward" in record.getMessage()
    ]
    assert (
        "failed for 1 of 2" in warning
        and "unheard/of" in warning
        and "reward.on_error=skip" in warning
    )


GDPO = ["algorithm.adv_estimator=gdpo", "critic.enable=false"]
BUILT_IN = "custom_reward_function.path=null"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=ac"],
            "returns only reward, acc:",
        ),
        # verl's value for DAPO, with rules that return nothing beside the score.
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", BUILT_IN],
            "filter_groups.metric=acc, but the reward function returns only reward:",
        ),
        (
            [*GDPO, "algorithm.gdpo_reward_keys=[acc,form]"],
            "names form, but the rewards of this run are rule_scores, acc:",
        ),
        (
            [*GDPO, "algorithm.gdpo_reward_keys=[rule_scores,acc,rm_scores/judge]", BUILT_IN],
            "names acc, rm_scores/judge, but the rewards of this run are rule_scores:",
        ),
    ],
)
def test_the_name_of_a_reward_that_the_run_does_not_have_is_refused(
    refusal: Refusal, overrides: list[str], expected: str
):
    assert expected in refusal(*overrides)


def test_pools_that_do_not_fit_this_machine_are_refused_with_the_sums(refusal: Refusal):
    message = refusal("ray_kwargs.ray_init.num_cpus=3")
    assert "global_pool" in message and "'CPU': 4" in message and "'CPU': 3" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused(refusal: Refusal):
    assert "device=cpu" in refusal("trainer.device=cuda")


def test_a_worker_class_that_cannot_be_imported_is_refused(refusal: Refusal):
    message = refusal("worker_classes.actor=no_such_package.Actor")
    assert "worker_classes.actor" in message and "no_such_package" in message


@pytest.mark.parametrize("line", ["raise SystemExit('no licence')", "1 / 0"])
def test_a_module_of_a_role_that_ends_itself_is_refused(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
):
    (tmp_path / "ending_role.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal("worker_classes.judge=ending_role.Judge", "role_mapping.judge=global_pool")
    assert (
        "worker_classes.judge=ending_role.Judge cannot be imported" in message
        and "Traceback" not in message
    )


def test_a_custom_role_that_adds_no_columns_is_refused(refusal: Refusal):
    of_actor = "verl_like.workers.actor.ActorWorker"
    message = refusal(f"worker_classes.judge={of_actor}", "role_mapping.judge=global_pool")
    assert f"worker_classes.judge={of_actor} has no registered method annotate" in message


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package look as if it were not installed."""
    find_spec = importlib.util.find_spec

    def hide(package: str) -> None:
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *a: None if name == package else find_spec(name, *a),
        )

    return hide


def test_a_missing_vllm_is_refused_with_the_commands_that_install_it(
    refusal: Refusal, missing: Callable
):
    missing("vllm")
    message = refusal("actor_rollout_ref.rollout.name=vllm")
    assert "vllm is not installed" in message and "bash scripts/environment.sh" in message


def test_a_vllm_that_is_built_for_another_device_is_refused(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
):
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.32.0" if name == "vllm" else version(name)
    )
    message = refusal("actor_rollout_ref.rollout.name=vllm")
    assert (
        "device=cpu" in message and "built for CUDA: run bash scripts/environment.sh cpu" in message
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0+cpu")
    require_vllm_for("cpu")
    with pytest.raises(
        ValueError, match="device=cuda, but the vllm that is installed is built for the CPU"
    ):
        require_vllm_for("cuda")


def test_an_engine_that_compiles_for_a_cpu_is_refused_where_there_is_no_compiler(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    vllm = "actor_rollout_ref.rollout.name=vllm"
    message = refusal(vllm, "actor_rollout_ref.rollout.enforce_eager=false")
    assert "rollout.enforce_eager=false has torch compile" in message
    assert "the compiler no-such-compiler is not there" in message


@pytest.mark.parametrize("model", ["actor_rollout_ref.model", "critic.model"])
def test_a_missing_flash_attn_is_refused_for_every_model_that_asks_for_it(
    refusal: Refusal, missing: Callable, model: str
):
    missing("flash_attn")
    message = refusal(f"{model}.override_config.attn_implementation=flash_attention_2")
    assert (
        f"{model}.override_config.attn_implementation" in message
        and "flash-attn is not installed" in message
    )


def test_a_tracker_that_is_not_installed_is_refused(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    assert "pip install -e '.[mlflow]'" in refusal("trainer.logger=[console,mlflow]")


def test_a_context_longer_than_the_models_is_refused_with_the_sum(refusal: Refusal):
    message = refusal("data.max_prompt_length=200", "data.max_response_length=100")
    assert "200 + 100 = 300" in message and "256 positions" in message


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 11,
}


@pytest.mark.parametrize(
    ("model", "settings", "positions"),
    [
        ("critic.model", {"max_position_embeddings": 11}, "11 positions;"),
        ("reward_model.model", {"max_position_embeddings": 11}, "11 positions;"),
        (
            "critic.model",
            {
                "rope_parameters": LONG_ROPE
                | {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
            },
            "11 positions before rope_type=longrope changes them by the longest sequence of a "
            "pass;",
        ),
    ],
)
def test_a_critic_and_a_reward_model_with_fewer_positions_than_a_response_may_take_are_refused(
    refusal: Refusal, tmp_path: Path, model: str, settings: dict, positions: str
):
    LlamaConfig(**settings).save_pretrained(tmp_path / "short")
    enabled = ["reward_model.enable=true"] if model.startswith("reward") else []
    message = refusal(f"{model}.path={tmp_path / 'short'}", *enabled)
    assert f"{model}.path={tmp_path / 'short'} has {positions}" in message
    assert "data.max_prompt_length + data.max_response_length = 8 + 4 = 12 tokens: lower" in message


def test_a_model_that_drops_activations_in_training_is_refused(refusal: Refusal):
    message = refusal("critic.model.override_config={attention_dropout: 0.25}")
    assert "set critic.model.override_config.attention_dropout=0.0" in message


@pytest.mark.parametrize("engine", ["vllm", "vllm_async"])
def test_a_model_of_a_family_that_vllm_does_not_compute_as_the_trainer_is_refused_with_it(
    refusal: Refusal, tmp_path: Path, tiny_llama: Callable, engine: str
):
    folder, llama = tiny_llama()
    shutil.copytree(folder, tmp_path / "cohere2", ignore=shutil.ignore_patterns("*.safetensors"))
    config = Cohere2Config(
        vocab_size=llama.config.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=1,
    )
    Cohere2ForCausalLM(config).save_pretrained(tmp_path / "cohere2")
    rollout = [
        f"actor_rollout_ref.rollout.{key}"
        for key in (f"name={engine}", "weight_transport=shared_memory")
    ]
    # Without a critic, which the family has no model for.
    model = f"actor_rollout_ref.model.path={tmp_path}/cohere2"
    message = refusal(model, "algorithm.adv_estimator=reinforce_plus_plus", *rollout)
    assert (
        f"name={engine}: actor_rollout_ref.model.path={tmp_path}/cohere2 is a cohere2, which "
        "vLLM does not load, or of which it makes other log-probabilities" in message
    )
    assert "set actor_rollout_ref.rollout.name=hf" in message


def test_what_gets_an_adapter_is_looked_for_in_the_critics_own_class(refusal: Refusal):
    message = refusal("critic.model.lora_rank=2", "critic.model.target_modules=[q_proj,lm_head]")
    assert "critic.model.target_modules=" in message
    assert "LlamaForTokenClassification has no layer lm_head" in message


def test_a_warm_up_of_the_critic_as_long_as_the_epochs_is_refused(refusal: Refusal):
    message = refusal(
        "trainer.total_training_steps=null", "trainer.total_epochs=1", "trainer.critic_warmup=2"
    )
    assert "trainer.critic_warmup=2 is not less than the 2 training steps" in message


def test_heads_that_the_ranks_sharing_a_sequence_cannot_share_out_are_refused(refusal: Refusal):
    sizes = [
        f"{part}.ulysses_sequence_parallel_size=3" for part in ("actor_rollout_ref.actor", "critic")
    ]
    assert f"{sizes[0]} does not divide the 4 attention heads" in refusal(
        "trainer.n_gpus_per_node=3", *sizes
    )


@pytest.mark.parametrize("part", ["actor_rollout_ref.actor", "critic.model"])
def test_experts_of_a_model_that_has_none_are_not_distributed(refusal: Refusal, part: str):
    setting = f"{part}.fsdp_config.expert_parallel_size=2"
    message = refusal("trainer.n_gpus_per_node=2", setting)
    assert f"{setting}: Llama" in message
    assert "has no experts that transformers can distribute; set" in message


def test_an_engine_does_not_distribute_the_experts_of_a_model_that_has_none(
    tmp_path: Path, tiny_llama: Callable
):
    rollout = "actor_rollout_ref.rollout"
    settings = tiny_run_settings(tmp_path, tiny_llama, engine="vllm")
    sizes = [f"{rollout}.{name}_parallel_size=2" for name in ("tensor_model", "expert")]
    config = load_ppo_config([*settings, *sizes, "trainer.device=cuda"])
    with pytest.raises(ValueError, match=r"expert_parallel_size=2: .* has no experts that could"):
        check_engine_reads(config)


def test_an_output_folder_that_cannot_be_made_names_the_key(refusal: Refusal, tmp_path: Path):
    (tmp_path / "a_file").write_text("")
    assert "trainer.default_local_dir" in refusal(
        f"trainer.default_local_dir={tmp_path}/a_file/runs"
    )
