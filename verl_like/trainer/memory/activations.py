"""How many values a token has in a decoder layer, for the sums of a GPU's memory.

The numbers were counted in Llama, Qwen3 and Qwen3-MoE, from what autograd saves.
"""

from dataclasses import dataclass

from torch import nn

MATRICES_OF_AN_EXPERT = 3
"""Gate, up and down. Each has hidden times intermediate parameters."""
SAVED_OF_AN_EXPERT = 2
"""Hidden states that autograd saves for a token of an expert: its input and its output."""
LIVE_OF_AN_EXPERT = 3.45
"""Hidden states that exist at one time for a token of an expert, in a pass without gradients. They
are 4: the input, the output, this times its weight, and this in the order of tokens. But a part of
their memory is free then, and this number was measured."""


@dataclass(frozen=True)
class ExpertSizes:
    """What the feed-forward block of one layer with experts computes of a token."""

    intermediate: int
    """The intermediate sizes of the experts that compute a token together."""
    shared_intermediate: int
    """The intermediate size of the experts that compute every token."""


@dataclass(frozen=True)
class TokenValues:
    """Values of one token in the largest decoder layer of a model."""

    saved: int
    """Values that autograd saves, without checkpointing."""
    live: float
    """Values that exist at one time in a pass without gradients."""
    expanded: int
    """How many hidden states of a token go through experts. It is 0 in a dense model."""

    @classmethod
    def of(
        cls,
        layers: list[nn.Module],
        hidden: int,
        intermediate: int,
        num_selected: int,
        *,
        has_norms: bool,
        has_adapter: bool,
    ) -> "TokenValues":
        """Counts the values of a model's layers.

        Args:
            layers: the decoder layers.
            hidden: the size of hidden states.
            intermediate: the intermediate size of layers without experts.
            num_selected: how many experts of a layer compute a token.
            has_norms: True if queries and keys are normalised.
            has_adapter: True if an adapter is trained in place of the model.
        """
        saved_hidden = 13
        if has_norms:
            saved_hidden = 20
        live_intermediate = 3
        if has_adapter:
            live_intermediate = 4
        saved = saved_hidden * hidden
        live = 4 * hidden
        experts = []
        for layer in layers:
            experts += experts_of(layer, hidden, num_selected)
        is_all_experts = len(experts) == len(layers)
        # A model with experts may have dense layers before them.
        saved_of_blocks: list[int] = []
        live_of_blocks: list[float] = []
        if not is_all_experts:
            saved_of_blocks.append(4 * intermediate)
            live_of_blocks.append(live_intermediate * intermediate)
        expanded = num_selected * hidden
        for sizes in experts:
            used = sizes.intermediate + sizes.shared_intermediate
            saved_of_hidden = SAVED_OF_AN_EXPERT * expanded
            if sizes.shared_intermediate:  # its output may be multiplied by a gate
                saved_of_hidden += hidden
            live_of_hidden = LIVE_OF_AN_EXPERT * expanded
            live_of_up = expanded + live_intermediate * used
            saved_of_blocks.append(4 * used + saved_of_hidden)
            live_of_blocks.append(max(live_of_hidden, live_of_up))
        return cls(
            saved=saved + max(saved_of_blocks),
            live=live + max(live_of_blocks),
            expanded=num_selected if experts else 0,
        )


def experts_of(layer: nn.Module, hidden: int, num_selected: int) -> list[ExpertSizes]:
    """Returns the sizes of the block with experts of a layer, or nothing if it has none.

    transformers stacks the matrices of experts in parameters (experts, out, in).
    """
    per_size = MATRICES_OF_AN_EXPERT * hidden
    found = []
    for path, experts in layer.named_modules():
        block_path, _, name = path.rpartition(".")
        if name != "experts":
            continue
        stacked = [matrices for matrices in experts.parameters() if matrices.ndim == 3]
        of_an_expert = sum(matrices[0].numel() for matrices in stacked)
        of_shared = 0
        for part in layer.get_submodule(block_path).children():
            matrices = [matrix.numel() for matrix in part.parameters() if matrix.ndim == 2]
            # A router has one matrix.
            if part is not experts and len(matrices) >= MATRICES_OF_AN_EXPERT:
                of_shared += sum(matrices)
        sizes = ExpertSizes(
            intermediate=num_selected * of_an_expert // per_size,
            shared_intermediate=of_shared // per_size,
        )
        found.append(sizes)
    return found
