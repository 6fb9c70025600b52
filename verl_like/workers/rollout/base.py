"""What every rollout engine has in common: prompts in, checked and padded responses out, verified weights."""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from verl_like.protocol import PAD_COLUMN, DataProto, Metric
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.models.pretrained import load_hf_config, load_tokenizer
from verl_like.workers.planning.partition import num_groups
from verl_like.workers.weight_sync import WeightExport, WeightSyncError, check_exports, iterate_weights

# Legend: B prompts, n responses per prompt, P padded prompt length, R padded response length, T = P + R.

CPU_NUM_SEQS = 256
"""Sequences at once where neither the configuration nor vLLM's defaults for GPUs say how many."""

_SECONDS_BETWEEN_PARTS = 0.05  # sending finished samples costs the engine well under a millisecond each time


class RolloutError(RuntimeError):
    """The engine returned something that is not a response to its prompt."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Greedy decoding has temperature 0; its log-probabilities are those of temperature 1."""

    n: int
    temperature: float
    top_k: int
    """-1 means all tokens."""
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response and belong to it; empty means that every response has `max_tokens` tokens."""


@dataclass(frozen=True)
class Completion:
    """One response: its tokens, the last of which may be a stop token, and their log-probabilities."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    num_cached_tokens: int = 0
    """Tokens of its prompt that were not computed for it, because the prefix cache had them."""


@dataclass(frozen=True)
class FinishedSample:
    """A response that is complete while others are still being generated."""

    uid: str
    """Of its prompt."""
    index: int
    """Among the n responses to the prompt."""
    token_ids: Sequence[int]


