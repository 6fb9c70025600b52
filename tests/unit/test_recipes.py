"""Every list of overrides in docs/recipes.md is a configuration that can run, and holds what its
heading says."""

import re
import shlex
from pathlib import Path

import pytest

from verl_like.trainer.config import ConfigError, PPOConfig, load_ppo_config

PAGE = Path(__file__).parents[2] / "docs/recipes.md"


def arrays(text: str) -> dict[str, list[str]]:
    """The bash arrays of a page's code blocks by name, without their comments."""
    found = re.findall(r"^(\w+)=\(\n(.*?)^\)$", text, re.MULTILINE | re.DOTALL)
    return {name: shlex.split(body, comments=True) for name, body in found}


LISTS = arrays(PAGE.read_text())
COMMON = LISTS["common"]
RECIPES = {name: overrides for name, overrides in LISTS.items() if name != "common"}


def config_of(name: str) -> PPOConfig:
    return load_ppo_config([*COMMON, *RECIPES[name]])


def key_of(override: str) -> str:
    return override.partition("=")[0]


def test_the_page_has_a_list_for_each_heading():
    assert set(RECIPES) == {"grpo", "dr_grpo", "dapo", "gspo", "rloo", "ppo"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_configuration_that_can_run(name: str):
    config_of(name)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_no_key_twice(name: str):
    keys = [key_of(override) for override in [*COMMON, *RECIPES[name]]]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", ["dapo", "ppo"])
def test_a_misspelt_key_of_a_recipe_is_refused(name: str):
    for position, override in enumerate(RECIPES[name]):
        key, _, value = override.partition("=")
        misspelt = [*RECIPES[name]]
        misspelt[position] = f"{key}x={value}"
        with pytest.raises(ConfigError, match=f"{key}x: there is no such key"):
            load_ppo_config([*COMMON, *misspelt])


@pytest.mark.parametrize("name", RECIPES)
def test_every_override_of_a_recipe_has_its_value(name: str):
    config = config_of(name).model_dump(mode="json")
    for override in RECIPES[name]:
        key, _, value = override.partition("=")
        block = config
        *parents, leaf = key.split(".")
        for parent in parents:
            block = block[parent]
        shown = str(block[leaf])
        same_text = shown.lower() == value.lower()
        assert same_text or float(shown) == float(value), f"{override} became {shown}"


@pytest.mark.parametrize("name", RECIPES)
def test_only_ppo_trains_a_critic(name: str):
    assert config_of(name).plan.needs_critic == (name == "ppo")


@pytest.mark.parametrize("name", RECIPES)
def test_a_reference_is_loaded_where_there_is_a_kl(name: str):
    has_kl = name in ("grpo", "rloo", "ppo")
    assert config_of(name).plan.role_of_reference == ("ref" if has_kl else None)


@pytest.mark.parametrize(
    ("name", "num_updates"),
    [("grpo", 1), ("dr_grpo", 1), ("dapo", 16), ("gspo", 4), ("rloo", 1), ("ppo", 8)],
)
def test_a_step_has_as_many_updates_as_the_page_says(name: str, num_updates: int):
    config = config_of(name)
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert config.data.train_batch_size // mini_batch == num_updates
