"""From prompts to episodes, and from episodes to a batch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.rewards.manager import RewardError
from verl_like.workers.agents.episode import Episode, FinishedRow
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
    """Returns what environments and harnesses get of each of (B,) prompts: the fields of
    `extra_info`, and over them the prompt's messages and the other columns."""
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
    n = len(episodes) // max(1, len(prompts))
    needed = 1 if prompts.meta_info.get("validate") else min(rules.min_samples, n)
    is_failed = np.array([episode.ended == "failed" for episode in episodes]).reshape(-1, n)
    num_left = n - is_failed.sum(1)
    is_dropped = num_left < needed
    is_failed[is_dropped] = True
    failed_S = is_failed.flatten().tolist()
    problems = [episode for episode in episodes if episode.reward_problem]
    if problems and rules.on_error == "fail":
        raise RewardError(
            f"{problems[0].name}: {problems[0].reward_problem}\nFix the reward, or set "
            "reward.on_error=skip (leave the episode out) or reward.on_error=score (score it 0)."
        )
    prompt_ids = prompt_tokens(prompts)
    rows: list[FinishedRow] = []
    sample_of_row = []
    skipped = []
    for number, episode in enumerate(episodes):
        is_left_out = not episode.has_reward
        if episode.reward_problem:
            is_left_out = rules.on_error == "skip"
        its_rows = list(episode.rows)
        if failed_S[number] or not its_rows:
            is_left_out = True
            its_rows = [_filler(prompt_ids[number // n], rules.filler_token)]
        rows += its_rows
        sample_of_row += [number] * len(its_rows)
        skipped += [is_left_out] * len(its_rows)
    failed = [failed_S[number] for number in sample_of_row]
    metrics = metrics_of(episodes)
    metrics["agent/num_dropped_prompts"] = Metric.sum(int(is_dropped.sum()))
    metrics["reward/num_errors"] = Metric.sum(len(problems))
    return DataProto.from_dict(
        tensors={
            "prompts": jagged_from_lists([row.prompt_ids for row in rows], torch.int64),
            "responses": jagged_from_lists([row.response_ids for row in rows], torch.int64),
            "response_mask": jagged_from_lists([row.response_mask for row in rows], torch.int64),
            "rollout_log_probs": jagged_from_lists([row.log_probs for row in rows], torch.float32),
            "episode_scores": jagged_from_lists([row.scores for row in rows], torch.float32),
            "sample_id": torch.tensor(sample_of_row),
            "is_skipped": torch.tensor(skipped),
            "is_failed": torch.tensor(failed),
        },
        non_tensors={"policy_version": [row.versions for row in rows]},
        meta_info={"metrics": metrics},
    )


def _filler(prompt_ids: Sequence[int], token: int) -> FinishedRow:
    """Returns the row of an episode that has none."""
    nothing = np.zeros(1, np.float32)
    return FinishedRow(
        prompt_ids=np.array(prompt_ids, np.int64),
        response_ids=np.array([token], np.int64),
        response_mask=np.zeros(1, np.int64),
        log_probs=nothing,
        scores=nothing,
        versions=(),
    )


def metrics_of(episodes: Sequence[Episode]) -> dict[str, Metric]:
    """Returns how long episodes were, how their calls joined rows, and what failed how often."""
    ended = [episode for episode in episodes if episode.ended != "failed"]
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for episode in episodes:
        counts.update(episode.counts)
        failures.update(kind for kind, _text in episode.failures)
    num_prompt_tokens = counts.pop("prompt_tokens", 0)
    hit_rate = counts.pop("cached_tokens", 0) / max(1, num_prompt_tokens)
    metrics = {
        "rollout/prefix_cache_hit_rate": Metric.mean(hit_rate, weight=num_prompt_tokens),
        "agent/num_failed": Metric.sum(len(episodes) - len(ended)),
    }
    for name in PER_EPISODE:
        mean = counts.pop(name, 0) / max(1, len(ended))
        metrics[f"agent/{name}/mean"] = Metric.mean(mean, weight=len(ended))
    for name, number in counts.items():
        metrics[f"agent/num_{name}"] = Metric.sum(number)
    for kind, number in failures.items():
        metrics[f"agent/num_failures/{kind}"] = Metric.sum(number)
    if ended:
        seconds = [episode.seconds for episode in ended]
        metrics["agent/seconds/mean"] = Metric.mean(float(np.mean(seconds)), weight=len(ended))
        metrics["agent/seconds/max"] = Metric.max(max(seconds))
    return metrics
