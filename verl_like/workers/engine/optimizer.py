"""AdamW and the learning rate as a pure function of the number of training steps done."""

import math

import torch

from verl_like.workers.config.engine import OptimConfig


def build_optimizer(
    parameters: list[torch.nn.Parameter], config: OptimConfig, with_ema: bool = False
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) with one kernel for all parameters, its moments
    at zero.

    `with_ema` adds `ema` to the state, the parameter in float32: so it is sharded, offloaded and
    saved with the rest.

    The state is there before the first step: `get_state_dict` would make a missing one by a step,
    which counts.
    """
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True
    )
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        if with_ema:
            optimizer.state[parameter]["ema"] = parameter.detach().to(torch.float32, copy=True)
    return optimizer


def learning_rate(step: int, config: OptimConfig, total_steps: int | None) -> float:
    """Learning rate of training step `step` (0 for the first).

    It rises linearly over the W warm-up steps, reaching `lr` in step W - 1, so the first step
    already learns. Then it stays, or falls to 0 at step `total_steps` along a line or half a
    cosine. Raises ValueError if it depends on `total_steps`, which is None.
    """
    needs_total = config.lr_scheduler_type != "constant" or config.lr_warmup_steps_ratio > 0
    if needs_total and total_steps is None:
        raise ValueError(
            f"optim.lr_scheduler_type={config.lr_scheduler_type} with "
            f"lr_warmup_steps_ratio={config.lr_warmup_steps_ratio} depends on the number of "
            "training steps, which is not given; make the worker with total_training_steps."
        )
    total = total_steps or 0
    warmup = (
        config.lr_warmup_steps
        if config.lr_warmup_steps >= 0
        else int(config.lr_warmup_steps_ratio * total)
    )
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    remaining = (
        1 - progress
        if config.lr_scheduler_type == "linear"
        else 0.5 * (1 + math.cos(math.pi * progress))
    )
    return config.lr * remaining
