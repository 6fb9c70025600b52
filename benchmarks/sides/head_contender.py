"""What every contender of the benchmark `head` does: run a head on the same random inputs, for time
and for memory."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.serve import peak_resident_bytes, resident_bytes, serve, stopwatch

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(hidden (N, H), weight (V, H), labels (N,)) -> log-probabilities and entropies (N,)."""


def serve_heads(**heads: Head) -> None:
    """Answers `prepare`, `run`, `peak` and `results` for one of `heads`, which `prepare`
    chooses."""
    state: dict[str, Any] = {}

    def prepare(head: str, shape: list[int], device: str) -> dict[str, Any]:
        num_tokens, vocabulary, hidden_size = shape
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device, dtype)

        state["hidden"] = draw(num_tokens, hidden_size)
        state["weight"] = draw(vocabulary, hidden_size).mul_(2 * hidden_size**-0.5)
        state["labels"] = torch.randint(0, vocabulary, (num_tokens,), generator=generator).to(
            device
        )
        state["grads"] = (
            torch.linspace(-1, 1, num_tokens, device=device),
            torch.linspace(0, 1, num_tokens, device=device),
        )
        for name in ("hidden", "weight"):
            state[name].requires_grad_()
        state["head"] = heads[head]
        return {}

    def step(backward: bool) -> tuple[torch.Tensor, ...]:
        hidden = state["hidden"]
        weight = state["weight"]
        labels = state["labels"]
        hidden.grad = weight.grad = None
        with torch.set_grad_enabled(backward):
            log_probs, entropies = state["head"](hidden, weight, labels)
            if backward:
                torch.autograd.backward((log_probs, entropies), state["grads"])
        if hidden.is_cuda:
            torch.cuda.synchronize()
        return log_probs, entropies

    def run(backward: bool) -> dict[str, Any]:
        with stopwatch() as seconds:
            step(backward)
        return {"seconds": seconds[0]}

    def peak(backward: bool) -> dict[str, Any]:
        """Bytes over what the process held before; the first run of its kind in this process."""
        gc.collect()
        on_gpu = state["hidden"].is_cuda
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = (
            torch.cuda.memory_allocated()
            if on_gpu
            else state.setdefault("before", resident_bytes())
        )
        step(backward)
        after = torch.cuda.max_memory_allocated() if on_gpu else peak_resident_bytes()
        return {"bytes": after - before}

    def results() -> dict[str, Any]:
        log_probs, entropies = step(backward=True)
        tensors = (log_probs, entropies, state["hidden"].grad, state["weight"].grad)
        return {
            name: tensor.detach().float().cpu().numpy()
            for name, tensor in zip(
                ("log_probs", "entropies", "grad_hidden", "grad_weight"), tensors, strict=True
            )
        }

    # The libraries' own first-call costs, of threads and of workspaces, are no part of a head's
    # memory.
    small = torch.randn(256, 256, requires_grad=True)
    (small @ small).softmax(-1).sum().backward()
    serve(prepare, run, peak, results)
