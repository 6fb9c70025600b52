import torch

from benchmarks.sides.head_contender import serve_heads
from verl_like.workers.models.linear_log_prob import LOGITS_PER_CHUNK, linear_log_prob


def ours(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return linear_log_prob(hidden, weight, labels, with_entropy=True)


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = (hidden @ weight.T).log_softmax(
        -1, dtype=torch.promote_types(hidden.dtype, torch.float32)
    )
    return log_probs.gather(-1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def float64(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return naive(hidden.double(), weight.double(), labels)


class _Products(torch.autograd.Function):
    """The matrix products alone: one forward; backward one that computes the logits again and two
    for the gradients.

    They go through one buffer of the size of our chunk, which costs no more than products of the
    whole vocabulary.
    """

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.tensors = hidden, weight
        for _, _, logits in _Products.chunks(hidden, weight):
            del logits
        return hidden.new_zeros(len(hidden)), hidden.new_zeros(len(hidden))

    @staticmethod
    def backward(ctx, *_):
        hidden, weight = ctx.tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.empty_like(weight)
        for start, end, logits in _Products.chunks(hidden, weight):
            grad_hidden.addmm_(logits, weight[start:end])
            torch.mm(logits.T, hidden, out=grad_weight[start:end])
        return grad_hidden, grad_weight

    @staticmethod
    def chunks(hidden, weight):
        size = max(1, LOGITS_PER_CHUNK[hidden.device.type] // len(hidden))
        buffer = hidden.new_empty(len(hidden) * size)
        for start in range(0, len(weight), size):
            end = min(start + size, len(weight))
            logits = buffer[: len(hidden) * (end - start)].view(len(hidden), end - start)
            yield start, end, torch.mm(hidden, weight[start:end].T, out=logits)


def products(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _Products.apply(hidden, weight)


if __name__ == "__main__":
    serve_heads(ours=ours, naive=naive, float64=float64, products=products)
