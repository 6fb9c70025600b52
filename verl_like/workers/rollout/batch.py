"""A batch of prompts as token lists, and responses as a batch."""

import itertools
from collections import Counter
from collections.abc import Sequence

import torch

from verl_like.protocol import PAD_COLUMN, DataProto, Metric
from verl_like.protocol.row_ops import RowTaker, jagged_from_lists, jagged_parts
from verl_like.workers.rollout.request import Completion

# Legend: B prompts, n responses per prompt, N = B * n.


def prompt_uids(prompts: DataProto) -> list[str]:
    """Each row's uid.

    Raises ValueError without a column `uid`, or if two rows besides padding share one, so that they draw the same.
    """
    if "uid" not in prompts.non_tensor_batch:
        raise ValueError(
            "generate_sequences needs the column 'uid' to seed each prompt's responses; got "
            f"{sorted(prompts.non_tensor_batch)}."
        )
    uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
    counts = Counter(itertools.compress(uids, is_real(prompts)))
    if repeated := [uid for uid, count in counts.items() if count > 1]:
        raise ValueError(
            f"generate_sequences got several rows of the prompts {repeated}, which would draw the same responses; give "
            "each prompt once and rollout.n for the number of its responses."
        )
    return uids


def prompt_tokens(prompts: DataProto) -> list[list[int]]:
    """The token ids of each row's prompt."""
    tokens, offsets = (part.tolist() for part in jagged_parts(prompts.batch["prompts"]))
    return [tokens[start:end] for start, end in itertools.pairwise(offsets)]


def is_real(prompts: DataProto) -> torch.Tensor:
    """(B,) bool, False on padding rows."""
    return ~prompts.batch.get(PAD_COLUMN, torch.zeros(len(prompts), dtype=torch.bool))


def assemble(prompts: DataProto, completions: Sequence[Completion]) -> DataProto:
    """N responses beside their B prompts; see `RolloutEngine.stream_sequences`."""
    n = len(completions) // max(1, len(prompts))
    repeated = RowTaker(torch.arange(len(prompts)).repeat_interleave(n))
    responses = jagged_from_lists([each.token_ids for each in completions], torch.int64)
    is_real_B = is_real(prompts)
    num_cached = sum(each.num_cached_tokens for i, each in enumerate(completions) if is_real_B[i // n])
    lengths_B = jagged_parts(prompts.batch["prompts"])[1].diff()
    num_prompt_tokens = n * int(lengths_B[is_real_B].sum())
    hit_rate = Metric.mean(num_cached / max(1, num_prompt_tokens), weight=num_prompt_tokens)
    return DataProto.from_dict(
        tensors={
            "prompts": repeated.tensor(prompts.batch["prompts"]),
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "rollout_log_probs": jagged_from_lists([each.log_probs for each in completions], torch.float32),
        },
        non_tensors={"policy_version": [completion.versions for completion in completions]},
        meta_info={"metrics": {"rollout/prefix_cache_hit_rate": hit_rate}},
    )
