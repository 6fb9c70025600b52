"""The models of the roles: a Hugging Face backbone over packed sequences, and a head that reads
only the scored tokens."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl_like.workers.models.linear_log_prob import linear_log_prob
from verl_like.workers.models.packing import PackedBatch
from verl_like.workers.models.routed_experts import SWITCH_OFF, RouterShape, Routing
from verl_like.workers.models.shared_prompts import rows_at

# Legend: N tokens of the packed batch, M scored tokens, S sequences, D hidden size.


class PackedModel(nn.Module):
    """A Hugging Face model whose backbone runs over a packed batch.

    A subclass applies the head in `forward`.
    """

    auto_class: ClassVar[Any]
    """transformers' class that loads the model."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.heads = nn.ModuleDict()
        """Further heads, besides the model's own."""
        self.saving: AbstractContextManager = nullcontext()
        """A context that says where autograd keeps tensors for the backbone's backward pass."""
        self.routers: RouterShape | None = None
        """The shape of the routers if they can replay and record, see `attach_replay`."""
        self.replays = False
        """Whether passes may be given a routing that the routers replay."""

    def hidden_states(self, packed: PackedBatch) -> Tensor:
        """Runs the backbone, and returns its outputs after the final norm, (N, D), for the tokens
        in `packed`.

        If ranks share the batch, these are this rank's share of the tokens, filler included.
        Attention exchanges tokens for heads with the other ranks (`packed.exchange`, see
        SequenceExchange), so the tokens attend to all tokens of their sequence.

        Routers replay `packed.routed_experts`, and fill `packed.record` and `packed.load`. Raises
        ValueError if they cannot.
        """
        record = packed.record
        load = packed.load
        if packed.routed_experts is not None and not self.replays:
            raise ValueError(
                "a pass is given the routing of experts, and the model of this role does not "
                f"replay it; {SWITCH_OFF}"
            )
        routing = None
        if packed.routed_experts is not None or record is not None or load is not None:
            routing = Routing(packed.routed_experts, load)
            routing.counted = packed.counted
        further: dict[str, Any] = routing.arguments if routing else {}
        if packed.token_places is not None:
            further["key_places"] = packed.token_places
            further["query_lengths"] = torch.tensor(packed.query_lengths)
            further["cu_queries"] = packed.cu_queries
        with self.saving:
            outputs: Any = self.hf.base_model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                use_cache=False,
                cu_seqlens=packed.cu_seqlens,
                # With a list compiled layers would be compiled again for each number of sequences.
                sequence_lengths=torch.tensor(packed.sequence_lengths),
                sequence_parallel=packed.exchange,
                **further,
            )
        if routing:
            shape = routing.require_all(self.routers)
            if record is not None:
                record.selected = packed.of_sequences(routing.own_selection(shape.dtype))
            if load is not None:
                routing.fill(load, shape, packed.exchange)
        return outputs.last_hidden_state[0]

    def scored_states(self, packed: PackedBatch) -> Tensor:
        """Returns the `hidden_states` that predict the scored tokens, (M, D)."""
        hidden = self.hidden_states(packed)
        if packed.token_places is None:
            return hidden[packed.scored]
        return rows_at(hidden, packed.scored)


class PolicyModel(PackedModel):
    """A language model, which gives the log-probabilities of the scored tokens.

    All logits never exist at the same time.
    """

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
    ) -> tuple[Tensor, ...]:
        """Returns what `linear_log_prob` computes for the scored tokens, (M,) float32 each.

        Raises ValueError for a temperature that is not positive.
        """
        if temperature <= 0:
            raise ValueError(
                f"temperature={temperature}: log-probabilities of a greedy policy do not exist; "
                "use > 0."
            )
        return linear_log_prob(
            self.scored_states(packed),
            self.hf.get_output_embeddings().weight,
            packed.labels,
            temperature=temperature,
            scale=self.logit_scale,
            softcap=self.softcap,
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
        )


def changes_of_logits(hf: PreTrainedModel) -> tuple[float, float | None]:
    """Returns how a language model changes the output of its head: a factor, and a bound or None.

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
    if config.model_type == "hyperclovax":  # it multiplies by what other models divide by
        unsupported.append("logits_scaling")
    found = {name: getattr(config, name, None) for name in unsupported}
    if any(value not in (None, 1) for value in found.values()):
        raise ValueError(
            f"{type(hf).__name__} changes its logits after the head ({found}), which is not "
            "supported."
        )
    multiplier = getattr(config, "logit_scale", None) or 1
    divisor = getattr(config, "logits_scaling", None) or 1
    softcap = getattr(config, "final_logit_softcapping", None)
    return multiplier / divisor, softcap


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Returns the repeated blocks of a model, which are gathered and computed one at a time."""
    assert hf._no_split_modules is not None, f"{type(hf).__name__} names no repeated blocks"
    names = set(hf._no_split_modules)
    return [module for module in hf.modules() if type(module).__name__ in names]


def head_name(hf: PreTrainedModel) -> str:
    """Returns the name of the head of a model that is not a language model."""
    return "score" if hasattr(hf, "score") else "classifier"


class ValueModel(PackedModel):
    """A model with a value head, which gives the value of the state before each scored token."""

    auto_class = AutoModelForTokenClassification

    def forward(self, packed: PackedBatch) -> Tensor:
        """Returns the values, (M,) float32."""
        head = self.hf.get_submodule(head_name(self.hf))
        values_M1 = head(self.scored_states(packed))
        # The output is a copy, because FSDP2's hooks on a view would be lost by an in-place
        # operation on it.
        values_M = values_M1.squeeze(-1)
        return values_M.to(torch.float32, copy=True)


class RewardModel(PackedModel):
    """A model with a score head, which gives one score for each sequence, at its last token."""

    auto_class = AutoModelForSequenceClassification

    def forward(self, packed: PackedBatch) -> Tensor:
        """Returns the scores, (S,) float32."""
        last_S = packed.cu_seqlens[1:].long() - 1
        hidden_SD = self.hidden_states(packed)[last_S]
        head = self.hf.get_submodule("score")
        scores_S = head(hidden_SD).squeeze(-1)
        return scores_S.to(torch.float32, copy=True)
