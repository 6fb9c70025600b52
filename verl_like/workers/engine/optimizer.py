"""The optimizer, AdamW, and the learning rate, a function of the number of training steps done."""

import math

import torch

from verl_like.workers.config.engine import OptimConfig


def build_optimizer(
    parameters: list[torch.nn.Parameter], config: OptimConfig, with_ema: bool = False
) -> torch.optim.AdamW:
    """Makes AdamW (Loshchilov & Hutter, arXiv:1711.05101) with one kernel for all parameters.

    Its moments are zero. They exist before the first step, because the engine offloads them, saves
    them and reads a checkpoint into them. `with_ema` adds `ema` to the state of each parameter, a
    copy of it in float32, which is then sharded, offloaded and saved with the rest.
    """
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True
    )
    for parameter in parameters:
        state = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        if with_ema:
            state["ema"] = parameter.detach().to(torch.float32, copy=True)
        optimizer.state[parameter] = state
    return optimizer


def learning_rate(step: int, config: OptimConfig, total_steps: int | None) -> float:
    """Returns the learning rate of training step `step`, 0 for the first.

    It rises linearly over the W warm-up steps and reaches `lr` in step W - 1, so that the first
    step already learns. Then it stays constant, or falls to 0 at step `total_steps`, linearly or by
    half a cosine. Raises ValueError if it depends on `total_steps`, which is None.
    """
    needs_total = config.lr_scheduler_type != "constant" or config.lr_warmup_steps_ratio > 0
    if needs_total and total_steps is None:
        raise ValueError(
            f"optim.lr_scheduler_type={config.lr_scheduler_type} with "
            f"lr_warmup_steps_ratio={config.lr_warmup_steps_ratio} depends on the number of "
            "training steps, which is not given; make the worker with total_training_steps."
        )
    total = total_steps or 0
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    num_decay_steps = max(1, total - warmup)
    progress = min(1.0, (step - warmup) / num_decay_steps)
    if config.lr_scheduler_type == "linear":
        remaining = 1 - progress
    else:
        cosine = math.cos(math.pi * progress)
        remaining = 0.5 * (1 + cosine)
    return config.lr * remaining
