"""From responses to rewards: the driver decodes responses, reward processes score them by rules,
and the scores become the column `rule_scores`, next to those of reward models."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_like.algorithms.groups import PromptGroups
from verl_like.algorithms.masked import on_last_token
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.protocol import DataProto, Future, Metric
from verl_like.protocol.padded import view_of_samples
from verl_like.protocol.row_ops import jagged_on_last_token, jagged_parts
from verl_like.protocol.samples import SampleRows
from verl_like.rewards.manager import RewardError, RewardManager, RewardResult
from verl_like.rewards.process import Answer
from verl_like.rewards.sample import RewardSample
from verl_like.single_controller import CallEvent
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config.roles import Role
from verl_like.workers.config.roles import RewardModelConfig
from verl_like.workers.rollout import FinishedRequest

Span = tuple[int, float, float]
"""A process id, and the start and the end of what the process did."""
_PAUSE_S = 0.01
"""Two spans of a process count as one if fewer seconds than these are between them."""
_LEFT_TO_MODELS = Answer(score=0.0)
"""What the rules answer for a row that has no rule."""
RULE_COLUMNS = {"rule_scores": 1.0}
"""The reward column of the rules, with its weight."""
EARLY_COLUMNS = ("rule_scores", "episode_scores")
"""Rewards that are there before the whole batch is."""
COUNT_PREFIX = "reward/num_"
"""The prefix of the metrics in which `PendingScores` counts responses that could not be scored."""
EXTRA_PREFIX = "reward_extra/"
"""The prefix of the columns with what a reward function returns besides the score."""


def reward_columns(
    role_worker_mapping: Mapping[str, ClassWithInitArgs],
    reward_models: Mapping[str, RewardModelConfig],
    with_rules: bool,
) -> dict[str, float]:
    """Returns the columns whose weighted sum is the reward, with their weights. They are those that
    the worker class of each role declares and, if `with_rules`, the column of the rules.

    Only reward models, agents and custom roles may declare columns. The weight of a reward model,
    which is in its configuration `reward_models[role]`, multiplies the weights that its class
    declares. Raises ValueError if the role may not declare a column, if its class does not write
    the column, or if two roles write it.
    """
    columns = {}
    if with_rules:
        columns.update(RULE_COLUMNS)
    for role, built in role_worker_mapping.items():
        worker_class = built.cls
        model = reward_models.get(role)
        method = "annotate"
        if model:
            method = "compute_rm_score"
        if role == Role.Agent:
            method = "run_episodes"
        methods = registered_methods(worker_class)
        spec = methods.get(method)
        written = (spec and spec.writes) or ()
        for name, weight in worker_class.reward_columns.items():
            where = f"{worker_class.__name__}.reward_columns has {name!r}"
            if role in set(Role) - {Role.Agent} and not model:
                raise ValueError(
                    f"{where}, but only a reward model and custom roles reward, not the {role}."
                )
            if name not in written:
                raise ValueError(
                    f"{where}, which is not in the writes=[...] of its {method}: name it there."
                )
            column = name
            if model:
                column = column_of(name, role)
                weight *= model.weight
            if column in columns:
                raise ValueError(
                    f"{where}, which another role or the rules write as well: rename the column."
                )
            columns[column] = weight
    return columns


def column_of(name: str, role: str) -> str:
    """Returns the name in the batch of a column that a reward model's worker calls `name`. If there
    are several reward models, the role is appended for all but the first."""
    if role == Role.RewardModel:
        return name
    return f"{name}/{role}"


@dataclass(frozen=True)
class ModelScores:
    """The scores of a reward model, which may still be computed."""

    role: str
    pending: Future[DataProto]

    def get(self) -> DataProto:
        """Waits for the scores, and returns them under their names in the batch."""
        scores = self.pending.get()
        names = list(scores.tensors())
        names_in_batch = [column_of(name, self.role) for name in names]
        return scores.rename(names, names_in_batch)


def reward_means(batch: DataProto, reward_columns: Mapping[str, float]) -> dict[str, Metric]:
    """Returns means over the samples that were scored.

    They are taken of each reward without its weight, if there is more than one, and of each number
    that the reward function returned beside the score. A number that no sample has gets no mean.
    """
    is_scored_B = batch.tensor_batch["response_mask"].any(-1)
    values = {}
    if len(reward_columns) > 1:
        for name in reward_columns:
            rewards_B = batch.tensor_batch[name].sum(-1)
            values[name] = rewards_B[is_scored_B]
    for name, numbers_B in extra_numbers(batch).items():
        has_number_B = is_scored_B & ~numbers_B.isnan()
        values[name] = numbers_B[has_number_B]
    means = {}
    for name, numbers in values.items():
        if len(numbers):
            mean = float(numbers.mean())
            means[f"reward/{name}/mean"] = Metric.mean(mean, weight=len(numbers))
    return means


def total_scores(batch: DataProto, reward_columns: Mapping[str, float]) -> Tensor:
    """Returns the reward before any KL penalty: the weighted sum of the reward columns, (B, R).

    Raises RewardError if a column of a sample is not finite, unless the rules skipped the sample.
    An estimator that compares all rows of a batch would otherwise make every advantage infinite or
    NaN. A sample that the rules skipped may keep NaN: `reward` masks its row, and
    `generate_and_score` sets its score to 0.
    """
    weighted = []
    for name, weight in reward_columns.items():
        rewards_BR = batch.tensor_batch[name]
        is_finite_B = rewards_BR.isfinite().all(-1)
        if "is_skipped" in batch.tensor_batch:
            is_finite_B |= batch.tensor_batch["is_skipped"]
        if not is_finite_B.all():
            is_wrong_B = ~is_finite_B
            wrong_rows = is_wrong_B.nonzero().flatten().tolist()
            first = wrong_rows[0]
            raise RewardError(
                f"the reward {name!r} of {len(wrong_rows)} of {len(batch)} samples is no "
                f"finite number, the first of them row {first} of the batch: "
                f"{rewards_BR[first].tolist()}; look at the weights and the data type of the "
                "model that computes it"
            )
        weighted.append(weight * rewards_BR)
    return torch.stack(weighted).sum(0)


def scores_by_reward(batch: DataProto, reward_columns: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns each reward by itself, (B, R), by name, for estimators that normalise rewards
    separately.

    These are the weighted reward columns, and the numbers that the reward function returned beside
    the score, on the last token. A number is NaN for a sample for which it was not returned.
    """
    scores = {}
    for name, weight in reward_columns.items():
        scores[name] = weight * batch.tensor_batch[name]
    mask_BR = batch.tensor_batch["response_mask"]
    for name, numbers_B in extra_numbers(batch).items():
        scores[name] = on_last_token(numbers_B.float(), mask_BR)
    return scores


