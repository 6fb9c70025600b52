"""From prompts to episodes, and from episodes to a batch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.row_ops import jagged_from_arrays, jagged_from_lists
from verl_like.rewards.manager import RewardError
from verl_like.workers.agents.episode import Episode, FinishedRow, Row, TokenIds
from verl_like.workers.models.routed_experts import OWN, ROUTED_EXPERTS
from verl_like.workers.rollout.batch import prompt_tokens

# Legend: B prompts, n episodes per prompt, S = B * n samples, N rows of all samples.

ROW_COLUMNS = ("data_source", "reward_model", "extra_info")
"""The columns of the dataset that environments and harnesses get, besides the prompt."""
PER_EPISODE = ("calls", "rows", "tool_calls")
"""Counts whose mean over episodes is a metric. Of the others it is the sum."""


@dataclass(frozen=True)
class EpisodeRules:
    """What the driver does with episodes that failed."""

    min_samples: int
    """The fewest samples of a prompt that are trained; with fewer the prompt is dropped."""
    num_of_step: int
    """The episodes of a training step. If so many fail one after the other, the run ends."""
    on_error: Literal["fail", "skip", "score"]
    """What a reward that is none does: `reward.on_error`."""
    filler_token: int
    """The token of a row that stands for an episode without one. It is not trained."""


def rows_of(prompts: DataProto) -> list[dict[str, Any]]:
    """Returns the dataset's row for each of (B,) prompts, as environments and harnesses get it: the
    fields of `extra_info`, and over them the prompt's messages and the other columns."""
    columns = prompts.non_tensor_batch
    rows = []
    for number in range(len(prompts)):
        row = dict(columns["extra_info"][number] or {})
        for name in ROW_COLUMNS:
            row[name] = columns[name][number]
        row["prompt"] = columns["raw_prompt"][number]
        rows.append(row)
    return rows


def assemble_episodes(
    prompts: DataProto, episodes: Sequence[Episode], rules: EpisodeRules
) -> DataProto:
    """Returns the batch of S episodes of (B,) prompts, those of a prompt next to each other. Each
    episode has one or more rows.

    Its columns are those of `run_episodes` in docs/columns.md. An episode that failed has one row
    without a token that is trained. If fewer than `min_samples` of a prompt have not failed, all of
    them count as failed, unless this is a validation. Raises RewardError for a reward that is none
    if `on_error` is "fail".
    """
    problems = [episode for episode in episodes if episode.reward_problem]
    if problems and rules.on_error == "fail":
        raise RewardError(
            f"{problems[0].name}: {problems[0].reward_problem}\nFix the reward, or set "
            "reward.on_error=skip (leave the episode out) or reward.on_error=score (score it 0)."
        )
    n = len(episodes) // max(1, len(prompts))
    needed = min(rules.min_samples, n)
    is_validation = prompts.meta_info.get("validate")
    if is_validation:
        needed = 1
    num_left: Counter[int] = Counter()
    for number, episode in enumerate(episodes):
        prompt = number // n
        num_left[prompt] += episode.ended != "failed"
    dropped = {prompt for prompt, num in num_left.items() if num < needed}
    prompt_ids = prompt_tokens(prompts)
    rows: list[FinishedRow] = []
    sample_of_row = []
    failed = []
    skipped = []
    for number, episode in enumerate(episodes):
        prompt = number // n
        is_failed = episode.ended == "failed" or prompt in dropped
        is_skipped = not episode.has_reward
        if episode.reward_problem:
            is_skipped = rules.on_error == "skip"
        its_rows = episode.rows
        if is_failed or not its_rows:
            is_skipped = True
            filler = _filler(prompt_ids[prompt], rules.filler_token)
            its_rows = (filler,)
        for row in its_rows:
            rows.append(row)
            sample_of_row.append(number)
            failed.append(is_failed)
            skipped.append(is_skipped)
    metrics = metrics_of(episodes)
    metrics["agent/num_dropped_prompts"] = Metric.sum(len(dropped))
    metrics["reward/num_errors"] = Metric.sum(len(problems))
    tensors = _columns(rows)
    tensors["sample_id"] = torch.tensor(sample_of_row)
    tensors["is_skipped"] = torch.tensor(skipped)
    tensors["is_failed"] = torch.tensor(failed)
    if not is_validation:
        tensors |= _routing(rows)
    versions = [row.versions for row in rows]
    return DataProto.from_dict(
        tensors=tensors, non_tensors={"policy_version": versions}, meta_info={"metrics": metrics}
    )


def _columns(rows: Sequence[FinishedRow]) -> dict[str, Tensor]:
    """Returns the jagged columns of (N,) rows, by their names."""
    prompts = [row.prompt_ids for row in rows]
    responses = [row.response_ids for row in rows]
    masks = [row.response_mask for row in rows]
    log_probs = [row.log_probs for row in rows]
    scores = [row.scores for row in rows]
    return {
        "prompts": jagged_from_lists(prompts, torch.int64),
        "responses": jagged_from_lists(responses, torch.int64),
        "response_mask": jagged_from_lists(masks, torch.int64),
        "rollout_log_probs": jagged_from_lists(log_probs, torch.float32),
        "episode_scores": jagged_from_lists(scores, torch.float32),
    }


def _routing(rows: Sequence[FinishedRow]) -> dict[str, Tensor]:
    """Returns the column `routed_experts` by its name if routing is recorded.

    Rows without any, which stand for episodes that failed, have no record of a token.
    """
    recorded = [row.routed_experts for row in rows if row.routed_experts is not None]
    if not recorded:
        return {}
    like = recorded[0]
    of_rows = []
    for row in rows:
        routing = row.routed_experts
        if routing is None:
            num_tokens = len(row.prompt_ids) + len(row.response_ids)
            shape = (num_tokens, *like.shape[1:])
            routing = np.full_like(like, OWN, shape=shape)
        of_rows.append(routing)
    return {ROUTED_EXPERTS: jagged_from_arrays(of_rows)}


def _filler(prompt_ids: TokenIds, token: int) -> FinishedRow:
    """Returns the row of an episode that has none."""
    row = Row(prompt_ids)
    row.insert([token])
    return row.finished({})


def metrics_of(episodes: Sequence[Episode]) -> dict[str, Metric]:
    """Returns how long episodes were, how their calls joined rows, and what failed how often."""
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    seconds = []
    for episode in episodes:
        counts.update(episode.counts)
        for failure, _text in episode.failures:
            failures[failure] += 1
        if episode.ended != "failed":
            seconds.append(episode.seconds)
    num_ended = len(seconds)
    num_prompt_tokens = counts.pop("prompt_tokens", 0)
    num_cached = counts.pop("cached_tokens", 0)
    metrics = {
        "rollout/prefix_cache_hit_rate": Metric.mean_of(num_cached, num_prompt_tokens),
        "agent/num_failed": Metric.sum(len(episodes) - num_ended),
    }
    for name in PER_EPISODE:
        metrics[f"agent/{name}/mean"] = Metric.mean_of(counts.pop(name, 0), num_ended)
    for name, number in counts.items():
        metrics[f"agent/num_{name}"] = Metric.sum(number)
    for kind, number in failures.items():
        metrics[f"agent/num_failures/{kind}"] = Metric.sum(number)
    if seconds:
        metrics["agent/seconds/mean"] = Metric.mean_of(sum(seconds), num_ended)
        metrics["agent/seconds/max"] = Metric.max(max(seconds))
    return metrics
