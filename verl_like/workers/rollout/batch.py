"""The conversion of a batch of prompts into requests, and of their responses into a batch."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from verl_like.protocol import PAD_COLUMN, DataProto, Metric
from verl_like.protocol.row_ops import RowTaker, jagged_from_arrays, jagged_from_lists, jagged_parts
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS, count_own
from verl_like.workers.rollout.request import Completion, GenerationRequest, Sampling, request_seed

# Legend: B prompts, n responses per prompt, N = B * n.

T = TypeVar("T")


@dataclass(frozen=True)
class RequestRules:
    """How a batch becomes requests, and how requests are routed to replicas.

    The rules are the same on every rank and on the driver.
    """

    seed: int
    """The seed of the run."""
    training: Sampling
    num_samples: int
    """The number of responses to each prompt, n."""
    validation: Sampling
    num_validation_samples: int
    greedy: Sampling
    """As in training, but the likeliest token each time, and one response to a prompt."""
    routing: str
    """The value of `rollout.routing`."""
    num_slots: int
    """The number of requests that a replica computes at once."""

    def requests_of(self, prompts: DataProto, call: str) -> list[GenerationRequest]:
        """Returns the requests of a batch, (B * n,), in which those of a prompt are consecutive.

        A request's seed depends on the run's seed, `global_steps`, `validate`, the prompt's uid and
        the number of the response; it does not depend on other rows or on their order.

        Raises ValueError for a uid that two rows have, or without `global_steps` or `uid`.

        Args:
            prompts: columns `prompts` (B, *) int64, jagged, and `uid`; meta `global_steps` (int),
                `validate` (bool, default False) and `greedy` (bool, default False).
            call: a few words that distinguish the names of these requests from those of other
                calls.
        """
        if "global_steps" not in prompts.meta_info:
            raise ValueError(
                "generate_sequences needs meta_info['global_steps'] to seed the engine; got "
                f"{list(prompts.meta_info)}."
            )
        step = int(prompts.meta_info["global_steps"])
        validate = bool(prompts.meta_info.get("validate"))
        sampling, n = self._sampling_of(prompts)
        uids = prompt_uids(prompts)
        requests = []
        for row, token_ids in enumerate(prompt_tokens(prompts)):
            uid = uids[row]
            for k in range(n):
                request = GenerationRequest(
                    name=f"row {row} (uid {uid}), sample {k} of {call}",
                    prompt_ids=token_ids,
                    seed=request_seed(self.seed, step, validate, uid, k),
                    sampling=sampling,
                    uid=uid,
                    index=k,
                )
                requests.append(request)
        return requests

    def _sampling_of(self, prompts: DataProto) -> tuple[Sampling, int]:
        """Returns how the responses to a batch are drawn, and how many for each prompt."""
        if prompts.meta_info.get("greedy"):
            return self.greedy, 1
        if prompts.meta_info.get("validate"):
            return self.validation, self.num_validation_samples
        return self.training, self.num_samples


def greedy_requests(prompts: DataProto, max_tokens: int) -> list[GenerationRequest]:
    """Returns requests that continue each prompt with the likeliest tokens, `max_tokens` of them.

    No token ends such a response early. By these responses the engine is compared with the actor,
    see `draw_greedily`.
    """
    sampling = Sampling(
        temperature=0.0, top_k=-1, top_p=1.0, max_tokens=max_tokens, stop_token_ids=()
    )
    return [
        GenerationRequest(f"prompt {row}, drawn greedily", token_ids, seed=0, sampling=sampling)
        for row, token_ids in enumerate(prompt_tokens(prompts))
    ]


def prompt_uids(prompts: DataProto) -> list[str]:
    """Returns the uid of each row.

    Raises ValueError without a column `uid`, or if two rows have the same uid, because they would
    draw the same responses. Padding rows may repeat one.
    """
    if "uid" not in prompts.non_tensor_batch:
        raise ValueError(
            "generate_sequences needs the column 'uid' to seed each prompt's responses; got "
            f"{sorted(prompts.non_tensor_batch)}."
        )
    uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
    real_uids = _of_real(prompts, uids)
    num_rows_of = Counter(real_uids)
    repeated = [uid for uid, num_rows in num_rows_of.items() if num_rows > 1]
    if repeated:
        raise ValueError(
            f"generate_sequences got several rows of the prompts {repeated}, which would draw the "
            "same responses; give each prompt once and rollout.n for the number of its responses."
        )
    return uids


def prompt_tokens(prompts: DataProto) -> list[list[int]]:
    """Returns the token ids of each row's prompt."""
    values, offsets = jagged_parts(prompts.tensor_batch["prompts"])
    tokens = values.tolist()
    return [tokens[start:end] for start, end in itertools.pairwise(offsets.tolist())]


