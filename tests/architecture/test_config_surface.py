"""The configuration stays small, documented and used; its modules stay light."""

import ast
import json
import subprocess
import sys

from source_tree import PACKAGE, ROOT, parse, python_files

from verl_like.trainer.config import PPOConfig
from verl_like.trainer.config.compose import leaves
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.config.supervised import DPOConfig, ILQLConfig, RMConfig, SFTConfig

MAX_LEAVES = 150
# The options of one technique, which count with it and not with what a run asks of everybody.
TECHNIQUES = (
    *("algorithm.filter_groups.", "algorithm.rollout_correction.", "reward.overlong_buffer."),
    *(
        "algorithm.gamma",
        "algorithm.lam",
        "algorithm.norm_adv_by_std_in_grpo",
        "actor_rollout_ref.actor.clip_ratio_c",
    ),
    *("reward_model.weight", "reward_models"),  # several rewards
    *("actor_rollout_ref.actor.ptx_coef", "data.ptx_"),  # a language-model loss beside the policy's
    "actor_rollout_ref.actor.ema_decay",
    # resuming
    *(
        "trainer.resume_",
        "trainer.damaged_ckpt",
        "trainer.max_ckpt_to_keep",
        "trainer.best_ckpt_metric",
    ),
    *(
        f"{model}.model.{name}"
        for model in ("actor_rollout_ref", "critic")
        for name in ("lora_", "target_modules")
    ),
    "actor_rollout_ref.rollout.routing",  # a queue for engines whose responses differ in length
    "actor_rollout_ref.rollout.quantization",  # an engine whose distribution is corrected
    "reward.max_memory_gb",  # a limit against a fault, which no run has to set
)
CONFIG_FILES = [*python_files(PACKAGE / "workers/config", PACKAGE / "trainer/config")]


def test_the_entry_point_has_at_most_150_keys():
    """The options of an algorithm stand in its own file and are no leaves of the schema."""
    number = sum(not path.startswith(TECHNIQUES) for path, _, _ in leaves(PPOConfig))
    assert number <= MAX_LEAVES, (
        f"{number} keys: a new key needs a user, and one without a user can go"
    )


def test_the_readme_says_how_many_keys_there_are():
    of_examples = [
        len(list(leaves(schema))) for schema in (SFTConfig, RMConfig, DPOConfig, ILQLConfig)
    ]
    claim = (
        f"{len(list(leaves(PPOConfig)))} for PPO, {min(of_examples)} to {max(of_examples)} for "
        "each trainer on examples"
    )
    assert claim in (ROOT / "README.md").read_text(), f"write: {claim}"


def test_every_key_is_documented():
    undocumented = [
        path
        for path, model, name in leaves(DetachedConfig)
        if not model.model_fields[name].description
    ]
    assert not undocumented, f"write a docstring under these fields: {undocumented}"


# Read where the configuration is resolved: by the presets, as what clip_ratio_low and
# clip_ratio_high mean by null, and by the properties makers, attn_implementation, hf_overrides,
# tokenizer, num_shards and reward_models_by_role.
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
