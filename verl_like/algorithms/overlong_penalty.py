"""Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13)."""

import torch


def overlong_penalty(
    response_lengths: torch.Tensor,
    max_response_length: int,
    buffer_length: int,
    penalty_factor: float,
) -> torch.Tensor:
    """What is added to the scores of long responses, (B,) float32, between -penalty_factor and 0.

    0 up to max_response_length - buffer_length tokens; from there it falls linearly to
    -penalty_factor at max_response_length, and stays there.

    Args:
        response_lengths: (B,) int, tokens of each response.
        max_response_length: of the run, in tokens.
        buffer_length: the tokens below the maximum over which the penalty grows, from 1 to
            max_response_length.
        penalty_factor: the largest penalty.
    """
    overlong = response_lengths - (max_response_length - buffer_length)
    return -penalty_factor * overlong.clamp(min=0, max=buffer_length).float() / buffer_length