def names_of_real(prompts: DataProto, requests: Sequence[GenerationRequest]) -> set[str]:
    """Returns the names of the requests of a batch without those of padding rows."""
    real = _of_real(prompts, requests)
    return {request.name for request in real}


def _of_real(prompts: DataProto, values: Sequence[T]) -> Iterator[T]:
    """Yields the values without those of padding rows. Each row has equally many, which are
    consecutive."""
    n = len(values) // max(1, len(prompts))
    is_real_N = is_real(prompts).repeat_interleave(n)
    return itertools.compress(values, is_real_N)


def is_real(prompts: DataProto) -> Tensor:
    """Returns a mask (B,) bool that is False for padding rows."""
    none_B = torch.zeros(len(prompts), dtype=torch.bool)
    return ~prompts.tensor_batch.get(PAD_COLUMN, none_B)


def assemble(prompts: DataProto, completions: Sequence[Completion]) -> DataProto:
    """Returns the batch of N responses beside their B prompts, repeated, all without padding.

    The responses to a prompt are consecutive in `completions` and in the result, whose columns are
    those of `generate_sequences` in docs/columns.md. The log-probabilities are under the
    distribution that the tokens were drawn from (temperature, top-k, top-p).
    """
    n = len(completions) // max(1, len(prompts))
    numbers = torch.arange(len(prompts))
    repeated = numbers.repeat_interleave(n)
    taker = RowTaker(repeated)
    token_ids = prompts.tensor_batch["prompts"]
    lists_of_tokens = [completion.token_ids for completion in completions]
    lists_of_log_probs = [completion.log_probs for completion in completions]
    responses = jagged_from_lists(lists_of_tokens, torch.int64)
    versions = [completion.versions for completion in completions]
    metrics = {"rollout/prefix_cache_hit_rate": _hit_rate(prompts, completions, n)}
    tensors = {
        "prompts": taker.tensor(token_ids),
        "responses": responses,
        "response_mask": torch.ones_like(responses),
        "rollout_log_probs": jagged_from_lists(lists_of_log_probs, torch.float32),
    }
    meta_info = prompts.meta_info
    is_trained = not (meta_info.get("validate") or meta_info.get("greedy"))
    has_routing = [each.routed_experts is not None for each in completions]
    if is_trained and any(has_routing):
        column = _routing(completions)
        tensors[ROUTED_EXPERTS] = column
        # The last token of a response has none, since nothing is drawn after it.
        num_unrecorded = count_own(column) - len(completions)
        metrics["rollout/num_unrecorded_tokens"] = Metric.sum(num_unrecorded)
    return DataProto.from_dict(
        tensors=tensors, non_tensors={"policy_version": versions}, meta_info={"metrics": metrics}
    )


def _routing(completions: Sequence[Completion]) -> Tensor:
    """Returns the column `routed_experts` of responses.

    Raises ValueError if some have no routing.
    """
    arrays = []
    for number, completion in enumerate(completions):
        routing = completion.routed_experts
        if routing is None:
            raise ValueError(
                f"response {number} of {len(completions)} has no routing, and others have: have "
                "the engine record it for all of them"
            )
        arrays.append(routing)
    return jagged_from_arrays(arrays)


def _hit_rate(prompts: DataProto, completions: Sequence[Completion], n: int) -> Metric:
    """Returns the share of prompt tokens that were taken from the prefix cache.

    Prompts count once for each response, and padding rows do not count.
    """
    real = _of_real(prompts, completions)
    num_cached = sum(completion.num_cached_tokens for completion in real)
    _values, offsets = jagged_parts(prompts.tensor_batch["prompts"])
    lengths_B = offsets.diff()
    real_lengths = lengths_B[is_real(prompts)]
    num_prompt_tokens = n * int(real_lengths.sum())
    return Metric.mean_of(num_cached, num_prompt_tokens)
