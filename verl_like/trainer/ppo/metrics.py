"""Step and validation metrics computed on the driver, under verl's names."""

from collections import Counter, defaultdict

import numpy as np
import torch

from verl_like.algorithms.corrections.off_policy_metrics import compute_offpolicy_metrics
from verl_like.protocol import DataProto, Metric
from verl_like.protocol.padded import view_of_samples
from verl_like.protocol.row_ops import jagged_parts
from verl_like.protocol.samples import SampleRows
from verl_like.trainer.ppo.scoring import extra_numbers


def batch_metrics(
    batch: DataProto, max_prompt_length: int, max_response_length: int
) -> dict[str, Metric]:
    """Scores, rewards, advantages, lengths and log-prob drift of the samples of one training batch.

    `batch` holds by response token `response_mask`, `token_level_scores`, `token_level_rewards`,
    `advantages`, `returns` and, when there is a critic, `values`.
    """
    samples = SampleRows.of(batch)
    tensors = batch.tensors()
    prompt_lengths_B, lengths_B = (
        jagged_parts(tensors[name])[1].diff() for name in ("prompts", "responses")
    )
    # Under bypass the rollout's log-probabilities stand for the trainer's, and there is nothing to
    # compare.
    has_drift = (
        "old_log_probs" in tensors and tensors["old_log_probs"] is not tensors["rollout_log_probs"]
    )
    view = view_of_samples(batch).tensor_batch
    mask_name = "sampled_mask" if "sampled_mask" in view else "response_mask"
    counted_S = view[mask_name].any(-1)  # not the samples that were skipped

    def column(name: str) -> torch.Tensor:
        return view[name] if counted_S.all() else view[name][counted_S]

    mask = column(mask_name).bool()
    prompt_lengths = prompt_lengths_B[samples.first_rows][counted_S].float()
    marks, offsets = jagged_parts(tensors[mask_name])
    num_marks = torch.nn.functional.pad(marks.long().cumsum(0), (1, 0))
    marked_B = num_marks[offsets[1:]] - num_marks[offsets[:-1]]
    longest_S = torch.zeros(samples.num_samples, dtype=torch.int64)
    longest = longest_S.scatter_reduce(0, samples.sample_of_row, marked_B, "amax")[counted_S]
    metrics = {
        **_mean_max_min("critic/score", column("token_level_scores").sum(-1)),
        **_mean_max_min("critic/rewards", column("token_level_rewards").sum(-1)),
        **_mean_max_min("critic/advantages", column("advantages")[mask]),
        **_mean_max_min("critic/returns", column("returns")[mask]),
        **_mean_max_min("response_length", mask.sum(-1).float()),
        **_mean_max_min("prompt_length", prompt_lengths),
        "response_length/clip_ratio": _mean(longest == max_response_length),
        "prompt_length/clip_ratio": _mean(prompt_lengths == max_prompt_length),
        "perf/total_num_tokens": Metric.sum(float(prompt_lengths_B.sum() + lengths_B.sum())),
    }
    if has_drift:
        metrics |= _drift(column("rollout_log_probs"), column("old_log_probs"), mask)
    if "values" in view and mask.any():
        returns = column("returns")[mask]
        values = column("values")[mask]
        metrics |= _mean_max_min("critic/values", values)
        unexplained = (returns - values).var(unbiased=False) / (returns.var(unbiased=False) + 1e-5)
        metrics["critic/vf_explained_var"] = Metric.mean(1.0 - unexplained.item())
    return metrics


def validation_metrics(batch: DataProto, scores_B: torch.Tensor) -> dict[str, float]:
    """`val-core/{data_source}/{variable}/mean@N` over prompts of N samples each, and `best@N/mean`
    when N > 1.

    The variables of the (B,) responses are "reward", their rewards `scores_B`, and the numbers that
    the reward function added. The core variable of a data source is "acc" where its reward function
    reports that, else "reward"; the other variables go to `val-aux/`. In a sample without it, such
    as one that was skipped, the core variable counts 0; the others are means over the samples that
    have them.
    """
    prompts = batch.non_tensor_batch["uid"]
    numbers = extra_numbers(batch)
    values = [
        {"reward": score}
        | {name: float(added[i]) for name, added in numbers.items() if not np.isnan(added[i])}
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
            metrics[f"{prefix}/mean@{num_samples}"] = float(
                np.mean([np.mean(v) for v in values_of_prompt.values()])
            )
            if num_samples > 1:
                best = [max(v) for v in values_of_prompt.values()]
                metrics[f"{prefix}/best@{num_samples}/mean"] = float(np.mean(best))
    return metrics


def _mean(values: torch.Tensor) -> Metric:
    # Of no values NaN, which weighs nothing
    return Metric.mean(values.float().mean().item(), weight=values.numel())


def _mean_max_min(name: str, values: torch.Tensor) -> dict[str, Metric]:
    if not values.numel():  # every sample of the batch was skipped
        return {}
    return {
        f"{name}/mean": _mean(values),
        f"{name}/max": Metric.max(values.max().item()),
        f"{name}/min": Metric.min(values.min().item()),
    }


def _drift(
    rollout_log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask_BR: torch.Tensor
) -> dict[str, Metric]:
    """How far the engine's token probabilities are from the trainer's, on the very same weights."""
    rollout = rollout_log_probs[mask_BR].exp()
    actor = old_log_probs[mask_BR].exp()
    if rollout.numel() < 2:
        return {}
    difference = (rollout - actor).abs()
    correlation = torch.corrcoef(torch.stack([rollout, actor]))[0, 1]
    off_policy = compute_offpolicy_metrics(old_log_probs, rollout_log_probs, mask_BR)
    return {
        **{f"rollout_corr/{name}": Metric.mean(value) for name, value in off_policy.items()},
        "training/rollout_probs_diff_mean": _mean(difference),
        "training/rollout_probs_diff_max": Metric.max(difference.max().item()),
        "training/rollout_probs_diff_std": Metric.mean(difference.std().item()),
        "training/rollout_actor_probs_pearson_corr": Metric.mean(correlation.item()),
    }
