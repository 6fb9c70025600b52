import torch

from benchmarks.sides.head_contender import serve_heads
from verl_like.workers.linear_log_prob import linear_log_prob


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return linear_log_prob(hidden, weight, labels, with_entropy=True)


def naive(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = (hidden @ weight.T).log_softmax(-1, dtype=torch.promote_types(hidden.dtype, torch.float32))
    return log_probs.gather(-1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def float64(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return naive(hidden.double(), weight.double(), labels)


class _Products(torch.autograd.Function):
    """The matrix products alone: one forward; backward one that computes the logits again and two for the gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, buffer):
        torch.mm(hidden, weight.T, out=buffer)
        ctx.tensors = hidden, weight, buffer
        return hidden.new_zeros(len(hidden)), hidden.new_zeros(len(hidden))

    @staticmethod
    def backward(ctx, *_):
        hidden, weight, buffer = ctx.tensors
        torch.mm(hidden, weight.T, out=buffer)
        return buffer @ weight, buffer.T @ hidden, None


_buffers: dict[tuple[int, int], torch.Tensor] = {}


def products(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = len(hidden), len(weight)
    if size not in _buffers:
        _buffers[size] = hidden.new_empty(size)
    return _Products.apply(hidden, weight, _buffers[size])


if __name__ == "__main__":
    serve_heads(ours=ours, naive=naive, float64=float64, products=products)
