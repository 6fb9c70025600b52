"""Cases of the GPU check that need no model: the device, attention kernels, the chunks of the
head."""

import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.sides.gpu_process import seconds_of
from benchmarks.sides.head_ours import naive
from verl_like.workers.models import linear_log_prob as head_module
from verl_like.workers.models.attention import (
    Kernel,
    Sequences,
    packed_flash,
    packed_sdpa,
    packed_varlen,
)

# Legend: N tokens of all sequences, H query heads, G key/value heads, D head size; M scored tokens,
# V vocabulary.

KERNELS = {"sdpa": packed_sdpa, "varlen": packed_varlen, "flash-attn": packed_flash}
ATTENTION_SHAPES = [(16, 16, 128, None), (16, 8, 128, None), (14, 2, 64, None), (16, 8, 128, 128)]
"""Query heads, key/value heads, head size, window."""


def machine(report: Any, device: str) -> None:
    """What this is, and the rate of a plain matrix product."""
    versions = f"Python's torch {torch.__version__}, transformers {transformers.__version__}"
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU with {torch.get_num_threads()} threads"
    )
    report.note(f"{name}; {versions}.")
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (256, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = seconds_of(device, lambda: left @ right)
    report.row(
        f"product of two matrices of {size} x {size}, {dtype}",
        "TFLOP/s",
        [2e-12 * size**3 / s for s in seconds],
    )


def attention(report: Any, device: str, *, kernel: str) -> None:
    """A kernel against attention written out, forward and backward; then its time."""
    if kernel != "sdpa" and device != "cuda":
        report.skip(f"attention, {kernel}", "cuda only")
        return
    if kernel == "flash-attn" and importlib.util.find_spec("flash_attn") is None:
        report.skip(f"attention, {kernel}", "flash-attn is not installed")
        return
    lengths = [1024, 700, 33, 1, 512, 512] if device == "cuda" else [150, 33, 1, 7, 7]
    for heads, groups, head_dim, window in ATTENTION_SHAPES:
        tensors = draw_attention(heads, groups, head_dim, sum(lengths), device)
        expected = with_gradients(
            written_out, [tensor.float() for tensor in tensors], lengths, window
        )
        got = with_gradients(KERNELS[kernel], tensors, lengths, window)
        errors = {
            output: ((mine.float() - right).norm() / right.norm()).item()
            for output, mine, right in zip(("output", "dq", "dk", "dv"), got, expected, strict=True)
        }
        what = f"attention, {kernel}, {heads}/{groups} heads of {head_dim}, window {window}"
        report.row(f"{what}: largest relative error", "", [max(errors.values())])
        assert max(errors.values()) < (2e-2 if device == "cuda" else 1e-5), (
            f"{what}: relative errors {errors}"
        )
    longest = 16_384 if device == "cuda" else 256
    for lengths in [longest], [longest // 8] * 8:
        tensors = draw_attention(16, 8, 128, sum(lengths), device)
        # Two products forward and five backward; half of the pairs are later tokens.
        operations = 7 * sum(16 * 128 * length**2 for length in lengths)
        run = partial(with_gradients, KERNELS[kernel], tensors, lengths, None)
        rates = [1e-12 * operations / seconds for seconds in seconds_of(device, run)]
        what = f"attention, {kernel}, {len(lengths)} x {lengths[0]} tokens, 16/8 heads of 128"
        report.row(f"{what}: forward and backward", "TFLOP/s", rates)


def draw_attention(
    heads: int, groups: int, head_dim: int, num_tokens: int, device: str
) -> list[torch.Tensor]:
    """Query (1, H, N, D), key and value (1, G, N, D), and the output's gradient (1, N, H, D)."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(1, number, num_tokens, head_dim) for number in (heads, groups, groups)] + [
        (1, num_tokens, heads, head_dim)
    ]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def with_gradients(
    kernel: Kernel, tensors: list[torch.Tensor], lengths: list[int], window: int | None
) -> list[torch.Tensor]:
    """Output, and gradients of query, key and value."""
    *inputs, grad_output = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    starts = torch.tensor([0, *lengths], device=grad_output.device).cumsum(0).int()
    output = kernel(*leaves, Sequences(lengths, starts, window=window))
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """The same as a softmax over all N tokens: a token sees those before it in its own sequence,
    and in the window."""
    lengths = sequences.lengths
    window = sequences.window
    sequence_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(
        query.device
    )
    place_N = torch.arange(len(sequence_N), device=query.device)
    distance_NN = place_N[:, None] - place_N
    seen_NN = (
        (sequence_N[:, None] == sequence_N)
        & (distance_NN >= 0)
        & (distance_NN < (window or len(place_N)))
    )
    key, value = (
        tensor.repeat_interleave(query.size(1) // tensor.size(1), dim=1) for tensor in (key, value)
    )
    logits = (query @ key.transpose(2, 3) * query.size(-1) ** -0.5).masked_fill(
        ~seen_NN, -torch.inf
    )
    return (logits.softmax(-1) @ value).transpose(1, 2)


def head(report: Any, device: str, *, hidden_size: int) -> None:
    """Chunks of the head beside its four products: the logits twice, and both gradients."""
    num_tokens = 8192
    vocabulary = 151_936
    if device != "cuda":
        num_tokens = 256
        vocabulary = 3000
        hidden_size = hidden_size // 16
    tensors = draw_head(num_tokens, vocabulary, hidden_size, device)
    few = draw_head(256, vocabulary, hidden_size, device)
    right = head_results(
        lambda hidden, weight, labels: naive(hidden.float(), weight.float(), labels), few
    )
    products = seconds_of(device, lambda: bare_products(*tensors))
    what = f"head, {num_tokens} x {vocabulary} x {hidden_size}"
    report.row(f"{what}, four bare products", "s", products)
    of_training = head_module.LOGITS_PER_CHUNK
    for bits in (24, 26, 27, 28):
        head_module.LOGITS_PER_CHUNK = {device: 1 << bits}
        got = head_results(ours, few)
        errors = [
            ((a.float() - b).abs().max() / b.abs().max()).item()
            for a, b in zip(got, right, strict=True)
        ]
        assert max(errors) < (3e-2 if device == "cuda" else 1e-5), (
            f"{what}, chunks of 2^{bits}: errors {errors}"
        )
        before = start_peak(device)
        seconds = seconds_of(device, lambda: head_results(ours, tensors))
        ratio = statistics.median(seconds) / statistics.median(products)
        report.row(f"{what}, chunks of 2^{bits} logits", "s", seconds, of_products=ratio)
        report_peak(report, f"{what}, chunks of 2^{bits} logits: peak memory", device, before)
    head_module.LOGITS_PER_CHUNK = of_training  # the cases that follow run in this process too


def ours(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return head_module.linear_log_prob(hidden, weight, labels, with_entropy=True)


def draw_head(
    num_tokens: int, vocabulary: int, hidden_size: int, device: str
) -> list[torch.Tensor]:
    """Hidden states, weight and labels."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(num_tokens, hidden_size, device=device).to(dtype).requires_grad_()
    weight = (
        torch.randn(vocabulary, hidden_size, device=device)
        .mul_(2 * hidden_size**-0.5)
        .to(dtype)
        .requires_grad_()
    )
    return [hidden, weight, torch.randint(vocabulary, (num_tokens,), device=device)]


def head_results(function: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probabilities and entropies, and the gradients of their weighted sum."""
    hidden, weight, _ = tensors
    log_probs, entropies = function(*tensors)
    weights = torch.linspace(0, 1, len(log_probs), device=log_probs.device)
    gradients = torch.autograd.grad(
        (log_probs * (weights - 0.5) + entropies * weights).sum(), (hidden, weight)
    )
    return [log_probs.detach(), entropies.detach(), *gradients]


def bare_products(hidden: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> None:
    with torch.no_grad():
        logits = hidden @ weight.T
        torch.mm(hidden, weight.T, out=logits)
        logits @ weight
        logits.T @ hidden


def start_peak(device: str) -> int:
    """Begins to measure the peak of the allocator; returns the bytes that are held now."""
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def report_peak(report: Any, what: str, device: str, before: int) -> None:
    """The peak since `start_peak`, over what was held then."""
    if device != "cuda":
        report.skip(what, "cuda only")
        return
    report.row(what, "GiB", [(torch.cuda.max_memory_allocated() - before) / 2**30])
