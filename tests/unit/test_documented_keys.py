"""Configuration keys that the teaching pages name exist, and their commands are configurations."""

import re
import shlex
from pathlib import Path

import pytest

from verl_like.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.registry import options_class
from verl_like.config_model import ConfigModel
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.config.keys import leaves
from verl_like.trainer.config.supervised import (
    DPOConfig,
    ILQLConfig,
    RMConfig,
    SFTConfig,
    broken_supervised_rules,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "quickstart.md",
    "recipes.md",
    "from_verl_and_trl.md",
    "scope.md",
    "lora.md",
    "after_training.md",
    "trackers.md",
    "trouble.md",
    "install.md",
    "tutorial.md",
    "detached.md",
    "two_nodes.md",
    "memory.md",
    "agents.md",
]
FIRST_NAMES = (
    "data|actor_rollout_ref|critic|reward|reward_model|algorithm|trainer|training|model|detached|"
    "custom_reward_function|ray_kwargs|agent"
)
KEY = re.compile(rf"(?<![\w./<])((?:{FIRST_NAMES})(?:\.\w+)+)(?:=|(?![\w(/.]))")
NOT_OF_A_SCHEMA = re.compile(
    r"actor_rollout_ref\.model\.override_config|custom_reward_function\.reward_kwargs|"
    r"data\.apply_chat_template_kwargs|reward_model\.ground_truth|model\.safetensors|"
    r"algorithm\.options\.scal"
)
SUPERVISED = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "ilql": ILQLConfig}


def known_keys() -> set[str]:
    """Every key of every trainer, with the blocks that hold it and the options of algorithms."""
    schemas: list[type[ConfigModel]] = [DetachedConfig, *SUPERVISED.values()]
    keys: set[str] = set()
    for schema in schemas:
        keys |= {path for path, _, _ in leaves(schema)}
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES):
        for name in registry.file_names():
            if declared := options_class(registry.get(name)):
                keys |= {f"{declared.section}.{field}" for field in declared.model_fields}
    blocks: set[str] = set()
    for key in keys:
        parts = key.split(".")
        blocks |= {".".join(parts[:length]) for length in range(1, len(parts))}
    return keys | blocks


def named_keys(text: str) -> list[str]:
    """The keys in quotes and in blocks of code that are not Python's."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if language in ("", "bash")]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"`([^`\n]+)`", prose)
    return KEY.findall("\n".join([*blocks, *quoted]))


def own_text(page: str) -> str:
    """The page without the left columns of its tables where those are of other programs."""
    text = (DOCS / page).read_text()
    if page != "from_verl_and_trl.md":
        return text
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)


@pytest.fixture
def tutorial_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the tutorial, which its command names, can be imported."""
    blocks = re.findall(
        r"^```python\n# (my_run/my_\w+\.py)\n(.*?)^```",
        (DOCS / "tutorial.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert len(blocks) == 2
    for name, code in blocks:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The trainers that the page's blocks of bash start, with their arguments."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(r"python -m verl_like\.trainer\.main_(\w+) (.*)", line)
            if match:
                found.append((match[1], shlex.split(match[2], comments=True)))
    return found


MISSPELT = "trainer.save_frq"
"""Shows on the page of messages what a refusal says."""
KNOWN = known_keys()
COMMANDS = [
    pytest.param(trainer, arguments, id=f"{page}-{position}")
    for page in PAGES
    for position, (trainer, arguments) in enumerate(commands((DOCS / page).read_text()))
    if not any(each.startswith(("$", "...", MISSPELT)) for each in arguments)
]


def test_keys_are_found_in_quotes_and_in_code():
    text = (
        "`trainer.a=1` trainer.b\n```bash\npython x.py data.c=2\n```\n```python\ntrainer.d\n```\n"
    )
    assert named_keys(text) == ["data.c", "trainer.a"]


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_names_exists(page: str):
    named = [key for key in named_keys(own_text(page)) if not NOT_OF_A_SCHEMA.match(key)]
    missing = sorted({key for key in named if key not in KNOWN | {MISSPELT}})
    assert not missing, f"{page} names keys that do not exist: {missing}"


@pytest.mark.parametrize(("trainer", "arguments"), COMMANDS)
def test_a_command_of_a_page_is_a_configuration_that_can_run(
    trainer: str, arguments: list[str], tutorial_files: None
):
    overrides = [each for each in arguments if not each.startswith("--")]
    if "--help" in arguments:
        return
    if trainer == "ppo":
        load_ppo_config(overrides)
    elif trainer == "detached":
        load_config(DetachedConfig, broken_detached_rules, overrides)
    else:
        load_config(SUPERVISED[trainer], broken_supervised_rules, overrides)
