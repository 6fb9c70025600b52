import torch
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import (
    _CHUNKED_LOGPROB_CHUNK_SIZE,
    entropy_from_logits,
    selective_log_softmax,
)

from benchmarks.sides.head_contender import serve_heads


def logits(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T
    return selective_log_softmax(logits, labels), entropy_from_logits(logits)


def fused(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model's forward does after `add_fused_lm_head`."""
    outputs = ("log_probs", "entropy")
    return ChunkedLogProbFunction.apply(
        hidden, weight, None, labels, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
    )[:2]


if __name__ == "__main__":
    serve_heads(logits=logits, fused=fused)
