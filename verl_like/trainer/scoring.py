"""From responses to `rule_scores`: decoded on the driver, scored in worker processes, put on the last token."""

import time

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl_like.data.prompt_dataset import PromptDataset
from verl_like.protocol import DataProto, Metric
from verl_like.rewards.manager import PendingRewards, RewardManager, RewardSample

EXTRA_PREFIX = "reward_extra/"
"""What a reward function returns besides the score, per sample, becomes columns with this prefix."""


class RuleScorer:
    """Scores batches with a reward function; `submit` returns at once, so that scoring overlaps the other phases."""

    def __init__(self, manager: RewardManager, tokenizer: PreTrainedTokenizerBase) -> None:
        self.manager = manager
        self.tokenizer = tokenizer

    def check(self, dataset: PromptDataset) -> None:
        """Scores the ground truth of the first row, so that a function that cannot work is refused before training.

        Raises:
            RewardError: the function raised, hung or returned something that is not a score.
        """
        row = dataset[0]
        ground_truth = row["reward_model"].get("ground_truth")
        self.manager.check(
            RewardSample("row 0", row["data_source"], str(ground_truth), ground_truth, row["extra_info"])
        )

    def submit(self, batch: DataProto) -> "PendingScores":
        mask_BR = batch.batch["response_mask"].bool()
        texts = self.tokenizer.batch_decode(
            [ids[mask].tolist() for ids, mask in zip(batch.batch["responses"], mask_BR, strict=True)],
            skip_special_tokens=True,
        )
        columns = batch.non_tensor_batch
        samples = [
            RewardSample(
                uid=columns["uid"][i],
                data_source=columns["data_source"][i],
                solution_str=text,
                ground_truth=columns["reward_model"][i].get("ground_truth"),
                extra_info=columns["extra_info"][i],
            )
            for i, text in enumerate(texts)
        ]
        return PendingScores(self.manager.submit(samples), mask_BR)


class PendingScores:
    """The scores of one batch on their way."""

    def __init__(self, pending: PendingRewards, mask_BR: torch.Tensor) -> None:
        self.pending = pending
        self.mask_BR = mask_BR
        self.submitted = time.time()

    def get(self) -> DataProto:
        """Returns `rule_scores` (B R) float32, `is_skipped` (B,) bool, and what the reward function added."""
        result = self.pending.get()
        scores_B = torch.from_numpy(np.where(result.skipped, 0.0, result.scores).astype(np.float32))
        skipped_B = torch.from_numpy(result.skipped)
        metrics = {
            "timing_s/reward": Metric.max(time.time() - self.submitted),
            "reward/num_skipped": Metric.sum(int(result.skipped.sum())),
            "reward/num_errors": Metric.sum(result.num_errors),
            "reward/num_timeouts": Metric.sum(result.num_timeouts),
        }
        return DataProto.from_dict(
            tensors={"rule_scores": on_last_token(scores_B, self.mask_BR), "is_skipped": skipped_B},
            non_tensors={f"{EXTRA_PREFIX}{name}": values for name, values in result.extra.items()},
            meta_info={"metrics": metrics},
        )


def on_last_token(scores_B: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """Scores (B,) as a (B R) matrix that is zero but for each row's last response token."""
    last_B1 = (mask_BR.long().cumsum(-1).argmax(-1)).unsqueeze(-1)
    return torch.zeros(mask_BR.shape, dtype=torch.float32).scatter_(1, last_B1, scores_B.unsqueeze(-1))
