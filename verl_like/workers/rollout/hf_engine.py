"""A rollout engine on transformers, which is slow, but short and easy to debug.

It computes one token of each response at a time, on its own copy of the model.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl_like.workers.models.lora import add_adapter, model_buffers, trained_parameters
from verl_like.workers.rollout.base import RolloutEngine
from verl_like.workers.rollout.request import (
    Completion,
    GenerationRequest,
    NamedCompletion,
    Sampling,
)
from verl_like.workers.weights.exports import WeightExport, iterate_weights
from verl_like.workers.weights.file_layout import FileLayout, each_in_files, file_layout
from verl_like.workers.weights.fingerprints import fingerprint_sum, read_fingerprints

# Legend: b responses that are computed together, t their longest length so far, V the vocabulary.


@dataclass
class _Response:
    """A response that is being drawn."""

    request: GenerationRequest
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The version of the weights that drew each token."""

    def has_ended(self) -> bool:
        """Returns whether its last token is the last that is drawn."""
        sampling = self.request.sampling
        if len(self.token_ids) == sampling.max_tokens:
            return True
        last = self.token_ids[-1]
        return last in sampling.stop_token_ids

    def completion(self) -> Completion:
        """Returns the response as the engine's caller gets it."""
        spans = []
        start = 0
        for version, tokens in itertools.groupby(self.versions):
            end = start + len(list(tokens))
            spans.append((version, start, end))
            start = end
        token_ids = np.array(self.token_ids, np.int64)
        log_probs = np.array(self.log_probs, np.float32)
        return Completion(token_ids, log_probs, tuple(spans))