def groups_differ(batch: DataProto, metric: str) -> Tensor:
    """Returns for each row, (B,) bool, whether the responses to its prompt differ in `metric`.
    Responses that could not be scored do not count. Responses of several rows are compared as one
    sample, and each of their rows gets the result.

    `metric` is "reward", the score of the rules and of the agents, or the name of a number that the
    reward function returned beside it. Raises ValueError if there is no such number.
    """
    view = view_of_samples(batch)
    early_columns = [name for name in EARLY_COLUMNS if name in view.tensor_batch]
    rewards = sum(view.tensor_batch[name].sum(-1) for name in early_columns)
    numbers = {"reward": rewards} | extra_numbers(view)
    require_metric(metric, numbers)
    # (B, 1), because PromptGroups takes values and a mask by token: here each response has one.
    values = numbers[metric].unsqueeze(-1)
    is_skipped = view.tensor_batch["is_skipped"].unsqueeze(-1)
    is_scored = ~is_skipped & ~values.isnan()
    uids = view.non_tensor_batch["uid"]
    groups = PromptGroups.of(values, is_scored, uids)
    sample_of_row = SampleRows.of(batch).sample_of_row
    return groups.differ[sample_of_row]


def require_metric(metric: str, numbers: Collection[str]) -> None:
    """Raises ValueError unless `algorithm.filter_groups.metric` is one of the numbers that the
    rules give."""
    if metric not in numbers:
        raise ValueError(
            f"algorithm.filter_groups.metric={metric}, but the reward function returns only "
            f"{', '.join(numbers)}: name one of these"
        )


def extra_numbers(batch: DataProto) -> dict[str, Tensor]:
    """Returns the numbers (B,) that the reward function returned beside the score, by name. Other
    values, such as texts, are left out."""
    numbers = {}
    for name, values in batch.non_tensor_batch.items():
        if name.startswith(EXTRA_PREFIX) and values.dtype != object:
            own_name = name.removeprefix(EXTRA_PREFIX)
            numbers[own_name] = torch.from_numpy(values)
    return numbers


