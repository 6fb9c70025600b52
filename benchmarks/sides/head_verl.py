import torch
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

from benchmarks.sides.head_contender import serve_heads


def logits(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T
    return logprobs_from_logits(logits, labels), entropy_from_logits(logits)


if __name__ == "__main__":
    serve_heads(logits=logits, fused=FusedLinearForPPO())
