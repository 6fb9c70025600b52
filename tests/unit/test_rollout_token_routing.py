"""Which computation of a token its record is, where a request was computed in several passes."""

import numpy as np
import pytest

from verl_like.workers.models.routed_experts import RouterShape
from verl_like.workers.rollout.token_routing import RoutedPiece, RoutedRequest, record_of_returned

SHAPE = RouterShape(num_layers=2, num_experts=200, top_k=1)


def piece(start: int, count: int, expert: int, is_computed: bool = True) -> RoutedPiece:
    """Tokens that one expert computed in one pass; the second layer has the next expert."""
    ids = np.empty((count, 2, 1), np.int16)
    ids[:, 0] = expert
    ids[:, 1] = expert + 1
    return RoutedPiece(start, ids, is_computed)


def experts(ids: np.ndarray) -> list[int]:
    assert ids.dtype == np.int16 and ids.shape[1:] == (2, 1)
    recorded = ids[ids[:, 0, 0] >= 0]
    assert (recorded[:, 1] == recorded[:, 0] + 1).all()
    return ids[:, 0, 0].tolist()


def test_the_passes_of_a_request_are_its_record_and_the_last_token_has_none():
    request = RoutedRequest(num_prompt_tokens=3)
    request.pieces = [piece(0, 2, 10), piece(2, 1, 20), piece(3, 1, 30), piece(4, 1, 40)]
    assert experts(request.record(6, SHAPE)) == [10, 10, 20, 30, 40, -1]
    # The engine had begun the token after the last one.
    assert experts(request.record(5, SHAPE)) == [10, 10, 20, 30, -1]


def test_a_token_that_is_computed_again_keeps_the_record_from_before_the_next_one_was_drawn():
    request = RoutedRequest(num_prompt_tokens=2)
    request.pieces = [piece(0, 2, 10), piece(2, 1, 20)]
    request.pieces += [piece(0, 3, 50), piece(3, 1, 60), piece(4, 1, 70)]
    assert experts(request.record(6, SHAPE)) == [10, 10, 20, 60, 70, -1]
    assert experts(request.last_computed(0, 5, SHAPE)) == [50, 50, 50, 60, 70]
    assert experts(request.last_computed(2, 4, SHAPE)) == [50, 60]


def test_a_prompt_that_is_computed_again_before_a_token_is_drawn_has_the_last_record():
    request = RoutedRequest(num_prompt_tokens=4)
    request.pieces = [piece(0, 2, 10), piece(0, 3, 20), piece(3, 1, 30), piece(4, 1, 40)]
    assert experts(request.record(6, SHAPE)) == [20, 20, 20, 30, 40, -1]


def test_tokens_of_the_prefix_cache_have_the_record_that_is_found_for_them():
    request = RoutedRequest(num_prompt_tokens=4)
    found = piece(0, 3, 10, is_computed=False)
    found.ids[1] = -1
    request.pieces = [found, piece(3, 1, 30)]
    assert experts(request.record(5, SHAPE)) == [10, -1, 10, 30, -1]


@pytest.mark.parametrize("num_prompt_tokens", [2, 4])
def test_what_is_left_of_a_forgotten_request_is_what_is_in_the_cache(num_prompt_tokens):
    request = RoutedRequest(num_prompt_tokens)
    request.pieces = [piece(0, 2, 10), piece(2, 1, 20), piece(1, 3, 50)]
    request.compact(SHAPE)
    [left] = request.pieces
    assert experts(left.ids) == [10, 50, 50, 50] and left.start == 0
    RoutedRequest(2).compact(SHAPE)


def test_what_vllm_returns_is_the_record_of_the_layers_with_a_router():
    """It returns all layers, those without a router too, as bytes."""
    returned = np.arange(2 * 4 * 1, dtype=np.uint8).reshape(2, 4, 1) + 190
    ids = record_of_returned(returned, 3, [1, 3], SHAPE)
    assert ids.dtype == np.int16
    assert ids.tolist() == [[[191], [193]], [[195], [197]], [[-1], [-1]]]


@pytest.mark.parametrize("num_returned", [None, 1, 3])
def test_a_response_whose_routing_has_other_tokens_is_refused(num_returned):
    returned = None if num_returned is None else np.zeros((num_returned, 4, 1), np.uint8)
    with pytest.raises(ValueError, match=f"routing of {num_returned} tokens .* has 3 with its"):
        record_of_returned(returned, 3, [1, 3], SHAPE)
