"""Secrets of a configuration: which values they are, and where they do not stand."""

import copy
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.registry import options_class
from verl_like.rewards.manager import RewardError, RewardFunctionSpec, RewardManager, RewardSample
from verl_like.secret_values import Redaction, is_secret_name, masked, with_masked_urls
from verl_like.single_controller.ray.start import make_auth_token
from verl_like.trainer.config import load_ppo_config, to_yaml
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.config.keys import leaves
from verl_like.trainer.config.supervised import DPOConfig, ILQLConfig, RMConfig, SFTConfig

NEEDED = [
    "device=cpu",
    "data.train_files=a.parquet",
    "data.val_files=a.parquet",
    "actor_rollout_ref.model.path=m",
    "custom_reward_function.path=r.py",
]
KWARGS = "custom_reward_function.reward_kwargs"


def shown(*overrides: str) -> dict:
    return load_ppo_config([*NEEDED, *overrides]).shown()


def test_our_own_keys_are_shown_and_any_other_with_the_name_of_a_secret_is_not():
    schemas = (DetachedConfig, SFTConfig, RMConfig, DPOConfig, ILQLConfig)
    names = {name for schema in schemas for _, _, name in leaves(schema)}
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        options = [options_class(registry.get(name)) for name in registry.file_names()]
        names |= {name for each in options if each for name in each.model_fields}
    assert not [name for name in names if is_secret_name(name)]
    for name in (
        "api_key",
        "HF_TOKEN",
        "clientSecret",
        "db_password",
        "aws_credentials",
        "monkey",
        "prompt_keys",
    ):
        assert is_secret_name(name), name


def test_values_are_masked_by_their_key_at_any_depth():
    tree = shown(
        f"{KWARGS}.api_key=canary",
        f"{KWARGS}.judge={{login: {{user: me, password: 1234}}, tokens: [a, b], on: true}}",
        f"{KWARGS}.secret=null",
        f"{KWARGS}.keyed=false",
    )["custom_reward_function"]["reward_kwargs"]
    assert tree == {
        "api_key": "***",
        "judge": {"login": {"user": "me", "password": "***"}, "tokens": ["***", "***"], "on": True},
        "secret": None,
        "keyed": False,
    }


def test_numbers_of_the_models_configuration_are_no_secrets():
    key = "actor_rollout_ref.model.override_config"
    tree = shown(f"{key}.pad_token_id=3", f"{key}.num_key_value_heads=2", f"{key}.hub_token=canary")
    expected = {"pad_token_id": 3, "num_key_value_heads": 2, "hub_token": "***"}
    assert tree["actor_rollout_ref"]["model"]["override_config"] == expected


def test_values_of_secret_variables_are_masked_wherever_they_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_JUDGE_TOKEN", "canary7")
    monkeypatch.setenv("MY_SEED_KEY", "77")
    monkeypatch.setenv("MY_REGION", "north")
    config = load_ppo_config(
        [
            *NEEDED,
            "trainer.project_name=${oc.env:MY_JUDGE_TOKEN}",
            "trainer.seed='${oc.decode:${oc.env:MY_SEED_KEY}}'",
            f"{KWARGS}.endpoint='https://judge/?who=${{oc.env:MY_JUDGE_TOKEN}}'",
            f"{KWARGS}.region=${{oc.env:MY_REGION}}",
            f"{KWARGS}.again=${{trainer.project_name}}",
            f"{KWARGS}.other='${{oc.env:NOT_THERE_KEY,also}}'",
        ]
    )
    assert config.trainer.project_name == "canary7" and config.trainer.seed == 77
    assert config.custom_reward_function.reward_kwargs["endpoint"] == "https://judge/?who=canary7"
    tree = config.updated({"trainer.total_training_steps": 3}).shown()
    assert tree["trainer"]["project_name"] == "***" == tree["trainer"]["seed"]
    assert tree["trainer"]["default_local_dir"] == "***"  # it follows the name of the project
    expected = {"endpoint": "***", "region": "north", "again": "***", "other": "***"}
    assert tree["custom_reward_function"]["reward_kwargs"] == expected
    assert "canary7" not in to_yaml(config) and "77" not in to_yaml(config)


def test_the_configurations_of_makers_and_workers_know_the_secrets_too(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MY_JUDGE_TOKEN", "canary7")
    settings = ["placement=detached", "trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo"]
    settings += ["actor_rollout_ref.rollout.n=2", "algorithm.rollout_correction.bypass_mode=true"]
    settings += ["trainer.project_name=${oc.env:MY_JUDGE_TOKEN}"]
    config = load_config(DetachedConfig, broken_detached_rules, [*NEEDED, *settings])
    for each in (config.with_all_pools(), config.of_maker("maker_0"), copy.deepcopy(config)):
        assert (
            each.shown()["trainer"]["project_name"] == "***"
            and each.redaction()("canary7") == "***"
        )


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://me:canary@host:8/path?q=a@b", "https://***@host:8/path?q=a@b"),
        ("s3://canary@bucket/model", "s3://***@bucket/model"),
        ("https://me:can@ary@host/", "https://***@host/"),
        ("https://host/@scope/model@1", "https://host/@scope/model@1"),
        ("from http://a:canary@b/ to http://c:canary@d", "from http://***@b/ to http://***@d"),
        ("me@host", "me@host"),
    ],
)
def test_of_a_url_the_user_information_alone_is_masked(url: str, expected: str):
    assert with_masked_urls(url) == expected == masked({"path": url})["path"]


