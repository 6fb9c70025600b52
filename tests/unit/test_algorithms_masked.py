"""Masked sums, means and whitening."""

import numpy as np
import pytest
import torch

from verl_like.algorithms.masked import (
    masked_mean,
    masked_sum,
    masked_whiten,
    on_last_token,
    zero_masked,
)

NAN, INF = float("nan"), float("inf")
VALUES = torch.tensor([[1.0, 2.0, NAN], [6.0, INF, -INF], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_statistics_see_only_selected_positions_for_every_mask_dtype(dtype):
    mask = MASK.to(dtype)
    assert masked_sum(VALUES, mask).item() == 9.0
    assert masked_sum(VALUES, mask, axis=-1).tolist() == [3.0, 6.0, 0.0]
    assert masked_mean(VALUES, mask).item() == 3.0
    assert masked_mean(VALUES, mask, axis=-1).tolist() == [1.5, 6.0, 0.0]
    assert masked_mean(VALUES, mask, axis=(0, 1)).item() == 3.0


def test_a_row_mask_broadcasts_over_the_columns_in_numerator_and_count():
    values, row_mask = torch.tensor([[1.0, 3.0], [NAN, 7.0]]), torch.tensor([[1], [0]])
    assert masked_mean(values, row_mask).item() == 2.0


def test_whitening_matches_numpy_and_zeroes_the_rest():
    generator = torch.Generator().manual_seed(0)
    values = 3 + 2 * torch.randn(4, 8, generator=generator)
    mask = torch.rand(4, 8, generator=generator) < 0.5
    selected = values.numpy().astype(np.float64)[mask.numpy()]
    scaled = (selected - selected.mean()) / np.sqrt(selected.var(ddof=1) + 1e-8)
    dirty = torch.where(mask, values, NAN)
    np.testing.assert_allclose(
        masked_whiten(dirty, mask)[mask].numpy(), scaled, rtol=1e-5, atol=1e-6
    )
    kept_mean = masked_whiten(dirty, mask, shift_mean=False)[mask].numpy()
    np.testing.assert_allclose(kept_mean, scaled + selected.mean(), rtol=1e-5, atol=1e-6)
    assert torch.equal(masked_whiten(dirty, mask)[~mask], torch.zeros(int((~mask).sum())))


def test_whitening_one_value_or_none_gives_zeros():
    one = torch.tensor([[0, 1, 0]])
    assert masked_whiten(torch.tensor([[NAN, 5.0, 1.0]]), one).tolist() == [[0.0, 0.0, 0.0]]
    assert masked_whiten(torch.tensor([[NAN, 5.0, 1.0]]), one, shift_mean=False).tolist() == [
        [0.0, 5.0, 0.0]
    ]
    assert masked_whiten(torch.full((1, 3), NAN), torch.zeros(1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def test_gradients_of_masked_statistics_stop_at_the_mask():
    values = VALUES.clone().requires_grad_()
    (masked_mean(values, MASK) + zero_masked(values, MASK).square().sum()).backward()
    expected = torch.tensor([[1 / 3 + 2, 1 / 3 + 4, 0.0], [1 / 3 + 12, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(values.grad, expected)


def test_a_rows_value_lies_on_its_last_selected_position():
    # The second row has a hole, the third nothing
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    assert on_last_token(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [
        [0, 1, 0, 0],
        [0, 0, 2, 0],
        [0, 0, 0, 0],
    ]


def test_whitening_adds_1e_8_to_the_variance():
    # 1e-4 and -1e-4: mean 0, unbiased variance 2e-8
    whitened = masked_whiten(torch.tensor([[1e-4, -1e-4]]), torch.ones(1, 2))
    torch.testing.assert_close(whitened, torch.tensor([[1.0, -1.0]]) / 3**0.5)
