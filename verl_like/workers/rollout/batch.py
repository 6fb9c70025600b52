"""A batch of prompts as token lists, and responses as a batch."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from verl_like.protocol import PAD_COLUMN, DataProto, Metric
from verl_like.workers.rollout.request import Completion

# Legend: B prompts, n responses per prompt, N = B * n, P padded prompt length, R padded response length, T = P + R.


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
    """The token ids of each row's prompt, without padding."""
    mask_BP = prompts.batch["attention_mask"].bool()
    return [ids[mask].tolist() for ids, mask in zip(prompts.batch["input_ids"], mask_BP, strict=True)]


def is_real(prompts: DataProto) -> torch.Tensor:
    """(B,) bool, False on padding rows."""
    return ~prompts.batch.get(PAD_COLUMN, torch.zeros(len(prompts), dtype=torch.bool))


def assemble(
    prompts: DataProto, completions: Sequence[Completion], *, response_length: int, pad_token_id: int
) -> DataProto:
    """Pads N responses on the right and puts them beside their B prompts; see `RolloutEngine.stream_sequences`."""
    n = len(completions) // max(1, len(prompts))
    shape = (len(completions), response_length)
    responses = np.full(shape, pad_token_id, dtype=np.int64)
    response_mask = np.zeros(shape, dtype=np.int64)
    log_probs = np.zeros(shape, dtype=np.float32)
    for row, completion in enumerate(completions):
        length = len(completion.token_ids)
        responses[row, :length] = completion.token_ids
        response_mask[row, :length] = 1
        log_probs[row, :length] = completion.log_probs

    prompt_ids, prompt_mask, prompt_positions = (
        prompts.batch[name].repeat_interleave(n, dim=0) for name in ("input_ids", "attention_mask", "position_ids")
    )
    # Positions go on counting over the padding, as in verl; nothing attends to them.
    response_positions = prompt_positions[:, -1:] + torch.arange(1, response_length + 1)
    responses_NR, mask_NR = torch.from_numpy(responses), torch.from_numpy(response_mask)
    is_real_B = is_real(prompts)
    num_cached = sum(each.num_cached_tokens for i, each in enumerate(completions) if is_real_B[i // n])
    num_prompt_tokens = n * int(prompts.batch["attention_mask"][is_real_B].sum())
    hit_rate = Metric.mean(num_cached / max(1, num_prompt_tokens), weight=num_prompt_tokens)
    return DataProto.from_dict(
        tensors={
            "prompts": prompt_ids,
            "responses": responses_NR,
            "input_ids": torch.cat([prompt_ids, responses_NR], dim=1),
            "attention_mask": torch.cat([prompt_mask, mask_NR], dim=1),
            "position_ids": torch.cat([prompt_positions, response_positions], dim=1),
            "response_mask": mask_NR,
            "rollout_log_probs": torch.from_numpy(log_probs),
        },
        non_tensors={"policy_version": [completion.versions for completion in completions]},
        meta_info={"metrics": {"rollout/prefix_cache_hit_rate": hit_rate}},
    )
