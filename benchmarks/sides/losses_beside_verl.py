"""Policy losses, corrections and KL estimators beside verl's functions, in one process."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo import rollout_corr_helper as verl_corrections
from verl.workers.config import ActorConfig, PolicyLossConfig

from benchmarks.serve import serve
from verl_like.algorithms.aggregation import LOSS_AGG_MODES, BatchCounts
from verl_like.algorithms.corrections import STATISTICS
from verl_like.algorithms.corrections.importance_sampling import compute_rollout_correction_weights
from verl_like.algorithms.corrections.off_policy_metrics import compute_offpolicy_metrics
from verl_like.algorithms.corrections.rejection import compute_rollout_rejection_mask
from verl_like.algorithms.kl import KL_ESTIMATORS, kl_penalty
from verl_like.algorithms.policy_losses import get_policy_loss_fn
from verl_like.algorithms.registry import call_by_name, options_class

ROWS = 12
LENGTH = 40
SEQUENCE_MEAN = "seq-mean-token-mean"
# Where verl draws at random, the share 1 leaves nothing to draw.
OPTIONS: dict[str, dict[str, float]] = {
    "sapo": {"tau_pos": 1.3, "tau_neg": 0.8},
    "dro": {"dro_beta": 0.7},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.8},
    "kl_cov": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.6},
}
MODES = {"sapo": (SEQUENCE_MEAN,), "geo_mean": (SEQUENCE_MEAN,)}
LOSSES = (
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "geo_mean",
    "gpg",
    "reinforce",
    "dro",
    "clip_cov",
)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """(ROWS, LENGTH) float64 columns; responses of several lengths with holes, none of them
    skipped."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (ROWS, 1))) & (
        rng.random((ROWS, LENGTH)) < 0.8
    )
    mask[:, 0] = True
    old = -rng.exponential(1.0, (ROWS, LENGTH)) - 1e-3
    columns = {
        "old_log_prob": old,
        "log_prob": np.minimum(old + rng.normal(0, 0.3, old.shape), -1e-3),
        "rollout_log_probs": np.minimum(old + rng.normal(0, 0.1, old.shape), -1e-3),
        "advantages": rng.normal(0, 1, old.shape),
        "rollout_is_weights": rng.uniform(0.2, 2, old.shape),
        "response_mask": mask.astype(np.int64),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def loss_difference(name: str, columns: dict[str, torch.Tensor], mode: str) -> float:
    """The larger of the relative differences in loss and gradient, and of the differences in shared
    metrics."""
    mask = columns["response_mask"]
    options = OPTIONS.get(name, {})
    policy_loss = {key: value for key, value in options.items() if not key.startswith("tau")}
    verl_config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.15,
        clip_ratio_high=0.25,
        policy_loss=PolicyLossConfig(loss_mode="vanilla", **policy_loss),
        **{key: value for key, value in options.items() if key.startswith("tau")},
    )
    # verl divides by the width of the columns; here it is said.
    counts = BatchCounts(loss_scale_factor=LENGTH)
    config = SimpleNamespace(clip_ratio_low=0.15, clip_ratio_high=0.25, clip_ratio_c=3.0)
    function = get_policy_loss_fn(name)
    declared = options_class(function)
    ours, theirs = (columns["log_prob"].clone().requires_grad_() for _ in range(2))
    inputs: dict[str, Any] = {
        **columns,
        "log_prob": ours,
        "loss_agg_mode": mode,
        "config": config,
        "counts": counts,
        "options": declared and declared(**options),
    }
    if hasattr(inputs["options"], "select_tokens"):
        # verl selects by the policy that is trained.
        inputs["selected_tokens"] = inputs["options"].select_tokens(
            columns["log_prob"], columns["advantages"], mask
        )
    loss, metrics = call_by_name(function, inputs)
    if name == "reinforce":
        verl_function = core_algos.compute_policy_loss_reinforce
    else:
        verl_function = core_algos.get_policy_loss_fn(name)
    verl_loss, verl_metrics = verl_function(
        columns["old_log_prob"],
        theirs,
        columns["advantages"],
        mask,
        mode,
        verl_config,
        columns["rollout_is_weights"],
    )
    loss.backward()
    verl_loss.backward()
    found = {key: float(value[mask.bool()].double().mean()) for key, value in metrics.items()}
    return max(
        abs(loss.item() / verl_loss.item() - 1),
        float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()),
        *(abs(value - verl_metrics[key]) for key, value in found.items()),
    )


