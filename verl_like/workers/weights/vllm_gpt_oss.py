"""Loads updates into vLLM's gpt-oss, whose `load_weights` copies values past the loaders of its
parameters.

While vLLM loads an update, a layer is empty until its loaders have got all of its values. What is
copied past them is lost. vLLM imports this module in the process of its worker; nothing else does.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from verl_like.workers.weights.exports import NamedTensor


class GptOssUpdates:
    """Gives the loaders single experts, and copies sinks when the update is loaded.

    From then on `model.load_weights` does so.
    """

    def __init__(self, model: Any) -> None:
        self.load = model.load_weights
        self.sinks: dict[str, Tensor] = {}
        """The attention sinks of the update that is loaded, by name."""
        model.load_weights = self.load_weights

    def load_weights(self, weights: Iterable[NamedTensor]) -> set[str]:
        """Loads all weights but sinks, which are kept. Returns the names of what was loaded."""
        return self.load(self._without_sinks(weights))

    def _without_sinks(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in weights:
            before, separator, leaf = name.partition(".experts.")
            if name.endswith(".sinks"):
                self.sinks[name] = tensor.clone()
            elif separator:
                for number, of_expert in enumerate(tensor):
                    yield f"{before}.experts.{number}.{leaf}", of_expert
            else:
                yield name, tensor

    def finish(self) -> None:
        """Copies the sinks, after the layers have got their memory again."""
        self.load(self.sinks.items())
        self.sinks = {}
