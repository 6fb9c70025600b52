"""How much work the rows of a PPO batch are, as the configuration divides them."""

from verl_like.protocol import DataProto
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.loop.balancing import RowWork
from verl_like.workers.planning.flops import ModelCost


def work_of_rows(batch: DataProto, cost: ModelCost, config: PPOConfig) -> RowWork:
    """Returns the work of each row of a batch for the policy."""
    return RowWork.of(
        batch,
        cost,
        balance=config.trainer.balance_batch,
        shares_prompts=config.actor_rollout_ref.actor.use_prefix_grouper,
    )
