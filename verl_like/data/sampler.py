"""Chooses the rows in the batch of a step, as a pure function of seed and step."""

import numpy as np


class EpochSampler:
    """Orders the rows anew in each epoch and divides them into batches. Rows that are left over at
    the end of an epoch are not used in it.

    It has no state, so a resumed run needs only the number of its step. The order depends on the
    epoch and on `seed`, which is below 2**32. Without `shuffle` it is that of the dataset. Raises
    ValueError if a batch takes more rows than there are. The message names the settings `key`_files
    and `key`_batch_size.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        key: str = "data.train",
    ) -> None:
        if num_rows < batch_size:
            raise ValueError(
                f"{key}_files has {num_rows} rows, fewer than {key}_batch_size={batch_size}: add "
                f"rows, or lower {key}_batch_size"
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.num_batches_per_epoch = num_rows // batch_size

    def batch(self, step: int) -> tuple[int, list[int]]:
        """Returns the epoch and the indices of the rows of a step. Steps are counted from 0 over
        all epochs."""
        epoch, position = divmod(step, self.num_batches_per_epoch)
        order = np.arange(self.num_rows)
        if self.shuffle:
            # NumPy guarantees that the stream of RandomState is the same in all versions. It does
            # not guarantee this for Generator.
            random = np.random.RandomState([self.seed, epoch])
            order = random.permutation(self.num_rows)
        start = position * self.batch_size
        return epoch, order[start : start + self.batch_size].tolist()
