"""Jagged rows as algorithms and code written for verl see them, and back; samples of several
rows."""

import numpy as np
import pytest
import torch

from verl_like.protocol import DataProto
from verl_like.protocol.padded import (
    PaddedColumns,
    padded,
    places_of_samples,
    strip,
    view_of_samples,
    view_with,
    without_padding,
)
from verl_like.protocol.row_ops import jagged_from_lengths
from verl_like.protocol.samples import SampleRows, concat_samples, count_samples, select_samples

PADDING = (4, 3, 9)  # prompts of at most 4 tokens, responses of at most 3, padding token 9


def jagged(*rows: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


def jagged_floats(*rows: list[float]) -> torch.Tensor:
    return jagged(*rows, dtype=torch.float32)


def batch() -> DataProto:
    """Three rows; the policy did not draw the middle token of the first response, the second one is
    empty."""
    return DataProto.from_dict(
        {
            "prompts": jagged([1, 2], [3, 4, 5, 6], [7]),
            "responses": jagged([10, 11, 12], [], [13]),
            "response_mask": jagged([1, 0, 1], [], [1]),
            "values": jagged_floats([0.5, 0.25, -1.0], [], [2.0]),
            "is_skipped": torch.tensor([False, True, False]),
            "prompt_scores": jagged_floats([0.1, 0.2], [0.3, 0.4, 0.5, 0.6], [0.7]),
        },
        {"uid": ["a", "b", "c"]},
        {"padding": PADDING, "global_steps": 7},
    )


def test_a_padded_view_names_columns_that_were_read_after_the_others_and_those_put_in_last():
    view = PaddedColumns(batch())
    view["returns"] = torch.zeros(3, 3)
    assert view["values"] is not None
    assert view["is_skipped"] is not None
    unread = ["attention_mask", "input_ids", "position_ids", "prompt_scores", "prompts"]
    unread += ["response_mask", "responses"]
    assert list(view) == [*unread, "values", "is_skipped", "returns"]


def test_the_padded_view_has_verls_layout():
    view = padded(batch())
    columns = {
        name: column.tolist() for name, column in view.tensors().items() if not column.is_nested
    }
    assert columns == {
        "prompts": [[9, 9, 1, 2], [3, 4, 5, 6], [9, 9, 9, 7]],
        "responses": [[10, 11, 12], [9, 9, 9], [13, 9, 9]],
        "response_mask": [[1, 0, 1], [0, 0, 0], [1, 0, 0]],
        "values": [[0.5, 0.25, -1.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]],
        "is_skipped": [False, True, False],
        "input_ids": [[9, 9, 1, 2, 10, 11, 12], [3, 4, 5, 6, 9, 9, 9], [9, 9, 9, 7, 13, 9, 9]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0]],
        "position_ids": [[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2, 3]],
    }
    # By prompt token: what it would be filled up with is not known
    assert view.batch["prompt_scores"].is_nested
    assert (
        view.non_tensor_batch["uid"].tolist() == ["a", "b", "c"]
        and view.meta_info["global_steps"] == 7
    )
    assert {name: view.batch[name].dtype for name in ("values", "response_mask")} == {
        "values": torch.float32,
        "response_mask": torch.int64,
    }


def test_only_wanted_columns_are_made():
    view = padded(batch(), ["values", "attention_mask", "is_skipped"])
    assert sorted(view.tensors()) == ["attention_mask", "is_skipped", "values"]


