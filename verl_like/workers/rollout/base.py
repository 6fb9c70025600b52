"""The base class of rollout engines: it checks requests, responses and weights."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase

from verl_like.plugins import Extensible
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig, SamplingConfig
from verl_like.workers.models.pretrained import load_hf_config, load_tokenizer
from verl_like.workers.planning.partition import num_groups
from verl_like.workers.rollout.batch import RequestRules
from verl_like.workers.rollout.request import (
    GenerationRequest,
    NamedCompletion,
    RolloutError,
    Sampling,
    check_completion,
)
from verl_like.workers.weights.arrival import (
    WeightSyncError,
    check_arrival,
    check_exports,
    check_staged,
)
from verl_like.workers.weights.exports import WeightExport
from verl_like.workers.weights.shared_memory import pin_pages

CPU_NUM_SEQS = 256
"""How many sequences are computed at once if neither the configuration nor vLLM's defaults for GPUs
say it."""


class RolloutEngine(Extensible, ABC):
    """Generates responses with the trainer's weights.

    Subclasses implement how tokens are sampled and how weights are loaded. Requests and weights can
    come between any two steps, also while responses are unfinished. The tokens of a response depend
    only on its request and on the weights that draw each token, up to the rounding of the logits.

    An engine is made and used on one thread, see `EngineThread`.

    `tensor_model_parallel_size` consecutive ranks, which are constructed at the same time, make up
    one replica. They get the same calls in the same order and return the same responses. `dp_rank`
    is the number of the replica, and `is_collect` is True on the one rank of it whose results are
    used.

    An engine starts without weights; `load_weights` loads them, and `policy_version` is their
    version. With `records_routing` completions have `routed_experts`. The constructor raises
    ValueError for a setting that does not fit and ModuleNotFoundError for a missing package; both
    messages say what to do.
    """

    can_record_routing = False
    """Whether the engine can say which experts compute each token."""

    replaced_methods: ClassVar = {
        "stream_sequences": "the driver makes requests of a batch; submit and step take these",
        "requests_for": "requests of a batch follow from rules()",
        "batch_of": "a batch is made of the completions that step returns, by assemble of "
        "verl_like.workers.rollout.batch",
        "greedy_requests": "greedy_requests of verl_like.workers.rollout.batch makes them",
        "capture_routing": "the constructor gets records_routing; set can_record_routing = True",
    }

    def __init__(
        self,
        config: RolloutConfig,
        model: TrainedModelConfig,
        *,
        rank: int,
        world_size: int,
        seed: int,
        device: str,
        records_routing: bool = False,
    ) -> None:
        if records_routing and not self.can_record_routing:
            raise ValueError(
                f"actor_rollout_ref.rollout.name={config.name} does not say which experts compute "
                "a token, so actor_rollout_ref.actor.router_replay.mode=R3 has no routing to "
                "replay; set name=vllm, or mode=R2"
            )
        size = config.tensor_model_parallel_size
        num_groups(
            size,
            world_size,
            "processes of the rollout pool",
            key="rollout.tensor_model_parallel_size",
        )
        self.config = config
        self.model_config = model.with_scaled_adapter()
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.device = device
        self.records_routing = records_routing
        self.dp_rank, self.tp_rank = divmod(rank, size)
        self.is_collect = self.tp_rank == 0
        self.hf_config = load_hf_config(model, key="actor_rollout_ref.model")
        tokenizer = load_tokenizer(model)
        self.eos_token_ids, self.pad_token_id = special_token_ids(tokenizer, model.path)
        self.policy_version: int | None = None
        """The version of the weights. It is None while the engine has no verified weights."""
        self.shows_by_numbers = False
        """True if weights may have no fingerprint in the engine, because it is not known how it
        keeps them. Log-probabilities then show whether they arrived."""
        self.unknown_parameters: tuple[str, ...] = ()
        """The engine's parameters without a fingerprint."""
        self._newest_version = -1
        self._vocab_size = self.hf_config.get_text_config().vocab_size
        self._in_flight: dict[str, GenerationRequest] = {}
        self._is_paused = False

    @abstractmethod
    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests, whose names differ from those of all requests in flight."""

    @abstractmethod
    def _step(self) -> list[NamedCompletion]:
        """Computes the next token of every request that the engine has room for.

        Returns the names and responses of those that ended.
        """

    @abstractmethod
    def _has_work(self) -> bool:
        """Returns whether a step would compute anything."""

    @abstractmethod
    def _abort(self, names: Collection[str]) -> None:
        """Drops requests from the engine. The caller takes them out of `_in_flight`, or submits
        them again."""

    @abstractmethod
    def _load(self, exports: Sequence[WeightExport], version: int) -> None:
        """Overwrites the engine's weights with staged ones.

        No later request may use keys and values that were computed with the old weights. For
        requests in flight `rollout.kv_after_update` says whether they may.
        """

    @abstractmethod
    def _fingerprints(self) -> dict[str, int]:
        """Returns the fingerprints (see `fingerprint_tensor`) of the weights that the engine
        computes with, by Hugging Face name."""

    def _wake(self) -> None:
        """Takes back the memory of the weights that `_sleep` has freed.

        An engine whose memory `_sleep` leaves in place has nothing to do.
        """

    @abstractmethod
    def _sleep(self) -> None:
        """Frees the device for training. The weights may be gone afterwards."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Adds requests to those in flight.

        Raises RuntimeError if no weights were loaded; ValueError for an empty or over-long prompt,
        tokens outside of the vocabulary, a longer response than the engine has room for, or the
        name of a request in flight. If it raises, none of the requests is added.
        """
        self._require_weights()
        names = set(self._in_flight)
        for request in requests:
            self._check_request(request)
            if request.name in names:
                raise ValueError(
                    f"A request named {request.name} is in flight; give every request a name of "
                    "its own."
                )
            names.add(request.name)
        for request in requests:
            self._in_flight[request.name] = request
        try:
            self._submit(requests)
        except Exception:
            self.abort(request.name for request in requests)
            raise

    def _check_request(self, request: GenerationRequest) -> None:
        """Raises ValueError for a prompt or a response length that the engine cannot compute."""
        prompt_ids = request.prompt_ids
        limit = self.config.prompt_length
        if request.episode:  # its prompt may have what was drawn before
            limit += self.config.response_length - request.sampling.max_tokens
        if not 0 < len(prompt_ids) <= limit:
            raise ValueError(
                f"The prompt of {request.name} has {len(prompt_ids)} tokens, but 1 to {limit} are "
                f"allowed with rollout.prompt_length={self.config.prompt_length}; filter or "
                "truncate the dataset, or raise data.max_prompt_length."
            )
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self._vocab_size:
            raise ValueError(
                f"The prompt of {request.name} has tokens outside of the vocabulary of "
                f"{self._vocab_size}: {list(prompt_ids)}; use the tokenizer of the model."
            )
        if request.sampling.max_tokens > self.config.response_length:
            raise ValueError(
                f"{request.name} asks for {request.sampling.max_tokens} tokens, but the engine "
                f"has room for rollout.response_length={self.config.response_length}; raise "
                "data.max_response_length."
            )

    def step(self) -> list[NamedCompletion]:
        """Computes the next token of every request that the engine has room for.

        Returns the names and responses of those that ended. A paused engine and one without
        requests return none. Raises RuntimeError if the last weights did not arrive; RolloutError
        if the engine lost a request, or for a response that `check_completion` refuses. If it
        raises, the other responses that ended in this step are lost, too.
        """
        if self._is_paused or not self._in_flight:
            return []
        self._require_weights()
        if not self._has_work():
            raise RolloutError(
                f"The rollout engine lost {len(self._in_flight)} requests: "
                f"{list(self._in_flight)[:5]}."
            )
        finished = self._step()
        requests = [self._in_flight.pop(name) for name, _completion in finished]
        for request, (name, completion) in zip(requests, finished, strict=True):
            who = f"The response to {name}"
            check_completion(completion, who, request.sampling, vocab_size=self._vocab_size)
        return finished

    @property
    def is_busy(self) -> bool:
        """True if requests are in flight, and the engine is not paused and has verified weights."""
        has_weights = self.policy_version is not None
        return bool(self._in_flight) and not self._is_paused and has_weights

    def agreed(self, number: int) -> int:
        """Returns the `number` of the replica's first rank on all of its ranks.

        All ranks of the replica call this, and the others wait for the first one.
        """
        return number

    def stream(self) -> Generator[list[NamedCompletion], None, None]:
        """Steps until no request is in flight, and yields what ended in each step.

        Raises RuntimeError if the engine is paused.
        """
        while self._in_flight:
            if self._is_paused:
                raise RuntimeError("The rollout engine is paused; resume it first.")
            yield self.step()

    def abort(self, names: Iterable[str]) -> list[str]:
        """Drops requests, and returns the names of those that were in flight."""
        aborted = []
        for name in names:
            if self._in_flight.pop(name, None):
                aborted.append(name)
        self._abort(aborted)
        return aborted

    def pause(self) -> None:
        """Stops to compute until `resume`.

        Requests in flight stay, and the engine still takes requests and weights.
        """
        self._is_paused = True

    def resume(self) -> None:
        """Computes again after `pause`."""
        self._is_paused = False

    def sleep(self) -> None:
        """Frees the device for training.

        The weights may be gone afterwards: load them again before generating.

        Raises RuntimeError if requests are in flight.
        """
        if self._in_flight:
            raise RuntimeError(
                f"{len(self._in_flight)} requests are in flight; abort them before the engine "
                "sleeps."
            )
        self._sleep()

    def wake(self) -> None:
        """Takes back the memory of the weights that `sleep` has freed, but not the weights.

        `load_weights` does both. Raises ValueError if others use that memory now.
        """
        self._wake()

    def forget_prompts(self) -> None:
        """Drops the cache of prompts that the engine keeps for later requests, unless requests are
        in flight. Most engines keep nothing."""

    def _require_weights(self) -> None:
        if self.policy_version is None:
            raise RuntimeError(
                "The rollout engine has no verified weights; call load_weights before generating."
            )

    def load_weights(
        self, exports: Sequence[WeightExport], version: int, *, checks_first: bool = True
    ) -> str:
        """Replaces the engine's weights, and verifies that they are the trainer's.

        Requests in flight continue with the new weights. `exports` are the results of
        `collect_weights` of all trainer ranks; `version` must not be older than one the engine had
        before. Returns one fingerprint of all parameters together, see `check_arrival`.

        Raises WeightSyncError if the exports are stale, incomplete or changed on their way; the
        engine then keeps the weights it has. It also raises WeightSyncError if the loaded weights
        are not the trainer's. After that, as after any other error in the middle of an update, the
        engine refuses to generate until a later `load_weights` succeeds.

        With `checks_first` the exports are checked before they are loaded. Without it, exports in
        the object store are checked only after loading, so that each byte is read once. Memory that
        the trainer may write into is always checked first.
        """
        if version < self._newest_version:
            raise WeightSyncError(
                f"Stale weights: version {version} was sent to an engine that already had "
                f"{self._newest_version}."
            )
        if self.device == "cuda":
            pin_pages(exports)
        is_written_by_trainer = self.config.weight_transport in ("shared_memory", "gloo")
        is_checked_first = checks_first or self.shows_by_numbers
        is_read_twice = is_checked_first and not self.config.sends_directly
        if is_written_by_trainer or is_read_twice:
            expected = check_staged(exports, version, self.device)
        else:
            expected = check_exports(exports, version)
        self.policy_version = None  # until the whole update has arrived
        self._wake()
        self._load(exports, version)
        loaded = self._fingerprints()
        if self.shows_by_numbers:
            self._leave_to_numbers(expected, loaded)
        failure = f"Weights of version {version} did not arrive at rollout rank {self.rank}"
        fingerprint = check_arrival(expected, loaded, failure)
        self.policy_version = version
        self._newest_version = version
        return fingerprint

    def _leave_to_numbers(self, expected: dict[str, int], loaded: Mapping[str, int]) -> None:
        """Removes from `expected` what has no fingerprint in the engine.

        Raises WeightSyncError if what arrived was not checked either.
        """
        without = sorted(expected.keys() - loaded.keys())
        if without and self.config.sends_directly:
            raise WeightSyncError(
                f"It is not known how the engine keeps {', '.join(without[:5])}, so what arrives "
                "is checked before it is loaded, which "
                f"rollout.weight_transport={self.config.weight_transport} does not do: set "
                "rollout.weight_transport=object_store."
            )
        for name in without:
            del expected[name]

    @property
    def num_slots(self) -> int:
        """The number of requests that the engine computes at once."""
        return self.config.max_num_seqs or CPU_NUM_SEQS

    def rules(self) -> RequestRules:
        """Returns how batches of prompts become requests, by the configuration."""
        config = self.config
        val_kwargs = config.val_kwargs
        return RequestRules(
            seed=self.seed,
            training=self._sampling(config),
            num_samples=config.n,
            validation=self._sampling(val_kwargs),
            num_validation_samples=val_kwargs.n,
            greedy=self._sampling(SamplingConfig(temperature=0.0)),
            routing=config.routing,
            num_slots=self.num_slots,
        )

    def _sampling(self, source: SamplingConfig) -> Sampling:
        """Returns the sampling of a configuration; temperature 0 ignores top-k and top-p."""
        greedy = source.temperature == 0
        return Sampling(
            temperature=source.temperature,
            top_k=-1 if greedy or source.top_k == 0 else source.top_k,
            top_p=1.0 if greedy else source.top_p,
            max_tokens=self.config.response_length,
            stop_token_ids=() if self.config.ignore_eos else self.eos_token_ids,
        )


def special_token_ids(tokenizer: PreTrainedTokenizerBase, path: str) -> tuple[tuple[int, ...], int]:
    """Returns the tokens that end a response, in ascending order, and the padding token.

    A response ends with an end-of-sequence token of the tokenizer or of generation_config.json. A
    tokenizer without a padding token pads with its end-of-sequence token. Raises ValueError if the
    tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer at {tokenizer.name_or_path} has no end-of-sequence token; add one to "
            "its tokenizer_config.json."
        )
    end_tokens = {tokenizer.eos_token_id}
    with contextlib.suppress(OSError):  # of a model without generation_config.json
        generation = GenerationConfig.from_pretrained(os.path.expanduser(path))
        if generation.eos_token_id is not None:
            # One number, or several.
            more = np.atleast_1d(generation.eos_token_id)
            end_tokens.update(more.tolist())
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = tokenizer.eos_token_id
    return tuple(sorted(end_tokens)), padding
