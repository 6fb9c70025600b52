"""How a batch crosses processes and goes to disk."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from protocol_batches import batches, jagged, plain_rows, unchanged

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.wire import from_wire, to_wire


def through_pickle(data: DataProto, protocol: int = 5) -> tuple[DataProto, bytes, list[bytes]]:
    """The batch after pickling with out-of-band buffers that are read-only, as shared memory is;
    the in-band bytes."""
    pickled: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(
        data, protocol, buffer_callback=pickled.append if protocol == 5 else None
    )
    buffers = [bytes(buffer.raw()) for buffer in pickled]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pickle.loads(in_band, buffers=buffers), in_band, buffers  # noqa: S301 our own bytes


@settings(max_examples=30, deadline=None, derandomize=True)
@given(batches())
def test_pickling_gives_back_the_same_batch(data: DataProto):
    with unchanged(data):
        for protocol in (4, 5):
            loaded = through_pickle(data, protocol)[0]
            assert loaded.equal(data) and plain_rows(loaded) == plain_rows(data)
            assert (loaded.batch is None) == (data.batch is None) and len(loaded) == len(data)


def test_tensor_bytes_travel_out_of_band():
    columns = {
        "floats": torch.randn(256, 1024),
        "half": torch.randn(256, 1024).bfloat16(),
        "bools": torch.zeros(256, 1024, dtype=torch.bool),
        "ragged": jagged([torch.randn(1024)] * 256, torch.zeros(0)),
    }
    meta = {"weights": torch.randn(1024, 256), "nested": [{"x": torch.randn(1024)}]}
    data = DataProto.from_dict(columns, {"numbers": np.ones((256, 1024))}, meta)
    loaded, in_band, buffers = through_pickle(data)
    assert len(in_band) < 4096
    assert sum(map(len, buffers)) == (4 + 2 + 1 + 4 + 8 + 4) * 256 * 1024 + 4 * 1024 + 8 * 257
    assert loaded.equal(data)


def test_sending_a_view_of_a_few_rows_sends_only_these_rows():
    data = DataProto.from_dict(
        {"x": torch.randn(100, 256), "ragged": jagged([torch.randn(64)] * 100, torch.zeros(0))}
    )
    _, in_band, buffers = through_pickle(data.rows(10, 12))
    assert sum(map(len, buffers)) == 2 * 256 * 4 + 2 * 64 * 4 + 3 * 8 and len(in_band) < 2048


def test_tensors_share_the_memory_of_the_arrays_in_both_directions():
    for tensor in (
        torch.arange(6.0).view(2, 3),
        torch.arange(6).bfloat16(),
        torch.tensor([True, False]),
    ):
        wire = to_wire(tensor)
        assert wire.array.ctypes.data == tensor.data_ptr()
        wire.array.flags.writeable = False
        back = from_wire(wire)
        assert (
            back.data_ptr() == tensor.data_ptr()
            and torch.equal(back, tensor)
            and back.dtype == tensor.dtype
        )


def test_float8_and_scalar_tensors_travel():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.tensor([1.0, -2.0, 0.5]).to(dtype)
        back = from_wire(to_wire(tensor))
        assert back.dtype == dtype and back.float().tolist() == [1.0, -2.0, 0.5]
    loaded, _, _ = through_pickle(
        DataProto(meta_info={"coef": torch.tensor(0.5), "pair": (torch.tensor(1), 2)})
    )
    assert loaded.meta_info == {"coef": torch.tensor(0.5), "pair": (torch.tensor(1), 2)}


def test_a_write_into_a_received_column_shows_in_its_version():
    loaded, _, _ = through_pickle(DataProto.from_dict({"x": torch.ones(2), "y": torch.ones(2)}))
    before = loaded.column_versions()
    loaded.batch["x"] = loaded.batch["x"] * 2
    assert loaded.column_versions()["y"] == before["y"]
    loaded = pickle.loads(pickle.dumps(loaded))  # noqa: S301 in memory that the test may write
    before = loaded.column_versions()
    loaded.batch["x"].add_(1)
    assert (
        loaded.column_versions()["x"] > before["x"] and loaded.column_versions()["y"] == before["y"]
    )


def test_gradients_do_not_travel():
    weight = torch.ones(2, requires_grad=True)
    loaded, _, _ = through_pickle(DataProto.from_dict({"x": weight * 2}))
    assert not loaded.batch["x"].requires_grad and loaded.batch["x"].tolist() == [2, 2]


def test_a_file_keeps_the_types_of_objects(tmp_path):
    objects = [
        {"style": "rule", "ground_truth": "72", 3: (1, "é\ud800")},
        [float("inf"), -float("inf"), float("nan"), 1e-300, True, None, 2**70],
        np.float32(0.1),
        np.int64(7),
        np.array(["a", "bcd"]),
        {"tensor": torch.ones(2).bfloat16(), "array": np.arange(3)[::-1], "type": "dict"},
    ]
    meta = {
        "metrics": {"loss": Metric.mean(float("nan"), 0.0)},
        "steps": 3,
        "empty": {},
        "ref": torch.tensor(0.5),
    }
    data = DataProto.from_dict(non_tensors={"objects": objects}, meta_info=meta)
    data.save_to_disk(tmp_path / "batch.safetensors")
    loaded = DataProto.load_from_disk(tmp_path / "batch.safetensors")
    assert loaded.equal(data)
    found = loaded.non_tensor_batch["objects"]
    assert [type(value) for value in found] == [type(value) for value in objects]
    assert (
        isinstance(found[0][3], tuple)
        and type(found[1][4]) is bool
        and found[4].dtype == np.dtype("<U3")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["batch.safetensors"]


def test_text_of_numpy_is_stored_as_text(tmp_path):
    DataProto.from_dict(non_tensors={"uid": list(np.array(["0-1", "0-2"]))}).save_to_disk(
        tmp_path / "batch"
    )
    assert DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch["uid"].tolist() == [
        "0-1",
        "0-2",
    ]


def test_a_value_without_a_safe_form_is_refused_by_place_and_leaves_no_file(tmp_path):
    path = tmp_path / "batch.safetensors"
    for bad, where in (
        (
            DataProto.from_dict(non_tensors={"x": [1, {"f": object()}]}),
            r"\['non_tensor_batch'\]\['x'\]\[1\]\['f'\] is a object",
        ),
        (DataProto(meta_info={"s": {1, 2}}), r"\['meta_info'\]\['s'\] is a set"),
        (
            DataProto(None, {"when": np.array(["2020-01-01"], dtype="datetime64[D]")}),
            r"array of datetime64",
        ),
        (DataProto(None, {"big": np.ones(1, dtype=">f4")}), r"\['big'\] is a array of >f4"),
        (
            DataProto(None, {"long": np.ones(1, dtype=np.longdouble)}),
            r"\['long'\] is a array of float128",
        ),
        (
            DataProto(meta_info={"m": {frozenset(): 1}}),
            r"\['meta_info'\]\['m'\] key is a frozenset",
        ),
    ):
        with pytest.raises(ValueError, match=where):
            bad.save_to_disk(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_refused(tmp_path):
    # NumPy has no such type: the file is refused by the names of its entries, before they are
    # loaded.
    safetensors.torch.save_file(
        {"x": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match="was not written by save_to_disk"):
        DataProto.load_from_disk(tmp_path / "model.safetensors")


def test_saving_over_a_file_replaces_it_as_a_whole(tmp_path):
    path = tmp_path / "batch.safetensors"
    for rows in (2, 3):
        DataProto.from_dict({"x": torch.arange(rows)}).save_to_disk(path)
    assert DataProto.load_from_disk(path).batch["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError):
        DataProto(meta_info={"bad": object()}).save_to_disk(path)
    assert len(DataProto.load_from_disk(path)) == 3


def test_a_process_that_makes_jagged_columns_writes_nothing_to_standard_error():
    """torch warns once in a process, for those who trace a model: users would see it in each run."""
    program = (
        "import torch\n"
        "from verl_like.protocol.row_ops import jagged_from_lists\n"
        "print(jagged_from_lists([[1, 2], [3]], torch.int64).offsets().tolist())\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[0, 2, 3]\n", "")
