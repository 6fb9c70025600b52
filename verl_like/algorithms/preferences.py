"""Losses and metrics of answers in pairs, of which one is preferred.

B pairs. In the model of Bradley and Terry the answer of reward r_c is preferred to that of r_r with
the probability sigmoid(r_c - r_r).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def pairwise_loss(difference: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Returns -(1 - e) log sigmoid(d) - e log sigmoid(-d), (B,), where e is the probability that a
    label is wrong.

    With d = r_c - r_r it trains a reward model (arXiv:2203.02155, eq. 1), less a margin that a pair
    may have (arXiv:2307.09288, eq. 2). With d = beta h, and h = log(pi(c) / ref(c)) - log(pi(r) /
    ref(r)), it is DPO (arXiv:2305.18290, eq. 7), and where e > 0 conservative DPO (Mitchell 2023).
    """
    right = (1 - label_smoothing) * logsigmoid(difference)
    wrong = label_smoothing * logsigmoid(-difference)
    return -right - wrong


def ipo_loss(log_ratio_difference: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Returns (h - 1 / (2 beta))^2, (B,), of IPO (arXiv:2310.12036, eq. 17), whose tau is beta; no
    label is smoothed."""
    return (log_ratio_difference - 1 / (2 * beta)) ** 2


def dpo_loss(log_ratio_difference: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Returns the loss of DPO, (B,): `pairwise_loss` of beta h."""
    return pairwise_loss(beta * log_ratio_difference, label_smoothing)


DPO_LOSSES = {"dpo": dpo_loss, "ipo": ipo_loss}
"""The loss (h (B,), beta, label_smoothing) -> (B,) by `training.loss_type`."""


def preference_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Returns metrics of each pair, (B,) float, from the rewards (B,) of both answers.

    With p = sigmoid(r_c - r_r): `confidence` is max(p, 1 - p), whose mean is that of `accuracy`
    where the rewards are calibrated, and `brier` is (1 - p)^2, the Brier score.
    """
    margin = chosen - rejected
    return {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": margin,
        "accuracy": (margin > 0).float(),
        "confidence": torch.sigmoid(margin.abs()),
        "brier": torch.sigmoid(-margin) ** 2,
    }
