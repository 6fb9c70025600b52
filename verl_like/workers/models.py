"""The trained models: a Hugging Face backbone over packed sequences, with a head that reads only the scored tokens."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from verl_like.workers.sequence_parallel import SequenceShare

# Legend: B rows, T = P + R padded sequence length, P prompt, R response, N tokens without padding, M scored tokens,
# S sequences, V vocabulary, D hidden size.

LOGITS_PER_CHUNK = 1 << 25
"""Largest number of logits that exist at a time (128 MiB in float32, and as much again for their softmax)."""

SEQUENCE_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
"""What `pack` reads."""

_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True)
class PackedBatch:
    """Rows without their padding, one after the other, and where their response tokens are."""

    input_ids: torch.Tensor
    """(1, N) int64."""
    position_ids: torch.Tensor
    """(1, N) int64."""
    cu_seqlens: torch.Tensor
    """(S + 1,) int32, where each sequence starts; the last entry is N."""
    sequence_lengths: list[int]
    """The S lengths, on the host."""
    scored: torch.Tensor
    """(M,) int64: packed index of the token *before* each response token, whose output predicts it."""
    labels: torch.Tensor
    """(M,) int64, the response tokens themselves."""
    response_mask: torch.Tensor
    """(B, R) bool, where in the padded rows the M scored tokens lie."""
    share: SequenceShare | None = None
    """Under sequence parallelism, which part this is: tokens and scored tokens are then this rank's alone."""

    def unpack(self, scored_values: torch.Tensor) -> torch.Tensor:
        """(M,) -> (B, R) float32, zero outside the response mask; differentiable; a share's values are gathered."""
        if self.share is not None:
            scored_values = self.share.gather(scored_values)
        padded = torch.zeros(self.response_mask.shape, dtype=torch.float32, device=scored_values.device)
        return padded.masked_scatter(self.response_mask, scored_values.float())


def pack(rows: Mapping[str, torch.Tensor]) -> PackedBatch:
    """Removes the padding of rows: `input_ids`, `attention_mask`, `position_ids` (B, T), `response_mask` (B, R).

    The last R of a row's T positions are the response.

    Raises:
        ValueError: a row without any token, or a response token that has no attended token before it.
    """
    input_ids = rows["input_ids"]
    attended_BT, scored_BR = rows["attention_mask"].bool(), rows["response_mask"].bool()
    lengths = attended_BT.sum(-1)
    prompt_length = attended_BT.size(1) - scored_BR.size(1)
    predicts_BR = attended_BT[:, prompt_length - 1 : -1]
    if not bool((lengths > 0).all()) or not bool((predicts_BR & attended_BT[:, prompt_length:])[scored_BR].all()):
        raise ValueError(
            "attention_mask and response_mask do not fit: every row needs a token, and every response token must be "
            f"attended and follow an attended one; rows have {lengths.tolist()} tokens and "
            f"{scored_BR.sum(-1).tolist()} response tokens. Prompts are padded on the left, responses on the right."
        )
    packed_index_BT = (attended_BT.flatten().cumsum(0) - 1).view_as(attended_BT)
    return PackedBatch(
        input_ids=input_ids[attended_BT].unsqueeze(0),
        position_ids=rows["position_ids"][attended_BT].unsqueeze(0),
        cu_seqlens=nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        sequence_lengths=lengths.tolist(),
        scored=packed_index_BT[:, prompt_length - 1 : -1][scored_BR],
        labels=input_ids[:, prompt_length:][scored_BR],
        response_mask=scored_BR,
    )


class PackedModel(nn.Module):
    """A Hugging Face model with its head taken off: `hidden_states` runs the backbone over a packed batch."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.saving: AbstractContextManager = nullcontext()  # where autograd keeps what the backbone's backward needs

    def hidden_states(self, packed: PackedBatch) -> torch.Tensor:
        """(N, D) outputs of the backbone, after its final norm."""
        with self.saving:
            outputs: Any = self.hf.base_model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                use_cache=False,
                cu_seqlens=packed.cu_seqlens,
                sequence_lengths=packed.sequence_lengths,
                sequence_parallel=packed.share and packed.share.parallel,
            )
        return outputs.last_hidden_state[0]


class PolicyModel(PackedModel):
    """Log-probability and entropy of each response token; the full logits never exist."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        scaled = {name: getattr(hf.config, name) for name in _SCALED_LOGITS if getattr(hf.config, name, None)}
        if any(value != 1 for value in scaled.values()):
            raise ValueError(
                f"{type(hf).__name__} changes its logits after the head ({scaled}), which is not supported."
            )

    def forward(
        self, packed: PackedBatch, temperature: float, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores the response tokens under softmax(logits / temperature).

        Args:
            packed: N tokens, M of them scored.
            temperature: the sampling temperature of the rollout, > 0.
            with_entropy: whether to compute the entropy too.

        Returns:
            Log-probabilities, and entropies in nats or None: (M,) float32, both differentiable.

        Raises:
            ValueError: temperature not positive.
        """
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: log-probabilities of a greedy policy do not exist; use > 0.")
        hidden_MD = self.hidden_states(packed)[packed.scored]
        head = self.hf.get_output_embeddings()
        rows = max(1, LOGITS_PER_CHUNK // head.weight.size(0))
        if len(hidden_MD) <= rows:
            return _score_tokens(hidden_MD, packed.labels, head, temperature, with_entropy)
        chunks = [
            checkpoint(_score_tokens, hidden, labels, head, temperature, with_entropy, use_reentrant=False)
            for hidden, labels in zip(hidden_MD.split(rows), packed.labels.split(rows), strict=True)
        ]
        log_probs, entropies = zip(*chunks, strict=True)
        return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def _score_tokens(
    hidden_MD: torch.Tensor, labels_M: torch.Tensor, head: nn.Module, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits_MV = head(hidden_MD).float() / temperature
    normalizer_M = logits_MV.logsumexp(-1)
    log_probs_M = logits_MV.gather(-1, labels_M.unsqueeze(-1)).squeeze(-1) - normalizer_M
    if not with_entropy:
        return log_probs_M, None
    probs_MV = (logits_MV - normalizer_M.unsqueeze(-1)).exp()
    return log_probs_M, normalizer_M - (probs_MV * logits_MV).sum(-1)


class ValueModel(PackedModel):
    """The value of the state before each response token."""

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        """(M,) float32."""
        # copy: the hooks of FSDP2 on an output that is a view would be lost in an in-place operation.
        return self.hf.score(self.hidden_states(packed)[packed.scored]).squeeze(-1).to(torch.float32, copy=True)


class RewardModel(PackedModel):
    """One score a sequence, read at its last token."""

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        """(S,) float32."""
        last = packed.cu_seqlens[1:].long() - 1
        return self.hf.score(self.hidden_states(packed)[last]).squeeze(-1).to(torch.float32, copy=True)
