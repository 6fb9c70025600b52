"""Terms of the actor's loss beside the surrogate, in float64. Imports nothing from `verl_like`."""

import numpy as np
import step_world as world
import torch
from step_llama import Llama


def kl_estimate(log_prob: torch.Tensor, reference: torch.Tensor, name: str) -> torch.Tensor:
    """Schulman's estimators (2020); "+" keeps the value and takes the gradient of half the squared
    difference."""
    d = log_prob - reference
    estimators = {
        "kl": d,
        "abs": d.abs(),
        "mse": d**2 / 2,
        "low_var_kl": ((-d).exp() - 1 + d).clamp(-10, 10),
    }
    value = estimators[
        {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(name.rstrip("+"), name.rstrip("+"))
    ]
    return value.detach() + d**2 / 2 - (d**2 / 2).detach() if name.endswith("+") else value


def ptx_loss(model: Llama, settings: dict[str, object], step: int) -> torch.Tensor:
    """The mean of -log p over all tokens but the first of each text of an optimizer step
    (arXiv:2203.02155, eq. 2).

    An end-of-sequence token follows each text.

    Each epoch takes the texts in a random order, and leaves out those at its end that fill no step.
    """
    size, order = settings["data.ptx_batch_size"], np.arange(len(world.TEXTS))
    epoch, place = divmod(step, len(order) // size)
    order = np.random.RandomState([settings["trainer.seed"], epoch]).permutation(order)
    losses = []
    for number in order[place * size : (place + 1) * size].tolist():
        tokens = [*world.encode(world.TEXTS[number]), world.EOS]
        logits_TV = model.hidden_states(tokens) @ model.parameters["lm_head.weight"].T
        losses.append(
            -torch.log_softmax(logits_TV[:-1], dim=-1)[range(len(tokens) - 1), tokens[1:]]
        )
    return torch.cat(losses).mean()
