"""The trained models: a Hugging Face backbone over packed sequences, with a head that reads only the scored tokens."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from verl_like.workers.linear_log_prob import linear_log_prob
from verl_like.workers.sequence_parallel import SequenceShare

# Legend: B rows, T = P + R padded sequence length, P prompt, R response, N tokens without padding, M scored tokens,
# S sequences, D hidden size.

SEQUENCE_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
"""What `pack` reads."""

_UNSUPPORTED_LOGIT_CHANGES = ("lm_head_multiplier", "output_multiplier", "logits_soft_cap")


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
                # Not as a list: compiled layers would be compiled again for every other number of sequences.
                sequence_lengths=torch.tensor(packed.sequence_lengths),
                sequence_parallel=packed.share and packed.share.parallel,
            )
        return outputs.last_hidden_state[0]


class PolicyModel(PackedModel):
    """Log-probability and entropy of each response token; the full logits never exist."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        self.logit_scale, self.softcap = _changes_of_logits(hf)

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
        return linear_log_prob(
            self.hidden_states(packed)[packed.scored],
            self.hf.get_output_embeddings().weight,
            packed.labels,
            temperature=temperature,
            scale=self.logit_scale,
            softcap=self.softcap,
            with_entropy=with_entropy,
        )


def _changes_of_logits(hf: PreTrainedModel) -> tuple[float, float | None]:
    """What the model multiplies its head's output by, and the bound of its logits, or None.

    Raises:
        ValueError: a head that is not one matrix, or logits that are changed in another way.
    """
    head, config = hf.get_output_embeddings(), hf.config.get_text_config()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(f"The head of {type(hf).__name__} is {head}; only one matrix without a bias is supported.")
    unsupported = list(_UNSUPPORTED_LOGIT_CHANGES)
    if config.model_type == "hyperclovax":  # multiplies by what all others divide by
        unsupported.append("logits_scaling")
    found = {name: getattr(config, name, None) for name in unsupported}
    if any(value not in (None, 1) for value in found.values()):
        raise ValueError(f"{type(hf).__name__} changes its logits after the head ({found}), which is not supported.")
    scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    return scale, getattr(config, "final_logit_softcapping", None)


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
