"""The head computed in chunks of the vocabulary, against the formulas in float64 over the full
logits."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_like.workers.models import linear_log_prob as module
from verl_like.workers.models.linear_log_prob import linear_log_prob

M, D, V = 37, 16, 101


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (M,), generator=generator)


def in_float64(hidden, weight, labels, temperature=1.0, scale=1.0, softcap=None):
    logits = scale * hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    return log_probs.gather(-1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def weighted(log_probs, entropies):
    """A loss in which every token counts differently, in log-probability and in entropy."""
    weights = torch.linspace(-1, 1, M)
    return (log_probs * weights).sum() + (entropies * weights.flip(0).square()).sum()


def assert_close(got, expected, tolerance):
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"relative error {error}"


def use_chunks(monkeypatch, columns, rows):
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", {"cpu": columns * M})
    monkeypatch.setattr(module, "LOGITS_PER_BLOCK", rows * columns)


@pytest.mark.parametrize("columns, rows", [(V, M), (40, 7), (1, 1)])
@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.7, "scale": 0.5}, {"temperature": 0.7, "softcap": 3.0}]
)
def test_values_and_gradients_are_those_of_float64_whatever_the_chunks(
    monkeypatch, columns, rows, changes
):
    use_chunks(monkeypatch, columns, rows)
    hidden, weight, labels = inputs()
    hidden_64, weight_64 = (
        tensor.detach().double().requires_grad_() for tensor in (hidden, weight)
    )
    log_probs, entropies = linear_log_prob(hidden, weight, labels, **changes, with_entropy=True)
    log_probs_64, entropies_64 = in_float64(hidden_64, weight_64, labels, **changes)
    assert_close(log_probs, log_probs_64, 1e-6)
    assert_close(entropies, entropies_64, 1e-6)
    # A second pass through the same graph finds no chunk kept by the first.
    for losses in [
        (weighted(log_probs, entropies), weighted(log_probs_64, entropies_64)),
        (weighted(log_probs, torch.zeros(M)), weighted(log_probs_64, torch.zeros(M))),
        (weighted(torch.zeros(M), entropies), weighted(torch.zeros(M), entropies_64)),
    ]:
        got, expected = (
            torch.autograd.grad(loss, tensors, retain_graph=True)
            for loss, tensors in zip(
                losses, [(hidden, weight), (hidden_64, weight_64)], strict=True
            )
        )
        assert_close(got[0], expected[0], 1e-5)
        assert_close(got[1], expected[1], 1e-5)


def test_entropy_keeps_its_digits_where_the_logits_are_large(monkeypatch):
    use_chunks(monkeypatch, 40, M)
    hidden, weight, labels = inputs()
    with torch.no_grad():
        hidden[:, 0], weight[:, 0] = 64.0, 1.0  # moves all logits by 64 and no probability
    _, entropies = linear_log_prob(hidden, weight, labels, with_entropy=True)
    _, expected = in_float64(hidden.double(), weight.double(), labels)
    assert expected.min() < 0.5
    torch.testing.assert_close(entropies.double(), expected, rtol=0, atol=5e-5)


def test_bfloat16_loses_only_what_its_products_lose(monkeypatch):
    use_chunks(monkeypatch, 40, 7)
    hidden, weight, labels = inputs(torch.bfloat16)
    hidden_64, weight_64 = (
        tensor.detach().double().requires_grad_() for tensor in (hidden, weight)
    )
    log_probs, entropies = linear_log_prob(
        hidden, weight, labels, temperature=2.0, with_entropy=True
    )
    log_probs_64, entropies_64 = in_float64(hidden_64, weight_64, labels, temperature=2.0)
    assert log_probs.dtype == entropies.dtype == torch.float32
    assert_close(log_probs, log_probs_64, 1e-2)
    assert_close(entropies, entropies_64, 1e-2)
    weighted(log_probs, entropies).backward()
    weighted(log_probs_64, entropies_64).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert_close(hidden.grad, hidden_64.grad, 1e-2)
    assert_close(weight.grad, weight_64.grad, 1e-2)


def test_a_weight_that_is_used_twice_gets_both_gradients():
    hidden, weight, labels = inputs()
    once = [
        torch.autograd.grad(linear_log_prob(part, weight, labels)[0].sum(), weight)[0]
        for part in (hidden, -hidden)
    ]
    twice = (
        linear_log_prob(hidden, weight, labels)[0].sum()
        + linear_log_prob(-hidden, weight, labels)[0].sum()
    )
    torch.testing.assert_close(torch.autograd.grad(twice, weight)[0], once[0] + once[1])


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    tensors = list(inputs())
    expected = torch.autograd.grad(
        weighted(*linear_log_prob(*tensors, with_entropy=True)), tensors[1 - frozen]
    )[0]
    tensors[frozen] = tensors[frozen].detach()
    weighted(*linear_log_prob(*tensors, with_entropy=True)).backward()
    assert tensors[frozen].grad is None
    assert torch.equal(tensors[1 - frozen].grad, expected)


def test_entropy_is_computed_only_when_asked_for():
    (log_probs,) = linear_log_prob(*inputs())
    with torch.no_grad():
        again, entropies = linear_log_prob(*inputs(), with_entropy=True)
    assert torch.equal(again, log_probs) and not entropies.requires_grad


@pytest.mark.parametrize("columns, rows", [(V, M), (40, 7), (1, 1)])
@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.7, "scale": 0.5}, {"temperature": 0.7, "softcap": 3.0}]
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-6), (torch.bfloat16, 4e-2)])
def test_sums_of_squared_probabilities_are_those_of_numpy(
    monkeypatch, columns, rows, changes, dtype, tolerance
):
    use_chunks(monkeypatch, columns, rows)
    hidden, weight, labels = inputs(dtype)
    logits = (
        changes.get("scale", 1.0)
        * hidden.detach().double().numpy()
        @ weight.detach().double().numpy().T
    )
    if "softcap" in changes:
        logits = changes["softcap"] * np.tanh(logits / changes["softcap"])
    powers = np.exp(logits / changes.get("temperature", 1.0))
    expected = ((powers / powers.sum(-1, keepdims=True)) ** 2).sum(-1)
    alone = linear_log_prob(hidden, weight, labels, **changes, with_sum_pi_squared=True)
    for got in (
        alone,
        linear_log_prob(
            hidden, weight, labels, **changes, with_entropy=True, with_sum_pi_squared=True
        ),
    ):
        np.testing.assert_allclose(got[-1].numpy(), expected, rtol=tolerance)
        assert got[-1].dtype == torch.float32 and got[0].requires_grad and not got[-1].requires_grad
    (log_probs,) = linear_log_prob(hidden, weight, labels, **changes)
    log_probs.sum().backward()
    expected_gradient, weight.grad = weight.grad, None
    alone[0].sum().backward()
    assert (
        len(alone) == 2
        and torch.equal(alone[0], log_probs)
        and torch.equal(weight.grad, expected_gradient)
    )


def test_a_batch_without_scored_tokens_has_a_gradient_of_zero():
    hidden, weight, labels = inputs()
    log_probs, entropies = linear_log_prob(hidden[:0], weight, labels[:0], with_entropy=True)
    assert log_probs.shape == entropies.shape == (0,)
    (log_probs.sum() + entropies.sum()).backward()
    assert not hidden.grad.any() and not weight.grad.any()


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


def test_neither_pass_makes_a_tensor_larger_than_a_chunk_or_the_weight(monkeypatch):
    use_chunks(monkeypatch, 40, 7)
    with LargestTensor() as mode:
        hidden, weight, labels = inputs()
        weighted(*linear_log_prob(hidden, weight, labels, with_entropy=True)).backward()
    assert mode.largest == max(40 * M, V * D)
    with LargestTensor() as mode:
        in_float64(*inputs())
    assert mode.largest == V * M
