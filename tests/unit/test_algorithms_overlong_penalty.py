"""DAPO's penalty for long responses, by hand."""

import torch

from verl_like.algorithms.overlong_penalty import overlong_penalty


def test_the_penalty_grows_linearly_in_the_buffer_and_stays_at_the_factor():
    # The buffer of 4 begins after 16 tokens: 1/4 of the factor 0.5 for each token more.
    lengths = torch.tensor([0, 10, 16, 17, 18, 20, 25])
    penalty = overlong_penalty(lengths, max_response_length=20, buffer_length=4, penalty_factor=0.5)
    assert torch.equal(penalty, torch.tensor([0.0, 0, 0, -0.125, -0.25, -0.5, -0.5]))


def test_a_buffer_of_the_whole_length_penalises_every_token():
    penalty = overlong_penalty(
        torch.tensor([1, 8]), max_response_length=8, buffer_length=8, penalty_factor=2.0
    )
    assert torch.equal(penalty, torch.tensor([-0.25, -2.0]))
