import msgpack
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl_like.protocol import DataProto, Metric, Part
from verl_like.protocol.wire import to_wire
from verl_like.single_controller.ray.message import (
    flatten_arguments,
    flatten_result,
    restore_arguments,
    restore_result,
)
from verl_like.single_controller.shard import BatchShard, StoredBatch


def small_batch():
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.arange(12).view(4, 3),
            "advantages": torch.tensor([0.5, -1.0, 2.0, float("inf")], dtype=torch.bfloat16),
            "is_pad": torch.tensor([True, False, False, True]),
        },
        meta_info={"global_steps": 3, "names": ["a", None], "nested": {"temperature": 0.5, "validate": False}},
    )


def over_the_wire(message):
    """As Ray sends it: refuses whatever is not made of plain values."""
    return msgpack.unpackb(msgpack.packb(message, strict_types=True), strict_map_key=False)


def assert_equal_batches(found, wanted):
    assert list(found.tensors()) == list(wanted.tensors())
    for name, tensor in wanted.tensors().items():
        assert found.batch[name].dtype == tensor.dtype and torch.equal(found.batch[name], tensor)
    assert found.meta_info == wanted.meta_info


def test_a_small_result_travels_as_plain_values():
    result = restore_result(over_the_wire(flatten_result(small_batch())))
    assert_equal_batches(result, small_batch())


def test_what_arrived_is_memory_of_its_own_that_can_be_written_into():
    result = restore_result(over_the_wire(flatten_result(DataProto.from_dict({"is_pad": torch.tensor([True])}))))
    result.batch["is_pad"].fill_(False)  # Python has one object for all b"\x01"
    assert bytes([1]) != bytes([0]) and not result.batch["is_pad"].item()


def test_a_result_of_meta_info_alone_travels_as_plain_values():
    result = restore_result(over_the_wire(flatten_result(DataProto(meta_info={"loss": 0.25}))))
    assert result.batch is None and result.meta_info == {"loss": 0.25}


def test_a_shard_of_a_small_batch_travels_as_plain_values_and_is_flattened_once_for_all_ranks():
    batch = small_batch()
    wires = {name: to_wire(tensor) for name, tensor in batch.tensors().items()}
    stored = StoredBatch(4, (), {}, (4, wires, {}, batch.meta_info))
    seen = {}
    shards = [BatchShard((Part(stored, stored),), rank, 2, ("input_ids", "is_pad")) for rank in range(2)]
    messages = [flatten_arguments({0: shard, "scale": 2.0}, seen) for shard in shards]
    assert messages[0][0][1][0] is messages[1][0][1][0]
    for rank, message in enumerate(messages):
        arguments = restore_arguments(over_the_wire(message))
        assert arguments["scale"] == 2.0
        rows = arguments[0].resolve(list).data
        assert sorted(rows.tensors()) == ["input_ids", "is_pad"]
        assert torch.equal(rows.batch["input_ids"], batch.batch["input_ids"][2 * rank : 2 * rank + 2])


@pytest.mark.parametrize(
    "result",
    [
        None,
        [1, "text"],
        DataProto.from_dict(tensors={"large": torch.zeros(3000, 2)}),
        DataProto.from_dict(tensors={"x": torch.zeros(2)}, non_tensors={"uid": np.array(["a", "b"], dtype=object)}),
        DataProto.from_dict(tensors={"x": torch.zeros(2)}, meta_info={"metrics": {"loss": Metric.mean(1.0)}}),
        DataProto.from_dict(tensors={"x": torch.zeros(2)}, meta_info={"sizes": (1, 2)}),
        DataProto.from_dict(tensors={"x": torch.zeros(2)}, meta_info={"count": 1 << 70}),
        DataProto(
            TensorDict(
                {"ragged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)},
                batch_size=[2],
            )
        ),
    ],
)
def test_other_results_travel_as_they_are(result):
    plain, value = flatten_result(result)
    assert plain is None and value is result
    assert restore_result([plain, value]) is result