def test_a_message_has_no_secret_of_the_configuration_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SOME_API_KEY", "canary of the environment")
    monkeypatch.setenv("SHORT_KEY", "us")
    tree = {
        "reward_kwargs": {"password": 123456, "url": "http://me:canary/1"},
        "path": "http://me:longpass@host/x",
    }
    redacted = Redaction.of(tree)
    text = "us: canary of the environment, 123456, me:longpass, longpass at http://you:too@host/"
    assert redacted(text) == "us: ***, ***, ***, *** at http://***@host/"


def test_a_mask_is_not_taken_for_the_secret():
    for override in (f"{KWARGS}.api_key='***'", "custom_reward_function.path='http://***@host/'"):
        with pytest.raises(
            ConfigError,
            match=r"custom_reward_function\..*: a secret stands as \*\*\* in the record",
        ):
            load_ppo_config([*NEEDED, override])


@pytest.mark.parametrize("value", ["canary,b", "canary=~b"])
def test_an_error_of_the_command_line_does_not_repeat_a_secret(value: str):
    with pytest.raises(ConfigError, match=r"reward_kwargs\.api_key=\*\*\*: ") as error:
        load_ppo_config([*NEEDED, f"{KWARGS}.api_key={value}"])
    assert "canary" not in str(error.value)


def test_what_a_reward_function_raises_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", "canary of the environment")
    (tmp_path / "tells.py").write_text(
        "import os\ndef compute_score(api_key, **arguments):\n"
        "    raise ValueError(f'{api_key} and {os.environ[\"JUDGE_API_KEY\"]}')\n"
    )
    config = load_ppo_config([*NEEDED, f"{KWARGS}.api_key=canary of the key"])
    spec = RewardFunctionSpec(
        str(tmp_path / "tells.py"), reward_kwargs={"api_key": "canary of the key"}
    )
    manager = RewardManager(spec, num_workers=1, redacted=config.redaction())
    with pytest.raises(RewardError, match=r"ValueError: \*\*\* and \*\*\*"):
        manager.submit([RewardSample("row 1", "a", "b", "c")]).get()
    manager.close()


def test_a_long_error_of_a_reward_function_is_cut_after_its_secrets_are_masked(tmp_path: Path):
    (tmp_path / "tells.py").write_text(
        "def compute_score(api_key, **arguments):\n"
        "    raise ValueError('a' * 1970 + api_key * 500 + 'b' * 20_000 + api_key + 'c' * 1800 + ' "
        "the end')\n"
    )
    key = "canary of the key " * 3
    config = load_ppo_config([*NEEDED, f"{KWARGS}.api_key={key!r}"])
    spec = RewardFunctionSpec(str(tmp_path / "tells.py"), reward_kwargs={"api_key": key})
    manager = RewardManager(spec, num_workers=1, redacted=config.redaction())
    with pytest.raises(RewardError, match=r"ValueError: a+") as error:
        manager.submit([RewardSample("row 1", "a", "b", "c")]).get()
    said = str(error.value)
    assert " ... " in said and "the end" in said and len(said) < 5_000
    assert not any(word in said for word in ("canary", "of the", "the key"))
    manager.close()


@pytest.mark.parametrize(
    "answer",
    [
        "{'score': api_key * 9}",
        "{'score': 1.0, api_key * 9: object()}",
        "{'score': 1.0, 'judge': float('inf')}",
    ],
)
def test_what_a_reward_function_returns_wrongly_is_shown_without_secrets(
    tmp_path: Path, answer: str
):
    (tmp_path / "tells.py").write_text(
        f"def compute_score(api_key, **arguments):\n    return {answer}\n"
    )
    key = "canary of the key " * 2
    config = load_ppo_config([*NEEDED, f"{KWARGS}.api_key={key!r}"])
    spec = RewardFunctionSpec(str(tmp_path / "tells.py"), reward_kwargs={"api_key": key})
    manager = RewardManager(spec, num_workers=1, redacted=config.redaction())
    with pytest.raises(RewardError, match="the function returned") as error:
        manager.submit([RewardSample("row 1", "a", "b", "c")]).get()
    assert not any(word in str(error.value) for word in ("canary", "of the key"))
    manager.close()


def test_a_reward_function_that_fails_in_its_import_is_shown_in_short_and_without_secrets(
    tmp_path: Path,
):
    (tmp_path / "tells.py").write_text(
        "raise ValueError('canary of the key' * 2000 + ' the end')\n"
    )
    spec = RewardFunctionSpec(str(tmp_path / "tells.py"))
    redacted = load_ppo_config([*NEEDED, f"{KWARGS}.api_key=canary of the key"]).redaction()
    with pytest.raises(ValueError, match="the end") as error:
        RewardManager(spec, num_workers=1, redacted=redacted)
    assert "canary" not in str(error.value) and len(str(error.value)) < 5_000


def test_the_token_of_ray_that_we_make_is_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / ".ray/auth_token"
    make_auth_token(path)
    token = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(token) == 64
    make_auth_token(path)
    assert path.read_text() == token
    path.unlink()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    make_auth_token(path)
    assert not path.exists()


def test_the_token_of_the_slurm_job_is_for_its_owner_alone(tmp_path: Path):
    script = (Path(__file__).parents[2] / "examples/cluster/slurm.sh").read_text()
    (line,) = [line for line in script.splitlines() if "get-auth-token" in line]
    env = os.environ | {"HOME": str(tmp_path), "ray": str(Path(sys.executable).with_name("ray"))}
    subprocess.run(["bash", "-euc", line], env=env, check=True, timeout=60)
    assert stat.S_IMODE((tmp_path / ".ray/auth_token").stat().st_mode) == 0o600
