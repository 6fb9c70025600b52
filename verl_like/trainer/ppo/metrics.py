"""Step and validation metrics computed on the driver, under verl's names."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.corrections.off_policy_metrics import compute_offpolicy_metrics
from verl_like.protocol import DataProto, Metric
from verl_like.protocol.padded import view_of_samples
from verl_like.protocol.row_ops import jagged_parts
from verl_like.protocol.samples import SampleRows
from verl_like.trainer.ppo.scoring import extra_numbers
from verl_like.workers.models.packing import num_marked
from verl_like.workers.models.routed_experts import UNREPLAYED

Response = dict[str, float]
"""The variables of a response of a validation by name: its reward, and numbers beside it."""


def batch_metrics(
    batch: DataProto, max_prompt_length: int, max_response_length: int
) -> dict[str, Metric]:
    """Returns metrics of the samples of one training batch: scores, rewards, advantages, lengths,
    and how far the rollout's log-probabilities are from the trainer's.

    `batch` has the columns `response_mask`, `token_level_scores`, `token_level_rewards`,
    `advantages` and `returns`, with an entry for each response token, and `values` if there is a
    critic. Samples that were skipped do not count.
    """
    samples = SampleRows.of(batch)
    tensors = batch.tensors()
    prompt_tokens, prompt_offsets = jagged_parts(tensors["prompts"])
    response_tokens, _offsets = jagged_parts(tensors["responses"])
    num_tokens = len(prompt_tokens) + len(response_tokens)
    view = view_of_samples(batch).tensor_batch
    mask_name = "response_mask"
    if "sampled_mask" in view:
        mask_name = "sampled_mask"
    counted_S = view[mask_name].any(-1)  # False for the samples that were skipped

    def column(name: str) -> Tensor:
        values = view[name]
        if counted_S.all():
            return values
        return values[counted_S]

    mask = column(mask_name).bool()
    returns = column("returns")[mask]
    advantages = column("advantages")[mask]
    prompt_lengths_B = prompt_offsets.diff()
    prompt_lengths_S = prompt_lengths_B[samples.first_rows]
    prompt_lengths = prompt_lengths_S[counted_S].float()
    longest_rows_S = _longest_rows(tensors[mask_name], samples)
    longest_rows = longest_rows_S[counted_S]
    distributions = {
        "critic/score": column("token_level_scores").sum(-1),
        "critic/rewards": column("token_level_rewards").sum(-1),
        "critic/advantages": advantages,
        "critic/returns": returns,
        "response_length": mask.sum(-1).float(),
        "prompt_length": prompt_lengths,
    }
    metrics: dict[str, Metric] = {}
    for name, values in distributions.items():
        metrics |= _mean_max_min(name, values)
    fills_response = longest_rows == max_response_length
    fills_prompt = prompt_lengths == max_prompt_length
    metrics |= {
        "response_length/clip_ratio": _mean(fills_response),
        "prompt_length/clip_ratio": _mean(fills_prompt),
        "perf/total_num_tokens": Metric.sum(num_tokens),
    }
    # With bypass_mode the two columns are one, and there is nothing to compare.
    old_log_probs = tensors.get("old_log_probs")
    if old_log_probs is not None and old_log_probs is not tensors["rollout_log_probs"]:
        rollout = column("rollout_log_probs")
        old = column("old_log_probs")
        metrics |= _drift(rollout, old, mask)
        if UNREPLAYED in view:
            unreplayed = column(UNREPLAYED)
            metrics |= _effect_of_replay(rollout, old, unreplayed, mask)
    if "values" in view and mask.any():
        values = column("values")[mask]
        metrics |= _mean_max_min("critic/values", values)
        residuals = returns - values
        residual_variance = residuals.var(unbiased=False)
        variance = returns.var(unbiased=False)
        unexplained = residual_variance / (variance + 1e-5)
        explained = 1.0 - unexplained.item()
        metrics["critic/vf_explained_var"] = Metric.mean(explained)
    return metrics


def _longest_rows(mask: Tensor, samples: SampleRows) -> Tensor:
    """Returns the most tokens that the jagged mask marks in one row of each sample, (S,) int64."""
    num_marked_B = num_marked(mask)
    zeros_S = torch.zeros(samples.num_samples, dtype=torch.int64)
    return zeros_S.scatter_reduce(0, samples.sample_of_row, num_marked_B, "amax")


def validation_metrics(batch: DataProto, scores_B: Tensor, num_samples: int) -> dict[str, float]:
    """Returns metrics of a validation, for each data source and each variable of its responses.

    `{data_source}/{variable}/mean@N` is the mean over prompts with N = `num_samples` samples each,
    fewer where episodes of agents failed, and if N > 1,
    `best@N/mean` is the mean of the prompts' best samples. The variables of the (B,) responses are
    "reward", with the values `scores_B`, and the numbers that the reward function returned beside
    the score.

    A data source has one core variable, whose metrics are called `val-core/...`: "acc" if its
    reward function returns that, else "reward". The others are called `val-aux/...`. A sample that
    lacks the core variable, for instance because it was skipped, counts as 0. Other variables are
    averaged over the samples that have them.
    """
    sources = batch.non_tensor_batch["data_source"]
    uids = batch.non_tensor_batch["uid"]
    numbers = extra_numbers(batch)
    # The responses to each prompt of each source, by the prompt's uid.
    by_source: dict[str, dict[str, list[Response]]] = defaultdict(lambda: defaultdict(list))
    for i, score in enumerate(scores_B.tolist()):
        response = {"reward": score}
        for name, numbers_B in numbers.items():
            number = float(numbers_B[i])
            if not np.isnan(number):
                response[name] = number
        by_source[sources[i]][uids[i]].append(response)
    metrics: dict[str, float] = {}
    for source, by_prompt in by_source.items():
        metrics |= _metrics_of_source(source, list(by_prompt.values()), num_samples)
    return metrics


def _metrics_of_source(
    source: str, responses_of_prompts: Sequence[Sequence[Response]], num_samples: int
) -> dict[str, float]:
    """Returns the metrics of a validation for one data source, whose prompts have these
    responses."""
    names: dict[str, None] = {}  # a set that keeps the order
    for responses in responses_of_prompts:
        for response in responses:
            names |= dict.fromkeys(response)
    core = "reward"
    if "acc" in names:
        core = "acc"
    metrics = {}
    for name in names:
        means = []
        bests = []
        for responses in responses_of_prompts:
            values = []
            for response in responses:
                if name in response:
                    values.append(response[name])
                elif name == core:
                    values.append(0.0)
            if values:
                means.append(np.mean(values))
                bests.append(max(values))
        kind = "val-aux"
        if name == core:
            kind = "val-core"
        prefix = f"{kind}/{source}/{name}"
        mean = np.mean(means)
        metrics[f"{prefix}/mean@{num_samples}"] = float(mean)
        if num_samples > 1:
            best = np.mean(bests)
            metrics[f"{prefix}/best@{num_samples}/mean"] = float(best)
    return metrics


def _mean(values: Tensor) -> Metric:
    """Returns the mean of values. That of no values is NaN, with a weight of 0."""
    mean = values.float().mean().item()
    return Metric.mean(mean, weight=values.numel())


def _mean_max_min(name: str, values: Tensor) -> dict[str, Metric]:
    """Returns mean, maximum and minimum of values. No values, as when every sample of the batch was
    skipped, have no metrics."""
    if not values.numel():
        return {}
    smallest, largest = values.aminmax()
    return {
        f"{name}/mean": _mean(values),
        f"{name}/max": Metric.max(largest.item()),
        f"{name}/min": Metric.min(smallest.item()),
    }


def _drift(rollout_log_probs: Tensor, old_log_probs: Tensor, mask_BR: Tensor) -> dict[str, Metric]:
    """Returns metrics of how far the rollout engine's probabilities of tokens are from the
    trainer's. Both have the same weights. Less than two tokens have no metrics."""
    rollout = rollout_log_probs[mask_BR].exp()
    actor = old_log_probs[mask_BR].exp()
    if rollout.numel() < 2:
        return {}
    difference = (rollout - actor).abs()
    largest = difference.max().item()
    deviation = difference.std().item()
    both = torch.stack([rollout, actor])
    correlations = torch.corrcoef(both)
    correlation = correlations[0, 1].item()
    off_policy = compute_offpolicy_metrics(old_log_probs, rollout_log_probs, mask_BR)
    metrics = {f"rollout_corr/{name}": Metric.mean(value) for name, value in off_policy.items()}
    return metrics | {
        "training/rollout_probs_diff_mean": _mean(difference),
        "training/rollout_probs_diff_max": Metric.max(largest),
        "training/rollout_probs_diff_std": Metric.mean(deviation),
        "training/rollout_actor_probs_pearson_corr": Metric.mean(correlation),
    }


def _effect_of_replay(
    rollout_log_probs: Tensor, old_log_probs: Tensor, unreplayed_log_probs: Tensor, mask_BR: Tensor
) -> dict[str, Metric]:
    """Returns how far the rollout engine's log-probabilities are from the trainer's with and
    without router replay, on the tokens that were computed without it, too."""
    is_known = ~unreplayed_log_probs.isnan()
    compared = mask_BR & is_known
    if not compared.any():
        return {}
    rollout = rollout_log_probs[compared]
    replayed = old_log_probs[compared]
    unreplayed = unreplayed_log_probs[compared]
    with_replay = (replayed - rollout).abs()
    without = (unreplayed - rollout).abs()
    return {
        "router_replay/log_probs_diff_with": _mean(with_replay),
        "router_replay/log_probs_diff_without": _mean(without),
    }
