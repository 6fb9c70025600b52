"""What a method that was written for verl gets and returns: batches with padded columns."""

import torch

from verl_like.protocol import PAD_COLUMN, DataProto
from verl_like.protocol.padded import (
    VERL_COLUMNS,
    has_jagged_prompts,
    padded,
    strip,
    without_padding,
)
from verl_like.single_controller.decorator import MethodSpec
from verl_like.single_controller.shard import select_columns


def argument_of(spec: MethodSpec, data: DataProto) -> DataProto:
    """Returns the batch as the method reads it: with padded columns, unless it takes jagged ones.

    Raises ValueError for jagged prompts without the meta entry `padding`, which says how wide
    padded columns are.
    """
    columns = spec.read_columns
    if spec.jagged or not has_jagged_prompts(data):
        if columns is None:
            return data
        return select_columns(data, columns)
    if columns is None:
        return padded(data)
    return padded(data, (*columns, PAD_COLUMN))


def result_of(spec: MethodSpec, result: DataProto, data: DataProto) -> DataProto:
    """Returns what a method returned for a batch, without padding.

    Returned prompts and responses in verl's layout become jagged, as do columns (B, R, ...) beside
    the responses of the batch. Any other result comes back as it is.
    """
    if spec.jagged or not has_jagged_prompts(data):
        return result
    columns = result.tensors()
    if "input_ids" in columns and "attention_mask" in columns:
        _, _, pad_token_id = data.meta_info["padding"]
        jagged = without_padding(result, pad_token_id)
        jagged.meta_info.pop("padding")  # the batch's own says how wide the columns are
        return jagged
    if len(result) != len(data):  # it has only meta_info, or rows of its own
        return result
    if "responses" not in data.tensors():  # nothing says how long columns (B, R, ...) are
        return result
    if "responses" in columns:
        given = padded(data, ["responses"]).tensors()
        if not torch.equal(columns["responses"], given["responses"]):
            raise ValueError(
                f"{spec.name} returned other responses than it was given: return input_ids and "
                "attention_mask with them, which say how long they are"
            )
    only_tokens = data.select(batch_keys=["prompts", "responses"], non_tensor_batch_keys=[])
    stripped = strip(result, only_tokens)
    kept = [name for name in columns if name not in VERL_COLUMNS]
    return stripped.select(batch_keys=kept)
