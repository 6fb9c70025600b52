"""The padded columns of a micro-batch."""

import torch

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lengths, jagged_from_lists
from verl_like.workers.engine.micro_batch import MicroBatch
from verl_like.workers.models.packing import Rows


def test_a_column_with_several_values_a_token_is_padded_with_all_of_them():
    responses = jagged_from_lists([[5, 6], [7]], torch.int64)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    columns = {
        "prompts": jagged_from_lists([[2], [3, 4]], torch.int64),
        "responses": responses,
        "response_mask": torch.ones_like(responses),
        "of_heads": jagged_from_lengths(values, torch.tensor([2, 1])),
    }
    rows = Rows.of(DataProto.from_dict(columns))
    padded = MicroBatch(rows, "cpu")["of_heads"]
    assert padded.tolist() == [[[1, 2], [3, 4]], [[5, 6], [0, 0]]]
