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
    """Metrics of the samples of one training batch: scores, rewards, advantages, lengths, and how
    far the rollout's log-probabilities are from the trainer's.

    `batch` has the columns `response_mask`, `token_level_scores`, `token_level_rewards`,
    `advantages` and `returns`, with an entry for each response token, and `values` if there is a
    critic. Samples that were skipped do not count.
    """
    samples = SampleRows.of(batch)
    tensors = batch.tensors()
    _tokens, prompt_offsets = jagged_parts(tensors["prompts"])
    _tokens, response_offsets = jagged_parts(tensors["responses"])
    prompt_lengths_B = prompt_offsets.diff()
    lengths_B = response_offsets.diff()
    # With bypass_mode the two columns are one, and there is nothing to compare.
    old_log_probs = tensors.get("old_log_probs")
    has_drift = old_log_probs is not None and old_log_probs is not tensors["rollout_log_probs"]
    view = view_of_samples(batch).tensor_batch
    mask_name = "sampled_mask" if "sampled_mask" in view else "response_mask"
    counted_S = view[mask_name].any(-1)  # False for the samples that were skipped

    def column(name: str) -> torch.Tensor:
        return view[name] if counted_S.all() else view[name][counted_S]

    mask = column(mask_name).bool()
    prompt_lengths = prompt_lengths_B[samples.first_rows][counted_S].float()
    # The tokens of each row that the mask marks, and the most of any row of a sample:
    marks, offsets = jagged_parts(tensors[mask_name])
    num_marks = torch.nn.functional.pad(marks.long().cumsum(0), (1, 0))
    marked_B = num_marks[offsets[1:]] - num_marks[offsets[:-1]]
    zeros_S = torch.zeros(samples.num_samples, dtype=torch.int64)
    longest_S = zeros_S.scatter_reduce(0, samples.sample_of_row, marked_B, "amax")
    longest = longest_S[counted_S]
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
    """Metrics of a validation, for each data source and each variable of its responses.

    `{data_source}/{variable}/mean@N` is the mean over prompts with N samples each, and if N > 1,
    `best@N/mean` is the mean of the prompts' best samples. The variables of the (B,) responses are
    "reward", with the values `scores_B`, and the numbers that the reward function returned beside
    the score.

    A data source has one core variable, whose metrics are called `val-core/...`: "acc" if its
    reward function returns that, else "reward". The others are called `val-aux/...`. A sample that
    lacks the core variable, for instance because it was skipped, counts as 0. Other variables are
    averaged over the samples that have them.
    """
    prompts = batch.non_tensor_batch["uid"]
    numbers = extra_numbers(batch)
    values: list[dict[str, float]] = []
    for i, score in enumerate(scores_B.tolist()):
        of_response = {"reward": score}
        for name, numbers_B in numbers.items():
            if not np.isnan(numbers_B[i]):
                of_response[name] = float(numbers_B[i])
        values.append(of_response)
    rows_of_source: dict[str, list[int]] = defaultdict(list)
    for i, source in enumerate(batch.non_tensor_batch["data_source"]):
        rows_of_source[source].append(i)
    metrics: dict[str, float] = {}
    for source, rows in rows_of_source.items():
        names: dict[str, None] = {}  # a set that keeps the order
        for i in rows:
            names |= dict.fromkeys(values[i])
        core = "acc" if "acc" in names else "reward"
        num_samples = max(Counter(prompts[i] for i in rows).values())
        for name in names:
            values_of_prompt: dict[str, list[float]] = defaultdict(list)
            for i in rows:
                if name == core or name in values[i]:
                    values_of_prompt[prompts[i]].append(values[i].get(name, 0.0))
            kind = "val-core" if name == core else "val-aux"
            prefix = f"{kind}/{source}/{name}"
            means = [np.mean(of_prompt) for of_prompt in values_of_prompt.values()]
            metrics[f"{prefix}/mean@{num_samples}"] = float(np.mean(means))
            if num_samples > 1:
                best = [max(of_prompt) for of_prompt in values_of_prompt.values()]
                metrics[f"{prefix}/best@{num_samples}/mean"] = float(np.mean(best))
    return metrics


def _mean(values: torch.Tensor) -> Metric:
    """The mean of values. That of no values is NaN, with a weight of 0."""
    return Metric.mean(values.float().mean().item(), weight=values.numel())


def _mean_max_min(name: str, values: torch.Tensor) -> dict[str, Metric]:
    """Mean, maximum and minimum of values. No values, as when every sample of the batch was
    skipped, have no metrics."""
    if not values.numel():
        return {}
    return {
        f"{name}/mean": _mean(values),
        f"{name}/max": Metric.max(values.max().item()),
        f"{name}/min": Metric.min(values.min().item()),
    }


def _drift(
    rollout_log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask_BR: torch.Tensor
) -> dict[str, Metric]:
    """How far the rollout engine's probabilities of tokens are from the trainer's. Both have the
    same weights. Less than two tokens have no metrics."""
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
