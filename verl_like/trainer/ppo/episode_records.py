"""Makes the records of episodes that people see, of a few episodes of each step."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl_like.protocol import DataProto
from verl_like.workers.agents.episode import Episode, FinishedRow


@dataclass
class EpisodeRecords:
    """Makes records, as `EpisodeRecord` describes them."""

    tokenizer: PreTrainedTokenizerBase
    num_shown: int
    """Of a step or a validation so many episodes are shown without a failure, and as many with
    one."""
    counts: Counter[tuple[int, bool, bool]] = field(default_factory=Counter)
    """How many were shown, by step, whether it is a validation, and whether something failed."""

    def of(
        self, prompts: DataProto, episodes: Sequence[Episode], has_rewards: bool
    ) -> list[dict[str, Any]]:
        """Returns the records of some of the episodes of (B,) prompts. Which they are, and their
        order, depends on the step.

        `has_rewards` is False if others score the episodes.
        """
        if not episodes:
            return []
        step = int(prompts.meta_info["global_steps"])
        is_validation = bool(prompts.meta_info.get("validate"))
        uids = prompts.non_tensor_batch["uid"]
        n = len(episodes) // max(1, len(prompts))
        order = np.random.default_rng(step).permutation(len(episodes))
        records = []
        for number in order.tolist():
            episode = episodes[number]
            failures = list(episode.failures)
            if episode.reward_problem:
                failures.append(("reward", episode.reward_problem))
            kind = (step, is_validation, bool(failures))
            if self.counts[kind] == self.num_shown:
                continue
            self.counts[kind] += 1
            reward = None
            if has_rewards and episode.has_reward:
                scores = [row.scores.sum() for row in episode.rows]
                reward = float(sum(scores))
            record = {
                "step": step,
                "is_validation": is_validation,
                "uid": str(uids[number // n]),
                "sample": number % n,
                "ended": episode.ended,
                "reward": reward,
                "failures": failures,
                "seconds": episode.seconds,
                "rows": [self._parts(row) for row in episode.rows],
                "turns": [asdict(turn) for turn in episode.turns],
            }
            records.append(record)
        return records

    def _parts(self, row: FinishedRow) -> list[tuple[str, bool]]:
        """Returns the text of a row in parts, each with whether the policy drew it."""
        prompt = zip(itertools.repeat(0), row.prompt_ids.tolist())
        response = zip(row.response_mask.tolist(), row.response_ids.tolist(), strict=True)
        parts = []
        for is_drawn, tokens in itertools.groupby([*prompt, *response], key=itemgetter(0)):
            token_ids = [token for _, token in tokens]
            text = str(self.tokenizer.decode(token_ids))
            parts.append((text, bool(is_drawn)))
        return parts
