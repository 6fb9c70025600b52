"""From responses to `rule_scores`: decoded on the driver, scored in reward processes, put on the
last token."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl_like.algorithms.groups import PromptGroups
from verl_like.algorithms.masked import on_last_token
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.protocol import DataProto, Future, Metric
from verl_like.protocol.padded import view_of_samples
from verl_like.protocol.row_ops import jagged_on_last_token
from verl_like.protocol.samples import SampleRows
from verl_like.rewards.manager import RewardError, RewardManager, RewardResult
from verl_like.rewards.process import Answer
from verl_like.rewards.sample import RewardSample
from verl_like.single_controller import CallEvent
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.worker import Worker
from verl_like.trainer.config.roles import Role
from verl_like.workers.config.roles import RewardModelConfig
from verl_like.workers.rollout import FinishedRequest

_PAUSE_S = 0.01
_LEFT_TO_MODELS = Answer(score=0.0)  # of a row without a rule
RULE_COLUMNS = {"rule_scores": 1.0}
EXTRA_PREFIX = "reward_extra/"
"""What a reward function returns besides the score, per sample, becomes columns with this
prefix."""


def reward_columns(
    worker_classes: Mapping[str, type[Worker]],
    reward_models: Mapping[str, RewardModelConfig],
    with_rules: bool,
) -> dict[str, float]:
    """The columns whose weighted sum is the reward: those that the worker class of each role
    declares, and the rules'.

    The weight of each of `reward_models`, by their roles, multiplies those that its class declares.
    Raises ValueError for a column that its class does not write, that two roles write, or of a role
    that does not reward.
    """
    columns = dict(RULE_COLUMNS) if with_rules else {}
    for role, worker_class in worker_classes.items():
        model = reward_models.get(role)
        method = "compute_rm_score" if model else "annotate"
        spec = registered_methods(worker_class).get(method)
        for name, weight in worker_class.reward_columns.items():
            column = column_of(name, role) if model else name
            where = f"{worker_class.__name__}.reward_columns has {name!r}"
            if role in set(Role) and not model:
                raise ValueError(
                    f"{where}, but only a reward model and custom roles reward, not the {role}."
                )
            if name not in ((spec and spec.writes) or ()):
                raise ValueError(
                    f"{where}, which is not in the writes=[...] of its {method}: name it there."
                )
            if column in columns:
                raise ValueError(
                    f"{where}, which another role or the rules write as well: rename the column."
                )
            columns[column] = weight * model.weight if model else weight
    return columns


def column_of(name: str, role: str) -> str:
    """The column of the batch for the column `name` of a reward model's worker: a further model's
    ends in its role."""
    return name if role == Role.RewardModel else f"{name}/{role}"


@dataclass(frozen=True)
class ModelScores:
    """The scores of a reward model, which may still be computed."""

    role: str
    pending: Future[DataProto]

    def get(self) -> DataProto:
        """What the model's worker returned, under the names of the batch."""
        scores = self.pending.get()
        names = list(scores.tensors())
        return scores.rename(names, [column_of(name, self.role) for name in names])


def reward_means(batch: DataProto, reward_columns: Mapping[str, float]) -> dict[str, Metric]:
    """The mean over the samples that were scored: of each reward before its weight, where there are
    several, and of each number that the reward function returned beside the score of any of
    them."""
    names = reward_columns if len(reward_columns) > 1 else ()
    is_scored_B = batch.tensor_batch["response_mask"].any(-1)
    values = {name: batch.tensor_batch[name].sum(-1)[is_scored_B] for name in names}
    for name, numbers in extra_numbers(batch).items():
        values[name] = torch.from_numpy(numbers)[is_scored_B & ~torch.from_numpy(numbers).isnan()]
    return {
        f"reward/{name}/mean": Metric.mean(float(of.mean()), weight=len(of))
        for name, of in values.items()
        if len(of)
    }


def total_scores(batch: DataProto, reward_columns: Mapping[str, float]) -> torch.Tensor:
    """The reward before any KL penalty: the weighted sum of the reward columns, (B, R).

    Raises RewardError for a sample, not one that rules skip, of which a column is not a finite
    number: an estimator that compares all rows of a batch would make it the advantage of every one.
    """
    for name in reward_columns:
        is_wrong_B = ~batch.tensor_batch[name].isfinite().all(-1)
        if "is_skipped" in batch.tensor_batch:
            is_wrong_B &= ~batch.tensor_batch["is_skipped"]
        if is_wrong_B.any():
            row = int(is_wrong_B.nonzero()[0])
            rewards_R = batch.tensor_batch[name][row].tolist()
            raise RewardError(
                f"the reward {name!r} of {int(is_wrong_B.sum())} of {len(batch)} samples is no "
                f"finite number, the first of them row {row} of the batch: "
                f"{rewards_R}; look at the weights and the data type of the "
                "model that computes it"
            )
    return torch.stack(
        [weight * batch.tensor_batch[name] for name, weight in reward_columns.items()]
    ).sum(0)


