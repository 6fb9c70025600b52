"""Weights leave the trainer complete, once and unchanged, and whatever goes wrong on the way is
noticed."""

import dataclasses
import os
import pickle
from concurrent.futures import ProcessPoolExecutor

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

from verl_like.single_controller.worker import reserve_port
from verl_like.workers.weights.arrival import WeightSyncError, check_exports
from verl_like.workers.weights.exports import WeightExport, collect_weights, iterate_weights
from verl_like.workers.weights.file_layout import FileTensor
from verl_like.workers.weights.fingerprints import fingerprint_tensor


def _parameters(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (10, 4), "layer.0": (7, 3), "norm": (4,), "layer.1": (5, 5), "head": (3, 4)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def _exports(
    parameters: list[tuple[str, torch.Tensor]], world_size: int = 2, version: int = 3
) -> list[WeightExport]:
    return [
        collect_weights(
            parameters,
            layout=LAYOUT,
            dtype=torch.float32,
            rank=rank,
            world_size=world_size,
            version=version,
            bucket_bytes=130,
        )
        for rank in range(world_size)
    ]


def test_the_exports_of_all_ranks_hold_every_parameter_once_in_the_trainers_order() -> None:
    parameters = _parameters()
    exports = _exports(parameters)
    check_exports(exports, 3)
    received = list(iterate_weights(list(reversed(exports))))
    assert [name for name, _ in received] == [name for name, _ in parameters]
    for (_, sent), (_, got) in zip(parameters, received, strict=True):
        assert torch.equal(sent, got)


def test_buckets_close_at_their_size_and_go_round_the_ranks() -> None:
    # bytes: embed 160, layer.0 84, norm 16, layer.1 100, head 48; at 130 bytes a bucket closes.
    first, second = _exports(_parameters())
    assert [(b.index, b.names) for b in first.buckets] == [(0, ("embed",)), (2, ("layer.1",))]
    assert [(b.index, b.names) for b in second.buckets] == [
        (1, ("layer.0", "norm")),
        (3, ("head",)),
    ]
    assert first.num_bytes == 260 and second.num_bytes == 148


def test_bfloat16_values_arrive_bit_for_bit() -> None:
    values = torch.tensor([1.0, -0.0, 3.14159, 1e-40, float("inf")])
    export = collect_weights([("w", values)], dtype=torch.bfloat16, rank=0, world_size=1, version=0)
    ((_, got),) = iterate_weights([export])
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.view(torch.int16), values.bfloat16().view(torch.int16))


def test_an_export_does_not_change_when_the_trainer_goes_on() -> None:
    parameter = torch.ones(4)
    export = collect_weights(
        [("w", parameter)], dtype=torch.float32, rank=0, world_size=1, version=0
    )
    parameter.zero_()
    ((_, got),) = iterate_weights([export])
    assert torch.equal(got, torch.ones(4))


def test_buffers_pickle_out_of_band_and_read_only_ones_are_read_without_a_copy() -> None:
    export = collect_weights(
        [("w", torch.randn(5000))], dtype=torch.float32, rank=0, world_size=1, version=0
    )
    buffers: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(export, protocol=5, buffer_callback=buffers.append)
    assert len(in_band) < 2000 and len(buffers) == 1
    export.buckets[0].data.flags.writeable = False  # as Ray hands it out
    ((_, got),) = iterate_weights([export])
    assert got.data_ptr() == export.buckets[0].data.ctypes.data


def test_tied_parameters_are_exported_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    export = collect_weights(
        model.named_parameters(), dtype=torch.float32, rank=0, world_size=1, version=0
    )
    assert export.num_tensors == 1 and export.buckets[0].names == ("embed.weight",)


def test_a_parameter_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="embed is exported twice"):
        _exports([*_parameters(), _parameters()[0]])


def test_the_expected_fingerprints_are_those_of_the_trainers_parameters() -> None:
    parameters = _parameters()
    exports = _exports(parameters)
    expected = {name: fingerprint_tensor(tensor) for name, tensor in parameters}
    assert check_exports(exports, 3) == expected
    # Each of the two ranks has all of them, and counts every second one.
    for turn, (name, fingerprint) in enumerate(expected.items()):
        assert exports[turn % 2].fingerprints[name] == fingerprint
        assert exports[1 - turn % 2].fingerprints[name] == 0


def test_stale_weights_are_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"version 4, version of rank 0: expected 4, got 3\."):
        check_exports(_exports(_parameters()), 4)


def test_a_missing_rank_is_noticed() -> None:
    with pytest.raises(WeightSyncError, match=r"ranks: expected \[0, 1\], got \[1\]"):
        check_exports(_exports(_parameters())[1:], 3)


