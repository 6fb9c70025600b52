"""REINFORCE++ with a baseline (arXiv 2501.03262): the score above the group's mean, whitened over
the whole batch.

    score_i = sum of the token rewards of row i
    d_i     = score_i - mean of the group          at every token of row i
    A_i     = (d_i - mean) / sqrt(var + 1e-8)      mean, unbiased variance over all response tokens

The deviation over the batch replaces that over the group, which is a poor estimate from few
samples. A group of equal scores has d = 0, and A = 0 if d is 0 on average over the tokens of the
batch. A row that lost its baseline (see `grpo`) is left out of the whitening and gets 0. The paper
adds a KL term to the loss: `actor.use_kl_loss=True`, `actor.kl_loss_type=k2`.

Keys: `actor_rollout_ref.rollout.n`.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.groups import PromptGroups
from verl_like.algorithms.masked import masked_whiten


@register_adv_est("reinforce_plus_plus_baseline", over_batch=True)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
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
    row_deviations = groups.scores_above(groups.mean())
    deviations = groups.on_tokens(row_deviations, token_level_rewards.dtype)
    has_baseline = groups.valid & groups.has_baseline.unsqueeze(-1)
    advantages = masked_whiten(deviations, has_baseline)
    return advantages, advantages
