"""Laws of the batch: taking rows apart and putting them together loses, invents, aliases and
changes nothing."""

import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_batches import batches, plain_rows, share_memory, unchanged

from verl_like.protocol import (
    DataProto,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

law = settings(max_examples=30, deadline=None, derandomize=True)


@law
@given(batches(), st.integers(1, 3), st.data())
def test_concat_undoes_chunk(data: DataProto, chunks: int, draw: st.DataObject):
    data = data.repeat(chunks)
    with unchanged(data):
        parts = data.chunk(chunks)
        joined = DataProto.concat(parts)
    rows = plain_rows(data)
    size = len(data) // chunks
    assert [plain_rows(part) for part in parts] == [
        rows[i * size : (i + 1) * size] for i in range(chunks)
    ]
    assert joined.equal(data) and plain_rows(joined) == rows
    assert not share_memory(data, DataProto.concat([data])) and not any(
        share_memory(data, part) for part in parts
    )


@law
@given(batches(), st.integers(1, 7))
def test_concat_undoes_split(data: DataProto, split_size: int):
    with unchanged(data):
        pieces = data.split(split_size)
        joined = DataProto.concat(pieces)
    assert joined.equal(data)
    assert all(len(piece) == split_size for piece in pieces[:-1]) and len(pieces[-1]) <= split_size
    assert not any(share_memory(data, piece) for piece in pieces)


@law
@given(batches(min_rows=1))
def test_parts_without_rows_add_nothing_to_a_concat(data: DataProto):
    empty = data.slice(0, 0)
    assert DataProto.concat([empty, data, DataProto(), empty]).equal(data)
    assert DataProto.concat([empty, DataProto()]).equal(empty)


@law
@given(batches(), st.integers(0, 3))
def test_repeat_gives_aabb_interleaved_and_abab_otherwise(data: DataProto, times: int):
    rows = plain_rows(data)
    with unchanged(data):
        interleaved, tiled = data.repeat(times), data.repeat(times, interleave=False)
    assert plain_rows(interleaved) == [row for row in rows for _ in range(times)]
    assert plain_rows(tiled) == rows * times
    assert not share_memory(data, interleaved) and not share_memory(data, tiled)


@law
@given(batches(), st.data())
def test_each_row_is_repeated_by_its_own_count(data: DataProto, draw: st.DataObject):
    counts = draw.draw(st.lists(st.integers(0, 3), min_size=len(data), max_size=len(data)))
    expected = [
        row for row, count in zip(plain_rows(data), counts, strict=True) for _ in range(count)
    ]
    assert plain_rows(data.sample_level_repeat(counts)) == expected
    assert plain_rows(data.sample_level_repeat(torch.tensor(counts, dtype=torch.int32))) == expected


@law
@given(batches(), st.data())
def test_indices_and_masks_select_copies_of_rows(data: DataProto, draw: st.DataObject):
    count = len(data)
    indices = draw.draw(st.lists(st.integers(-count, count - 1), max_size=5)) if count else []
    mask = draw.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    rows = plain_rows(data)
    with unchanged(data):
        for form in (
            list,
            tuple,
            lambda x: np.array(x, dtype=np.int32),
            lambda x: torch.tensor(x, dtype=torch.int64),
        ):
            selected = data[form(indices)]
            assert plain_rows(selected) == [rows[i] for i in indices]
            assert not share_memory(data, selected)
        for form in (
            lambda x: np.array(x, dtype=bool),
            lambda x: torch.tensor(x, dtype=torch.bool),
        ):
            assert plain_rows(data.select_idxs(form(mask))) == [
                row for row, keep in zip(rows, mask, strict=True) if keep
            ]


@law
@given(batches(), st.slices(6))
def test_a_slice_copies_the_rows_that_python_would_take(data: DataProto, index: slice):
    with unchanged(data):
        part = data[index]
    assert plain_rows(part) == plain_rows(data)[index]
    assert not share_memory(data, part)
    assert part.meta_info is not data.meta_info


@law
@given(batches(), st.data())
def test_the_inverse_permutation_undoes_reorder(data: DataProto, draw: st.DataObject):
    order = torch.tensor(draw.draw(st.permutations(range(len(data)))), dtype=torch.int64)
    original, rows = data.slice(), plain_rows(data)
    assert data.reorder(order) is None
    assert plain_rows(data) == [rows[i] for i in order.tolist()]
    data.reorder(order.argsort())
    assert data.equal(original)


@law
@given(batches(min_rows=1), st.integers(1, 8))
def test_unpad_undoes_pad_and_pad_rows_wrap_around(data: DataProto, divisor: int):
    rows = plain_rows(data)
    with unchanged(data):
        padded, pad_size = pad_dataproto_to_divisor(data, divisor)
        restored = unpad_dataproto(padded, pad_size)
    assert len(padded) % divisor == 0 and pad_size == len(padded) - len(data) < divisor
    if pad_size:
        assert padded.batch["is_pad"].tolist() == [False] * len(data) + [True] * pad_size
        padded.pop(["is_pad"])
    assert plain_rows(padded) == [rows[i % len(rows)] for i in range(len(padded))]
    assert restored.equal(data)
    assert not share_memory(data, padded) and not share_memory(padded, restored)


@law
@given(batches(), st.data())
def test_union_undoes_pop(data: DataProto, draw: st.DataObject):
    original = data.slice()
    tensors = draw.draw(st.lists(st.sampled_from(sorted(data.tensors()) or ["-"]), unique=True))
    arrays = draw.draw(
        st.lists(st.sampled_from(sorted(data.non_tensor_batch) or ["-"]), unique=True)
    )
    tensors, arrays = [key for key in tensors if key != "-"], [key for key in arrays if key != "-"]
    popped = data.pop(tensors, arrays, ["temperature"])
    assert not set(tensors) & set(data.tensors()) and not set(arrays) & set(data.non_tensor_batch)
    assert "temperature" not in data.meta_info
    with unchanged(data, popped):
        united = data.union(popped)
        assert united.equal(original) and popped.union(data).equal(original)
    assert united is not data and united.meta_info is not data.meta_info


@law
@given(batches())
def test_union_with_itself_changes_nothing_even_with_nans(data: DataProto):
    with unchanged(data):
        assert data.union(data).equal(data)
        assert data.union(data.slice()).equal(data)
        assert data.union(DataProto()).equal(data) and DataProto().union(data).equal(data)


@law
@given(batches(), st.data())
def test_select_keeps_exactly_the_chosen_columns_and_shares_them(
    data: DataProto, draw: st.DataObject
):
    keys = draw.draw(st.lists(st.sampled_from(sorted(data.tensors()) or ["-"]), unique=True))
    keys = [key for key in keys if key != "-"]
    chosen = data.select(keys, [], ["temperature"])
    assert (list(chosen.tensors()), chosen.non_tensor_batch, chosen.meta_info) == (
        keys,
        {},
        {"temperature": 1.0},
    )
    assert all(chosen.batch[key] is data.batch[key] for key in keys)
    assert chosen.batch is None or len(chosen) == len(data)
    assert data.select().equal(data)


@law
@given(batches())
def test_a_file_gives_back_the_same_batch(data: DataProto):
    with tempfile.TemporaryDirectory() as folder, unchanged(data):
        data.save_to_disk(f"{folder}/batch.safetensors")
        loaded = DataProto.load_from_disk(f"{folder}/batch.safetensors")
    assert loaded.equal(data) and plain_rows(loaded) == plain_rows(data)


@law
@given(batches(), st.integers(1, 3), st.booleans())
def test_every_epoch_of_the_iterator_gives_every_row_once(
    data: DataProto, size: int, shuffle: bool
):
    data = data.repeat(size)
    with unchanged(data):
        seen = list(
            data.make_iterator(size, epochs=2, seed=3, dataloader_kwargs={"shuffle": shuffle})
        )
        again = list(
            data.make_iterator(size, epochs=2, seed=3, dataloader_kwargs={"shuffle": shuffle})
        )
    rows = plain_rows(data)
    per_epoch = len(data) // size
    for epoch in (seen[:per_epoch], seen[per_epoch:]):
        found = [row for batch in epoch for row in plain_rows(batch)]
        assert sorted(map(str, found)) == sorted(map(str, rows))
        assert shuffle or found == rows
    assert len(seen) == 2 * per_epoch and all(a.equal(b) for a, b in zip(seen, again, strict=True))
    assert all(
        batch.meta_info is not data.meta_info and "temperature" in batch.meta_info for batch in seen
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_columns_of_several_megabytes_keep_their_values(dtype):
    rows = (torch.arange(1024)[:, None] % 250).repeat(1, 5000).to(dtype)
    data = DataProto.from_dict({"x": rows})
    assert torch.equal(DataProto.concat(data.chunk(2)).batch["x"], rows)
    assert torch.equal(data.select_idxs(torch.arange(1024).flip(0)).batch["x"], rows.flip(0))


@law
@given(batches(jagged_columns=False), st.integers(1, 3))
def test_unfold_undoes_fold(data: DataProto, groups: int):
    data = data.repeat(groups)
    with unchanged(data):
        folded = fold_batch_dim(data, groups)
        unfolded = unfold_batch_dim(folded)
    assert len(folded) == groups and unfolded.equal(data)
    assert not share_memory(data, folded) and not share_memory(folded, unfolded)
