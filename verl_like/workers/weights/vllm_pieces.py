"""Which pieces of Hugging Face's tensors are in a parameter of vLLM, which may be fused of several
and is sharded over the processes of a replica.

vLLM imports this module in the process of its worker; nothing else does.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
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
    is_transposed: bool = False
    """True if the matrix, or that of each expert, is transposed in vLLM."""
    expert: int | None = None
    """The number of the expert whose matrix it is; None for any other tensor."""
    shard: str = ""
    """Of an expert's matrix: `w1` for the gate, `w3` for what it multiplies, `w2` for the way
    back."""


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
    if isinstance(module, RoutedExperts):
        return _cut_experts(module, leaf, parameter, sources)
    if sources and sources[0].is_transposed:
        turned = [Source(source.hf_name, source.shape[::-1]) for source in sources]
        pieces_of_turned = cut_parameter(module, leaf, parameter, turned)
        if pieces_of_turned is None:
            return None
        return [
            Piece(piece.hf_name, piece.first_column, piece.first_row, piece.values.T)
            for piece in pieces_of_turned
        ]
    rank = get_tensor_model_parallel_rank()
    # A shard has whole outputs of the layer, or all outputs for some inputs.
    by_rows = isinstance(module, ColumnParallelLinear | VocabParallelEmbedding)
    by_columns = isinstance(module, RowParallelLinear) and leaf == "weight"
    num_shards = module.tp_size if by_rows or by_columns else 1
    if leaf == "sinks":  # one for each query head
        by_rows = True
        num_shards = get_tensor_model_parallel_world_size()
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


def _cut_experts(
    module: RoutedExperts, leaf: str, parameter: Tensor, sources: Sequence[Source]
) -> list[Piece] | None:
    """Does `cut_parameter` for the experts of a layer, (own experts, rows, columns), or (own
    experts, rows) for biases.

    `w13` has the rows of the gate, and then those of what it multiplies. Ranks have whole experts
    each, or of each expert some of the values between its matrices: rows of `w13`, columns of `w2`.
    """
    pieces = []
    num_matrices = 0
    for source in sources:
        if source.expert is None:  # nothing else can be beside the matrices of all experts
            return _cut_stacked(module, leaf, parameter, source) if len(sources) == 1 else None
        place = module.expert_map_manager.map_global_to_local(source.expert)
        if place == -1:
            continue
        num_matrices += 1
        piece = _cut_expert(module, parameter[place], source)
        if piece is not None:
            pieces.append(piece)
    matrices_per_expert = 2 if leaf.startswith("w13") else 1
    is_whole = num_matrices == matrices_per_expert * len(parameter)
    return pieces if is_whole else None


def _cut_expert(module: RoutedExperts, own: Tensor, source: Source) -> Piece | None:
    """Returns this rank's piece of an expert's matrix or bias; None if another rank counts it.

    `own` is what this rank has of the expert; of `w13` both halves. Rows and columns behind those
    of the source are padding.
    """
    parallel = module.moe_config.moe_parallel_config
    rank = parallel.tp_rank
    num_rows = source.shape[0]
    if source.shard == "w2":
        if own.ndim == 1:
            return Piece(source.hf_name, 0, 0, own[:num_rows]) if rank == 0 else None
        num_columns = source.shape[1] // parallel.tp_size
        return Piece(source.hf_name, 0, rank * num_columns, own[:num_rows, :num_columns])
    start = 0 if source.shard == "w1" else len(own) // 2
    num_rows //= parallel.tp_size
    values = own[start : start + num_rows]
    if own.ndim == 2:
        values = values[:, : source.shape[1]]
    return Piece(source.hf_name, rank * num_rows, 0, values)


def _cut_stacked(
    module: RoutedExperts, leaf: str, parameter: Tensor, source: Source
) -> list[Piece] | None:
    """Returns this rank's pieces of the matrices or biases of all experts, which are one tensor of
    Hugging Face; None if the shapes do not fit."""
    parallel = module.moe_config.moe_parallel_config
    is_back = leaf.startswith("w2")
    is_bias = leaf.endswith("bias")
    if is_bias and is_back and parallel.tp_rank > 0:
        return []
    own = parameter.unsqueeze(-1) if is_bias else parameter
    shape = (*source.shape, 1) if is_bias else source.shape
    cut_dim = 2 if is_back else 1
    if source.is_transposed and not is_bias:
        own = own.transpose(1, 2)
        cut_dim = 3 - cut_dim  # rows of the parameter are columns of the source
    num_shards = 1 if is_bias and is_back else parallel.tp_size
    expected = list(shape[1:])
    expected[cut_dim - 1] //= num_shards
    if list(own.shape[1:]) != expected:
        return None
    # In a transposed tensor the gate alternates with what it multiplies. In others they are halves.
    num_parts = 1 if is_back or source.is_transposed else 2
    part_size = own.shape[cut_dim] // num_parts
    pieces = []
    for expert in range(shape[0]):
        place = module.expert_map_manager.map_global_to_local(expert)
        if place == -1:
            continue
        for part, values in enumerate(own[place].split(part_size, cut_dim - 1)):
            first = (part * num_shards + parallel.tp_rank) * part_size
            first_row = first if cut_dim == 1 else 0
            first_column = first if cut_dim == 2 else 0
            pieces += _flat_pieces(source, expert, first_row, first_column, values)
    return pieces


def _flat_pieces(
    source: Source, expert: int, first_row: int, first_column: int, values: Tensor
) -> list[Piece]:
    """Returns pieces of a stacked tensor, whose rows are the experts with all their values, for a
    block of an expert's matrix."""
    num_columns = 1 if len(source.shape) == 2 else source.shape[2]
    if values.shape[1] == num_columns:
        start = first_row * num_columns
        return [Piece(source.hf_name, expert, start, values.reshape(1, -1))]
    pieces = []
    for row, own in enumerate(values, first_row):
        start = row * num_columns + first_column
        pieces.append(Piece(source.hf_name, expert, start, own.unsqueeze(0)))
    return pieces
