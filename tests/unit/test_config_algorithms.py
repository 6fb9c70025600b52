"""Algorithms and plugins in the configuration: own options, needs, and what is refused without
loading torch."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.registry import facts_of, option_keys, options_class, read_options
from verl_like.trainer.config import ConfigError, PPOConfig, load_ppo_config, to_yaml

REQUIRED = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "actor_rollout_ref.model.path=my/model",
]
PLUGIN = '''
from typing import ClassVar

from verl_like.algorithms.advantages import AdvantageOptions, register_adv_est
from verl_like.algorithms.policy_losses import PolicyLossOptions, register_policy_loss


class ShrinkOptions(AdvantageOptions):
    factor: float = 0.5
    """Factor of the reward."""
    weights: dict[str, float] = {"a": 1.0}
    """A mapping."""


@register_adv_est("shrink")
def shrink(token_level_rewards, values, old_log_probs, options: ShrinkOptions):
    return options.factor * token_level_rewards, values


class BesideClipRatio(PolicyLossOptions):
    section: ClassVar[str] = "actor_rollout_ref.actor"

    tau_up: float = 1.0
    """Temperature above."""


@register_policy_loss("towards_reference")
def towards_reference(log_prob, ref_log_prob, response_mask, options: BesideClipRatio):
    return (log_prob - ref_log_prob).sum(), {}


class InTheBlock(PolicyLossOptions):
    rate: float = 0.25
    """A rate."""


@register_policy_loss("with_a_rate")
def with_a_rate(log_prob, options: InTheBlock):
    return log_prob.sum(), {}
'''
ESTIMATOR, LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "shrinking.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "plugins=shrinking"
    sys.modules.pop("shrinking", None)
    for registry, names in (
        (ADVANTAGE_ESTIMATORS, ["shrink"]),
        (POLICY_LOSSES, ["towards_reference", "with_a_rate"]),
    ):
        for name in names:
            registry.entries.pop(name, None)


def load(*overrides: str) -> PPOConfig:
    return load_ppo_config([*REQUIRED, *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    return str(error.value)


def test_the_options_of_the_chosen_algorithms_are_keys_with_defaults(plugin: str, tmp_path: Path):
    chosen = [plugin, f"{ESTIMATOR}=shrink", f"{LOSS}=towards_reference"]
    config = load(*chosen, "algorithm.options.factor=0.75", "actor_rollout_ref.actor.tau_up=3.0")
    assert config.plugins == ("shrinking",)
    options = read_options(ADVANTAGE_ESTIMATORS.get("shrink"), algorithm=config.algorithm)
    assert options is not None and options.model_dump() == {"factor": 0.75, "weights": {"a": 1.0}}
    options = read_options(
        POLICY_LOSSES.get("towards_reference"), actor_rollout_ref=config.actor_rollout_ref
    )
    assert options is not None and options.model_dump() == {"tau_up": 3.0}
    (tmp_path / "printed.yaml").write_text("defaults: [ppo_trainer, _self_]\n" + to_yaml(config))
    again = load_ppo_config([], "printed", str(tmp_path))
    assert again == config and again.model_dump()["algorithm"]["options"] == {
        "factor": 0.75,
        "weights": {"a": 1.0},
    }


def test_options_in_the_block_of_the_loss_are_read_from_there(plugin: str):
    config = load(plugin, f"{LOSS}=with_a_rate", "actor_rollout_ref.actor.policy_loss.rate=0.5")
    options = read_options(
        POLICY_LOSSES.get("with_a_rate"), actor_rollout_ref=config.actor_rollout_ref
    )
    assert options is not None and options.model_dump() == {"rate": 0.5}


def test_roles_follow_from_what_the_algorithms_need(plugin: str):
    config = load(
        plugin, f"{ESTIMATOR}=shrink", f"{LOSS}=towards_reference", "data.train_batch_size=256"
    )
    assert config.plan.active_roles == ("actor", "rollout", "ref", "critic")
    assert config.plan.needs_old_log_probs
    other = load(
        plugin, f"{ESTIMATOR}=grpo", "actor_rollout_ref.rollout.n=2", "data.train_batch_size=256"
    )
    assert other.plan.active_roles == ("actor", "rollout") and not other.plan.needs_old_log_probs


def test_an_unknown_option_is_refused_with_the_nearest_name(plugin: str):
    chosen = [plugin, f"{ESTIMATOR}=shrink", f"{LOSS}=towards_reference"]
    assert "did you mean algorithm.options.factor?" in refusal(
        *chosen, "algorithm.options.factr=0.5"
    )
    assert "did you mean actor_rollout_ref.actor.tau_up?" in refusal(
        *chosen, "actor_rollout_ref.actor.tau_pu=2.0"
    )
    assert "algorithm.options.factor: there is no such key" in refusal(
        "algorithm.options.factor=0.5"
    )
    message = refusal(*chosen, "actor_rollout_ref.actor.policy_loss.rate=0.5")
    assert "actor_rollout_ref.actor.policy_loss.rate: there is no such key" in message


@pytest.mark.parametrize(
    ("key", "kind_and_name", "choice"),
    [
        (
            "actor_rollout_ref.actor.policy_loss.clip_cov_ratio",
            "policy loss clip_cov",
            f"{LOSS}=clip_cov",
        ),
        ("algorithm.gdpo_reward_keys", "advantage estimator gdpo", f"{ESTIMATOR}=gdpo"),
    ],
)
def test_an_option_of_an_algorithm_that_was_not_chosen_is_refused_with_its_name(
    key: str, kind_and_name: str, choice: str
):
    message = refusal(f"{key}=0.1")
    assert message == (
        f"{key}: there is no such key; it is an option of the {kind_and_name}: set {choice}, or "
        "remove the option"
    )


def test_the_options_that_are_known_before_torch_is_loaded_are_those_that_the_functions_take():
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        for name in registry.file_names():
            taken = options_class(registry.get(name))
            known = registry.file_options(name)
            assert (known is None) == (taken is None), name
            if taken:
                assert option_keys(taken) == option_keys(known), name


def test_the_facts_that_are_known_before_torch_is_loaded_are_those_of_the_signatures():
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        assert sorted(registry.known_facts) == registry.file_names()
        for name, known in registry.known_facts.items():
            function = registry.get(name)
            found = facts_of(function, over_batch=name in registry.over_batch)
            assert known == replace(found, by_position=known.by_position), name


def test_the_facts_of_a_plugin_are_read_from_its_signature(plugin: str):
    load(plugin, f"{ESTIMATOR}=shrink", "data.train_batch_size=256")
    of_estimator = ADVANTAGE_ESTIMATORS.facts("shrink")
    assert of_estimator.needs == {"token_level_rewards", "values", "old_log_probs"}
    assert not of_estimator.over_batch
    of_loss = POLICY_LOSSES.facts("towards_reference")
    assert of_loss.needs == {"log_prob", "ref_log_prob", "response_mask"}
    assert of_loss.loss_agg_mode == "token-mean"


def test_both_names_of_an_estimator_have_its_facts():
    of_groups = {"token_level_rewards", "response_mask", "index"}
    for name in ("rloo", "rloo_vectorized"):
        assert ADVANTAGE_ESTIMATORS.facts(name).needs == of_groups


def test_a_whole_configuration_is_loaded_and_checked_without_torch():
    program = (
        "import json, sys\n"
        "from verl_like.trainer.config import load_ppo_config\n"
        "overrides = json.loads(sys.argv[1])\n"
        "for estimator, loss in (('gae', 'vanilla'), ('opo', 'gspo'), ('rloo', 'clip_cov')):\n"
        "    chosen = [f'algorithm.adv_estimator={estimator}']\n"
        "    chosen += [f'actor_rollout_ref.actor.policy_loss.loss_mode={loss}']\n"
        "    config = load_ppo_config([*overrides, *chosen])\n"
        "    print(config.plan.needs_critic, config.actor_rollout_ref.actor.loss_agg_mode)\n"
        "for registry in config.algorithm_keys.values():\n"
        "    for name in registry.names():\n"
        "        registry.facts(name), registry.options_of(name)\n"
        "heavy = ('torch', 'ray', 'vllm', 'transformers', 'tensordict')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    settings = [*REQUIRED, "actor_rollout_ref.rollout.n=2", "data.train_batch_size=256"]
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "True token-mean",
        "False seq-mean-token-mean",
        "False token-mean",
        "[]",
    ]


def test_both_names_of_an_estimator_have_its_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "aliases", {"several_rewards": "gdpo"})
    message = refusal(f"{ESTIMATOR}=several_rewards", "algorithm.gdpo_reward_kys=[a]")
    assert message.endswith("did you mean algorithm.gdpo_reward_keys?")


def test_an_option_of_another_type_is_refused_by_its_path(plugin: str):
    message = refusal(plugin, f"{ESTIMATOR}=shrink", "algorithm.options.factor=much")
    assert message.startswith('algorithm.options.factor="much": expected a valid number')
    assert "expected keys" in refusal("algorithm.options=3")


def test_an_unknown_algorithm_is_refused_with_the_nearest_name():
    assert "did you mean vanilla?" in refusal(f"{LOSS}=vanila")
    # An acronym of its own: nothing is meant.
    assert "unknown policy loss 'dapo'. Known are " in refusal(f"{LOSS}=dapo")
    assert f"{ESTIMATOR}=geo: unknown advantage estimator 'geo'; did you mean gae?" in refusal(
        f"{ESTIMATOR}=geo"
    )


def test_a_plugin_that_cannot_be_imported_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert (
        "plugins: no_such.module cannot be imported (ModuleNotFoundError: No module named "
        "'no_such')" in refusal("plugins=[no_such.module]")
    )
    (tmp_path / "broken_plugin.py").write_text("int('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "plugins: broken_plugin cannot be imported (ValueError: invalid literal" in refusal(
        "plugins=broken_plugin"
    )


def test_a_plugin_that_imports_from_where_a_module_was_before_is_told_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "earlier_plugin.py").write_text(
        "from verl_like.trainer.ppo_trainer import RayPPOTrainer\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal("plugins=earlier_plugin")
    assert "No module named 'verl_like.trainer.ppo_trainer'" in message
    assert "import from verl_like.trainer.ppo.ray_trainer, where its names are now" in message


def test_keys_types_and_names_are_judged_before_torch_is_loaded():
    program = (
        "import json, sys\n"
        "from verl_like.trainer.config import ConfigError, load_ppo_config\n"
        "for wrong in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        load_ppo_config(wrong)\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    wrong = [
        "actor_rollout_ref.actor.ppo_mini_batch_siz=4",
        "actor_rollout_ref.actor.policy_loss.temperature=4",
        "algorithm.options.factor=4",
        "algorithm.gamma=much",
        "algorithm.adv_estimator=gea",
        "plugins=[no_such_plugin]",
    ]
    arguments = json.dumps([[*REQUIRED, override] for override in wrong])
    result = subprocess.run(
        [sys.executable, "-c", program, arguments], capture_output=True, text=True, timeout=60
    )
    *problems, has_torch = result.stdout.splitlines()
    assert [problem.split(":")[0].split("=")[0] for problem in problems] == [
        override.split("=")[0] for override in wrong
    ], result.stderr
    assert has_torch == "False"
