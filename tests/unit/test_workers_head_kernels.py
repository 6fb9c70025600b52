"""The Triton kernels of the head, run on a CPU by Triton's interpreter, against float64 and the
code of a CPU."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from verl_like.workers.models import linear_log_prob as module

pytest.importorskip("triton")

M, C, START = 5, 200, 1000
TILE = 64  # four tiles, the last with 8 columns
Interpret = Callable[..., list[torch.Tensor]]


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    """Calls a function in a process in which the interpreter runs all kernels, as Triton asks when
    it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(torch.set_num_threads, 1).result()
    with pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)


# What runs in that process.


def statistics(x, cap, with_entropy, with_sum_pi_squared):
    from verl_like.workers.models import head_kernels

    head_kernels.TILE = TILE
    return [
        one.tolist() for one in head_kernels.statistics(x, cap, with_entropy, with_sum_pi_squared)
    ]


def to_gradient(x, *arguments):
    from verl_like.workers.models import head_kernels

    head_kernels.TILE = TILE
    x = x.clone()
    head_kernels.to_gradient(x, *arguments)
    return str(x.dtype), x.tolist()


def head(hidden, weight, labels, softcap):
    """Values and gradients of the head when it takes the way of a GPU, in chunks of 90 columns."""
    from verl_like.workers.models import head_kernels

    head_kernels.TILE = TILE
    module._kernels = lambda x_MC: head_kernels
    module.LOGITS_PER_CHUNK = {"cpu": 90 * len(hidden)}
    return [one.tolist() for one in values_and_gradients(hidden, weight, labels, softcap)]


def values_and_gradients(hidden, weight, labels, softcap):
    hidden, weight = (tensor.clone().requires_grad_() for tensor in (hidden, weight))
    changes = {"softcap": softcap, "scale": 0.5, "temperature": 0.7}
    scores = module.linear_log_prob(
        hidden, weight, labels, **changes, with_entropy=True, with_sum_pi_squared=True
    )
    weights = torch.linspace(-1, 1, len(labels))
    loss = (scores[0] * weights).sum() + (scores[1] * weights.flip(0).square()).sum()
    return [score.detach() for score in scores] + list(torch.autograd.grad(loss, (hidden, weight)))


# What runs here.


def chunk(dtype=torch.float32, size=2.0) -> torch.Tensor:
    """A chunk of logits, whose second row has nearly all probability in the first column of the
    last tile."""
    x_MC = size * torch.randn(M, C, generator=torch.Generator().manual_seed(0))
    x_MC[1, 192] = x_MC[1].max() + 40
    x_MC[2] = x_MC[2].sort().values  # the largest so far grows with each tile
    x_MC[3] = x_MC[3].sort(descending=True).values  # and never does
    return x_MC.to(dtype)


def logits_in_float64(x_MC, cap):
    return x_MC.double() if cap is None else cap * x_MC.double().tanh()