def test_prompts_before_generation_are_the_whole_sequence():
    view = padded(batch().select(["prompts"]))
    assert view.batch["input_ids"].tolist() == [[9, 9, 1, 2], [3, 4, 5, 6], [9, 9, 9, 7]]
    assert view.batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
    assert view.batch["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]]


def test_prompts_and_responses_of_the_same_lengths_are_padded_on_their_own_sides():
    data = DataProto.from_dict(
        {
            "prompts": jagged([1, 2]),
            "responses": jagged([3, 4]),
            "values": jagged_floats([0.5, 0.25]),
        },
        meta_info={"padding": PADDING},
    )
    view = padded(data)
    assert view.batch["prompts"].tolist() == [[9, 9, 1, 2]]
    assert view.batch["responses"].tolist() == [[3, 4, 9]]
    assert view.batch["values"].tolist() == [[0.5, 0.25, 0.0]]


def test_verls_layout_without_padding_is_the_batch_again():
    data = batch()
    data.pop(["prompt_scores"])
    back = without_padding(padded(data), pad_token_id=9)
    assert back.equal(data)
    assert back.batch["values"].offsets() is back.batch["responses"].offsets()


def test_a_batch_of_verl_without_response_mask_gets_one_of_its_response_tokens():
    view = padded(batch(), ["responses", "input_ids", "attention_mask"])
    back = without_padding(view, pad_token_id=9)
    assert back.meta_info["padding"] == PADDING and padded(back).batch["input_ids"].equal(
        view.batch["input_ids"]
    )
    assert [row.tolist() for row in back.batch["response_mask"].unbind()] == [[1, 1, 1], [], [1]]
    assert [row.tolist() for row in back.batch["prompts"].unbind()] == [[1, 2], [3, 4, 5, 6], [7]]


def test_a_batch_without_rows_is_padded_to_none():
    view = padded(batch()[[]])
    assert {
        name: tuple(column.shape)
        for name, column in view.select(["input_ids", "values"]).tensors().items()
    } == {"input_ids": (0, 7), "values": (0, 3)}


def test_what_does_not_fit_is_refused():
    data = batch()
    data.meta_info["padding"] = (4, 2, 9)
    with pytest.raises(ValueError, match="a row has 3 tokens, but padded rows have 2"):
        padded(data)
    with pytest.raises(ValueError, match=r"no meta_info\['padding'\]"):
        padded(batch().select(meta_info_keys=[]))
    with pytest.raises(ValueError, match=r"this one lacks \['attention_mask'\]"):
        without_padding(DataProto.from_dict({"input_ids": torch.ones(1, 2)}), 9)
    between = DataProto.from_dict(
        {"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 0, 1]])}
    )
    with pytest.raises(ValueError, match="here padding is between"):
        without_padding(between, 9)


def of_samples() -> DataProto:
    """Six rows that are samples of one, two and three rows; the number 5 is of two samples; the
    third row is empty."""
    return DataProto.from_dict(
        {
            "prompts": jagged([1, 2], [3], [4], [5, 6, 7], [8], [1]),
            "responses": jagged([10, 11], [12], [], [13, 14, 15], [16], [17, 18]),
            "response_mask": jagged([1, 1], [1], [], [1, 0, 1], [1], [0, 1]),
            "values": jagged_floats([0.5, 1.0], [1.5], [], [2.0, 2.5, 3.0], [3.5], [4.0, 4.5]),
            "sample_id": torch.tensor([5, 7, 7, 5, 5, 5]),
            "is_skipped": torch.tensor([True, False, False, True, True, False]),
            "three": torch.arange(18).view(6, 3),  # as wide as responses, but not by response token
        },
        {"uid": ["a", "b", "b", "c", "c", "c"], "turn": [0, 0, 1, 0, 1, 2]},
        {"padding": PADDING, "global_steps": 7},
    )


def lists(column: torch.Tensor) -> list:
    return [row.tolist() for row in column.unbind()] if column.is_nested else column.tolist()


def test_tokens_of_a_samples_rows_follow_each_other_in_the_view():
    view = view_of_samples(of_samples())
    assert len(view) == 3
    assert {name: column.tolist() for name, column in view.batch.items()} == {
        # As wide as the longest sample, which has 6 tokens in its three rows.
        "responses": [[10, 11, 9, 9, 9, 9], [12, 9, 9, 9, 9, 9], [13, 14, 15, 16, 17, 18]],
        "response_mask": [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 1]],
        "attention_mask": [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]],
        "values": [
            [0.5, 1.0, 0.0, 0.0, 0.0, 0.0],
            [1.5, 0.0, 0.0, 0.0, 0.0, 0.0],
            [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
        ],
        "sample_id": [5, 7, 5],
        "is_skipped": [True, False, True],
        "three": [[0, 1, 2], [3, 4, 5], [9, 10, 11]],
    }
    assert {name: array.tolist() for name, array in view.non_tensor_batch.items()} == {
        "uid": ["a", "b", "c"],
        "turn": [0, 0, 0],
    }
    assert view.meta_info == {"padding": PADDING, "global_steps": 7}


@pytest.mark.parametrize("make", [batch, of_samples])
@pytest.mark.parametrize("make_view", [view_of_samples, padded])
def test_a_view_without_padding_is_the_batch_again(make, make_view):
    data = make()
    assert strip(make_view(data), data).equal(data)


def test_what_was_written_into_a_view_of_samples_goes_to_their_rows():
    data, before = of_samples(), of_samples()
    view = view_of_samples(data)
    # Also where no token is, which is lost
    view.batch["advantages"] = torch.arange(18.0).view(3, 6)
    view.batch["values"] = view.batch["values"] * 2
    view.batch["score"] = torch.tensor([0.25, 0.5, 0.75])
    view.batch["pair"] = torch.tensor([[1, 2], [3, 4], [5, 6]])
    view.batch["is_skipped"] = torch.tensor([False, True, False])
    view.non_tensor_batch["grade"] = np.array(["A", "B", "C"], dtype=object)
    view.meta_info["seen"] = True
    back = strip(view, data)
    assert {
        name: lists(back.batch[name])
        for name in ("advantages", "values", "score", "pair", "is_skipped")
    } == {
        "advantages": [[0, 1], [6], [], [12, 13, 14], [15], [16, 17]],
        "values": [[1, 2], [3], [], [4, 5, 6], [7], [8, 9]],
        "score": [0.25, 0.5, 0.5, 0.75, 0.75, 0.75],
        "pair": [[1, 2], [3, 4], [3, 4], [5, 6], [5, 6], [5, 6]],
        "is_skipped": [False, True, True, False, False, False],
    }
    assert back.batch["advantages"].offsets() is back.batch["responses"].offsets()
    assert back.non_tensor_batch["grade"].tolist() == ["A", "B", "B", "C", "C", "C"]
    assert back.non_tensor_batch["turn"].tolist() == [0, 0, 1, 0, 1, 2] and back.meta_info["seen"]
    untouched = ["prompts", "responses", "response_mask", "sample_id", "three"]
    assert back.select(untouched, ["uid", "turn"], ["padding", "global_steps"]).equal(
        data.select(untouched)
    )
    assert data.equal(before)


@pytest.mark.parametrize("make_view", [view_of_samples, padded])
def test_strip_keeps_dense_columns_and_non_tensors(make_view):
    data = batch()
    data.batch["three"] = torch.arange(9).view(3, 3)
    view = make_view(data)
    view.batch["three"] = view.batch["three"] + 1
    view.batch["pair"] = torch.tensor([[1, 2], [3, 4], [5, 6]])
    view.batch["returns"] = torch.arange(9.0).view(3, 3)
    view.batch["experts"] = torch.arange(18).view(3, 3, 2)
    view.non_tensor_batch["grade"] = np.array(["A", "B", "C"], dtype=object)
    back = strip(view, data)
    assert {
        name: lists(back.batch[name])
        for name in ("three", "pair", "returns", "experts", "is_skipped")
    } == {
        "three": [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        "pair": [[1, 2], [3, 4], [5, 6]],
        "returns": [[0, 1, 2], [], [6]],
        "experts": [[[0, 1], [2, 3], [4, 5]], [], [[12, 13]]],
        "is_skipped": [False, True, False],
    }
    assert {name: array.tolist() for name, array in back.non_tensor_batch.items()} == {
        "uid": ["a", "b", "c"],
        "grade": ["A", "B", "C"],
    }
    assert lists(back.batch["prompt_scores"]) == lists(data.batch["prompt_scores"])


def test_where_each_sample_is_one_row_the_view_is_the_padded_batch():
    data = of_samples()[[0, 1, 3]]
    for named in (data, data.select(["prompts", "responses", "values"])):
        view, whole = view_of_samples(named), padded(named)
        assert sorted(view.batch) == sorted(whole.batch.keys()) and "input_ids" in view.batch
        assert all(view.batch[name].equal(column) for name, column in whole.tensors().items())
        view.batch["advantages"] = torch.arange(9.0).view(3, 3)
        assert lists(strip(view, named).batch["advantages"]) == [[0, 1], [3], [6, 7, 8]]


@pytest.mark.parametrize("rows", [[], [4], [2]])
def test_views_of_no_row_and_of_one_row(rows):
    data = of_samples()[rows]
    view = view_of_samples(data)
    assert len(view) == len(rows) and view.batch["input_ids"].shape == (len(rows), 7)
    view.batch["advantages"] = view.batch["values"] + 1
    view.batch["score"] = torch.ones(len(rows))
    back = strip(view, data)
    assert lists(back.batch["advantages"]) == {(): [], (4,): [[4.5]], (2,): [[]]}[tuple(rows)]
    assert back.batch["score"].shape == (len(rows),) and back.non_tensor_batch["uid"].shape == (
        len(rows),
    )


def test_a_column_with_several_numbers_a_token_is_one_of_samples():
    data = of_samples()[[0, 1, 2]]
    pairs = [[[1, 2], [3, 4]], [[5, 6]], []]
    lengths = torch.tensor([2, 1, 0])
    data.batch["experts"] = jagged_from_lengths(torch.arange(1, 7).view(3, 2), lengths)
    view = view_of_samples(data)
    assert view.batch["experts"].tolist() == [[[1, 2], [3, 4], [0, 0]], [[5, 6], [0, 0], [0, 0]]]
    view.batch["more"] = view.batch["experts"] * 2
    back = strip(view, data)
    assert lists(back.batch["experts"]) == pairs
    assert lists(back.batch["more"]) == [[[2, 4], [6, 8]], [[10, 12]], []]


def test_one_sample_of_two_rows_is_one_row_of_the_view():
    data = of_samples()[[1, 2]]
    view = view_of_samples(data)
    assert view.batch["response_mask"].tolist() == [[1, 0, 0]], "as wide as the batch says"
    view.batch["advantages"] = torch.arange(3.0).view(1, 3)
    assert lists(strip(view, data).batch["advantages"]) == [[0], []]


def test_a_column_of_a_view_is_padded_when_it_is_read():
    data = batch()
    data.meta_info["padding"] = (1, 3, 9)  # too narrow for prompts, which nobody reads
    view = view_of_samples(data)
    assert view.batch["values"].shape == (3, 3) and view.batch["values"] is view.batch["values"]
    with pytest.raises(ValueError, match="a row has 4 tokens, but padded rows have 1"):
        view.batch["input_ids"]


@pytest.mark.parametrize("make", [batch, of_samples])
def test_another_view_of_a_batch_pads_only_the_columns_that_are_read(make):
    view = view_of_samples(make())
    values = view.batch["values"]
    other = view_with(view, {"score": torch.ones(3)})
    assert list(view.batch.read) == ["values"] and "score" not in view.batch
    assert other.batch["values"] is values and other.batch["score"].tolist() == [1, 1, 1]
    mask = view_with(other, {"response_mask": other.batch["response_mask"] * 0})
    assert list(view.batch.read) == ["values", "response_mask"]
    assert not mask.batch["response_mask"].any() and other.batch["response_mask"].any()
    assert type(mask) is type(view) and len(mask) == 3 and mask.meta_info == view.meta_info


def test_a_view_has_the_columns_of_a_batch():
    data = batch()
    view = view_of_samples(data)
    assert sorted(view.batch) == sorted(view.batch.keys()) == sorted(padded(data).batch.keys())
    assert len(view.batch) == 3 and "values" in view.batch and "advantages" not in view.batch
    assert view.batch.get("advantages") is None
    with pytest.raises(KeyError):
        view.batch["advantages"]
    with pytest.raises(KeyError):
        del view.batch["advantages"]
    view.batch["advantages"] = view.batch.pop("values")
    del view.batch["is_skipped"]
    view.batch["response_mask"] = view.batch.pop("response_mask") * 2
    assert "values" not in view.batch and sorted(view.tensors()) == sorted(view.batch)
    back = strip(view, data)
    assert sorted(back.tensors()) == [
        "advantages",
        "prompt_scores",
        "prompts",
        "response_mask",
        "responses",
    ]
    assert lists(back.batch["advantages"]) == lists(data.batch["values"])
    assert lists(back.batch["response_mask"]) == [[2, 0, 2], [], [2]]


def test_samples_of_one_two_and_three_rows():
    samples = SampleRows(torch.tensor([0, 1, 3, 6]))
    assert (samples.num_samples, samples.is_plain) == (3, False)
    assert samples.first_rows.tolist() == [0, 1, 3]
    assert samples.sample_of_row.tolist() == [0, 1, 1, 2, 2, 2]
    places = places_of_samples(torch.tensor([0, 2, 3, 3, 6, 7, 9]), 3, samples.starts)
    assert places.shape == (3, 6) and places.of_values.tolist() == [0, 1, 6, 12, 13, 14, 15, 16, 17]
    assert places_of_samples(torch.tensor([0, 2, 3]), 3, None).of_values.tolist() == [0, 1, 3]


def test_tokens_of_a_view_cannot_be_replaced():
    view = view_of_samples(batch())
    for name in ("responses", "prompts", "attention_mask"):
        with pytest.raises(
            ValueError, match=f"{name} was put into a padded view, which cannot change tokens"
        ):
            view.batch[name] = torch.zeros(3, 3)


def test_a_column_under_two_names_stays_one_column():
    data = batch()
    view = view_of_samples(data)
    view.batch["old_log_probs"] = view.batch["values"]
    view.batch["response_mask"] = view.batch["response_mask"]
    back = strip(view, data)
    assert back.batch["old_log_probs"] is back.batch["values"]
    assert back.batch["response_mask"] is data.batch["response_mask"]


def test_columns_are_popped_from_a_view_and_are_gone_from_the_batch():
    data = batch()
    view = view_of_samples(data)
    popped = view.pop(["values"])
    assert popped.batch["values"].shape == (3, 3) and "values" not in view.batch
    assert "values" not in strip(view, data).tensors()


def test_samples_are_rows_that_follow_each_other_with_the_same_number():
    assert SampleRows.of(of_samples()).starts.tolist() == [0, 1, 3, 6]
    assert SampleRows.of(batch()).starts.tolist() == [0, 1, 2, 3], "without numbers each row"
    assert count_samples(of_samples()) == 3 and count_samples(batch()) == 3
    assert count_samples(of_samples()[[1, 2]]) == 1 and count_samples(of_samples()[[]]) == 0


@pytest.mark.parametrize("starts", [[0], [0, 1], [0, 1, 2, 3]])
def test_samples_of_one_row_stay_as_they_are(starts):
    samples = SampleRows(torch.tensor(starts))
    assert (
        samples.is_plain
        and samples.num_samples == len(starts) - 1
        and samples.first_rows.tolist() == starts[:-1]
    )


@pytest.mark.parametrize(
    ("start", "stop", "rows"),
    [
        (0, 1, [0]),
        (1, 2, [1, 2]),
        (1, 3, [1, 2, 3, 4, 5]),
        (2, 9, [3, 4, 5]),
        (0, 3, range(6)),
        (1, 1, []),
        (3, 3, []),
    ],
)
def test_selected_samples_have_all_their_rows(start, stop, rows):
    data = of_samples()
    chosen = select_samples(data, start, stop)
    assert chosen.equal(data[list(rows)])
    if rows:
        assert chosen.batch["three"].data_ptr() == data.batch["three"][rows[0] :].data_ptr()


def test_selected_samples_without_numbers_are_rows():
    assert select_samples(batch(), 1, 3).equal(batch()[[1, 2]])


def test_joined_samples_are_numbered_through():
    parts = [of_samples()[[0, 1, 2]], of_samples()[[]], of_samples()[[1, 2, 3]], of_samples()[[5]]]
    whole = concat_samples(parts)
    # 5 77 | | 77 5 | 5: neither the 7s nor the 5s of two parts are one sample.
    assert whole.batch["sample_id"].tolist() == [0, 1, 1, 2, 2, 3, 4] and count_samples(whole) == 5
    others = [name for name in whole.tensors() if name != "sample_id"]
    assert whole.select(others).equal(DataProto.concat(parts).select(others))
    assert parts[0].batch["sample_id"].tolist() == [5, 7, 7], "the parts keep their numbers"


def test_joined_batches_without_samples_or_rows():
    assert concat_samples([batch(), batch()]).equal(DataProto.concat([batch(), batch()]))
    none = concat_samples([of_samples()[[]], of_samples()[[]]])
    assert len(none) == 0 and none.batch["sample_id"].dtype == torch.int64
