"""A DataProto as one TensorDict, and back."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_like.protocol import DataProto


def batch_of_all_kinds() -> DataProto:
    lengths = [2, 0, 3]
    rows = [torch.arange(length) for length in lengths]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    half = torch.tensor([[0.5], [1.5], [2.5]], dtype=torch.bfloat16)
    tensors = {"scores": half, "responses": jagged}
    arrays = {"uid": [{"epoch": 1}, ["a", "b"], None], "count": np.array([7, 8, 9], dtype=np.int16)}
    return DataProto.from_dict(tensors, arrays, {"temperature": 0.25, "names": ["x", "y"]})


def test_every_kind_of_column_comes_back_with_its_values_and_types():
    batch = batch_of_all_kinds()
    data = batch.to_tensordict()
    assert list(data.batch_size) == [3]
    assert isinstance(data.get("uid"), NonTensorStack)
    assert isinstance(data.get("temperature"), NonTensorData)
    back = DataProto.from_tensordict(data)
    assert back.equal(batch)
    assert back.non_tensor_batch["count"].dtype == np.int16
    assert back.batch["scores"].dtype == torch.bfloat16
    assert back.batch["responses"].offsets().tolist() == [0, 2, 2, 5]


def test_rows_of_the_tensordict_are_rows_of_the_batch():
    data = batch_of_all_kinds().to_tensordict().select("scores", "uid", "temperature")
    row = data[1]
    assert row["scores"].tolist() == [1.5]
    assert row["uid"] == ["a", "b"]


@pytest.mark.parametrize(
    "batch",
    [
        DataProto.from_dict(non_tensors={"uid": ["a", "b"]}, meta_info={"step": 4}),
        DataProto.from_dict({"scores": torch.zeros(0, 2)}, {"uid": []}),
        DataProto(meta_info={"step": 4}),
        DataProto.from_dict({"scores": torch.ones(2)}),
    ],
    ids=["no tensors", "no rows", "no columns", "tensors alone"],
)
def test_a_batch_that_lacks_something_comes_back(batch: DataProto):
    assert DataProto.from_tensordict(batch.to_tensordict()).equal(batch)


def test_a_name_of_two_things_is_refused_with_what_to_do():
    batch = DataProto.from_dict({"score": torch.ones(2)}, meta_info={"score": 1.0})
    with pytest.raises(
        ValueError, match=r"to_tensordict: .*score.* more than one .* rename or pop"
    ):
        batch.to_tensordict()
    data = DataProto.from_dict({"x": torch.ones(2)}, meta_info={"step": 1}).to_tensordict()
    with pytest.raises(ValueError, match=r"from_tensordict: .*step.* meta_info has, too"):
        DataProto.from_tensordict(data, meta_info={"step": 2})
    assert DataProto.from_tensordict(data, meta_info={"epoch": 2}).meta_info == {
        "step": 1,
        "epoch": 2,
    }


def test_other_shapes_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"uid.* has shape \(2, 2\).* make it a tensor column"):
        DataProto.from_dict(non_tensors={"uid": np.zeros((2, 2))}).to_tensordict()
    with pytest.raises(ValueError, match=r"batch_size \[2, 3\]; .*reshape\(-1\)"):
        DataProto.from_tensordict(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(ValueError, match=r"meta_info has the keys \[3\], .* use texts as keys"):
        DataProto(meta_info={3: "x"}).to_tensordict()
