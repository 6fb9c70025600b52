"""What every rollout engine has in common: requests and batches in, checked responses out, verified weights."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase

from verl_like.protocol import DataProto
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.models.pretrained import load_hf_config, load_tokenizer
from verl_like.workers.planning.partition import num_groups
from verl_like.workers.rollout.batch import assemble, is_real, prompt_tokens, prompt_uids
from verl_like.workers.rollout.request import (
    Completion,
    GenerationRequest,
    RolloutError,
    Sampling,
    check_completion,
    request_seed,
)
from verl_like.workers.weight_sync import WeightExport, WeightSyncError, check_arrival, check_exports, check_staged
from verl_like.workers.weight_transfer.shared_memory import pin_pages

# Legend: B prompts, n responses per prompt.

CPU_NUM_SEQS = 256
"""Sequences at once where neither the configuration nor vLLM's defaults for GPUs say how many."""

_SECONDS_BETWEEN_PARTS = 0.05  # sending finished samples costs the engine well under a millisecond each time


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

    Requests come one by one (`submit`, `step`, `abort`) or as a batch (`stream_sequences`), and weights at any time
    between two steps, also while responses are unfinished. The tokens of a response do not depend on the way: they are
    a function of its request and of the weights of each token, up to the rounding of the logits.

    `tensor_model_parallel_size` consecutive ranks, which are constructed at the same time, make up one replica. They
    get the same calls in the same order and return the same responses; `dp_rank` numbers the replicas and `is_collect`
    marks the rank of each whose result is used.

    An engine starts without weights. `load_weights` brings them and `policy_version` says which ones it has. Raises
    ValueError for a setting that does not fit, ModuleNotFoundError for a missing package; both say what to do.
    """

    def __init__(
        self, config: RolloutConfig, model: TrainedModelConfig, *, rank: int, world_size: int, seed: int, device: str
    ) -> None:
        size = config.tensor_model_parallel_size
        num_groups(size, world_size, "processes of the rollout pool", key="rollout.tensor_model_parallel_size")
        self.config = config
        self.model_config = model.with_scaled_adapter()
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.device = device
        self.dp_rank, self.tp_rank = divmod(rank, size)
        self.is_collect = self.tp_rank == 0
        self.hf_config = load_hf_config(model, key="actor_rollout_ref.model")
        self.eos_token_ids, self.pad_token_id = special_token_ids(load_tokenizer(model), model.path)
        self.policy_version: int | None = None
        """Version of the weights; None until weights were loaded and verified, and while the engine has none."""
        self._newest_version = -1
        self._vocab_size = self.hf_config.get_text_config().vocab_size
        self._in_flight: dict[str, GenerationRequest] = {}
        self._is_paused = False

    @abstractmethod
    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests, whose names are unlike those of all in flight."""

    @abstractmethod
    def _step(self) -> list[tuple[str, Completion]]:
        """Computes the next token of every request that there is room for; returns those that ended, by name."""

    @abstractmethod
    def _has_work(self) -> bool:
        """Whether a step would compute anything."""

    @abstractmethod
    def _abort(self, names: Collection[str]) -> None:
        """Forgets requests in flight."""

    @abstractmethod
    def _load(self, exports: Sequence[WeightExport], version: int) -> None:
        """Overwrites the engine's weights with staged ones.

        No request that is submitted from now on uses what was computed with the old ones, and those in flight do so as
        `rollout.kv_after_update` says.
        """

    @abstractmethod
    def _fingerprints(self) -> dict[str, int]:
        """Fingerprints (see weight_sync.py) of the weights that the engine computes with, by Hugging Face name."""

    @abstractmethod
    def _sleep(self) -> None:
        """Frees the device for training. The weights may be gone."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Takes requests in, beside those in flight.

        Raises RuntimeError if no weights were loaded; ValueError for an empty or over-long prompt, tokens outside of
        the vocabulary, a longer response than the engine has room for, or the name of a request in flight. Then none of
        the requests is taken in.
        """
        self._require_weights()
        names = set(self._in_flight)
        for request in requests:
            self._check_request(request)
            if request.name in names:
                raise ValueError(f"A request named {request.name} is in flight; give every request a name of its own.")
            names.add(request.name)
        self._in_flight |= {request.name: request for request in requests}
        try:
            self._submit(requests)
        except Exception:
            self.abort(request.name for request in requests)
            raise

    def _check_request(self, request: GenerationRequest) -> None:
        prompt_ids, limit = request.prompt_ids, self.config.prompt_length
        if not 0 < len(prompt_ids) <= limit:
            raise ValueError(
                f"The prompt of {request.name} has {len(prompt_ids)} tokens, but 1 to rollout.prompt_length={limit} "
                "are allowed; filter or truncate the dataset, or raise data.max_prompt_length."
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocab_size:
            raise ValueError(
                f"The prompt of {request.name} has tokens outside of the vocabulary of {self._vocab_size}: "
                f"{list(prompt_ids)}; use the tokenizer of the model."
            )
        if request.sampling.max_tokens > self.config.response_length:
            raise ValueError(
                f"{request.name} asks for {request.sampling.max_tokens} tokens, but the engine has room for "
                f"rollout.response_length={self.config.response_length}; raise data.max_response_length."
            )

    def step(self) -> list[tuple[str, Completion]]:
        """Computes the next token of every request that the engine has room for; returns those that ended, by name.

        A paused engine and one without requests do nothing. Raises RuntimeError if the last weights did not arrive;
        RolloutError if the engine lost a request, or returned something that is not 1 to R known tokens with finite
        log-probabilities. What else ended in this step is gone then too.
        """
        if self._is_paused or not self._in_flight:
            return []
        self._require_weights()
        if not self._has_work():
            raise RolloutError(f"The rollout engine lost {len(self._in_flight)} requests: {list(self._in_flight)[:5]}.")
        finished = self._step()
        requests = [self._in_flight.pop(name) for name, _ in finished]
        for request, (name, completion) in zip(requests, finished, strict=True):
            check_completion(completion, f"The response to {name}", request.sampling, vocab_size=self._vocab_size)
        return finished

    def stream(self) -> Generator[list[tuple[str, Completion]], None, None]:
        """Steps until nothing is in flight; yields what ended in each step. RuntimeError while the engine is paused."""
        while self._in_flight:
            if self._is_paused:
                raise RuntimeError("The rollout engine is paused; resume it first.")
            yield self.step()

    def abort(self, names: Iterable[str]) -> list[str]:
        """Forgets requests; returns the names of those that were in flight."""
        aborted = [name for name in names if self._in_flight.pop(name, None)]
        self._abort(aborted)
        return aborted

    def pause(self) -> None:
        """Computes nothing until `resume`. What is in flight stays, and requests and weights are still taken in."""
        self._is_paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._is_paused = False

    def sleep(self) -> None:
        """Frees the device for training. The weights may be gone: load them again before generating.

        Raises RuntimeError if requests are in flight.
        """
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} requests are in flight; abort them before the engine sleeps.")
        self._sleep()

    def stream_sequences(self, prompts: DataProto) -> Generator[list[FinishedSample], None, DataProto]:
        """Draws responses for a batch of prompts; yields those that are finished while others are still drawn.

        Returns B * n rows, the n responses of a prompt one after the other: the columns of `generate_sequences` in
        docs/columns.md, log-probabilities under the distribution the tokens were drawn from (temperature, top-k,
        top-p). Raises RuntimeError if requests are in flight, ValueError for a uid that two rows have or without
        `global_steps` or `uid`, and what `submit` and `step` raise.

        Args:
            prompts: columns `prompts` (B, *) int64, jagged, and the
                non-tensor column `uid`, which names the prompt in what is yielded, in errors and in the seeds; meta
                `global_steps` (int), `validate` (bool, default False: sample as `rollout.val_kwargs` says) and `greedy`
                (bool, default False: one response, the likeliest token each time). The other rows, their order and
                the number of replicas do not matter. Nothing is yielded for padding rows (`is_pad`).
        """
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} requests are in flight; let them end before a batch, or abort.")
        requests = self.requests_for(prompts)
        keys = {request.name: key for key, request in requests.items()}
        is_told_B = is_real(prompts) & self.is_collect
        uids = prompts.non_tensor_batch["uid"]
        completions: dict[tuple[int, int], Completion] = {}
        finished: list[FinishedSample] = []
        last_yield = time.monotonic()
        try:
            self.submit(list(requests.values()))
            for ended in self.stream():
                for name, completion in ended:
                    row, k = keys[name]
                    completions[row, k] = completion
                    if is_told_B[row]:
                        finished.append(FinishedSample(str(uids[row]), k, completion.token_ids))
                if finished and time.monotonic() - last_yield > _SECONDS_BETWEEN_PARTS:
                    yield finished
                    finished, last_yield = [], time.monotonic()
        finally:  # a call that fails or is closed early leaves no request to the next one
            self.abort(keys)
        return self.batch_of(prompts, [completions[key] for key in requests])

    def requests_for(self, prompts: DataProto) -> dict[tuple[int, int], GenerationRequest]:
        """The requests of a batch of prompts, see `stream_sequences`, by the prompt's row and the response's number."""
        if "global_steps" not in prompts.meta_info:
            raise ValueError(
                f"generate_sequences needs meta_info['global_steps'] to seed the engine; got {list(prompts.meta_info)}."
            )
        validate = bool(prompts.meta_info.get("validate", False))
        sampling, n = self._sampling(validate, greedy=bool(prompts.meta_info.get("greedy", False)))
        step = int(prompts.meta_info["global_steps"])
        token_lists = prompt_tokens(prompts)
        return {
            (row, k): GenerationRequest(
                f"row {row} (uid {uid}), sample {k}",
                token_lists[row],
                request_seed(self.seed, step, validate, uid, k),
                sampling,
            )
            for row, uid in enumerate(prompt_uids(prompts))
            for k in range(n)
        }

    def greedy_requests(self, prompts: DataProto, num_tokens: int) -> list[GenerationRequest]:
        """Requests for the likeliest tokens after each prompt: `num_tokens`, or as many as there is room for."""
        max_tokens = min(num_tokens, self.config.response_length)
        sampling = Sampling(temperature=0.0, top_k=-1, top_p=1.0, max_tokens=max_tokens, stop_token_ids=())
        return [
            GenerationRequest(f"prompt {row}, drawn greedily", tokens, seed=0, sampling=sampling)
            for row, tokens in enumerate(prompt_tokens(prompts))
        ]

    def forget_prompts(self) -> None:  # noqa: B027  most engines keep nothing
        """Drops what the engine keeps of prompts for later ones, unless requests are in flight."""

    def batch_of(self, prompts: DataProto, completions: Sequence[Completion]) -> DataProto:
        """What `stream_sequences` returns for prompts, from the responses to each, one prompt after the other."""
        return assemble(prompts, completions)

    def _require_weights(self) -> None:
        if self.policy_version is None:
            raise RuntimeError("The rollout engine has no verified weights; call load_weights before generating.")

    def load_weights(self, exports: Sequence[WeightExport], version: int, *, checks_first: bool = True) -> str:
        """Replaces the engine's weights and proves that they are the trainer's; requests in flight go on with them.

        `exports` are `collect_weights` of every trainer rank; `version` is not older than what the engine had before.
        Returns one fingerprint of all parameters together, see `check_arrival`.

        Raises WeightSyncError if the exports are stale, incomplete or changed on their way, and goes on with the
        weights it has; or if it ended up with other weights, and refuses to generate until a later `load_weights`
        succeeds. So it does after any other error in the middle of an update.

        Without `checks_first` what changed in the object store is noticed after it was loaded, so that each byte is
        read once. Memory that the trainer may write into is always checked before.
        """
        if version < self._newest_version:
            raise WeightSyncError(
                f"Stale weights: version {version} was sent to an engine that already had {self._newest_version}."
            )
        if self.device == "cuda":
            pin_pages(exports)
        is_written_by_trainer = self.config.weight_transport in ("shared_memory", "gloo")
        is_read_twice = is_written_by_trainer or (checks_first and not self.config.sends_directly)
        expected = check_staged(exports, version, self.device) if is_read_twice else check_exports(exports, version)
        self.policy_version = None  # until the whole update has arrived
        self._load(exports, version)
        failure = f"Weights of version {version} did not arrive at rollout rank {self.rank}"
        fingerprint = check_arrival(expected, self._fingerprints(), failure)
        self.policy_version = self._newest_version = version
        return fingerprint

    def _sampling(self, validate: bool, greedy: bool) -> tuple[Sampling, int]:
        """How responses are drawn, and how many to a prompt."""
        source = self.config.val_kwargs if validate else self.config
        n = 1 if greedy else source.n
        greedy = greedy or source.temperature == 0
        sampling = Sampling(
            temperature=0.0 if greedy else source.temperature,
            top_k=-1 if greedy or source.top_k == 0 else source.top_k,
            top_p=1.0 if greedy else source.top_p,
            max_tokens=self.config.response_length,
            stop_token_ids=() if self.config.ignore_eos else self.eos_token_ids,
        )
        return sampling, n


def special_token_ids(tokenizer: PreTrainedTokenizerBase, path: str) -> tuple[tuple[int, ...], int]:
    """The tokens that end a response (the tokenizer's, and those of generation_config.json) and the padding token.

    Raises ValueError if the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer at {tokenizer.name_or_path} has no end-of-sequence token; add one to its "
            "tokenizer_config.json."
        )
    try:
        generation_eos = GenerationConfig.from_pretrained(os.path.expanduser(path)).eos_token_id
    except OSError:  # the model has no generation_config.json
        generation_eos = None
    more = [] if generation_eos is None else np.atleast_1d(generation_eos).tolist()
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return tuple(sorted({tokenizer.eos_token_id, *more})), pad
