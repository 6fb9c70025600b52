"""On-policy RL with optimal reward baseline (arXiv 2505.23585): the baseline weighs long responses
more.

    score_i = sum of the token rewards of row i,  len_i = its number of response tokens
    A_i     = score_i - sum_j len_j score_j / sum_j len_j     over the group

Every token of row i gets A_i.

The baseline of least variance weighs a score with the squared norm of the response's gradient,
which is taken to be proportional to the length. Groups of one, of equal scores and with skipped
rows are treated as in `grpo`.

Keys: `actor_rollout_ref.rollout.n`.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.groups import PromptGroups


@register_adv_est("opo")
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: object = None,
) -> tuple[Tensor, Tensor]:
    """Returns one advantage for each response, (B, R) at each of its tokens, as the advantages and
    as the returns.

    `epsilon` and `config` are parameters in verl and not read.
    """
    groups = PromptGroups.of(token_level_rewards, response_mask, index)
    lengths = groups.valid.sum(dim=-1).double()
    num_tokens = groups.sum(lengths).clamp(min=1)
    baseline = groups.sum(lengths * groups.scores) / num_tokens
    row_advantages = groups.scores_above(baseline)
    advantages = groups.on_tokens(row_advantages, token_level_rewards.dtype)
    return advantages, advantages
