"""Group policy gradient (arXiv 2504.02546): the score above the group's mean, corrected for groups
without a gradient.

    score_i = sum of the token rewards of row i
    A_i     = alpha (score_i - mean of the group) / f_norm      every token of row i gets A_i
    alpha   = scored rows of the batch / those of them with a gradient

A row has a gradient if the scores of its group differ, or if it is a group of one with a score
other than 0. A group of equal scores has no gradient but counts in the denominator of the loss;
alpha makes up for that. It counts the rows of the whole batch (`over_batch`), so that
`detached.update_in_flight`, which has few rows at a time, refuses this estimator. Groups of one and
with skipped rows are treated as in `grpo`. f_norm is an argument of the function; in a run it is 1.
verl divides by the number of rows whose score is not 0 instead, so that wrong responses with reward
0 raise alpha although they have a gradient, and it ignores its argument `alpha`.

Keys: `actor_rollout_ref.rollout.n`. The loss that belongs to it is `gpg`.
"""

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.advantages import register_adv_est
from verl_like.algorithms.groups import PromptGroups


@register_adv_est("gpg", over_batch=True)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float | None = None,
    config: object = None,
) -> tuple[Tensor, Tensor]:
    """Returns one advantage for each response, (B, R) at each of its tokens, as the advantages and
    as the returns.

    `f_norm` divides the advantages. `alpha` multiplies them; if it is None, it is computed from the
    batch. `epsilon` and `config` are parameters in verl and not read.
    """
    groups = PromptGroups.of(token_level_rewards, response_mask, index)
    row_advantages = groups.scores_above(groups.mean()) / f_norm
    # A group of one keeps its score as the advantage.
    is_single_with_score = groups.is_single & (groups.scores != 0)
    has_gradient = groups.scored & (groups.differ | is_single_with_score)
    num_with_gradient = has_gradient.sum().clamp(min=1)
    scale = groups.scored.sum() / num_with_gradient if alpha is None else alpha
    advantages = groups.on_tokens(scale * row_advantages, token_level_rewards.dtype)
    return advantages, advantages
