"""The roles of PPO, and how the roles of one pool are grouped into processes."""

from collections import defaultdict
from enum import StrEnum


class Role(StrEnum):
    """Names used in `role_mapping` and `worker_classes`; any other name there is a custom role."""

    Actor = "actor"
    Rollout = "rollout"
    RefPolicy = "ref"
    Teacher = "teacher"
    Critic = "critic"
    RewardModel = "reward_model"
    Agent = "agent"


OWN_PROCESS = (Role.Rollout, Role.Agent)
"""Roles that share no process with others."""
POLICY_KEY = "actor_rollout_ref.model"
"""The configuration key of the policy's model."""


def reward_model_key(role: str) -> str:
    """The configuration key of the model of a reward model's role."""
    return "reward_model.model" if role == Role.RewardModel else f"reward_models.{role}"


def process_groups(role_mapping: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Which roles share a process: `[(pool, roles), ...]`, one entry a worker group.

    Training roles of a pool share one process per device. A rollout engine manages device memory
    and threads of its own, and agents answer the driver at any time, so each of the two has its own
    process, next to the others when it is mapped to the same pool.
    """
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for role, pool in role_mapping.items():
        own_process = role if role in OWN_PROCESS else ""
        groups[pool, own_process].append(role)
    return [(pool, roles) for (pool, _), roles in groups.items()]