@dataclass(eq=False)
class RuleScorer:
    """Scores responses with a reward function, in processes that run beside generation and the
    other phases.

    A row whose `reward_model.style` is "model" is left to the reward model, unless the function is
    a custom one, which scores every row.
    """

    manager: RewardManager
    tokenizer: PreTrainedTokenizerBase
    scores_every_row: bool
    on_call: Callable[[CallEvent], None] | None = None
    """Called with each call of the reward processes, which appear as a worker group `rules` on the
    pool `driver`."""
    _rank_of_process: dict[int, int] = field(default_factory=dict)
    """A rank for each reward process, by its process id."""
    _numbers: set[str] = field(default_factory=set)
    """The names of all numbers that `check` saw beside scores."""

    def check(self, dataset: PromptDataset) -> list[str]:
        """Tries the reward function before a run: has it score the ground truth of the first row of
        each data source. `RewardManager.check` raises the error if it fails or has no reward for a
        data source.

        Returns the names of the numbers that the function returned beside the scores, for any of
        the data sources.
        """
        first: dict[str, RewardSample] = {}
        for row in dataset:
            source = row["data_source"]
            is_scored = self.scores_every_row or has_rule(row["reward_model"])
            if source in first or not is_scored:
                continue
            reward_model = row["reward_model"]
            truth = reward_model.get("ground_truth")
            first[source] = RewardSample(
                name=f"row {row['index']}",
                data_source=source,
                solution_str=str(truth),
                ground_truth=truth,
                extra_info=row["extra_info"],
                raw_prompt=row["raw_prompt"],
            )
        samples = list(first.values())
        extra = self.manager.check(samples)
        numbers = [name for name, values in extra.items() if values.dtype != object]
        self._numbers.update(numbers)
        return numbers

    def with_all_numbers(
        self, extra: Mapping[str, np.ndarray], num_samples: int
    ) -> dict[str, np.ndarray]:
        """Adds a column of NaN for each number that `check` saw and that `extra`, what the function
        returned for some samples, lacks.

        The function may return a number for one data source alone, of which a batch may have no
        row. All batches get the same columns this way.
        """
        columns = dict(extra)
        missing = self._numbers - extra.keys()
        for name in sorted(missing):
            columns[name] = np.full(num_samples, np.nan)
        return columns

    def report(self, ran: list[Span]) -> None:
        """Tells `on_call` when each reward process was scoring. `ran` has the span of the scoring
        of each sample."""
        if self.on_call is None:
            return
        for pid, started, finished in _merged(ran):
            next_rank = len(self._rank_of_process)
            rank = self._rank_of_process.setdefault(pid, next_rank)
            call = CallEvent("driver", "rules", "score", rank, started, finished)
            self.on_call(call)


def has_rule(reward_model: dict) -> bool:
    """Returns whether a row of the dataset, whose field `reward_model` is given, is scored by a
    rule. If not, the reward model alone scores it."""
    return reward_model.get("style") != "model"


