"""Jagged rows as algorithms and code written for verl see them, and back."""

import pytest
import torch

from verl_like.protocol import DataProto
from verl_like.protocol.padded import padded, without_padding

PADDING = (4, 3, 9)  # prompts of at most 4 tokens, responses of at most 3, padding token 9


def jagged(*rows: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def jagged_floats(*rows: list[float]) -> torch.Tensor:
    return jagged(*rows, dtype=torch.float32)


def batch() -> DataProto:
    """Three rows; the policy did not draw the middle token of the first response, the second one is empty."""
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


def test_the_padded_view_has_verls_layout():
    view = padded(batch())
    columns = {name: column.tolist() for name, column in view.tensors().items() if not column.is_nested}
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
    assert view.batch["prompt_scores"].is_nested  # by prompt token: what it would be filled up with is not known
    assert view.non_tensor_batch["uid"].tolist() == ["a", "b", "c"] and view.meta_info["global_steps"] == 7
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
        {"prompts": jagged([1, 2]), "responses": jagged([3, 4]), "values": jagged_floats([0.5, 0.25])},
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
    assert back.meta_info["padding"] == PADDING and padded(back).batch["input_ids"].equal(view.batch["input_ids"])
    assert [row.tolist() for row in back.batch["response_mask"].unbind()] == [[1, 1, 1], [], [1]]
    assert [row.tolist() for row in back.batch["prompts"].unbind()] == [[1, 2], [3, 4, 5, 6], [7]]


def test_a_batch_without_rows_is_padded_to_none():
    view = padded(batch()[[]])
    assert {name: tuple(column.shape) for name, column in view.select(["input_ids", "values"]).tensors().items()} == {
        "input_ids": (0, 7),
        "values": (0, 3),
    }


def test_what_does_not_fit_is_refused():
    data = batch()
    data.meta_info["padding"] = (4, 2, 9)
    with pytest.raises(ValueError, match="a row has 3 tokens, but padded rows have 2"):
        padded(data)
    with pytest.raises(ValueError, match=r"no meta_info\['padding'\]"):
        padded(batch().select(meta_info_keys=[]))
    with pytest.raises(ValueError, match=r"this one lacks \['attention_mask'\]"):
        without_padding(DataProto.from_dict({"input_ids": torch.ones(1, 2)}), 9)
    between = DataProto.from_dict({"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 0, 1]])})
    with pytest.raises(ValueError, match="here padding is between"):
        without_padding(between, 9)
