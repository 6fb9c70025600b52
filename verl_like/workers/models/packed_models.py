"""The trained models: a Hugging Face backbone over packed sequences, and a head that reads only the
scored tokens."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl_like.workers.models.linear_log_prob import linear_log_prob
from verl_like.workers.models.packing import PackedBatch

# Legend: N tokens without padding, M scored tokens, S sequences, D hidden size.


class PackedModel(nn.Module):
    """A Hugging Face model with its head taken off: `hidden_states` runs the backbone over a packed
    batch."""

    auto_class: ClassVar[Any]
    """transformers' class that loads it."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.heads = nn.ModuleDict()  # besides the model's own
        # Where autograd keeps what the backbone's backward needs
        self.saving: AbstractContextManager = nullcontext()

    def hidden_states(self, packed: PackedBatch) -> torch.Tensor:
        """(N, D) outputs of the backbone, after its final norm."""
        with self.saving:
            outputs: Any = self.hf.base_model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                use_cache=False,
                cu_seqlens=packed.cu_seqlens,
                # Not as a list: compiled layers would be compiled again for every other number of
                # sequences.
                sequence_lengths=torch.tensor(packed.sequence_lengths),
                sequence_parallel=packed.exchange,
            )
        return outputs.last_hidden_state[0]


class PolicyModel(PackedModel):
    """Log-probability of each response token, and more of its distribution; the full logits never
    exist."""

    auto_class = AutoModelForCausalLM

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        self.logit_scale, self.softcap = changes_of_logits(hf)

    def forward(
        self,
        packed: PackedBatch,
        temperature: float,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """(M,) float32 each: what `linear_log_prob` computes for the response tokens at the
        rollout's temperature, which is positive or raises ValueError."""
        if temperature <= 0:
            raise ValueError(
                f"temperature={temperature}: log-probabilities of a greedy policy do not exist; "
                "use > 0."
            )
        return linear_log_prob(
            self.hidden_states(packed)[packed.scored],
            self.hf.get_output_embeddings().weight,
            packed.labels,
            temperature=temperature,
            scale=self.logit_scale,
            softcap=self.softcap,
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
        )


def changes_of_logits(hf: PreTrainedModel) -> tuple[float, float | None]:
    """What the model multiplies its head's output by, and the bound of its logits, or None.

    Raises ValueError for a head that is not one matrix, or logits that are changed in another way.
    """
    head = hf.get_output_embeddings()
    config = hf.config.get_text_config()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"The head of {type(hf).__name__} is {head}; only one matrix without a bias is "
            "supported."
        )
    unsupported = ["lm_head_multiplier", "output_multiplier", "logits_soft_cap"]
    if config.model_type == "hyperclovax":  # multiplies by what all others divide by
        unsupported.append("logits_scaling")
    found = {name: getattr(config, name, None) for name in unsupported}
    if any(value not in (None, 1) for value in found.values()):
        raise ValueError(
            f"{type(hf).__name__} changes its logits after the head ({found}), which is not "
            "supported."
        )
    scale = (getattr(config, "logit_scale", None) or 1) / (
        getattr(config, "logits_scaling", None) or 1
    )
    return scale, getattr(config, "final_logit_softcapping", None)


def head_name(hf: PreTrainedModel) -> str:
    """The name that a model's class has for the head that is not a language model's."""
    return "score" if hasattr(hf, "score") else "classifier"


class ValueModel(PackedModel):
    """The value of the state before each response token."""

    auto_class = AutoModelForTokenClassification

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        """(M,) float32."""
        values = self.hf.get_submodule(head_name(self.hf))(
            self.hidden_states(packed)[packed.scored]
        )
        # copy: the hooks of FSDP2 on an output that is a view would be lost in an in-place
        # operation.
        return values.squeeze(-1).to(torch.float32, copy=True)


class RewardModel(PackedModel):
    """One score a sequence, read at its last token."""

    auto_class = AutoModelForSequenceClassification

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        """(S,) float32."""
        last = packed.cu_seqlens[1:].long() - 1
        return (
            self.hf.get_submodule("score")(self.hidden_states(packed)[last])
            .squeeze(-1)
            .to(torch.float32, copy=True)
        )