@dataclass(eq=False)
class PendingScores:
    """The rules' scores of the responses to some prompts, which are computed while responses are
    still generated. The text of a sample of several rows is that of all tokens that were drawn.

    Each response that rules score has a slot in `pending`, the scores that the reward manager
    computes. The prompts give B * num_samples responses, of which `rows` are scored.
    """

    scorer: RuleScorer
    prompts: DataProto
    num_samples: int
    """How many responses each prompt gets."""

    def __post_init__(self) -> None:
        columns = self.prompts.non_tensor_batch
        self.rows: list[int] = []
        """The sample of the batch of responses that each slot belongs to."""
        self.slots: dict[tuple[str, int], int] = {}
        """The slot of each response, by its prompt's uid and its number among its samples."""
        for i, reward_model in enumerate(columns["reward_model"]):
            is_scored = self.scorer.scores_every_row or has_rule(reward_model)
            if not is_scored:
                continue
            uid = columns["uid"][i]
            first = i * self.num_samples
            for k in range(self.num_samples):
                self.slots[uid, k] = len(self.rows)
                self.rows.append(first + k)
        num_scored = len(self.rows)
        self.pending = self.scorer.manager.expect(num_scored)
        self.num_early = 0
        """How many responses were given to the rules before generation ended."""
        self.batch: DataProto | None = None
        """The batch of responses, once they are generated."""

    def add(self, finished: Sequence[FinishedRequest]) -> None:
        """Starts scoring responses that are complete while others are still generated."""
        early = {}
        for request, completion in finished:
            key = (request.uid, request.index)
            slot = self.slots.get(key)
            if slot is not None:
                early[slot] = completion.token_ids.tolist()
        self.num_early += len(early)
        self._submit(early)

    def complete(self, batch: DataProto) -> "PendingScores":
        """Starts scoring those of the B * num_samples samples of a batch that `add` did not get,
        and returns itself: `get` waits for all scores."""
        self.batch = batch
        slots = self.pending.missing()
        if not slots:
            return self
        columns = batch.tensor_batch
        token_ids, offsets = jagged_parts(columns["responses"])
        mask, _offsets = jagged_parts(columns["response_mask"])
        first_rows = SampleRows.of(batch).starts
        starts = offsets[first_rows].tolist()
        late = {}
        for slot in slots:
            sample = self.rows[slot]
            tokens = slice(starts[sample], starts[sample + 1])
            is_drawn = mask[tokens].bool()
            drawn_tokens = token_ids[tokens][is_drawn]
            late[slot] = drawn_tokens.tolist()
        self._submit(late)
        return self

    def _submit(self, token_ids: dict[int, list[int]]) -> None:
        """Decodes responses, given by their slots, and has the reward manager score them. One
        without a drawn token, which stands for an episode that failed, is not scored."""
        if not token_ids:
            return
        tokenizer = self.scorer.tokenizer
        responses = list(token_ids.values())
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        columns = self.prompts.non_tensor_batch
        for slot, text in zip(token_ids, texts, strict=True):
            i = self.rows[slot] // self.num_samples
            uid = columns["uid"][i]
            reward_model = columns["reward_model"][i]
            sample = RewardSample(
                name=f"sample uid {uid!r}",
                data_source=columns["data_source"][i],
                solution_str=text,
                ground_truth=reward_model.get("ground_truth"),
                extra_info=columns["extra_info"][i],
                raw_prompt=columns["raw_prompt"][i],
            )
            if token_ids[slot]:
                self.pending.submit(slot, sample)
            else:
                self.pending.leave_out(slot, sample)

    def get(self) -> DataProto:
        """Waits for the scores. Returns the columns `rule_scores` (rows, R) float32 and
        `is_skipped` (rows,) bool, and what the reward function returned beside scores.

        The score of a sample stands on its last token. `is_skipped` is True for a sample that could
        not be scored, or that the agents left out. A sample that is left to the reward model scores
        0 here.
        """
        assert self.batch is not None, "complete(batch) comes before get()"
        samples = SampleRows.of(self.batch)
        num_scored = len(self.rows)
        answers = [_LEFT_TO_MODELS] * samples.num_samples
        scored = self.pending.get()
        for row, answer in zip(self.rows, scored.answers, strict=True):
            answers[row] = answer
        result = RewardResult(answers)
        self.scorer.report(result.ran)
        extra = self.scorer.with_all_numbers(result.extra, samples.num_samples)
        metrics = {
            "reward/early_ratio": Metric.mean_of(self.num_early, num_scored),
            "reward/num_skipped": Metric.sum(result.skipped.sum()),
            "reward/num_errors": Metric.sum(result.num_errors),
            "reward/num_timeouts": Metric.sum(result.num_timeouts),
        }
        columns = self.batch.tensor_batch
        scores_B = torch.zeros(len(self.batch))
        last_rows = samples.starts[1:] - 1
        scores_B[last_rows] = torch.from_numpy(result.scores)
        is_skipped = torch.from_numpy(result.skipped)
        is_skipped_B = is_skipped[samples.sample_of_row]
        if "is_left_out" in columns:
            is_skipped_B |= columns["is_left_out"]
        scores = jagged_on_last_token(scores_B, columns["response_mask"])
        tensors = {"rule_scores": scores, "is_skipped": is_skipped_B}
        sample_of_row = samples.sample_of_row.numpy()
        non_tensors = {}
        for name, values in extra.items():
            non_tensors[f"{EXTRA_PREFIX}{name}"] = values[sample_of_row]
        return DataProto.from_dict(tensors, non_tensors, {"metrics": metrics})


def _merged(spans: list[Span]) -> list[Span]:
    """Joins spans of a process that follow each other almost at once."""
    merged: list[Span] = []
    last_pid = -1
    last_finished = 0.0
    for pid, started, finished in sorted(spans):
        if pid == last_pid and started - last_finished < _PAUSE_S:
            _pid, started, _finished = merged.pop()
        merged.append((pid, started, finished))
        last_pid = pid
        last_finished = finished
    return merged
