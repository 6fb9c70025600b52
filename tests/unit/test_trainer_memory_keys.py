"""The keys that an error for want of memory names."""

import re

import pytest

from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.config.supervised import SFTConfig
from verl_like.trainer.memory.keys import OF_ROLE, keys_that_lower


def has_key(schema: type, key: str) -> bool:
    for name in key.split("."):
        if name not in schema.model_fields:
            return False
        schema = schema.model_fields[name].annotation
    return True


@pytest.mark.parametrize("memory", ["host", "device"])
@pytest.mark.parametrize("role", [*OF_ROLE, "rollout", "judge", "actor+ref+critic"])
def test_every_key_that_lowers_the_memory_of_a_role_is_one_of_its_trainer(role: str, memory: str):
    schema = SFTConfig if role == "model" else PPOConfig
    keys = re.findall(
        r"\b\w+(?:\.\w+)+", keys_that_lower(memory, role).replace("docs/memory.md", "")
    )
    assert keys and all(has_key(schema, key) for key in keys), keys


def test_offload_is_named_where_it_helps():
    assert "critic.model.fsdp_config.optimizer_offload=true" in keys_that_lower(
        "device", "actor+critic"
    )
    assert "critic.model.fsdp_config.optimizer_offload=false" in keys_that_lower("host", "critic")
    assert "optimizer_offload" not in keys_that_lower("host", "ref"), "a reference has no optimizer"
