"""Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13)."""

from torch import Tensor


def overlong_penalty(
    response_lengths: Tensor, max_response_length: int, buffer_length: int, penalty_factor: float
) -> Tensor:
    """Returns what is added to the scores of long responses, (B,) float32, from -penalty_factor
    to 0.

    It is 0 up to max_response_length - buffer_length tokens. From there it falls linearly to
    -penalty_factor at max_response_length, and stays there.

    Args:
        response_lengths: (B,) int, tokens of each response.
        max_response_length: of the run, in tokens.
        buffer_length: the tokens below the maximum over which the penalty grows, from 1 to
            max_response_length.
        penalty_factor: the largest penalty.
    """
    longest_free = max_response_length - buffer_length
    overlong = (response_lengths - longest_free).clamp(min=0, max=buffer_length)
    return -penalty_factor * overlong.float() / buffer_length
