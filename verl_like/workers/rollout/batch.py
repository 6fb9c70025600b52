"""A batch of prompts as requests, and responses as a batch."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl_like.protocol import PAD_COLUMN, DataProto, Metric
from verl_like.protocol.row_ops import RowTaker, jagged_from_lists, jagged_parts
from verl_like.workers.rollout.request import Completion, GenerationRequest, Sampling, request_seed

# Legend: B prompts, n responses per prompt, N = B * n.


@dataclass(frozen=True)
class RequestRules:
    """How batches become requests, and which replica takes which. They are the same on every rank
    and on the driver."""

    seed: int
    """Of the run."""
    training: Sampling
    num_samples: int
    """Responses to each prompt, n."""
    validation: Sampling
    num_validation_samples: int
    greedy: Sampling
    """As in training, but the likeliest token each time, and one response to a prompt."""
    routing: str
    """`rollout.routing`."""
    num_slots: int
    """Requests that a replica computes at once."""

    def requests_of(self, prompts: DataProto, call: str) -> list[GenerationRequest]:
        """The requests of a batch, (B * n,): those for a prompt next to each other.

        A request's seed follows from the run's seed, `global_steps`, `validate`, the prompt's uid
        and the number of the response. The other rows and their order do not matter. `call` makes
        its name unlike that of requests of other calls.

        Raises ValueError for a uid that two rows have, or without `global_steps` or `uid`.

        Args:
            prompts: columns `prompts` (B, *) int64, jagged, and `uid`; meta `global_steps` (int),
                `validate` (bool, default False) and `greedy` (bool, default False).
            call: a few words.
        """
        if "global_steps" not in prompts.meta_info:
            raise ValueError(
                "generate_sequences needs meta_info['global_steps'] to seed the engine; got "
                f"{list(prompts.meta_info)}."
            )
        step = int(prompts.meta_info["global_steps"])
        validate = bool(prompts.meta_info.get("validate", False))
        sampling, n = self._sampling_of(prompts)
        rows = zip(prompt_uids(prompts), prompt_tokens(prompts), strict=True)
        return [
            GenerationRequest(
                name=f"row {row} (uid {uid}), sample {k} of {call}",
                prompt_ids=token_ids,
                seed=request_seed(self.seed, step, validate, uid, k),
                sampling=sampling,
                uid=uid,
                index=k,
            )
            for row, (uid, token_ids) in enumerate(rows)
            for k in range(n)
        ]

    def _sampling_of(self, prompts: DataProto) -> tuple[Sampling, int]:
        """How the responses to a batch are drawn, and how many to a prompt."""
        if prompts.meta_info.get("greedy", False):
            return self.greedy, 1
        if prompts.meta_info.get("validate", False):
            return self.validation, self.num_validation_samples
        return self.training, self.num_samples


def greedy_requests(prompts: DataProto, max_tokens: int) -> list[GenerationRequest]:
    """Requests for the `max_tokens` likeliest tokens after each prompt, also after one that ends a
    response."""
    sampling = Sampling(
        temperature=0.0, top_k=-1, top_p=1.0, max_tokens=max_tokens, stop_token_ids=()
    )
    return [
        GenerationRequest(f"prompt {row}, drawn greedily", token_ids, seed=0, sampling=sampling)
        for row, token_ids in enumerate(prompt_tokens(prompts))
    ]


def prompt_uids(prompts: DataProto) -> list[str]:
    """Each row's uid.

    Raises ValueError without a column `uid`, or if two rows besides padding share one, so that they
    draw the same.
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
            f"generate_sequences got several rows of the prompts {repeated}, which would draw the "
            "same responses; give each prompt once and rollout.n for the number of its responses."
        )
    return uids


def prompt_tokens(prompts: DataProto) -> list[list[int]]:
    """The token ids of each row's prompt."""
    tokens, offsets = (part.tolist() for part in jagged_parts(prompts.tensor_batch["prompts"]))
    return [tokens[start:end] for start, end in itertools.pairwise(offsets)]


def names_of_real(prompts: DataProto, requests: Sequence[GenerationRequest]) -> set[str]:
    """The names of the requests of a batch that are not of padding rows."""
    n = len(requests) // max(1, len(prompts))
    is_real_B = is_real(prompts)
    return {request.name for number, request in enumerate(requests) if is_real_B[number // n]}


def is_real(prompts: DataProto) -> torch.Tensor:
    """(B,) bool, False on padding rows."""
    return ~prompts.tensor_batch.get(PAD_COLUMN, torch.zeros(len(prompts), dtype=torch.bool))


def assemble(prompts: DataProto, completions: Sequence[Completion]) -> DataProto:
    """N responses beside their B prompts, those to a prompt next to each other: the columns of
    `generate_sequences` in docs/columns.md, without padding.

    The log-probabilities are under the distribution that the tokens were drawn from (temperature,
    top-k, top-p).
    """
    n = len(completions) // max(1, len(prompts))
    repeated = RowTaker(torch.arange(len(prompts)).repeat_interleave(n))
    responses = jagged_from_lists([each.token_ids for each in completions], torch.int64)
    is_real_B = is_real(prompts)
    num_cached = sum(
        each.num_cached_tokens for i, each in enumerate(completions) if is_real_B[i // n]
    )
    lengths_B = jagged_parts(prompts.tensor_batch["prompts"])[1].diff()
    num_prompt_tokens = n * int(lengths_B[is_real_B].sum())
    hit_rate = Metric.mean(num_cached / max(1, num_prompt_tokens), weight=num_prompt_tokens)
    return DataProto.from_dict(
        tensors={
            "prompts": repeated.tensor(prompts.tensor_batch["prompts"]),
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "rollout_log_probs": jagged_from_lists(
                [each.log_probs for each in completions], torch.float32
            ),
        },
        non_tensors={"policy_version": [completion.versions for completion in completions]},
        meta_info={"metrics": {"rollout/prefix_cache_hit_rate": hit_rate}},
    )