class RolloutEngine(ABC):
    """Generates responses with the trainer's weights; engines differ in how they sample and how they take weights.

    `tensor_model_parallel_size` consecutive ranks make up one replica. Its ranks get the same prompts and return the
    same responses; `dp_rank` numbers the replicas and `is_collect` marks the rank of each whose result is used.

    An engine starts without weights. `load_weights` brings them and `policy_version` says which ones it has.

    Args:
        config: how the engine samples.
        model: architecture and tokenizer.
        rank: this process among the `world_size` of the rollout. Ranks of a replica are constructed at the same time.
        seed: the run's seed.
        device: `cpu` or `cuda`.

    Raises:
        ValueError, ModuleNotFoundError: a setting or a package does not fit or is missing; the message says what to do.
    """

    def __init__(
        self, config: RolloutConfig, model: TrainedModelConfig, *, rank: int, world_size: int, seed: int, device: str
    ) -> None:
        size = config.tensor_model_parallel_size
        num_groups(size, world_size, "processes of the rollout pool", key="rollout.tensor_model_parallel_size")
        self.config = config
        self.model_config = model
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.device = device
        self.dp_rank = rank // size
        self.tp_rank = rank % size
        self.is_collect = self.tp_rank == 0
        self.hf_config = load_hf_config(model, key="actor_rollout_ref.model")
        self.eos_token_ids, self.pad_token_id = special_token_ids(model)
        self.policy_version: int | None = None
        """Version of the weights; None until weights were loaded and verified, and while the engine has none."""
        self._newest_version = -1

    @abstractmethod
    def _generate(
        self, prompts: list[list[int]], sampling: Sampling, seeds: list[list[int]]
    ) -> Generator[list[tuple[int, int, Completion]], None, None]:
        """Draws `sampling.n` responses for each prompt; all randomness of response k to prompt i is `seeds[i][k]`.

        Yields, again and again, what has been finished since: (prompt, index among its responses, response). It is
        closed early where a response is refused or the caller stops.
        """

    @abstractmethod
    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Overwrites the engine's weights and forgets whatever was computed with the old ones."""

    @abstractmethod
    def _fingerprint(self) -> int:
        """Fingerprint (see weight_sync.py) of the weights that the engine computes with."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees the device for training. The weights may be gone: load them again before generating."""

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """What `stream_sequences` returns."""
        stream = self.stream_sequences(prompts)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                return end.value

    def stream_sequences(self, prompts: DataProto) -> Generator[list[FinishedSample], None, DataProto]:
        """Draws responses for a batch of prompts; yields those that are finished while others are still drawn.

        Args:
            prompts: columns input_ids, attention_mask, position_ids (B, P) int64, padded on the left, and the
                non-tensor column `uid`, which names the prompt in what is yielded, in errors and in the seeds; meta
                `global_steps` (int), `validate` (bool, default False: sample as `rollout.val_kwargs` says) and `greedy`
                (bool, default False: one response, the likeliest token each time). A
                response is a function of the run's seed, `global_steps`, `validate`, its prompt's uid and its index
                among the n, up to the rounding of the logits; the other rows, their order and the number of
                replicas do not matter. Nothing is yielded for padding rows (`is_pad`).

        Returns:
            B * n rows, the n responses of a prompt one after the other: prompts (B*n, P), responses (B*n, R) padded on
            the right, input_ids, attention_mask, position_ids (B*n, T), response_mask (B*n, R) int64, 1 on generated
            tokens including the end-of-sequence token, rollout_log_probs (B*n, R) float32 under the distribution the
            tokens were drawn from (temperature, top-k, top-p), zero on padding; and the non-tensor column
            policy_version: of each response a tuple of spans (version, start, end) of its tokens, one span.

        Raises:
            RuntimeError: no weights were loaded.
            ValueError: an empty or over-long prompt, a uid that two rows have, or `global_steps` or `uid` missing.
            RolloutError: the engine's output is not n responses of 1 to R known tokens with finite log-probabilities.
        """
        if self.policy_version is None:
            raise RuntimeError("The rollout engine has no verified weights; call load_weights before generating.")
        if "global_steps" not in prompts.meta_info:
            raise ValueError(
                f"generate_sequences needs meta_info['global_steps'] to seed the engine; got {list(prompts.meta_info)}."
            )
        uids = prompt_uids(prompts)
        validate = bool(prompts.meta_info.get("validate", False))
        sampling = self._sampling(validate, greedy=bool(prompts.meta_info.get("greedy", False)))
        step = int(prompts.meta_info["global_steps"])
        seeds = [[request_seed(self.seed, step, validate, uid, k) for k in range(sampling.n)] for uid in uids]
        labels = [f"row {row} (uid {uid})" for row, uid in enumerate(uids)]
        token_lists = strip_padding(prompts, labels, self.config.prompt_length)
        is_pad_B = prompts.batch.get(PAD_COLUMN, torch.zeros(len(prompts), dtype=torch.bool))
        real_rows = [row for row, is_pad in enumerate(is_pad_B.tolist()) if not is_pad]
        reported_uids = {row: uids[row] for row in real_rows} if self.is_collect else {}
        with closing(self._generate(token_lists, sampling, seeds)) as generation:
            groups = yield from self._collect(generation, reported_uids, labels, sampling)
        num_cached = sum(completion.num_cached_tokens for row in real_rows for completion in groups[row])
        num_prompt_tokens = sampling.n * sum(len(token_lists[row]) for row in real_rows)
        output = assemble(
            prompts,
            groups,
            response_length=self.config.response_length,
            pad_token_id=self.pad_token_id,
            policy_version=self.policy_version,
        )
        hit_rate = Metric.mean(num_cached / max(1, num_prompt_tokens), weight=num_prompt_tokens)
        output.meta_info["metrics"] = {"rollout/prefix_cache_hit_rate": hit_rate}
        return output

    def _collect(
        self,
        generation: Iterator[list[tuple[int, int, Completion]]],
        reported_uids: Mapping[int, str],
        labels: Sequence[str],
        sampling: Sampling,
    ) -> Generator[list[FinishedSample], None, list[list[Completion]]]:
        """Checks what the engine finishes, yields that of the rows in `reported_uids`, returns all by prompt and k."""
        vocab_size = self.hf_config.get_text_config().vocab_size
        groups: list[dict[int, Completion]] = [{} for _ in labels]
        finished: list[FinishedSample] = []
        last_yield = time.monotonic()
        for completions in generation:
            for row, index, completion in completions:
                check_completion(completion, f"Response {index} of {labels[row]}", sampling, vocab_size=vocab_size)
                groups[row][index] = completion
                if row in reported_uids:
                    finished.append(FinishedSample(reported_uids[row], index, completion.token_ids))
            if finished and time.monotonic() - last_yield > _SECONDS_BETWEEN_PARTS:
                yield finished
                finished, last_yield = [], time.monotonic()
        for label, group in zip(labels, groups, strict=True):
            if sorted(group) != list(range(sampling.n)):
                raise RolloutError(
                    f"The rollout engine returned {len(group)} responses for {label}, not n={sampling.n}."
                )
        return [[group[index] for index in range(sampling.n)] for group in groups]

    def load_weights(self, exports: Sequence[WeightExport], version: int) -> dict[str, Any]:
        """Replaces the engine's weights and proves that they are the trainer's.

        Args:
            exports: `collect_weights` of every trainer rank.
            version: the version they must have, not older than what the engine had before.

        Returns:
            version, fingerprint (hexadecimal), num_bytes, seconds.

        Raises:
            WeightSyncError: the exports are stale or incomplete, or the engine ended up with other weights. It then
                refuses to generate until a later `load_weights` succeeds.
        """
        start = time.perf_counter()
        if version < self._newest_version:
            raise WeightSyncError(
                f"Stale weights: version {version} was sent to an engine that already had {self._newest_version}."
            )
        expected = check_exports(exports, version)
        self.policy_version = None
        self._load(iterate_weights(exports))
        loaded = self._fingerprint()
        if loaded != expected:
            raise WeightSyncError(
                f"Weights of version {version} did not arrive: the trainer's fingerprint is {expected:016x}, that of "
                f"rollout rank {self.rank} is {loaded:016x}."
            )
        self.policy_version = self._newest_version = version
        return {
            "version": version,
            "fingerprint": f"{loaded:016x}",
            "num_bytes": sum(export.num_bytes for export in exports),
            "seconds": time.perf_counter() - start,
        }

    def _sampling(self, validate: bool, greedy: bool) -> Sampling:
        source = self.config.val_kwargs if validate else self.config
        num_samples = 1 if greedy else source.n
        greedy = greedy or source.temperature == 0
        return Sampling(
            n=num_samples,
            temperature=0.0 if greedy else source.temperature,
            top_k=-1 if greedy or source.top_k == 0 else source.top_k,
            top_p=1.0 if greedy else source.top_p,
            max_tokens=self.config.response_length,
            stop_token_ids=() if self.config.ignore_eos else self.eos_token_ids,
        )


