"""Step and validation metrics computed on the driver, under verl's names."""

from collections import Counter, defaultdict

import numpy as np
import torch

from verl_like.algorithms.corrections.off_policy_metrics import compute_offpolicy_metrics
from verl_like.protocol import DataProto, Metric
from verl_like.protocol.padded import Padding, view_of_samples
from verl_like.protocol.row_ops import jagged_parts
from verl_like.protocol.samples import SampleRows
from verl_like.trainer.scoring import extra_numbers


def batch_metrics(batch: DataProto, max_prompt_length: int, max_response_length: int) -> dict[str, Metric]:
    """Scores, rewards, advantages, lengths and log-prob drift of the samples of one training batch.

    `batch` holds by response token `response_mask`, `token_level_scores`, `token_level_rewards`, `advantages`,
    `returns` and, when there is a critic, `values`.
    """
    prompt_lengths_S = jagged_parts(batch.tensors()["prompts"])[1].diff()[SampleRows.of(batch).first_rows].float()
    num_tokens = sum(len(jagged_parts(batch.tensors()[name])[0]) for name in ("prompts", "responses"))
    batch = view_of_samples(batch)
    # Under bypass the rollout's log-probabilities stand for the trainer's, and there is nothing to compare.
    old_log_probs_BR = batch.batch.get("old_log_probs")
    has_drift = old_log_probs_BR is not None and not old_log_probs_BR.equal(batch.batch["rollout_log_probs"])
    mask_name = "sampled_mask" if "sampled_mask" in batch.batch else "response_mask"
    counted_B = batch.batch[mask_name].any(-1)  # not the samples that were skipped
    counted = batch if counted_B.all() else batch.select_idxs(counted_B)
    columns = counted.batch
    mask_BR = columns[mask_name].bool()
    prompt_lengths_B = prompt_lengths_S[counted_B]
    response_lengths_B = mask_BR.sum(-1).float()
    longest_rows_B = mask_BR.unflatten(1, (-1, Padding.of(batch).max_response_length)).sum(-1).amax(-1)
    metrics = {
        **_mean_max_min("critic/score", columns["token_level_scores"].sum(-1)),
        **_mean_max_min("critic/rewards", columns["token_level_rewards"].sum(-1)),
        **_mean_max_min("critic/advantages", columns["advantages"][mask_BR]),
        **_mean_max_min("critic/returns", columns["returns"][mask_BR]),
        **_mean_max_min("response_length", response_lengths_B),
        **_mean_max_min("prompt_length", prompt_lengths_B),
        "response_length/clip_ratio": _mean(longest_rows_B == max_response_length),
        "prompt_length/clip_ratio": _mean(prompt_lengths_B == max_prompt_length),
        "perf/total_num_tokens": Metric.sum(float(num_tokens)),
    }
    if has_drift:
        metrics |= _drift(columns["rollout_log_probs"], columns["old_log_probs"], mask_BR)
    if "values" in columns and mask_BR.any():
        returns, values = columns["returns"][mask_BR], columns["values"][mask_BR]
        metrics |= _mean_max_min("critic/values", values)
        unexplained = (returns - values).var(unbiased=False) / (returns.var(unbiased=False) + 1e-5)
        metrics["critic/vf_explained_var"] = Metric.mean(1.0 - unexplained.item())
    return metrics


def validation_metrics(batch: DataProto, scores_B: torch.Tensor) -> dict[str, float]:
    """`val-core/{data_source}/{variable}/mean@N` over prompts of N samples each, and `best@N/mean` when N > 1.

    The variables of the (B,) responses are "reward", their rewards `scores_B`, and the numbers that the reward function
    added. The core variable of a data source is "acc" where its reward function reports that, else "reward"; the other
    variables go to `val-aux/`. In a sample without it, such as one that was skipped, the core variable counts 0; the
    others are means over the samples that have them.
    """
    prompts, numbers = batch.non_tensor_batch["uid"], extra_numbers(batch)
    values = [
        {"reward": score} | {name: float(added[i]) for name, added in numbers.items() if not np.isnan(added[i])}
        for i, score in enumerate(scores_B.tolist())
    ]
    rows_of_source: dict[str, list[int]] = defaultdict(list)
    for i, source in enumerate(batch.non_tensor_batch["data_source"]):
        rows_of_source[source].append(i)
    metrics: dict[str, float] = {}
    for source, rows in rows_of_source.items():
        names = dict.fromkeys(name for i in rows for name in values[i])
        core = "acc" if "acc" in names else "reward"
        num_samples = max(Counter(prompts[i] for i in rows).values())
        for name in names:
            values_of_prompt: dict[str, list[float]] = defaultdict(list)
            for i in rows:
                if name == core or name in values[i]:
                    values_of_prompt[prompts[i]].append(values[i].get(name, 0.0))
            prefix = f"{'val-core' if name == core else 'val-aux'}/{source}/{name}"
            metrics[f"{prefix}/mean@{num_samples}"] = float(np.mean([np.mean(v) for v in values_of_prompt.values()]))
            if num_samples > 1:
                best = [max(v) for v in values_of_prompt.values()]
                metrics[f"{prefix}/best@{num_samples}/mean"] = float(np.mean(best))
    return metrics


def _mean(values: torch.Tensor) -> Metric:
    return Metric.mean(values.float().mean().item(), weight=values.numel())  # of no values NaN, which weighs nothing


def _mean_max_min(name: str, values: torch.Tensor) -> dict[str, Metric]:
    if not values.numel():  # every sample of the batch was skipped
        return {}
    return {
        f"{name}/mean": _mean(values),
        f"{name}/max": Metric.max(values.max().item()),
        f"{name}/min": Metric.min(values.min().item()),
    }


def _drift(rollout_log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask_BR: torch.Tensor) -> dict[str, Metric]:
    """How far the engine's token probabilities are from the trainer's, on the very same weights."""
    rollout, actor = rollout_log_probs[mask_BR].exp(), old_log_probs[mask_BR].exp()
    if rollout.numel() < 2:
        return {}
    difference, correlation = (rollout - actor).abs(), torch.corrcoef(torch.stack([rollout, actor]))[0, 1]
    off_policy = compute_offpolicy_metrics(old_log_probs, rollout_log_probs, mask_BR)
    return {
        **{f"rollout_corr/{name}": Metric.mean(value) for name, value in off_policy.items()},
        "training/rollout_probs_diff_mean": _mean(difference),
        "training/rollout_probs_diff_max": Metric.max(difference.max().item()),
        "training/rollout_probs_diff_std": Metric.mean(difference.std().item()),
        "training/rollout_actor_probs_pearson_corr": Metric.mean(correlation.item()),
    }
