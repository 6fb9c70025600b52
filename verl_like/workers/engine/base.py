"""What the roles need of the engine that runs and trains their model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from verl_like.workers.models.packing import PackedBatch, Rows
from verl_like.workers.planning.flops import ModelCost


class TrainingEngine(Protocol):
    """One model over the ranks of a worker group, and its optimizer if it is trained.

    Every rank calls every method, with the same number of micro-batches: the methods communicate.
    Gradients of the ranks are added, not averaged, so a loss divides by counts over all ranks.
    """

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """Name of the torch dtype in which the layers compute."""
    sequence_parallel_size: int
    """Ranks that hold the same rows and share their tokens."""
    cost: ModelCost
    """FLOPs of a forward pass."""
    training_steps: int
    """Training steps done, by which the learning rate goes."""

    @property
    def lr(self) -> float:
        """Learning rate of the present training step."""

    def on_device(self, *, train: bool = False) -> AbstractContextManager[None]:
        """Within it the model can run; with `train` its passes can be differentiated."""

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within it a model that has an adapter computes as it does without."""

    def pack(self, rows: Rows) -> PackedBatch:
        """This rank's part of rows of the host, packed, on the device."""

    def run(self, packed: PackedBatch, *inputs: Any) -> Any:
        """What the model computes for a packed batch."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Adds the loss's gradient; the sum over all ranks is complete after the call with
        `is_last`, before `step`."""

    def step(self) -> float:
        """One optimizer step on the gradients added since the last one; returns their norm before
        clipping.

        Where the norm is not finite, the step is skipped: the parameters stay as they were. Too
        many such steps in a row raise FloatingPointError.
        """

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the Hugging Face model, full tensor or DTensor); tied parameters once. With an
        adapter only what is trained."""

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the Hugging Face model, tensor) of the buffers that belong to the model, see
        `model_buffers`. Every rank has all of them whole."""

    def save(self, path: str) -> None:
        """Copies parameters, buffers, optimizer and step count; the copy is written to `path` while
        training goes on, with what makes a Hugging Face folder of it. The last copy is written
        before the next is made."""

    def saved_files(self, *, wait: bool) -> dict[str, dict[str, Any]] | None:
        """`file_digest` of the files that `save` wrote on this rank, by name. None while they are
        being written, unless `wait`; raises OSError, naming the file that cannot be written."""

    def load(self, path: str, optimizer_only: bool = False) -> list[str]:
        """Reads what `save` wrote, on any number of ranks, or the optimizer's state alone, without
        the step count, for a schedule that begins anew; ValueError if none is there. Returns what
        the user should know."""

    def save_hf(self, path: str) -> None:
        """Writes the model, in the dtype the layers compute in, and its tokenizer as a Hugging Face
        folder."""
