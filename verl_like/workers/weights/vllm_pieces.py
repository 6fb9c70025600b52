"""Which pieces of Hugging Face's tensors are in a parameter of vLLM, which may be fused of several
and is sharded over the processes of a replica.

vLLM imports this module in the process of its worker; nothing else does.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class Source(NamedTuple):
    """A Hugging Face tensor that a parameter or buffer of vLLM is made of."""

    hf_name: str
    shape: torch.Size


class Piece(NamedTuple):
    """Values of a Hugging Face tensor."""

    hf_name: str
    first_row: int
    """Where the piece begins in the Hugging Face tensor."""
    first_column: int
    values: Tensor
    """(rows, columns)."""


class _Part(NamedTuple):
    """Rows of a Hugging Face tensor that are next to each other in vLLM's parameter too, before it
    is sharded."""

    hf_name: str
    first_row: int
    """Where the part begins in the Hugging Face tensor."""
    num_rows: int
    num_copies: int
    """How many neighbouring ranks have each row: keys and values of a head are on several ranks
    where there are more ranks than heads."""


def cut_parameter(
    module: Any, leaf: str, parameter: Tensor, sources: Sequence[Source]
) -> list[Piece] | None:
    """Cuts this process's shard of a vLLM parameter or buffer into pieces of its sources.

    Returns those that this process answers for: of the copies of a piece in a replica one counts.
    None if the sources do not add up to the parameter.

    Args:
        module: the layer that has the parameter by the name `leaf`.
        sources: what the parameter is made of, in the order there.
    """
    rank = get_tensor_model_parallel_rank()
    # A shard has whole outputs of the layer, or all outputs for some inputs.
    by_rows = isinstance(module, ColumnParallelLinear | VocabParallelEmbedding)
    by_columns = isinstance(module, RowParallelLinear) and leaf == "weight"
    num_shards = module.tp_size if by_rows or by_columns else 1
    num_rows = math.prod(parameter.shape[:1])
    num_columns = math.prod(parameter.shape[1:])
    num_columns_of_all = num_columns * num_shards if by_columns else num_columns
    for source in sources:
        if math.prod(source.shape[1:]) != num_columns_of_all:
            return None
    if isinstance(module, VocabParallelEmbedding):
        # vLLM pads the vocabulary with zeros, which the fingerprint ignores.
        num_padded = num_rows * num_shards
        parts = [_Part(source.hf_name, 0, num_padded, 1) for source in sources]
    else:
        parts = _find_parts(module, sources)
    matrix = parameter.reshape(num_rows, num_columns)
    pieces = []
    end = 0
    for part in parts:
        start = end
        own_rows = part.num_rows * part.num_copies
        if by_rows:
            own_rows //= num_shards
        end = start + own_rows
        is_first_copy = rank % part.num_copies == 0
        if is_first_copy:
            first_row = part.first_row
            if by_rows:
                shard = rank // part.num_copies
                first_row += shard * own_rows
            first_column = rank * num_columns if by_columns else 0
            values = matrix[start:end]
            piece = Piece(part.hf_name, first_row, first_column, values)
            pieces.append(piece)
    if end != num_rows:
        return None
    is_copy_of_rank_0 = num_shards == 1 and rank > 0
    return [] if is_copy_of_rank_0 else pieces


def _find_parts(module: Any, sources: Sequence[Source]) -> list[_Part]:
    """Returns the parts of the sources that a layer's parameter is made of, in their order
    there."""
    output_sizes = getattr(module, "output_sizes", [])
    num_parts = max(len(sources), len(output_sizes))
    num_copies = [1] * num_parts
    if isinstance(module, QKVParallelLinear):
        # Queries, keys, values
        replicas = module.num_kv_head_replicas
        num_copies = [1, replicas, replicas]
    parts = []
    if len(sources) == 1:
        # The Hugging Face tensor may be fused of the same outputs, as in Phi-3.
        (source,) = sources
        first_row = 0
        for num_rows_of_copies, copies in zip(output_sizes, num_copies, strict=False):
            num_rows = num_rows_of_copies // copies
            part = _Part(source.hf_name, first_row, num_rows, copies)
            parts.append(part)
            first_row += num_rows
        if first_row == math.prod(source.shape[:1]):
            return parts
        parts = []
    for source, copies in zip(sources, num_copies, strict=False):
        num_rows = math.prod(source.shape[:1])
        part = _Part(source.hf_name, 0, num_rows, copies)
        parts.append(part)
    return parts
