"""One row of a DataProto."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tensordict import TensorDict


@dataclass(eq=False)
class DataProtoItem:
    """One row: `batch` holds its tensors (no batch dimension), `non_tensor_batch` its objects.

    `jagged_keys` and `array_templates` (no rows; dtype and row shape) let `collate_fn` rebuild the columns.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    jagged_keys: frozenset[str] = frozenset()
    array_templates: dict[str, np.ndarray] = field(default_factory=dict)
