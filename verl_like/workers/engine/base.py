"""The protocol of training engines: what the roles need of the engine that runs their model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from verl_like.workers.models.packing import PackedBatch, Rows
from verl_like.workers.planning.flops import ModelCost
from verl_like.workers.weights.file_layout import FileLayout

FileDigests = dict[str, dict[str, Any]]
"""What `file_digest` returns of some files, by their names."""


class TrainingEngine(Protocol):
    """One model over the ranks of a worker group, and its optimizer if it is trained.

    The methods communicate, so every rank calls the same methods, with the same number of
    micro-batches. Gradients of the ranks are added, not averaged, so a loss must be divided by
    counts over all ranks.
    """

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """The name of the torch dtype in which the layers compute."""
    sequence_parallel_size: int
    """The number of ranks that have the same rows and share their tokens."""
    cost: ModelCost
    """The FLOPs of a forward pass."""
    training_steps: int
    """The number of training steps done, on which the learning rate depends."""

    @property
    def lr(self) -> float:
        """The learning rate of the present training step."""

    def on_device(self, *, train: bool = False) -> AbstractContextManager[None]:
        """Returns a context in which the model can run, and with `train` can be differentiated."""

    def without_adapter(self) -> AbstractContextManager[None]:
        """Returns a context in which the model computes without its adapter, if it has one."""

    def pack(self, rows: Rows) -> PackedBatch:
        """Packs rows of the host, and returns this rank's part of them on the device."""

    def run(self, packed: PackedBatch, *inputs: Any) -> Any:
        """Runs the model on a packed batch. `inputs` are further arguments of the model."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds the gradient of a loss to those since the last step.

        The call before `step` has `is_last`. After it the gradients are summed over all ranks.
        """

    def step(self) -> float:
        """Does an optimizer step with the gradients, and returns their norm before clipping.

        If the norm is not finite, the step is skipped, and the parameters stay as they were. Too
        many such steps in a row raise FloatingPointError.
        """

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names in the Hugging Face model and parameters, which are tensors or DTensors.

        Tied parameters come once. Of a model with an adapter only trained parameters come.
        """

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names in the Hugging Face model and buffers that belong to it, see
        `model_buffers`.

        Every rank has whole buffers.
        """

    @property
    def file_layout(self) -> FileLayout:
        """Where the tensors of a checkpoint's files lie in those parameters and buffers."""

    def save(self, path: str) -> None:
        """Copies the training state, and begins to write the copy to the folder `path`.

        The training state is parameters, buffers, optimizer state and step count. Files that make
        the folder a Hugging Face model are written, too. Training can continue meanwhile, but
        `saved_files` must be called before the next `save`.
        """

    def saved_files(self, *, wait: bool) -> FileDigests | None:
        """Returns `file_digest` of each file that this rank wrote in the last `save`, by its name.

        While files are being written, it waits for them if `wait` is True, and otherwise returns
        None. Raises OSError, which names the file, if a file cannot be written.
        """

    def load(self, path: str, optimizer_only: bool = False) -> list[str]:
        """Loads what `save` wrote, also on another number of ranks, and returns messages for the
        user.

        With `optimizer_only` it loads the optimizer's state alone, without the step count, for a
        schedule that begins again. Raises ValueError if there is no checkpoint.
        """

    def save_hf(self, path: str) -> None:
        """Writes the model and its tokenizer as a Hugging Face folder, in the dtype that the layers
        compute in."""