def scores_by_reward(
    batch: DataProto, reward_columns: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Each reward by itself, (B, R), by name: the weighted reward columns, and the numbers that the
    reward function returned beside the score, NaN where it did not."""
    scores = {name: weight * batch.tensor_batch[name] for name, weight in reward_columns.items()}
    numbers = {
        name: torch.from_numpy(values).float() for name, values in extra_numbers(batch).items()
    }
    return scores | {
        name: on_last_token(values, batch.tensor_batch["response_mask"])
        for name, values in numbers.items()
    }


def groups_differ(batch: DataProto, metric: str) -> torch.Tensor:
    """For each row, (B,) bool: whether the responses to its prompt that could be scored differ in
    `metric`.

    That is "reward" (the rules' score) or the name of a number that the reward function returned
    beside it; raises ValueError if there is none.
    """
    view = view_of_samples(batch)
    numbers = {"reward": view.tensor_batch["rule_scores"].sum(-1).numpy()} | extra_numbers(view)
    require_metric(metric, numbers)
    values = torch.from_numpy(numbers[metric]).unsqueeze(-1)
    is_scored = ~view.tensor_batch["is_skipped"].unsqueeze(-1) & ~values.isnan()
    groups = PromptGroups.of(values, is_scored, view.non_tensor_batch["uid"])
    return groups.differ[SampleRows.of(batch).sample_of_row]


def require_metric(metric: str, numbers: Collection[str]) -> None:
    """Raises ValueError if `algorithm.filter_groups.metric` is none of the numbers that the rules
    give."""
    if metric not in numbers:
        raise ValueError(
            f"algorithm.filter_groups.metric={metric}, but the reward function returns only "
            f"{', '.join(numbers)}: name one of these"
        )


def extra_numbers(batch: DataProto) -> dict[str, np.ndarray]:
    """What the reward function returned beside the score, as far as it is numbers."""
    extra = {
        name: values
        for name, values in batch.non_tensor_batch.items()
        if name.startswith(EXTRA_PREFIX)
    }
    return {
        name.removeprefix(EXTRA_PREFIX): values
        for name, values in extra.items()
        if values.dtype != object
    }


@dataclass(eq=False)
class RuleScorer:
    """Scores responses with a reward function, in processes that run beside generation and the
    other phases.

    Rows whose `reward_model.style` is "model" are left to the reward model, except by a custom
    function.
    """

    manager: RewardManager
    tokenizer: PreTrainedTokenizerBase
    scores_every_row: bool
    on_call: Callable[[CallEvent], None] | None = None
    """Gets the calls of the reward processes, as of a worker group `rules` on the pool `driver`."""
    _number_of_process: dict[int, int] = field(default_factory=dict)
    _numbers: set[str] = field(default_factory=set)
    """The names of all numbers that `check` saw beside scores."""

    def check(self, dataset: PromptDataset) -> list[str]:
        """Scores the ground truth of the first row of each data source before a run, as
        `RewardManager.check` does.

        Returns the names of the numbers that the function returned beside the scores, for any of
        the data sources. A data source without a reward fails too.
        """
        first: dict[str, RewardSample] = {}
        for row in dataset:
            source = row["data_source"]
            truth = row["reward_model"].get("ground_truth")
            if source not in first and (self.scores_every_row or has_rule(row["reward_model"])):
                info = row["extra_info"]
                prompt = row["raw_prompt"]
                first[source] = RewardSample(
                    f"row {row['index']}", source, str(truth), truth, info, prompt
                )
        extra = self.manager.check(list(first.values()))
        names = [name for name, values in extra.items() if values.dtype != object]
        self._numbers.update(names)
        return names

    def with_all_numbers(
        self, extra: Mapping[str, np.ndarray], num_samples: int
    ) -> dict[str, np.ndarray]:
        """What the function returned for some samples, with a column of NaN for each number that
        all of them lack.

        A number may be of one data source alone, and the others make a batch by chance.
        """
        missing = sorted(self._numbers - extra.keys())
        return {**extra, **{name: np.full(num_samples, np.nan) for name in missing}}

    def report(self, ran: list[tuple[int, float, float]]) -> None:
        """Gives `on_call` the times in which each process scored, from (process id, start, end) of
        each sample."""
        for pid, started, finished in _merged(ran):
            rank = self._number_of_process.setdefault(pid, len(self._number_of_process))
            if self.on_call is not None:
                self.on_call(CallEvent("driver", "rules", "score", rank, started, finished))


def has_rule(reward_model: dict) -> bool:
    """Whether a row of the dataset (its `reward_model` field) is scored by a rule, not by the
    reward model alone."""
    return reward_model.get("style") != "model"


@dataclass(eq=False)
class PendingScores:
    """The scores of the responses to some prompts, computed while the responses are generated."""

    scorer: RuleScorer
    prompts: DataProto
    num_samples: int
    """Responses to each prompt."""

    def __post_init__(self) -> None:
        columns = self.prompts.non_tensor_batch
        n = self.num_samples
        scored = [
            i
            for i, spec in enumerate(columns["reward_model"])
            if self.scorer.scores_every_row or has_rule(spec)
        ]
        self.rows = [i * n + k for i in scored for k in range(n)]
        """The row of the (B * n,) batch in each slot of `pending`."""
        self.slots = {
            (columns["uid"][row // n], row % n): slot for slot, row in enumerate(self.rows)
        }
        self.pending = self.scorer.manager.expect(len(self.rows))
        self.num_early = 0
        self.mask: torch.Tensor | None = None
        """`response_mask` of the batch, jagged."""

    def add(self, finished: Sequence[FinishedRequest]) -> None:
        """Starts scoring responses that are complete while others are still being generated."""
        early = {
            self.slots[request.uid, request.index]: completion.token_ids.tolist()
            for request, completion in finished
            if (request.uid, request.index) in self.slots
        }
        self.num_early += len(early)
        self._submit(early)

    def complete(self, batch: DataProto) -> "PendingScores":
        """Starts scoring the other responses of the (B * num_samples,) batch that was generated."""
        self.mask = batch.tensor_batch["response_mask"]
        missing = {slot: self.rows[slot] for slot in self.pending.missing()}
        tokens: list[list[int]] = []
        if missing:
            drawn = batch.select_idxs(list(missing.values())).tensor_batch
            pairs = zip(drawn["responses"].unbind(), drawn["response_mask"].unbind(), strict=True)
            tokens = [response[mask.bool()].tolist() for response, mask in pairs]
        self._submit(dict(zip(missing, tokens, strict=True)))
        return self

    def _submit(self, token_ids: dict[int, list[int]]) -> None:
        if not token_ids:
            return
        texts = self.scorer.tokenizer.batch_decode(
            list(token_ids.values()), skip_special_tokens=True
        )
        columns = self.prompts.non_tensor_batch
        for slot, text in zip(token_ids, texts, strict=True):
            i = self.rows[slot] // self.num_samples
            sample = RewardSample(
                name=f"sample uid {columns['uid'][i]!r}",
                data_source=columns["data_source"][i],
                solution_str=text,
                ground_truth=columns["reward_model"][i].get("ground_truth"),
                extra_info=columns["extra_info"][i],
                raw_prompt=columns["raw_prompt"][i],
            )
            self.pending.submit(slot, sample)

    def get(self) -> DataProto:
        """Returns `rule_scores` (B * num_samples, R) float32, `is_skipped` (B * num_samples,) bool,
        and what the reward function added."""
        assert self.mask is not None, "complete(batch) comes before get()"
        answers = dict(zip(self.rows, self.pending.get().answers, strict=True))
        result = RewardResult([answers.get(row, _LEFT_TO_MODELS) for row in range(len(self.mask))])
        self.scorer.report(result.ran)
        extra = self.scorer.with_all_numbers(result.extra, len(self.mask))
        metrics = {
            "reward/early_ratio": Metric.mean(
                self.num_early / max(1, len(answers)), weight=len(answers)
            ),
            "reward/num_skipped": Metric.sum(int(result.skipped.sum())),
            "reward/num_errors": Metric.sum(result.num_errors),
            "reward/num_timeouts": Metric.sum(result.num_timeouts),
        }
        columns = {
            "rule_scores": jagged_on_last_token(torch.from_numpy(result.scores), self.mask),
            "is_skipped": torch.from_numpy(result.skipped),
        }
        non_tensors = {f"{EXTRA_PREFIX}{name}": values for name, values in extra.items()}
        return DataProto.from_dict(columns, non_tensors, meta_info={"metrics": metrics})


def _merged(spans: list[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """The spans of each process, those with next to no time between them as one."""
    merged: list[tuple[int, float, float]] = []
    for pid, started, finished in sorted(spans):
        if merged and merged[-1][0] == pid and started - merged[-1][2] < _PAUSE_S:
            merged[-1] = pid, merged[-1][1], finished
        else:
            merged.append((pid, started, finished))
    return merged