def test_a_missing_bucket_is_noticed() -> None:
    first, second = _exports(_parameters())
    with pytest.raises(WeightSyncError, match=r"buckets: expected \[0, 1, 2, 3\], got \[0, 1, 2\]"):
        check_exports([first, dataclasses.replace(second, buckets=second.buckets[:1])], 3)


def test_a_parameter_left_out_of_a_bucket_is_noticed() -> None:
    first, second = _exports(_parameters())
    short = dataclasses.replace(second.buckets[0], names=("layer.0",), shapes=((7, 3),))
    with pytest.raises(WeightSyncError, match="number of tensors: expected 5, got 4"):
        check_exports([first, dataclasses.replace(second, buckets=(short, second.buckets[1]))], 3)


def test_ranks_that_exported_different_models_are_noticed() -> None:
    with pytest.raises(WeightSyncError, match="num_tensors of rank 1: expected 5, got 4"):
        check_exports([_exports(_parameters())[0], _exports(_parameters()[:4])[1]], 3)


STACKED = (3, 2, 4)
LAYOUT = {
    "stacked": [
        FileTensor(f"{row % 2}.{row // 2}", (1, 4), (4, 1), 4 * row, STACKED) for row in range(6)
    ],
    "turned": [FileTensor("turned in files", (3, 4, 2), (8, 1, 4), 0, STACKED)],
}


def _export_sharded(rank: int, port: int) -> WeightExport:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2))
    placements = {
        "embed": [Replicate(), Shard(0)],  # hybrid sharding
        "layer.0": [Shard(0), Shard(0)],  # 7 rows: 2, 2, 2 and 1
        "norm": [Replicate(), Replicate()],
        "layer.1": [Shard(1), Shard(0)],  # 5 x 5
        "experts": [Replicate(), Shard(1)],  # 2 x 3 x 4
        "odd": [Replicate(), Shard(0)],  # 5 rows: 3 and 2
        "one_row": [Shard(0), Replicate()],  # 1 and none
        "together": [Replicate(), Shard(0)],  # in the bucket of `odd`
        "stacked": [Replicate(), Shard(0)],  # 3 experts: 2 and 1
        "turned": [Shard(0), Shard(0)],  # 3 x 2 x 4: 1, 1, 1 and none
    }
    parameters = [
        (name, distribute_tensor(tensor, mesh, placements[name]) if name in placements else tensor)
        for name, tensor in _parameters_with_experts()
    ]
    export = collect_weights(
        parameters,
        layout=LAYOUT,
        dtype=torch.float32,
        rank=rank,
        world_size=4,
        version=3,
        bucket_bytes=130,
    )
    dist.destroy_process_group()
    return export


def _parameters_with_experts() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"experts": (2, 3, 4), "odd": (5, 2), "one_row": (1, 3), "together": (4, 2)}
    shapes |= {"stacked": STACKED, "turned": STACKED}
    return [
        *_parameters(),
        *((name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()),
    ]


def test_sharded_replicated_and_plain_parameters_export_like_full_ones() -> None:
    holder, port = reserve_port()
    with holder, ProcessPoolExecutor(4, mp_context=forked_ranks.ranks()) as pool:
        exports = list(pool.map(_export_sharded, range(4), [port] * 4, timeout=120))
    # norm lives on all ranks and counts once; so does head, a plain tensor.
    assert check_exports(exports, 3) == check_exports(_exports(_parameters_with_experts()), 3)
    assert all(export.fingerprints["layer.0"] != 0 for export in exports)
    # Of copies on all ranks those are counted in turn that ranks 2 and 0 have.
    names = list(exports[0].fingerprints)
    for name, turn in {"norm": 2, "head": 0}.items():
        assert names.index(name) % 4 == turn
        assert [export.fingerprints[name] != 0 for export in exports] == [
            rank == turn for rank in range(4)
        ]
    assert any(
        {"odd", "one_row", "together"} <= {*bucket.names}
        for export in exports
        for bucket in export.buckets
    )
    expected = dict(_parameters_with_experts())
    turned = expected.pop("turned")
    of_experts = expected.pop("stacked")
    rows = of_experts.view(6, 1, 4)
    expected |= {f"{row % 2}.{row // 2}": values for row, values in enumerate(rows)}
    expected["turned in files"] = turned.transpose(1, 2)
    received = dict(iterate_weights(exports))
    assert received.keys() == expected.keys()
    for name, sent in expected.items():
        assert torch.equal(received[name], sent), name


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2), Shard(2)])
def test_placements_that_are_not_whole_rows_or_columns_are_refused(placement: Placement) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parameter = DTensor.from_local(
            torch.ones(4, 2, 2), init_device_mesh("cpu", (1,)), [placement]
        )
        with pytest.raises(ValueError, match=r"Parameter w is placed as .*only Replicate"):
            collect_weights(
                [("w", parameter)], dtype=torch.float32, rank=0, world_size=1, version=0
            )
    finally:
        dist.destroy_process_group()
