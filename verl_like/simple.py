"""PPO by the statements of ColossalAI, whose place is verl_like/compat/colossalai.py."""

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