def special_token_ids(model: TrainedModelConfig) -> tuple[tuple[int, ...], int]:
    """The tokens that end a response (the tokenizer's and those of generation_config.json) and the padding token.

    Raises:
        ValueError: the tokenizer has no end-of-sequence token.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer at {tokenizer.name_or_path} has no end-of-sequence token; add one to its "
            "tokenizer_config.json."
        )
    try:
        generation_eos = GenerationConfig.from_pretrained(os.path.expanduser(model.path)).eos_token_id
    except OSError:  # the model has no generation_config.json
        generation_eos = None
    more = [] if generation_eos is None else np.atleast_1d(generation_eos).tolist()
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return tuple(sorted({tokenizer.eos_token_id, *more})), pad


def prompt_uids(prompts: DataProto) -> list[str]:
    """Each row's uid.

    Raises:
        ValueError: there is no column `uid`, or two rows besides padding share one, so that they draw the same.
    """
    if "uid" not in prompts.non_tensor_batch:
        raise ValueError(
            "generate_sequences needs the column 'uid' to seed each prompt's responses; got "
            f"{sorted(prompts.non_tensor_batch)}."
        )
    uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
    is_pad_B = prompts.batch.get(PAD_COLUMN, torch.zeros(len(prompts), dtype=torch.bool)).tolist()
    counts = Counter(uid for uid, is_pad in zip(uids, is_pad_B, strict=True) if not is_pad)
    if repeated := [uid for uid, count in counts.items() if count > 1]:
        raise ValueError(
            f"generate_sequences got several rows of the prompts {repeated}, which would draw the same responses; give "
            "each prompt once and rollout.n for the number of its responses."
        )
    return uids


def request_seed(seed: int, step: int, validate: bool, uid: str, sample: int) -> int:
    """The seed of one response, 63 bits: the same for the same arguments in every process, unrelated for others."""
    key = repr((seed, step, validate, uid, sample)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1


def strip_padding(prompts: DataProto, labels: Sequence[str], prompt_length: int) -> list[list[int]]:
    """Each prompt's tokens without the padding on its left.

    Raises:
        ValueError: a prompt is empty, or longer than `prompt_length`.
    """
    mask_BP = prompts.batch["attention_mask"].bool()
    token_lists = [ids[mask].tolist() for ids, mask in zip(prompts.batch["input_ids"], mask_BP, strict=True)]
    for label, token_ids in zip(labels, token_lists, strict=True):
        if not 0 < len(token_ids) <= prompt_length:
            raise ValueError(
                f"The prompt of {label} has {len(token_ids)} tokens, but 1 to rollout.prompt_length={prompt_length} "
                "are allowed; filter or truncate the dataset, or raise data.max_prompt_length."
            )
    return token_lists


def check_completion(completion: Completion, who: str, sampling: Sampling, *, vocab_size: int) -> None:
    """Refuses whatever is not 1 to R known tokens with finite log-probabilities.

    Raises:
        RolloutError: says `who`.
    """
    length = len(completion.token_ids)
    if not 1 <= length <= sampling.max_tokens:
        raise RolloutError(f"{who} has {length} tokens, but 1 to {sampling.max_tokens} are possible.")
    if not 0 <= min(completion.token_ids) <= max(completion.token_ids) < vocab_size:
        raise RolloutError(f"{who} has tokens outside of the vocabulary of {vocab_size}: {completion.token_ids}.")
    if length < sampling.max_tokens and completion.token_ids[-1] not in sampling.stop_token_ids:
        raise RolloutError(
            f"{who} stops after {length} of {sampling.max_tokens} tokens at token {completion.token_ids[-1]}, "
            f"which does not end a response (those that do: {sampling.stop_token_ids})."
        )
    if len(completion.log_probs) != length or not np.isfinite(completion.log_probs).all():
        raise RolloutError(f"{who} has {length} tokens but log-probabilities {list(completion.log_probs)}.")


def assemble(
    prompts: DataProto,
    groups: Sequence[Sequence[Completion]],
    *,
    response_length: int,
    pad_token_id: int,
    policy_version: int,
) -> DataProto:
    """Pads the responses on the right and puts them beside their prompts; see `RolloutEngine.generate_sequences`."""
    n = len(groups[0])
    completions = [completion for group in groups for completion in group]
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
        non_tensors={"policy_version": [((policy_version, 0, len(each.token_ids)),) for each in completions]},
    )