def assert_close(got, expected, tolerance):
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("with_sum_pi_squared", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_those_of_float64(interpret, dtype, cap, with_entropy, with_sum_pi_squared):
    x_MC = chunk(dtype)
    lse, entropy, norm = interpret(statistics, x_MC, cap, with_entropy, with_sum_pi_squared)
    log_probs = torch.log_softmax(logits_in_float64(x_MC, cap), -1)
    assert_close(lse, logits_in_float64(x_MC, cap).logsumexp(-1), 2e-6)
    if with_entropy:
        assert_close(entropy, -(log_probs.exp() * log_probs).sum(-1), 5e-6)
    if with_sum_pi_squared:
        assert_close(norm, log_probs.exp().square().sum(-1).sqrt(), 5e-6)


@pytest.mark.parametrize("num_columns", [1, TILE - 1, TILE, TILE + 1])
def test_columns_beyond_the_row_count_for_nothing(interpret, num_columns):
    x_MC = chunk()[:, :num_columns].contiguous() - 50  # what counts as 0 there would be the largest
    lse, entropy, norm = interpret(statistics, x_MC, None, True, True)
    log_probs = torch.log_softmax(x_MC.double(), -1)
    assert_close(lse, x_MC.double().logsumexp(-1), 2e-6)
    assert_close(entropy, -(log_probs.exp() * log_probs).sum(-1), 5e-6)
    assert_close(norm, log_probs.exp().square().sum(-1).sqrt(), 5e-6)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_logits_of_ten_thousand_give_the_statistics_of_float64(interpret, cap, sign):
    x_MC = chunk() + sign * 1e4
    lse, entropy, norm = interpret(statistics, x_MC, cap, True, True)
    log_probs = torch.log_softmax(logits_in_float64(x_MC, cap), -1)
    assert_close(lse, logits_in_float64(x_MC, cap).logsumexp(-1), 1e-6)
    assert_close(entropy, -(log_probs.exp() * log_probs).sum(-1), 5e-6)
    assert_close(norm, log_probs.exp().square().sum(-1).sqrt(), 5e-6)


def test_statistics_are_those_of_a_cpu(interpret):
    x_MC = chunk()
    for got, expected in zip(
        interpret(statistics, x_MC, 5.0, True, True),
        module._statistics(x_MC, 5.0, True, True),
        strict=True,
    ):
        assert_close(got, expected.double(), 5e-6)


@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("others", [-60.0, 1.0])
def test_the_gradient_is_that_of_float64(interpret, dtype, tolerance, cap, has_entropy, others):
    """Of a chunk beside one whose lse is `others`; labels are before, in and after the chunk, at
    its ends too."""
    x_MC = chunk(dtype)
    labels_M = torch.tensor([START - 1, START + 192, START, START + C - 1, START + C])
    grad_log_prob_M, grad_entropy_M = torch.linspace(-1.5, 1, M), torch.linspace(2, -1, M)
    x_64 = x_MC.double().requires_grad_()
    logits = logits_in_float64(x_64, cap)
    lse_M = torch.logaddexp(logits.logsumexp(-1), torch.tensor(others, dtype=torch.float64))
    log_probs = logits - lse_M[:, None]
    # The part of the other chunk: its own entropy is 0.
    log_rest = others - lse_M
    entropy_M = -(log_probs.exp() * log_probs).sum(-1) - log_rest.exp() * log_rest
    column_M = labels_M - START
    is_here_M = (column_M >= 0) & (column_M < C)
    label_M = logits.gather(1, column_M.clamp(0, C - 1)[:, None])[:, 0] * is_here_M
    loss = ((label_M - lse_M) * grad_log_prob_M).sum() + (
        entropy_M * grad_entropy_M * has_entropy
    ).sum()
    (expected,) = torch.autograd.grad(loss, x_64)
    entropy_terms = (entropy_M.detach().float(), grad_entropy_M) if has_entropy else (None, None)
    terms = (column_M, lse_M.detach().float(), grad_log_prob_M, *entropy_terms)
    got_dtype, got = interpret(to_gradient, x_MC, cap, *terms)
    assert got_dtype == str(dtype)
    torch.testing.assert_close(
        torch.tensor(got).double(), expected, rtol=tolerance, atol=tolerance / 20
    )
    x_again = x_MC.clone()
    share_M = logits.detach().logsumexp(-1).sub(lse_M.detach()).float()
    module._to_gradient(x_again, cap, terms[0], terms[1], share_M, *terms[2:])
    torch.testing.assert_close(
        torch.tensor(got), x_again.float(), rtol=tolerance, atol=tolerance / 20
    )


@pytest.mark.parametrize("sign", [-1, 1])
def test_logits_of_ten_thousand_have_the_gradient_of_a_cpu(interpret, sign):
    x_MC = chunk() + sign * 1e4
    lse_M, entropy_M, _ = module._statistics(x_MC, None, True, False)
    terms = (
        torch.arange(M),
        lse_M,
        torch.linspace(-1.5, 1, M),
        entropy_M,
        torch.linspace(2, -1, M),
    )
    _, got = interpret(to_gradient, x_MC, None, *terms)
    module._to_gradient(x_MC, None, terms[0], lse_M, torch.zeros(M), *terms[2:])
    # The distance of float32 numbers there is 1e-3, and so is the relative error of exp(z - lse).
    torch.testing.assert_close(torch.tensor(got), x_MC, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_whole_head_is_that_of_a_cpu(interpret, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, generator=generator) for rows in (7, 201))
    labels = torch.tensor([0, 89, 90, 100, 179, 180, 200])
    got = interpret(head, hidden, weight, labels, softcap)
    for one, expected in zip(
        got, values_and_gradients(hidden, weight, labels, softcap), strict=True
    ):
        torch.testing.assert_close(torch.tensor(one), expected, rtol=1e-5, atol=1e-5)


def test_no_rows_are_no_work(interpret):
    x_MC = torch.empty(0, C)
    assert interpret(statistics, x_MC, None, True, True) == [[], [], []]
    nothing = torch.empty(0)
    assert (
        interpret(to_gradient, x_MC, None, nothing.long(), nothing, nothing, nothing, nothing)[1]
        == []
    )


def test_a_gpus_chunks_are_whole_multiples_of_64_columns(monkeypatch):
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK", {"cpu": 90 * M})
    monkeypatch.setattr(module, "COLUMNS_PER_CHUNK", {"cpu": module.COLUMNS_PER_CHUNK["cuda"]})
    assert module._chunks(torch.empty(M, 4), torch.empty(201, 4)) == [
        (0, 64),
        (64, 128),
        (128, 192),
        (192, 201),
    ]
    assert module._chunks(torch.empty(100 * M, 4), torch.empty(70, 4)) == [(0, 64), (64, 70)]
    assert module._chunks(torch.empty(M, 4), torch.empty(33, 4)) == [(0, 33)]