def distillation_difference(columns: dict[str, torch.Tensor]) -> float:
    """verl's parts: its KL as a negative advantage, and its clipped loss of that and of the task's
    advantages."""
    verl_config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    config = SimpleNamespace(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    ours, theirs = (columns["log_prob"].clone().requires_grad_() for _ in range(2))
    function = get_policy_loss_fn("distillation")
    teacher = columns["rollout_log_probs"]
    options = {"distillation_loss_coef": 0.4, "loss_max_clamp": 0.3}
    declared = options_class(function)
    assert declared
    inputs = {
        **columns,
        "log_prob": ours,
        "config": config,
        "counts": BatchCounts(),
        "teacher_log_prob": teacher,
        "options": declared(**options),
    }
    loss, _ = call_by_name(function, inputs)
    signal = core_algos.kl_penalty(theirs, teacher, "k1").clamp(-0.3, 0.3)

    def surrogate(advantages: torch.Tensor) -> torch.Tensor:
        verl_columns = (
            columns["old_log_prob"],
            theirs,
            advantages,
            columns["response_mask"],
            "token-mean",
        )
        return core_algos.compute_policy_loss_vanilla(
            *verl_columns, verl_config, columns["rollout_is_weights"]
        )[0]

    verl_loss = 0.4 * surrogate(-signal.detach()) + surrogate(columns["advantages"])
    loss.backward()
    verl_loss.backward()
    return max(abs(loss.item() - verl_loss.item()), float((ours.grad - theirs.grad).abs().max()))


def correction_differences(columns: dict[str, torch.Tensor]) -> dict[str, float]:
    mask = columns["response_mask"]
    log_ratio = columns["old_log_prob"] - columns["rollout_log_probs"]
    found = {}
    for level in ("token", "sequence"):
        for threshold in (1.1, "0.9_1.2"):
            for normalize in (False, True):
                arguments = (log_ratio, mask, level, threshold, normalize)
                weights, metrics = compute_rollout_correction_weights(*arguments)
                verl_weights, verl_metrics = verl_corrections.compute_rollout_correction_weights(
                    *arguments
                )
                kind = "truncated" if isinstance(threshold, float) else "within a band"
                name = f"{level} weights, {kind}"
                differences = [float((weights - verl_weights).abs().max())]
                differences += [
                    abs(metrics[key] - verl_metrics[key])
                    for key in metrics.keys() & verl_metrics.keys()
                    if not key.endswith(("_max", "_min"))
                ]
                found[name] = max(found.get(name, 0.0), *differences)
    for statistic in STATISTICS:
        threshold = "0.9_1.1" if statistic.endswith("k1") else "0.01"
        kept, metrics = compute_rollout_rejection_mask(log_ratio, mask, statistic, threshold)
        verl_kept, verl_metrics = verl_corrections.compute_rollout_rejection_mask(
            log_ratio, mask, statistic, threshold
        )
        found[f"rejection by {statistic}"] = max(
            float((kept != verl_kept).sum()),
            *(abs(metrics[key] - verl_metrics[key]) for key in metrics),
        )
    arguments = columns["old_log_prob"], columns["rollout_log_probs"], mask
    metrics = compute_offpolicy_metrics(*arguments)
    verl_metrics = verl_corrections.compute_offpolicy_metrics(*arguments)
    shared = metrics.keys() & verl_metrics.keys()
    found["drift metrics"] = max(abs(metrics[key] / verl_metrics[key] - 1) for key in shared)
    return found


def kl_differences(columns: dict[str, torch.Tensor]) -> dict[str, float]:
    found = {}
    for estimator in (name + suffix for name in KL_ESTIMATORS for suffix in ("", "+")):
        ours, theirs = (columns["log_prob"].clone().requires_grad_() for _ in range(2))
        value = kl_penalty(ours, columns["old_log_prob"], estimator)
        verl_value = core_algos.kl_penalty(theirs, columns["old_log_prob"], estimator)
        value.sum().backward()
        verl_value.sum().backward()
        difference = max((value - verl_value).abs().max(), (ours.grad - theirs.grad).abs().max())
        found[f"KL {estimator}"] = float(difference.detach())
    return found


def differences(seed: int) -> dict[str, float]:
    columns = batch(seed)
    found = {}
    for name in (*LOSSES, "kl_cov"):
        modes = MODES.get(name, LOSS_AGG_MODES)
        found[f"{name} loss"] = max(loss_difference(name, columns, mode) for mode in modes)
    found["distillation loss"] = distillation_difference(columns)
    return found | correction_differences(columns) | kl_differences(columns)


if __name__ == "__main__":
    serve(differences)
