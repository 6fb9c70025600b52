"""The load of experts: how many tokens each of them computes, and how probable it was for them."""

from torch import Tensor

# Legend: L layers with a router, E experts.

LOAD_COUNT = "router_load/count/"
"""The beginning of the names of the metrics that count tokens, which the driver takes out of a
step's row. The numbers of layer and expert follow."""


# FSDP2 copies dataclasses among the arguments of a module, so this is none.


class RouterLoad:
    """What the routers of a model do in a pass, which fills it.

    Only tokens of rows with a scored token count. So padding does not count.
    """

    def __init__(self, with_probabilities: bool) -> None:
        self.with_probabilities = with_probabilities
        """Whether the pass fills `probabilities`."""
        self.counts: Tensor | None = None
        """How many tokens each expert has computed, (L, E) int64, without a graph."""
        self.probabilities: Tensor | None = None
        """The sums over tokens of the routers' probabilities of each expert, (L, E) float32. With
        router replay only tokens with a record count in it."""
