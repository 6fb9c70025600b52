"""From responses to `rule_scores`: decoded on the driver, scored in worker processes, put on the last token."""

import time

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl_like.algorithms.masked import on_last_token
from verl_like.data.prompt_dataset import PromptDataset
from verl_like.protocol import DataProto, Metric
from verl_like.rewards.manager import PendingRewards, RewardManager, RewardSample

EXTRA_PREFIX = "reward_extra/"
"""What a reward function returns besides the score, per sample, becomes columns with this prefix."""


class RuleScorer:
    """Scores batches with a reward function; `submit` returns at once, so that scoring overlaps the other phases.

    Rows whose `reward_model.style` is "model" are left to the reward model, except by a function of the user's own.
    """

    def __init__(self, manager: RewardManager, tokenizer: PreTrainedTokenizerBase, scores_every_row: bool) -> None:
        self.manager = manager
        self.tokenizer = tokenizer
        self.scores_every_row = scores_every_row

    def check(self, dataset: PromptDataset) -> None:
        """Scores the ground truth of the first row, so that a function that cannot work is refused before training.

        Raises:
            RewardError: the function raised, hung or returned something that is not a score.
        """
        row = next((row for row in dataset if self.scores_every_row or has_rule(row["reward_model"])), None)
        if row is not None:
            truth = row["reward_model"].get("ground_truth")
            self.manager.check(RewardSample("row 0", row["data_source"], str(truth), truth, row["extra_info"]))

    def submit(self, batch: DataProto) -> "PendingScores":
        mask_BR = batch.batch["response_mask"].bool()
        columns = batch.non_tensor_batch
        rows = [i for i, spec in enumerate(columns["reward_model"]) if self.scores_every_row or has_rule(spec)]
        texts = self.tokenizer.batch_decode(
            [batch.batch["responses"][i][mask_BR[i]].tolist() for i in rows], skip_special_tokens=True
        )
        samples = [
            RewardSample(
                uid=columns["uid"][i],
                data_source=columns["data_source"][i],
                solution_str=text,
                ground_truth=columns["reward_model"][i].get("ground_truth"),
                extra_info=columns["extra_info"][i],
            )
            for i, text in zip(rows, texts, strict=True)
        ]
        return PendingScores(self.manager.submit(samples), rows, mask_BR)


def has_rule(reward_model: dict) -> bool:
    """Whether a row of the dataset (its `reward_model` field) is scored by a rule, not by the reward model alone."""
    return reward_model.get("style") != "model"


class PendingScores:
    """The scores of some rows of a batch on their way."""

    def __init__(self, pending: PendingRewards, rows: list[int], mask_BR: torch.Tensor) -> None:
        self.pending = pending
        self.rows = rows
        self.mask_BR = mask_BR
        self.submitted = time.time()

    def get(self) -> DataProto:
        """Returns `rule_scores` (B R) float32, `is_skipped` (B,) bool, and what the reward function added."""
        result = self.pending.get()
        scores_B = self._for_all_rows(np.where(result.skipped, 0.0, result.scores).astype(np.float32), 0.0)
        skipped_B = self._for_all_rows(result.skipped, False)
        metrics = {
            "timing_s/reward": Metric.max(time.time() - self.submitted),
            "reward/num_skipped": Metric.sum(int(result.skipped.sum())),
            "reward/num_errors": Metric.sum(result.num_errors),
            "reward/num_timeouts": Metric.sum(result.num_timeouts),
        }
        return DataProto.from_dict(
            tensors={
                "rule_scores": on_last_token(torch.from_numpy(scores_B), self.mask_BR),
                "is_skipped": torch.from_numpy(skipped_B),
            },
            non_tensors={
                f"{EXTRA_PREFIX}{name}": self._for_all_rows(values, None if values.dtype == object else np.nan)
                for name, values in result.extra.items()
            },
            meta_info={"metrics": metrics},
        )

    def _for_all_rows(self, values: np.ndarray, other: object) -> np.ndarray:
        """One entry a row of the batch, `other` where a row was not scored."""
        column = np.full(len(self.mask_BR), other, dtype=values.dtype)
        column[self.rows] = values
        return column
