import msgpack
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl_like.protocol import CallHeader, DataProto, Metric, Part
from verl_like.single_controller.ray.message import (
    INLINE_BYTES,
    StoredBatch,
    pack,
    pack_state,
    unpack,
)
from verl_like.single_controller.shard import BatchShard


def small_batch():
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.arange(12).view(4, 3),
            "advantages": torch.tensor([0.5, -1.0, 2.0, float("inf")], dtype=torch.bfloat16),
            "is_pad": torch.tensor([True, False, False, True]),
            "ragged": torch.nested.nested_tensor(
                [torch.ones(n) for n in (1, 2, 1, 3)], layout=torch.jagged
            ),
        },
        meta_info={
            "global_steps": 3,
            "names": ["a", None],
            "nested": {"temperature": 0.5, "validate": False},
        },
    )


def over_the_wire(message, pickled=None):
    """As Ray sends it: what is not a plain value it pickles, which is refused here unless a list
    for it is given."""

    def put_aside(value):
        if pickled is None:
            raise TypeError(f"{type(value)} is not plain")
        pickled.append(value)
        return msgpack.ExtType(1, len(pickled).to_bytes(4, "big"))

    packed = msgpack.packb(message, strict_types=True, default=put_aside)
    return msgpack.unpackb(
        packed,
        strict_map_key=False,
        ext_hook=lambda _, index: pickled[int.from_bytes(index, "big") - 1],
    )


def test_a_small_batch_travels_as_plain_values():
    assert unpack(over_the_wire(pack(small_batch()))).equal(small_batch())


def test_what_arrived_is_memory_of_its_own_that_can_be_written_into():
    result = unpack(over_the_wire(pack(DataProto.from_dict({"is_pad": torch.tensor([True])}))))
    result.batch["is_pad"].fill_(False)  # Python has one object for all b"\x01"
    assert bytes([1]) != bytes([0]) and not result.batch["is_pad"].item()


def test_meta_info_alone_travels_as_plain_values_and_stays_without_a_batch():
    result = unpack(over_the_wire(pack(DataProto(meta_info={"loss": 0.25}))))
    assert result.batch is None and result.meta_info == {"loss": 0.25}


def test_a_header_travels_as_plain_values():
    assert unpack(over_the_wire(pack(CallHeader(3, 1.5, 2.5)))) == CallHeader(
        num_rows=3, started=1.5, finished=2.5
    )


def test_a_shard_of_a_small_batch_travels_as_plain_values():
    batch = small_batch()
    part = Part(CallHeader(4), StoredBatch([], {}, pack_state(*batch.__getstate__())))
    for rank in range(2):
        shard = unpack(over_the_wire(pack(BatchShard((part,), rank, 2, ("input_ids", "is_pad")))))
        rows = shard.resolve(
            lambda references: [
                r.load(1.0) if isinstance(r, StoredBatch) else r for r in references
            ]
        )
        assert sorted(rows.tensors()) == ["input_ids", "is_pad"]
        assert torch.equal(
            rows.batch["input_ids"], batch.batch["input_ids"][2 * rank : 2 * rank + 2]
        )


def test_a_shard_keeps_its_rows_and_what_they_are_rows_of():
    part = Part("header", "payload")
    shard = BatchShard((part, part), 1, 2, None, np.array([2, 0]), 4, True)
    found = unpack(over_the_wire(pack(shard), pickled=[]))
    assert (found.parts, found.index, found.num_shards, found.columns) == ((part, part), 1, 2, None)
    assert (found.row_numbers.tolist(), found.num_batch_rows, found.ordered) == ([2, 0], 4, True)


def test_large_columns_are_left_to_pickle_as_arrays_in_the_same_memory():
    large = torch.arange(INLINE_BYTES // 8 + 1)
    pickled: list[np.ndarray] = []
    found = unpack(
        over_the_wire(pack(DataProto.from_dict({"large": large, "small": large.float()})), pickled)
    )
    assert len(pickled) == 1 and found.batch["large"].data_ptr() == large.data_ptr()
    assert torch.equal(found.batch["small"], large.float()), (
        "4 bytes a number: small enough to stand in the message"
    )


@pytest.mark.parametrize(
    "result",
    [
        None,
        [1, "text"],
        ["batch", 2],
        DataProto.from_dict(
            tensors={"x": torch.zeros(2)}, non_tensors={"uid": np.array(["a", "b"], dtype=object)}
        ),
        DataProto.from_dict(
            tensors={"x": torch.zeros(2)}, meta_info={"metrics": {"loss": Metric.mean(1.0)}}
        ),
        DataProto.from_dict(
            tensors={"x": torch.zeros(2)},
            meta_info={"sizes": (1, 2), ("a", 1): {3: np.float32(0.1)}},
        ),
        DataProto.from_dict(
            tensors={"x": torch.zeros(2)}, meta_info={"count": 1 << 70, "scale": torch.ones(2)}
        ),
        DataProto(TensorDict({}, batch_size=[2])),
    ],
)
def test_whatever_else_a_result_holds_arrives_as_it_was(result):
    found = unpack(over_the_wire(pack(result), pickled=[]))
    assert found.equal(result) if isinstance(result, DataProto) else found == result
    if isinstance(result, DataProto):
        assert (found.batch is None) == (result.batch is None) and len(found) == len(result)
        assert list(map(type, found.meta_info.values())) == list(
            map(type, result.meta_info.values())
        )
