"""The configuration stays small, documented and used; its modules stay light."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, parse, python_files

from verl_like.trainer.config import PPOConfig
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.config.keys import leaves
from verl_like.trainer.config.supervised import DPOConfig, ILQLConfig, RMConfig, SFTConfig

CONFIG_FILES = [*python_files(PACKAGE / "workers/config", PACKAGE / "trainer/config")]


@pytest.mark.parametrize("document", ["README.md", "AGENTS.md"])
def test_the_documents_say_how_many_keys_there_are(document: str):
    """The options of an algorithm stand in its own file and are no leaves of the schema."""
    of_examples = [
        len(list(leaves(schema))) for schema in (SFTConfig, RMConfig, DPOConfig, ILQLConfig)
    ]
    claim = (
        f"{len(list(leaves(PPOConfig)))} for PPO, {min(of_examples)} to {max(of_examples)} for "
        "each trainer on examples"
    )
    text = " ".join((ROOT / document).read_text().split())
    assert claim in text, f"write: {claim}"


def test_every_key_is_documented():
    undocumented = [
        path
        for path, model, name in leaves(DetachedConfig)
        if not model.model_fields[name].description
    ]
    assert not undocumented, f"write a docstring under these fields: {undocumented}"


# Read where the configuration is resolved: by the presets, as what clip_ratio_low and
# clip_ratio_high follow, by the properties maker_names, attn_implementation,
# experts_implementation, hf_overrides, tokenizer and num_shards, and by the plan.
READ_BY_THE_CONFIGURATION = {
    "reward_models",
    "trainer.nnodes",
    "detached.num_makers",
    "trainer.n_gpus_per_node",
    "actor_rollout_ref.actor.clip_ratio",
    *("actor_rollout_ref.actor.fsdp_config.fsdp_size", "critic.model.fsdp_config.fsdp_size"),
    "actor_rollout_ref.model.tokenizer_path",
    *(
        f"{part}.override_config"
        for part in ("actor_rollout_ref.model", "critic.model", "reward_model.model")
    ),
}


def test_every_key_is_read_somewhere():
    """A key that nothing reads would be a setting without effect."""
    files = [path for path in python_files() if path not in CONFIG_FILES]
    read = {
        node.attr
        for path in files
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = [
        path
        for path, _, name in leaves(DetachedConfig)
        if name not in read and path not in READ_BY_THE_CONFIGURATION
    ]
    assert not unread, f"no module outside the configuration reads these keys: {unread}"


# A chosen algorithm's file imports torch; those of this plugin do not.
LIGHT_ALGORITHMS = """
from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.policy_losses import register_policy_loss


@register_adv_est("light")
def light(token_level_rewards, values, index):
    return token_level_rewards, values


@register_policy_loss("light")
def light_loss(log_prob, ref_log_prob):
    return log_prob.sum(), {}
"""
CHECK = """
import json, sys
from verl_like.trainer import config
from verl_like.trainer.config import compose, detached, rules, supervised

schemas = {
    "ppo": (config.PPOConfig, rules.broken_rules),
    "detached": (detached.DetachedConfig, detached.broken_detached_rules),
    "sft": (supervised.SFTConfig, supervised.broken_supervised_rules),
}
name, *overrides = sys.argv[1:]
try:
    checked = compose.load_config(*schemas[name], overrides)
    answer = checked.data.train_files[0]
except config.ConfigError as error:
    answer = str(error)
heavy = ("torch", "ray", "vllm", "transformers", "numpy")
print(json.dumps([answer, [module for module in heavy if module in sys.modules]]))
"""
OF_EXAMPLES = ["data.train_files=train.parquet", "model.path=my/model"]
OF_PPO = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "actor_rollout_ref.model.path=my/model",
    "actor_rollout_ref.rollout.n=2",
    "plugins=[light_algorithms]",
    "algorithm.adv_estimator=light",
    "actor_rollout_ref.actor.policy_loss.loss_mode=light",
]


def check_in_a_process(folder: Path, name: str, overrides: list[str]) -> tuple[str, list[str]]:
    """The first file of the checked configuration, or why it is refused; and which heavy packages
    the process has loaded then."""
    (folder / "light_algorithms.py").write_text(LIGHT_ALGORITHMS)
    output = subprocess.run(
        [sys.executable, "-c", CHECK, name, *overrides],
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answer, heavy = json.loads(output.stdout)
    return answer, heavy


@pytest.mark.parametrize(
    ("name", "overrides"), [("ppo", OF_PPO), ("detached", OF_PPO), ("sft", OF_EXAMPLES)]
)
def test_a_configuration_is_loaded_and_checked_without_a_heavy_package(
    tmp_path: Path, name: str, overrides: list[str]
):
    assert check_in_a_process(tmp_path, name, overrides) == ("train.parquet", [])


@pytest.mark.parametrize("name", ["ppo", "detached"])
def test_keys_and_values_are_refused_before_an_algorithm_loads_torch(tmp_path: Path, name: str):
    """The algorithms are those of the package, whose files import torch."""
    answer, heavy = check_in_a_process(tmp_path, name, [*OF_PPO[:3], "trainer.nnodes=two"])
    assert answer.startswith("trainer.nnodes") and heavy == []


def test_the_configuration_imports_no_heavy_package():
    program = (
        "import json, sys\nimport verl_like.trainer.main_ppo, verl_like.trainer.main_detached\n"
        "print(json.dumps([m for m in ('torch', 'ray', 'vllm', 'transformers', 'numpy') if m in "
        "sys.modules]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(output.stdout) == []
