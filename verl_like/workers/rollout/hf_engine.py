"""Reference rollout engine: a token at a time with transformers, on a copy of the model. Small,
slow, easy to debug."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl_like.workers.models.lora import add_adapter, model_buffers, trained_parameters
from verl_like.workers.models.pretrained import decoder_layers
from verl_like.workers.rollout.base import CPU_NUM_SEQS, RolloutEngine
from verl_like.workers.rollout.request import Completion, GenerationRequest, Sampling, VersionSpan
from verl_like.workers.weights.exports import WeightExport, iterate_weights
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
    """Of each token."""

    def has_ended(self) -> bool:
        sampling = self.request.sampling
        return (
            self.token_ids[-1] in sampling.stop_token_ids
            or len(self.token_ids) == sampling.max_tokens
        )

    def completion(self) -> Completion:
        spans: list[VersionSpan] = []
        for version, tokens in groupby(self.versions):
            start = spans[-1][2] if spans else 0
            spans.append((version, start, start + len(list(tokens))))
        return Completion(
            np.array(self.token_ids, np.int64), np.array(self.log_probs, np.float32), tuple(spans)
        )


@dataclass
class _Batch:
    """Responses that started together and are sampled alike."""

    responses: list[_Response]
    input_ids: torch.Tensor
    """(b, t) int64, padded on the left."""
    attention_mask: torch.Tensor
    """(b, t) int64."""
    cache: DynamicCache | None = None
    """Keys and values of all but the last token; None while nothing was computed with the present
    weights."""

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows."""
        if len(rows) == len(self.responses):
            return
        self.responses = [self.responses[row] for row in rows]
        indices = torch.tensor(rows, dtype=torch.int64, device=self.input_ids.device)
        self.input_ids, self.attention_mask = self.input_ids[indices], self.attention_mask[indices]
        if self.cache is not None:
            self.cache.batch_select_indices(indices)


