"""ILQL: what a language model and its Q and V heads learn from scored conversations (Snell et al.
2022, arXiv:2206.11871).

B rows, R padded response length. A state h is the text before a learned token, the action a is the
token, and h' the state before the next learned token of the row. The score r of a row is the reward
of its last one.
"""

from torch import Tensor

from verl_like.algorithms.discounted_sums import gae_in_blocks
from verl_like.algorithms.masked import on_last_token

MAX_WEIGHT = 100.0
"""The largest weight of a token in the language-model loss, as in IQL (arXiv:2110.06169)."""


def ilql_losses(
    log_probs: Tensor,
    q1: Tensor,
    q2: Tensor,
    log_softmax_q1: Tensor,
    log_softmax_q2: Tensor,
    target_q: Tensor,
    values: Tensor,
    *,
    scores: Tensor,
    mask: Tensor,
    gamma: float,
    expectile: float,
    awac_beta: float,
) -> dict[str, Tensor]:
    """Returns the four terms of the loss of each learned token, (B, R).

    td: sum over both heads of (Q(h, a) - r - gamma V(h'))^2, where V is 0 after the last token and
    has no gradient. value: |expectile - 1(u < 0)| u^2 with u = Q^(h, a) - V(h), where Q^ is the
    lesser of the target heads. cql: sum over both heads of log sum_a' exp Q(h, a') - Q(h, a). lm:
    -w log pi(a | h), where w = exp(awac_beta u), at most 100, has no gradient; awac_beta = 0 is
    behaviour cloning.

    Args:
        log_probs, q1, q2, target_q: (B, R) float, of the tokens. They are 0 where `mask` is 0, as
            are the next three.
        log_softmax_q1, log_softmax_q2: (B, R) float, the log-softmax of Q over the vocabulary.
        values: (B, R) float, V of the state before each token.
        scores: (B,) float.
        mask: (B, R) bool or 0/1, the learned tokens.
    """
    rewards = on_last_token(scores, mask)
    fixed_values = values.detach()
    # With lambda 0 the returns of GAE are r + gamma V(h').
    _advantages, targets = gae_in_blocks(rewards, fixed_values, mask.bool(), gamma, lam=0.0)
    advantages = target_q.detach() - values
    is_negative = (advantages < 0).to(advantages.dtype)
    asymmetry = (expectile - is_negative).abs()
    log_weights = awac_beta * advantages.detach()
    weights = log_weights.exp().clamp(max=MAX_WEIGHT)
    return {
        "td": (q1 - targets) ** 2 + (q2 - targets) ** 2,
        "value": asymmetry * advantages**2,
        "cql": -log_softmax_q1 - log_softmax_q2,
        "lm": -weights * log_probs,
    }