@dataclass
class _Batch:
    """Responses that started at the same step and have the same sampling."""

    responses: list[_Response]
    input_ids: Tensor
    """(b, t) int64, padded on the left."""
    attention_mask: Tensor
    """(b, t) int64."""
    cache: DynamicCache | None = None
    """The keys and values of all tokens but the last. It is None if the present weights have
    computed nothing yet."""

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows."""
        if len(rows) == len(self.responses):
            return
        self.responses = [self.responses[row] for row in rows]
        device = self.input_ids.device
        indices = torch.tensor(rows, dtype=torch.int64, device=device)
        self.input_ids = self.input_ids[indices]
        self.attention_mask = self.attention_mask[indices]
        if self.cache is not None:
            self.cache.batch_select_indices(indices)


class HfEngine(RolloutEngine):
    """Generates with transformers. Every rank is a replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        num_ranks = self.config.tensor_model_parallel_size
        if num_ranks != 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={num_ranks} needs rollout.name=vllm; the hf "
                "engine runs on one process."
            )
        self.model = self._make_model()
        self.model.eval()
        self.model.requires_grad_(False)
        self.model.to(self.device)
        self._file_layout: FileLayout = {}
        if not self.model_config.lora_rank:  # an adapter is in its files as in memory
            self._file_layout = file_layout(self.model)
        self._waiting: list[GenerationRequest] = []
        self._batches: list[_Batch] = []

    def _make_model(self) -> Any:
        """Makes the model. Without an adapter its weights are random, since the trainer sends all.
        With one they are those of `path`, since the trainer sends the adapter alone."""
        model_config = self.model_config
        options = {
            "dtype": getattr(torch, self.config.dtype),
            "trust_remote_code": model_config.trust_remote_code,
            "experts_implementation": model_config.experts_implementation,
        }
        text_config = self.hf_config.get_text_config()
        if getattr(text_config, "attn_logit_softcapping", None):
            # Only transformers' eager attention applies the soft cap of attention logits.
            options["attn_implementation"] = "eager"
        if not model_config.lora_rank:
            return AutoModelForCausalLM.from_config(self.hf_config, **options)
        path = model_config.expanded_path
        model = AutoModelForCausalLM.from_pretrained(path, config=self.hf_config, **options)
        add_adapter(model, model_config, "actor_rollout_ref.model")
        return model

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._wake()  # `_sleep` keeps the weights on the host
        self._waiting.extend(requests)

    def _has_work(self) -> bool:
        return bool(self._waiting or self._batches)

    def _abort(self, names: Collection[str]) -> None:
        self._waiting = [request for request in self._waiting if request.name not in names]
        for batch in self._batches:
            kept = [
                row
                for row, response in enumerate(batch.responses)
                if response.request.name not in names
            ]
            batch.keep(kept)
        self._batches = [batch for batch in self._batches if batch.responses]

    def _step(self) -> list[NamedCompletion]:
        num_running = sum(len(batch.responses) for batch in self._batches)
        room = self.num_slots - num_running
        while self._waiting and room > 0:
            requests = self._take_alike(room)
            new = self._new_batch(requests)
            self._batches.append(new)
            room -= len(requests)
        ended = []
        for batch in self._batches:
            for response in self._advance(batch):
                name = response.request.name
                completion = response.completion()
                ended.append((name, completion))
        self._batches = [batch for batch in self._batches if batch.responses]
        return ended

    def _take_alike(self, room: int) -> list[GenerationRequest]:
        """Takes the first waiting requests that have the same sampling, at most `room`."""
        sampling = self._waiting[0].sampling
        requests: list[GenerationRequest] = []
        for request in self._waiting:
            if len(requests) == room or request.sampling != sampling:
                break
            requests.append(request)
        del self._waiting[: len(requests)]
        return requests

    def _new_batch(self, requests: list[GenerationRequest]) -> _Batch:
        """Makes a batch of requests that have the same sampling; prompts are padded on the left."""
        responses = []
        prompts = []
        for request in requests:
            generator = torch.Generator().manual_seed(request.seed)
            responses.append(_Response(request, generator))
            prompts.append(torch.tensor(request.prompt_ids))
        masks = [torch.ones_like(prompt) for prompt in prompts]
        padded = partial(pad_sequence, batch_first=True, padding_side="left")
        input_ids = padded(prompts, padding_value=self.pad_token_id)
        return _Batch(responses, input_ids.to(self.device), padded(masks).to(self.device))

    @torch.no_grad()
    def _advance(self, batch: _Batch) -> list[_Response]:
        """Draws the next token of each response of a batch.

        Responses that ended are dropped from the batch and returned.
        """
        if batch.cache is None:
            batch.cache = DynamicCache(config=self.model.config)
        start = batch.cache.get_seq_length()
        num_before = batch.attention_mask.cumsum(-1) - 1
        position_ids = num_before.clamp(min=0)
        outputs = self.model(
            input_ids=batch.input_ids[:, start:],
            attention_mask=batch.attention_mask,
            position_ids=position_ids[:, start:],
            past_key_values=batch.cache,
            logits_to_keep=1,
        )
        logits_bV = outputs.logits[:, -1]
        sampling = batch.responses[0].request.sampling
        generators = [response.generator for response in batch.responses]
        tokens_b1, log_probs_b1 = _draw(logits_bV, sampling, generators)
        ones_b1 = torch.ones_like(tokens_b1)
        batch.input_ids = torch.cat([batch.input_ids, tokens_b1], dim=1)
        batch.attention_mask = torch.cat([batch.attention_mask, ones_b1], dim=1)
        assert self.policy_version is not None
        tokens = tokens_b1.squeeze(1).tolist()
        log_probs = log_probs_b1.squeeze(1).tolist()
        unfinished = []
        ended = []
        for row, response in enumerate(batch.responses):
            response.token_ids.append(tokens[row])
            response.log_probs.append(log_probs[row])
            response.versions.append(self.policy_version)
            if response.has_ended():
                ended.append(response)
            else:
                unfinished.append(row)
        batch.keep(unfinished)
        return ended

    @torch.no_grad()
    def _load(self, exports: Sequence[WeightExport], version: int) -> None:
        places = {}
        for file, parameter in each_in_files(self._file_layout, trained_parameters(self.model)):
            places[file.name] = file.of(parameter)
        buffers = {}
        for file, buffer in each_in_files(self._file_layout, model_buffers(self.model)):
            assert file.is_whole, f"{file.name} is a part of a buffer"
            buffers[file.name] = buffer
        for name, tensor in iterate_weights(exports):
            if name in buffers:
                copy = tensor.to(self.device, copy=True)  # in the trainer's dtype
                buffers[name].data = copy
            else:
                places[name].copy_(tensor)
        if self.config.kv_after_update == "recompute":
            for batch in self._batches:
                batch.cache = None

    def _fingerprints(self) -> dict[str, int]:
        weights = trained_parameters(self.model) + model_buffers(self.model)
        sums = {}
        for file, weight in each_in_files(self._file_layout, weights):
            part = file.of(weight)
            sums[file.name] = fingerprint_sum(part)
        return read_fingerprints(sums)

    def _wake(self) -> None:
        self.model.to(self.device)

    def _sleep(self) -> None:
        if not self.config.free_cache_engine:
            return
        self.model.to("cpu")
        torch.cuda.empty_cache()  # the training process cannot use memory that torch caches


def _draw(
    logits_bV: Tensor, sampling: Sampling, generators: list[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row with the row's own generator.

    The token with the largest log p - log E, where E has the exponential distribution, is a draw
    from p: -log E is Gumbel noise (the Gumbel-max trick). With temperature 0 it is the likeliest
    token.

    Returns:
        The tokens (b, 1) and their log-probabilities (b, 1).
    """
    if sampling.temperature > 0:
        logits_bV = _warped(logits_bV, sampling)
    log_probs_bV = logits_bV.float().log_softmax(-1)
    keys_bV = log_probs_bV
    if sampling.temperature > 0:
        noise_bV = torch.empty(logits_bV.shape)
        for row, generator in enumerate(generators):
            noise_bV[row].exponential_(generator=generator)
        log_noise_bV = noise_bV.log()
        keys_bV = log_probs_bV - log_noise_bV.to(logits_bV.device)
    tokens_b1 = keys_bV.argmax(-1, keepdim=True)
    log_probs_b1 = log_probs_bV.gather(-1, tokens_b1)
    return tokens_b1, log_probs_b1


def _warped(logits_bV: Tensor, sampling: Sampling) -> Tensor:
    """Returns logits at the temperature, with -infinity for tokens that top-k or top-p excludes."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k != -1:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    no_tokens = torch.empty(0, dtype=torch.int64)  # these warpers do not read them
    for warp in warpers:
        logits_bV = warp(no_tokens, logits_bV)
    return logits_bV