class HfEngine(RolloutEngine):
    """Generates with transformers; every rank is a replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.tensor_model_parallel_size != 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={self.config.tensor_model_parallel_size} "
                "needs rollout.name=vllm; the hf engine runs on one process."
            )
        model = self.model_config
        options = {
            "dtype": getattr(torch, self.config.dtype),
            "trust_remote_code": model.trust_remote_code,
        }
        if getattr(self.hf_config.get_text_config(), "attn_logit_softcapping", None):
            # Transformers' others do not bound attention logits
            options["attn_implementation"] = "eager"
        if model.lora_rank:  # only the adapter travels
            path = os.path.expanduser(model.path)
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                path, config=self.hf_config, **options
            )
            add_adapter(self.model, decoder_layers(self.model), model, "actor_rollout_ref.model")
        else:
            self.model = AutoModelForCausalLM.from_config(self.hf_config, **options)
        self.model.eval().requires_grad_(False).to(self.device)
        self._waiting: list[GenerationRequest] = []
        self._batches: list[_Batch] = []

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._wake()  # its weights are still there
        self._waiting.extend(requests)

    def _has_work(self) -> bool:
        return bool(self._waiting or self._batches)

    def _abort(self, names: Collection[str]) -> None:
        self._waiting = [request for request in self._waiting if request.name not in names]
        for batch in self._batches:
            batch.keep(
                [row for row, each in enumerate(batch.responses) if each.request.name not in names]
            )
        self._batches = [batch for batch in self._batches if batch.responses]

    def _step(self) -> list[tuple[str, Completion]]:
        room = (self.config.max_num_seqs or CPU_NUM_SEQS) - sum(
            len(batch.responses) for batch in self._batches
        )
        while self._waiting and room > 0:
            requests = list(
                next(groupby(self._waiting[:room], key=lambda request: request.sampling))[1]
            )
            del self._waiting[: len(requests)]
            self._batches.append(self._new_batch(requests))
            room -= len(requests)
        ended = [each for batch in self._batches for each in self._advance(batch)]
        self._batches = [batch for batch in self._batches if batch.responses]
        return [(each.request.name, each.completion()) for each in ended]

    def _new_batch(self, requests: list[GenerationRequest]) -> _Batch:
        width = max(len(request.prompt_ids) for request in requests)
        padding = [width - len(request.prompt_ids) for request in requests]
        responses = [_Response(each, torch.Generator().manual_seed(each.seed)) for each in requests]
        padded = [
            [self.pad_token_id] * p + [*each.prompt_ids]
            for p, each in zip(padding, requests, strict=True)
        ]
        mask = [[0] * p + [1] * (width - p) for p in padding]
        return _Batch(
            responses,
            torch.tensor(padded, device=self.device),
            torch.tensor(mask, device=self.device),
        )

    @torch.no_grad()
    def _advance(self, batch: _Batch) -> list[_Response]:
        """Draws the next token of each response; drops those that ended, and returns them."""
        if batch.cache is None:
            batch.cache = DynamicCache(config=self.model.config)
        start = batch.cache.get_seq_length()
        position_ids = (batch.attention_mask.cumsum(-1) - 1).clamp(min=0)
        logits_bV = self.model(
            input_ids=batch.input_ids[:, start:],
            attention_mask=batch.attention_mask,
            position_ids=position_ids[:, start:],
            past_key_values=batch.cache,
            logits_to_keep=1,
        ).logits[:, -1]
        generators = [each.generator for each in batch.responses]
        tokens_b1, log_probs_b1 = _draw(logits_bV, batch.responses[0].request.sampling, generators)
        batch.input_ids = torch.cat([batch.input_ids, tokens_b1], dim=1)
        batch.attention_mask = torch.cat([batch.attention_mask, torch.ones_like(tokens_b1)], dim=1)
        assert self.policy_version is not None
        for each, token, log_prob in zip(
            batch.responses, tokens_b1.tolist(), log_probs_b1.tolist(), strict=True
        ):
            each.token_ids += token
            each.log_probs += log_prob
            each.versions.append(self.policy_version)
        ended = [each for each in batch.responses if each.has_ended()]
        batch.keep([row for row, each in enumerate(batch.responses) if not each.has_ended()])
        return ended

    @torch.no_grad()
    def _load(self, exports: Sequence[WeightExport], version: int) -> None:
        parameters = dict(trained_parameters(self.model))
        buffers = dict(model_buffers(self.model))
        for name, tensor in iterate_weights(exports):
            if name in buffers:
                buffers[name].data = tensor.to(self.device, copy=True)  # in the trainer's dtype
            else:
                parameters[name].copy_(tensor)
        if self.config.kv_after_update == "recompute":
            for batch in self._batches:
                batch.cache = None

    def _fingerprints(self) -> dict[str, int]:
        weights = [*trained_parameters(self.model), *model_buffers(self.model)]
        return read_fingerprints({name: fingerprint_sum(weight) for name, weight in weights})

    def _wake(self) -> None:
        self.model.to(self.device)

    def _sleep(self) -> None:
        if self.config.free_cache_engine:
            self.model.to("cpu")
            torch.cuda.empty_cache()  # what torch keeps for itself, the training process cannot use


def _draw(
    logits_bV: torch.Tensor, sampling: Sampling, generators: list[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each row with the row's own generator; returns (b, 1) tokens and (b, 1)
    log-probabilities.

    The maximum of log p - log E over the tokens, with E drawn from the exponential distribution, is
    a draw from p (the Gumbel-max trick).
    """
    if sampling.temperature > 0:
        warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
        if sampling.top_k != -1:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        for warp in warpers:
            logits_bV = warp(torch.empty(0, dtype=torch.int64), logits_bV)
    log_probs_bV = keys_bV = logits_bV.float().log_softmax(-1)
    if sampling.temperature > 0:
        noise = torch.stack(
            [torch.empty(logits_bV.shape[-1]).exponential_(generator=g) for g in generators]
        )
        keys_bV = log_probs_bV - noise.log().to(logits_bV.device)
    tokens_b1 = keys_bV.argmax(-1, keepdim=True)
    return tokens_b1, log_probs_bV.gather(-1, tokens_b1)
