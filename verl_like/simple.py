"""The names of verl_like/compat/colossalai.py under their earlier module."""

from verl_like.compat.colossalai import (
    Actor,
    Critic,
    DDPStrategy,
    FsdpStrategy,
    NaiveStrategy,
    PPOTrainer,
    RewardModel,
    Strategy,
)

__all__ = [
    "Actor",
    "Critic",
    "DDPStrategy",
    "FsdpStrategy",
    "NaiveStrategy",
    "PPOTrainer",
    "RewardModel",
    "Strategy",
]
