"""DataProto by example: construction, columns, metadata, and what its errors say."""

import numpy as np
import pytest
import torch
from protocol_batches import jagged, plain_rows, share_memory, unchanged
from tensordict import TensorDict

from verl_like.protocol import (
    DataProto,
    DataProtoItem,
    Metric,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def make_batch(rows: int = 4) -> DataProto:
    ids = torch.arange(rows * 2).view(rows, 2)
    ragged = jagged([torch.arange(i % 3) for i in range(rows)], torch.zeros(0, dtype=torch.int64))
    uid = [f"0-{i}" for i in range(rows)]
    return DataProto.from_dict({"ids": ids, "ragged": ragged}, {"uid": uid}, {"temperature": 1.0})


def test_equally_long_lists_stay_one_element_per_row():
    data = DataProto.from_dict(
        non_tensors={"raw_prompt": [[1, 2], [3, 4]], "pair": ([1], {"a": 2})}
    )
    assert data.non_tensor_batch["raw_prompt"].shape == (2,)
    assert data.non_tensor_batch["raw_prompt"][1] == [3, 4] and data.non_tensor_batch["pair"][
        1
    ] == {"a": 2}
    assert len(data) == 2 and data.batch is None


def test_a_single_dict_is_sorted_into_tensors_and_arrays():
    data = DataProto.from_single_dict({"a": torch.ones(2, 1), "b": np.array([1, 2])}, {"step": 3})
    assert (list(data.tensors()), list(data.non_tensor_batch), data.meta_info) == (
        ["a"],
        ["b"],
        {"step": 3},
    )
    with pytest.raises(
        ValueError, match=r"non_tensor_batch\['c'\] is a list.*from_dict\(non_tensors"
    ):
        DataProto.from_single_dict({"a": torch.ones(2), "c": [1, 2]})


def test_columns_with_different_numbers_of_rows_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'a': 2, 'b': 3"):
        DataProto.from_dict({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match=r"2 rows .* \{'uid': 3\}"):
        DataProto.from_dict({"a": torch.ones(2)}, {"uid": ["x", "y", "z"]})
    with pytest.raises(ValueError, match=r"2 rows .* \{'b': 3\}"):
        DataProto(None, {"a": np.ones(2), "b": np.ones(3)})


def test_columns_of_a_wrong_kind_are_refused_by_name():
    with pytest.raises(ValueError, match=r"tensors\['a'\] is a list"):
        DataProto.from_dict({"a": [1, 2]})
    with pytest.raises(ValueError, match=r"non_tensor_batch\['a'\] is a str"):
        DataProto.from_dict(non_tensors={"a": "xy"})
    with pytest.raises(ValueError, match=r"non_tensor_batch\['a'\] is a list"):
        DataProto(None, {"a": [1, 2]})
    with pytest.raises(ValueError, match="one batch dimension"):
        DataProto(TensorDict({"a": torch.ones(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(ValueError, match=r"batch\['inner'\] is a TensorDict"):
        DataProto(TensorDict({"inner": TensorDict({"a": torch.ones(2)}, [2])}, [2]))


def test_a_jagged_column_must_be_ragged_in_its_second_dimension():
    column = jagged([torch.ones(1, 3), torch.ones(2, 3)], torch.zeros(0, 3))
    with pytest.raises(ValueError, match=r"tensors\['j'\] is ragged in dim 2"):
        DataProto.from_dict({"j": column.transpose(1, 2)})


def test_a_jagged_column_with_holes_keeps_only_its_rows():
    full = torch.arange(12).view(3, 4)
    holes = torch.nested.narrow(
        full, 1, torch.tensor([0, 1, 3]), torch.tensor([2, 3, 0]), layout=torch.jagged
    )
    data = DataProto.from_dict({"j": holes})
    assert [row.tolist() for row in data.select_idxs([1, 0, 2]).batch["j"].unbind()] == [
        [5, 6, 7],
        [0, 1],
        [],
    ]
    assert [row.tolist() for row in data.rows(1, 3).batch["j"].unbind()] == [[5, 6, 7], []]


def test_a_column_of_another_length_put_in_later_is_found_by_the_next_operation():
    data = make_batch()
    data.non_tensor_batch["late"] = np.arange(5)
    for operation in (
        lambda: data.slice(0, 2),
        lambda: data.union(DataProto()),
        lambda: DataProto.concat([data]),
    ):
        with pytest.raises(ValueError, match="'late': 5"):
            operation()


def test_construction_does_not_share_containers():
    source = TensorDict({"a": torch.ones(2)}, batch_size=[2])
    arrays, meta = {"uid": np.array(["x", "y"])}, {"nested": {"list": [1]}}
    data = DataProto(source, arrays, meta)
    data.batch["b"] = torch.zeros(2)
    data.non_tensor_batch["c"] = np.ones(2)
    data.meta_info["nested"]["list"].append(2)
    assert (list(source.keys()), list(arrays), meta) == (["a"], ["uid"], {"nested": {"list": [1]}})


def test_an_integer_gives_an_item_with_the_row_and_iteration_ends():
    data = make_batch(3)
    item = data[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["ids"].tolist() == [4, 5] and item.batch["ragged"].tolist() == [0, 1]
    assert item.non_tensor_batch == {"uid": "0-2"} and item.meta_info == {"temperature": 1.0}
    assert [row.non_tensor_batch["uid"] for row in data] == ["0-0", "0-1", "0-2"]
    with pytest.raises(IndexError, match=r"indices 3\.\.3 are outside the 3 rows"):
        data[3]
    with pytest.raises(TypeError, match="not str"):
        data["ids"]


def test_indices_outside_the_rows_and_wrong_masks_are_refused():
    data = make_batch()
    for indices in ([0, 4], [-5], torch.tensor([9])):
        with pytest.raises(IndexError, match="outside the 4 rows"):
            data[indices]
    with pytest.raises(ValueError, match="mask of 2 values for 4 rows"):
        data[[True, False]]
    with pytest.raises(ValueError, match="integers or bools"):
        data[np.array([0.0, 1.0])]
    with pytest.raises(ValueError, match="not a permutation"):
        data.reorder(torch.tensor([0, 0, 1, 2]))


def test_select_and_pop_of_missing_keys_name_the_key_and_what_exists():
    data = make_batch()
    with unchanged(data):
        for operation in (data.select, data.pop):
            with pytest.raises(ValueError, match=r"'nope' not in batch, which has 'ids', 'ragged'"):
                operation(["ids", "nope"])
            with pytest.raises(
                ValueError, match=r"'nope' not in non_tensor_batch, which has 'uid'"
            ):
                operation(["ids"], ["nope"])
            with pytest.raises(
                ValueError, match=r"'nope' not in meta_info, which has 'temperature'"
            ):
                operation(["ids"], ["uid"], ["nope"])


def test_rename_swaps_columns_and_never_overwrites_one():
    data = DataProto.from_dict({"a": torch.zeros(2), "b": torch.ones(2)})
    assert data.rename(["a", "b"], ["b", "a"]) is data
    assert data.batch["a"].tolist() == [1, 1] and data.batch["b"].tolist() == [0, 0]
    data.rename("a", "c")
    assert sorted(data.tensors()) == ["b", "c"]
    with pytest.raises(ValueError, match="would overwrite"):
        data.rename("b", "c")
    with pytest.raises(ValueError, match="'x' not in batch"):
        data.rename("x", "y")


def test_union_refuses_columns_that_differ_and_leaves_both_sides_alone():
    left = make_batch(2)
    changes = [
        ({"tensors": {"ids": torch.zeros(2, 2, dtype=torch.int64)}}, "batch key 'ids'"),
        ({"tensors": {"ids": left.batch["ids"].float()}}, "batch key 'ids'"),
        (
            {"tensors": {"ragged": jagged([torch.zeros(1), torch.zeros(1)], torch.zeros(0))}},
            "batch key 'ragged'",
        ),
        ({"non_tensors": {"uid": ["0-0", "0-7"]}}, "non_tensor_batch key 'uid'"),
        (
            {"non_tensors": {"uid": ["0-0", "0-1"]}, "meta_info": {"temperature": 0.5}},
            "meta_info key 'temperature'",
        ),
    ]
    for change, message in changes:
        right = DataProto.from_dict(**change)
        with unchanged(left, right), pytest.raises(ValueError, match=message):
            left.union(right)
    with pytest.raises(ValueError, match="2 rows and 3 rows"):
        left.union(make_batch(3))


def test_union_joins_metrics_and_timing_by_name():
    left = DataProto(meta_info={"metrics": {"actor/loss": Metric.mean(1.0)}, "timing": {"a": 1.0}})
    right = DataProto(meta_info={"metrics": {"critic/loss": Metric.sum(2.0)}, "timing": {"b": 2.0}})
    united = left.union(right)
    assert united.meta_info == {
        "metrics": {"actor/loss": Metric.mean(1.0), "critic/loss": Metric.sum(2.0)},
        "timing": {"a": 1.0, "b": 2.0},
    }
    assert list(left.meta_info["metrics"]) == ["actor/loss"]


def test_concat_merges_metrics_by_their_reduction_and_timings_into_lists():
    parts = [
        DataProto.from_dict(
            {"a": torch.ones(1)},
            meta_info={
                "metrics": {"loss": Metric.mean(value, weight), "longest": Metric.max(value)},
                "timing": {"forward": value},
                "clip": np.array([0.2, np.nan]),
                "scale": torch.tensor([float("nan")]),
                "target": float("nan"),
            },
        )
        for value, weight in ((1.0, 1.0), (4.0, 2.0))
    ]
    merged = DataProto.concat(parts).meta_info
    assert merged["metrics"] == {"loss": Metric.mean(3.0, 3.0), "longest": Metric.max(4.0)}
    assert merged["timing"] == {"forward": [1.0, 4.0]}
    assert DataProto.concat([DataProto.concat(parts), parts[0]]).meta_info["timing"] == {
        "forward": [1.0, 4.0, 1.0]
    }
    assert parts[0].meta_info["timing"] == {"forward": 1.0}


def test_concat_refuses_what_does_not_fit_and_says_what():
    one, two = make_batch(2), make_batch(2)
    with pytest.raises(ValueError, match="empty list"):
        DataProto.concat([])
    two.meta_info["temperature"] = 0.5
    with pytest.raises(ValueError, match=r"meta_info\['temperature'\] is 0.5 in part 1 but 1.0"):
        DataProto.concat([one, two])
    with pytest.raises(ValueError, match="'ragged' in batch not in all parts"):
        DataProto.concat([one, one.select(["ids"])])
    with pytest.raises(
        ValueError, match=r"column 'ids' is .*int64.* in part 0 but .*float32.* in part 1"
    ):
        DataProto.concat(
            [DataProto.from_dict({"ids": x}) for x in (one.batch["ids"], one.batch["ids"].float())]
        )
    with pytest.raises(ValueError, match=r"'ids'.*shape \(2,\).*shape \(3,\)"):
        DataProto.concat([DataProto.from_dict({"ids": torch.ones(1, n)}) for n in (2, 3)])
    with pytest.raises(ValueError, match=r"'ids'.*a tensor.*a jagged tensor"):
        DataProto.concat(
            [
                DataProto.from_dict({"ids": x})
                for x in (torch.ones(1, 2), jagged([torch.ones(2)], torch.ones(0)))
            ]
        )


def test_chunk_that_does_not_divide_names_the_sizes_and_the_way_out():
    with pytest.raises(
        ValueError, match=r"10 rows do not divide into 4 .*pad_dataproto_to_divisor\(data, 4\)"
    ):
        make_batch(10).chunk(4)
    with pytest.raises(ValueError, match="positive"):
        make_batch().chunk(0)


def test_a_batch_of_metadata_only_chunks_and_splits_into_copies():
    data = DataProto(meta_info={"step": 1, "nested": {"a": [1]}})
    pieces = [*data.chunk(3), *data.split(2)]
    assert len(pieces) == 4 and all(piece.equal(data) for piece in pieces)
    pieces[0].meta_info["nested"]["a"].append(2)
    assert data.meta_info == pieces[1].meta_info == {"step": 1, "nested": {"a": [1]}}
    assert DataProto.concat(pieces[1:]).equal(data)


def test_a_batch_without_columns_keeps_its_number_of_rows():
    data = make_batch(4).select([], [])
    assert [len(piece) for piece in data.chunk(2)] == [2, 2]
    assert len(DataProto.concat(data.chunk(2))) == 4 and len(data.repeat(3)) == 12


def test_padding_needs_rows_and_unpadding_drops_no_real_row():
    with pytest.raises(ValueError, match="no rows"):
        pad_dataproto_to_divisor(make_batch(4).slice(0, 0), 2)
    padded, pad_size = pad_dataproto_to_divisor(make_batch(3), 8)
    assert (
        padded.non_tensor_batch["uid"].tolist() == [f"0-{i}" for i in (0, 1, 2, 0, 1, 2, 0, 1)]
        and pad_size == 5
    )
    with pytest.raises(ValueError, match="not all padding"):
        unpad_dataproto(padded, 6)
    with pytest.raises(ValueError, match="cannot drop 9 of 8 rows"):
        unpad_dataproto(padded, 9)
    even, none = pad_dataproto_to_divisor(make_batch(4), 4)
    assert none == 0 and "is_pad" not in even.batch


def test_padding_twice_keeps_the_marks_of_the_first_time():
    once, _ = pad_dataproto_to_divisor(make_batch(3), 4)
    twice, added = pad_dataproto_to_divisor(once, 6)
    assert twice.batch["is_pad"].tolist() == [False, False, False, True, True, True]
    assert unpad_dataproto(twice, added).equal(once)


def test_rows_are_a_view_and_slices_are_not():
    data = make_batch(4)
    data.batch["ragged"] = jagged([torch.arange(3)] * 4, torch.zeros(0, dtype=torch.int64))
    view = data.rows(1, 3)
    assert plain_rows(view) == plain_rows(data)[1:3]
    assert view.batch["ids"].data_ptr() == data.batch["ids"][1].data_ptr()
    assert view.batch["ragged"].values().data_ptr() == data.batch["ragged"].values()[3:].data_ptr()
    assert np.shares_memory(view.non_tensor_batch["uid"], data.non_tensor_batch["uid"])
    assert view.meta_info is not data.meta_info
    assert not share_memory(data, data.slice(1, 3))
    with pytest.raises(ValueError, match=r"rows\(3, 5\) is not a range of the 4 rows"):
        data.rows(3, 5)


def test_versions_tell_which_column_was_written_into():
    data = make_batch(4)
    data.batch["ragged"] = jagged([torch.arange(3)] * 4, torch.zeros(0, dtype=torch.int64))
    before = data.column_versions()
    data.batch["ids"] + 1
    assert data.column_versions() == before
    data.batch["ids"][0] += 1
    changed = data.column_versions()
    assert changed["ids"] > before["ids"] and changed["ragged"] == before["ragged"]
    data.batch["ragged"].values().mul_(2)
    assert data.column_versions()["ragged"] > before["ragged"]
    with torch.inference_mode():
        data.batch["late"] = torch.ones(4)
    assert data.column_versions()["late"] == -1


def test_equal_sees_every_difference():
    def batch() -> DataProto:
        objects = [{"a": np.array([1.0, np.nan])}, [1, (2,)], None, float("nan")]
        return make_batch().union(
            DataProto.from_dict({"f": torch.full((4,), float("nan"))}, {"objects": objects})
        )

    def change(edit) -> DataProto:
        data = batch()
        edit(data)
        return data

    assert batch().equal(batch())
    edits = [
        lambda d: d.batch.update({"f": torch.tensor([float("nan")] * 3 + [0.0])}),
        lambda d: d.batch.update({"f": d.batch["f"].double()}),
        lambda d: d.batch.update({"ids": d.batch["ids"] + 1}),
        lambda d: d.batch.update(
            {"ragged": jagged([torch.zeros(1, dtype=torch.int64)] * 4, torch.zeros(0).long())}
        ),
        lambda d: d.pop(["ids"]),
        lambda d: d.non_tensor_batch.update(objects=d.non_tensor_batch["objects"][::-1]),
        lambda d: d.non_tensor_batch.update(uid=d.non_tensor_batch["uid"].astype(str)),
        lambda d: d.meta_info.update(temperature=0.5),
        lambda d: d.meta_info.update(extra=None),
    ]
    for edit in edits:
        assert not batch().equal(change(edit)) and not change(edit).equal(batch())


def test_a_mini_batch_size_that_does_not_divide_fails_at_the_call():
    with pytest.raises(ValueError, match="4 rows do not divide into mini-batches of 3"):
        make_batch().make_iterator(3, epochs=1)
    with pytest.raises(ValueError, match="without a seed"):
        make_batch().make_iterator(2, epochs=1, dataloader_kwargs={"shuffle": True})


def test_the_iterator_shuffles_each_epoch_anew_and_leaves_the_global_generator_alone():
    data = make_batch(32).select(["ids"])
    state = torch.get_rng_state()
    order = [
        b.batch["ids"][:, 0].tolist()
        for b in data.make_iterator(32, 2, seed=1, dataloader_kwargs={"shuffle": True})
    ]
    list(data.make_iterator(8, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert order[0] != order[1] and order[0] != sorted(order[0])
    other = next(data.make_iterator(32, 1, seed=2, dataloader_kwargs={"shuffle": True}))
    assert other.batch["ids"][:, 0].tolist() != order[0]


def test_the_description_has_rows_shapes_and_sizes():
    data = DataProto.from_dict({"x": torch.zeros(1024, 256)}, {"uid": ["a"] * 1024}, {"step": 1})
    text = data.get_data_info()
    assert text == repr(data)
    assert text.splitlines() == [
        "DataProto: 1024 rows, 1.01 MiB",
        "  x: (1024, 256) torch.float32 on cpu, 1.00 MiB",
        "  uid: (1024,) array of object",
        "  meta_info['step']: int",
    ]


def test_moving_to_a_device_works_in_place():
    data = make_batch()
    assert data.to("meta") is data
    assert {str(tensor.device) for tensor in data.tensors().values()} == {"meta"}


def test_union_of_dicts_makes_new_dicts():
    left, right = TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"b": torch.zeros(2)}, [2])
    assert set(union_tensor_dict(left, right).keys()) == {"a", "b"} and list(left.keys()) == ["a"]
    with pytest.raises(ValueError, match="batch sizes differ"):
        union_tensor_dict(left, TensorDict({"b": torch.zeros(3)}, [3]))
    arrays = {"x": np.array([1.0, np.nan])}
    assert list(union_numpy_dict(arrays, {"x": np.array([1.0, np.nan]), "y": np.ones(2)})) == [
        "x",
        "y",
    ]
    assert list(arrays) == ["x"]


def test_fold_says_why_it_cannot():
    with pytest.raises(ValueError, match="4 rows do not divide into 3"):
        fold_batch_dim(make_batch(4), 3)
    with pytest.raises(ValueError, match="'ragged' are jagged"):
        fold_batch_dim(make_batch(4), 2)
    folded = fold_batch_dim(make_batch(4).select(["ids"]), 2)
    assert folded.batch["ids"].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert folded.non_tensor_batch["uid"].tolist() == [["0-0", "0-1"], ["0-2", "0-3"]]
    folded.batch["flat"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"'flat': \(2,\)"):
        unfold_batch_dim(folded)
    for batch_dims in (0, 2):
        with pytest.raises(ValueError, match=f"first {batch_dims} dimensions"):
            unfold_batch_dim(DataProto.from_dict({"x": torch.arange(4)}), batch_dims)


def test_union_moves_no_column_to_another_device():
    here, there = (
        DataProto.from_dict({"a": torch.ones(2)}).to("cpu"),
        DataProto.from_dict({"b": torch.ones(2)}).to("meta"),
    )
    united = here.union(there).batch
    assert (united["a"].device.type, united["b"].device.type, united.device) == (
        "cpu",
        "meta",
        None,
    )
    assert here.union(
        DataProto.from_dict({"c": torch.ones(2)}).to("cpu")
    ).batch.device == torch.device("cpu")


def test_jagged_columns_with_rows_of_the_same_lengths_can_be_computed_with_after_every_operation(
    tmp_path,
):
    """torch computes between two jagged tensors only if they have one offsets tensor."""

    def jagged(*rows: list[float]) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    rewards, values = jagged([1.0, 2.0], [], [3.0]), jagged([10.0, 20.0], [], [30.0])
    with pytest.raises(RuntimeError):
        rewards + values
    data = DataProto.from_dict({"rewards": rewards, "dense": torch.ones(3, 2), "values": values})
    other = DataProto.from_dict(
        {"masks": jagged([1.0, 0.0], [], [1.0]), "tokens": jagged([1.0], [2.0], [3.0, 4.0])}
    )
    data.save_to_disk(tmp_path / "batch")
    united = data.union(other)
    assert united.batch["rewards"] is data.batch["rewards"]  # what is stored elsewhere stays known
    made = {
        "as given": (data, [[11.0, 22.0], [], [33.0]]),
        "picked rows": (data[[2, 0, 0]], [[33.0], [11.0, 22.0], [11.0, 22.0]]),
        "a view": (data.rows(1, 3), [[], [33.0]]),
        "joined": (DataProto.concat([data[[1]], data]), [[], [11.0, 22.0], [], [33.0]]),
        "renamed and selected": (
            data.rename("dense", "d").select(["values", "rewards"]),
            [[11.0, 22.0], [], [33.0]],
        ),
        "sent": (DataProto.from_state(*united.__getstate__()), [[11.0, 22.0], [], [33.0]]),
        "read": (DataProto.load_from_disk(tmp_path / "batch"), [[11.0, 22.0], [], [33.0]]),
        "no row": (data[[]], []),
    }
    for what, (batch, sums) in made.items():
        total = batch.batch["rewards"] + batch.batch["values"]
        assert [row.tolist() for row in total.unbind()] == sums, what
    masked = united.batch["rewards"] * united.batch["masks"]
    assert [row.tolist() for row in masked.unbind()] == [[1.0, 0.0], [], [3.0]]
    assert [row.tolist() for row in united.batch["tokens"].unbind()] == [[1.0], [2.0], [3.0, 4.0]]


def test_a_column_with_holes_one_that_is_moved_and_those_of_a_tensordict_share_offsets_too():
    def jagged(*rows: list[float]) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    wide = jagged([1.0, 2.0, 9.0], [3.0, 9.0, 9.0])
    narrowed = torch.nested.narrow(
        torch.stack(list(wide.unbind())), 1, 0, torch.tensor([2, 1]), layout=torch.jagged
    )
    plain = jagged([10.0, 20.0], [30.0])
    for tensors in ({"holes": narrowed, "plain": plain}, {"plain": plain, "holes": narrowed}):
        data = DataProto.from_dict(tensors)
        assert [row.tolist() for row in (data.batch["holes"] + data.batch["plain"]).unbind()] == [
            [11.0, 22.0],
            [33.0],
        ]
    direct = DataProto(
        TensorDict({"a": jagged([1.0], [2.0, 3.0]), "b": jagged([4.0], [5.0, 6.0])}, batch_size=[2])
    )
    assert [row.tolist() for row in (direct.batch["a"] + direct.batch["b"]).unbind()] == [
        [5.0],
        [7.0, 9.0],
    ]
    moved = direct.to("cpu")
    assert moved.batch["a"].offsets() is moved.batch["b"].offsets()
    on_meta = direct.to("meta").select()
    assert on_meta.batch["a"].device.type == "meta" and len(on_meta) == 2


def test_pop_leaves_the_dicts_that_others_hold_as_they_are():
    data = make_batch()
    arrays = data.non_tensor_batch
    meta_info = data.meta_info
    data.pop(non_tensor_batch_keys=["uid"], meta_info_keys=["temperature"])
    assert "uid" in arrays and "temperature" in meta_info
    assert "uid" not in data.non_tensor_batch and "temperature" not in data.meta_info
