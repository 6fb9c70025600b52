"""What code written for verl calls of a DataProto, and the library itself does not call."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch.utils.data import DataLoader

from verl_like.protocol import merge, row_ops
from verl_like.protocol.batch import Batch


class VerlDataProto(Batch):
    """Methods of verl's DataProto for its users."""

    def to_tensordict(self) -> TensorDict:
        """Returns all of the batch as one TensorDict with the rows as its batch dimension.

        Tensors stay as they are. An array becomes a NonTensorStack with an element for each row,
        and an entry of meta_info becomes NonTensorData. `from_tensordict` is the inverse. Raises
        ValueError where a name is used twice, for arrays with more than one dimension, and for a
        key of meta_info that is no text.
        """
        self.check_consistency()
        tensors = self.tensors()
        names = [*tensors, *self.non_tensor_batch, *self.meta_info]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(
                f"to_tensordict: {merge.names(twice)} are names of more than one column or entry "
                "of meta_info, and a TensorDict has one of each; rename or pop one of them first."
            )
        unnamed = [key for key in self.meta_info if not isinstance(key, str)]
        if unnamed:
            raise ValueError(
                f"to_tensordict: meta_info has the keys {unnamed}, and a TensorDict has names "
                "alone; use texts as keys."
            )
        data = TensorDict(tensors, batch_size=[len(self)])
        for name, array in self.non_tensor_batch.items():
            if array.ndim > 1:
                raise ValueError(
                    f"to_tensordict: non_tensor_batch[{name!r}] has shape {array.shape}, and a "
                    "NonTensorStack has one element a row; make it a tensor column."
                )
            rows = [NonTensorData(row, batch_size=[]) for row in array]
            if rows:
                data.set(name, NonTensorStack(*rows))
            else:
                data.set(name, NonTensorStack.from_list([]))
        for name, value in self.meta_info.items():
            data.set_non_tensor(name, value)
        return data

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None
    ) -> Self:
        """Returns the batch of a TensorDict with one batch dimension, see `to_tensordict`.

        `meta_info` is added to the entries that the TensorDict has. An array gets the dtype of its
        elements where these are NumPy scalars of one dtype, else it has objects. Raises ValueError
        for another number of batch dimensions, and for an entry that both have.
        """
        if tensor_dict.batch_dims != 1:
            raise ValueError(
                f"from_tensordict: the TensorDict has batch_size {list(tensor_dict.batch_size)}; "
                "give one whose only batch dimension is the rows, e.g. by reshape(-1)."
            )
        tensors: dict[str, Tensor] = {}
        arrays = {}
        entries: dict[str, Any] = {}
        for name in map(str, tensor_dict.keys()):
            value = tensor_dict.get(name)
            if isinstance(value, NonTensorStack):
                arrays[name] = array_of_rows([row.data for row in value])
            elif isinstance(value, NonTensorData):
                entries[name] = value.data
            else:
                tensors[name] = value
        given = dict(meta_info or {})
        twice = entries.keys() & given.keys()
        if twice:
            raise ValueError(
                f"from_tensordict: the TensorDict has entries {merge.names(twice)}, which "
                "meta_info has, too; leave them out of one."
            )
        batch = None
        if tensors:
            batch = row_ops.tensor_dict(tensors, len(tensor_dict))
        return cls(batch, arrays, entries | given)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Yields mini-batches of `mini_batch_size` rows, `epochs` times over, each with the
        meta_info.

        `dataloader_kwargs` go to torch's DataLoader, e.g. {"shuffle": True}, which needs a `seed`:
        the order is then another one in each epoch and depends on nothing but the seed. Raises
        ValueError (at the call, not at the first item) if the rows do not divide or if shuffle has
        no seed.
        """
        options = dict(dataloader_kwargs or {})
        if mini_batch_size <= 0 or len(self) % mini_batch_size:
            raise ValueError(
                f"make_iterator: {len(self)} rows do not divide into mini-batches of "
                f"{mini_batch_size}; choose a mini-batch size that divides the rows of one rank."
            )
        if options.get("shuffle") and seed is None:
            raise ValueError(
                "make_iterator: shuffle without a seed cannot be reproduced; pass seed=."
            )
        if len(self) == 0:
            return iter(())
        # Always its own generator: a DataLoader draws from torch's global one even when it does not
        # shuffle.
        generator = torch.Generator().manual_seed(seed or 0)
        # `__getitems__` gives a mini-batch as a whole, so there is nothing to collate.
        loader: DataLoader[Any] = DataLoader(
            cast(Any, self),
            mini_batch_size,
            collate_fn=lambda rows: rows,
            generator=generator,
            **options,
        )
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    def __getitems__(self, indices: list[int]) -> Self:
        """Returns rows for torch's DataLoader, in one call instead of one by one."""
        return self.select_idxs(indices)

    def reorder(self, indices: Tensor) -> None:
        """Orders the rows in place: row i becomes the old row indices[i]. Raises ValueError unless
        `indices` is a permutation."""
        order = row_ops.row_indices(indices, len(self))
        in_order = order.sort().values
        if not torch.equal(in_order, torch.arange(len(self))):
            raise ValueError(
                f"reorder: the {len(order)} indices are not a permutation of the {len(self)} rows; "
                "use select_idxs."
            )
        reordered = self.select_idxs(order)
        self.batch = reordered.batch
        self.non_tensor_batch = reordered.non_tensor_batch

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Renames tensor columns in place and returns self. Two names may be exchanged."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"rename: {len(old)} old keys but {len(new)} new keys.")
        tensors = self.tensors()
        merge.pick_keys("rename", "batch", tensors, old)
        new_names = dict(zip(old, new, strict=True))
        renamed = {new_names.get(name, name): tensor for name, tensor in tensors.items()}
        if len(renamed) != len(tensors):
            raise ValueError(
                f"rename: {merge.names(new)} would overwrite a column of {merge.names(tensors)}; "
                "pop that one first."
            )
        if self.batch is not None:
            self.batch = TensorDict(renamed, batch_size=[len(self)], device=self.batch.device)
        return self

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> Self:
        """Returns row i repeat_times[i] times, its copies side by side."""
        counts = torch.as_tensor(repeat_times, dtype=torch.int64).cpu()
        is_negative = counts < 0
        if counts.shape != (len(self),) or is_negative.any():
            raise ValueError(
                f"sample_level_repeat: needs one count >= 0 for each of the {len(self)} rows, got "
                f"{counts.tolist()}."
            )
        return self.select_idxs(torch.repeat_interleave(counts))

    def chunk(self, chunks: int) -> list[Self]:
        """Splits into `chunks` equal parts. A batch without columns gives `chunks` copies.

        Raises ValueError if the number of rows does not divide.
        """
        if chunks <= 0:
            raise ValueError(f"chunk: the number of chunks must be positive, got {chunks}.")
        if len(self) % chunks:
            raise ValueError(
                f"chunk: {len(self)} rows do not divide into {chunks} equal chunks; pad a copy "
                f"with pad_dataproto_to_divisor(data, {chunks}), or use split(split_size), whose "
                "last piece may be short."
            )
        size = len(self) // chunks
        starts = [index * size for index in range(chunks)]
        return [self.slice(start, start + size) for start in starts]

    def split(self, split_size: int) -> list[Self]:
        """Splits into pieces of `split_size` rows, of which the last one may be short. Without rows
        there is one empty piece."""
        if split_size <= 0:
            raise ValueError(f"split: split_size must be positive, got {split_size}.")
        starts = range(0, max(len(self), 1), split_size)
        return [self.slice(start, start + split_size) for start in starts]


def array_of_rows(rows: list[Any]) -> np.ndarray:
    """Returns an array (B,) of these elements, one a row."""
    dtypes = {row.dtype if isinstance(row, np.generic) else None for row in rows}
    if len(dtypes) == 1 and None not in dtypes:
        return np.array(rows, dtype=dtypes.pop())
    return row_ops.object_array(rows)
