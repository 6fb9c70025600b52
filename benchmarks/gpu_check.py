"""What only a GPU can show, in one call of at most ten minutes; without a GPU the same code at toy
size.

`scripts/gpu_check.sh [--only PREFIX ...] [--out FOLDER]` is the way to call it. It needs torch,
transformers and tensordict; no Ray, no vLLM, no network. Each case has a deadline. The first that
fails ends the process that runs them, and another one goes on with the next: a missing kernel, a
full memory or an illegal access costs the rows of one case. The exit status is 1 if a case failed;
its row says why, and `gpu_check.log` in the folder has the traceback.

Updates are `ActorWorker.update_actor` on one rank with NCCL: forward, PPO loss, backward, gradient
clipping, AdamW. MFU is `perf/mfu/actor`, over the data sheet's peak, without recomputed layers.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import ROOT, Report
from benchmarks.sides.gpu_process import EXPERTS, Case, run_cases

BUDGET = 540.0
"""Seconds after which no case begins or goes on."""
START = 90.0
"""Seconds that the process may take to start and to import torch and transformers."""
GOAL = 23_800.0
"""Tokens a second: twice what prime-rl publishes for the same model and length on one H100."""

KERNELS = "benchmarks.sides.gpu_kernels"
TRAINING = "benchmarks.sides.gpu_training"
MIXTURES = "benchmarks.sides.gpu_experts"
SPEED = {"function": f"{TRAINING}.speed", "seconds": 60}
VARIANTS: dict[str, dict] = {
    "plain": {},
    "parameters offloaded": {"fsdp": {"param_offload": True}},
    "optimizer offloaded": {"fsdp": {"optimizer_offload": True}},
    "both offloaded": {"fsdp": {"param_offload": True, "optimizer_offload": True}},
    "activations offloaded": {"model": {"enable_activation_offload": True}},
    "activations kept": {"model": {"enable_gradient_checkpointing": False}},
    "compiled": {"model": {"use_torch_compile": True}},
}
CASES = [
    Case("machine", f"{KERNELS}.machine", 30),
    *(
        Case(f"attention, {k}", f"{KERNELS}.attention", 40, {"kernel": k})
        for k in ("sdpa", "varlen", "flash-attn")
    ),
    *(
        Case(
            f"goal, {name}",
            f"{TRAINING}.goal",
            60 + 60 * compiled,
            {"kept": kept, "compiled": compiled},
        )
        for name, kept, compiled in [
            ("activations kept", True, False),
            ("layers recomputed", False, False),
            ("activations kept, compiled", True, True),
        ]
    ),
    *(
        Case(
            f"speed, {shape}{', activations kept' * kept}",
            arguments={"shape": shape, "kept": kept},
            **SPEED,
        )
        for shape in ("0.5B", "1.5B")
        for kept in (False, True)
    ),
    *(Case(f"head, {size}", f"{KERNELS}.head", 40, {"hidden_size": size}) for size in (896, 1536)),
    *(
        Case(
            f"engine, {name}",
            f"{TRAINING}.variant",
            90 if name == "compiled" else 40,
            {"name": name, **changed},
        )
        for name, changed in VARIANTS.items()
    ),
    Case("checkpoint", f"{TRAINING}.checkpoint", 60),
    Case("packing", f"{TRAINING}.packing", 60),
    *(
        Case(f"export, {shape}", f"{TRAINING}.export", 50, {"shape": shape})
        for shape in ("0.5B", "1.5B", EXPERTS)
    ),
    *(
        Case(
            f"experts, {way}{', compiled' * compiled}",
            f"{MIXTURES}.experts",
            90 + 60 * compiled,
            {"way": way, "compiled": compiled},
        )
        for way, compiled in [("grouped_mm", False), ("eager", False), ("grouped_mm", True)]
    ),
    Case("experts, replay", f"{MIXTURES}.replay", 90),
    *(
        Case(f"experts, {dtype}", f"{MIXTURES}.memory", 60, {"dtype": dtype})
        for dtype in ("bfloat16", "float32")
    ),
]


class GpuReport(Report):
    """A report that also holds the cases to the same values."""

    def __init__(self, name: str, title: str) -> None:
        super().__init__(name, title)
        self.first: dict[str, tuple[str, float]] = {}

    def same(self, what: str, case: str, value: float, relative: float) -> None:
        """Fails where `value` differs by more than `relative` from what the first case gave."""
        first_case, first = self.first.setdefault(what, (case, value))
        if not abs(value - first) <= relative * abs(first):
            self.failure(f"{case}: {what}", f"{value:.6g}, but {first:.6g} in {first_case}")


def measure(
    cases: Sequence[Case], device: str, report: GpuReport, log: Path, budget: float = BUDGET
) -> None:
    """Runs all cases, in a new process after each that fails, until the budget of seconds is
    spent."""
    context = multiprocessing.get_context("spawn")
    end = time.monotonic() + budget
    while cases and time.monotonic() < end:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=run_cases, args=(cases, device, theirs, str(log)), daemon=True
        )
        process.start()
        theirs.close()  # so that the connection ends with the process
        cases = follow(ours, cases, report, end)
        process.kill()
        process.join(timeout=30)
    for case in cases:
        report.failure(case.name, f"not begun within {budget:.0f} s")


def follow(
    connection: Connection, cases: Sequence[Case], report: GpuReport, end: float
) -> Sequence[Case]:
    """Reports what a process sends until a case fails or all are done; returns the cases after
    that."""
    deadline = time.monotonic() + START
    while cases:
        case, *rest = cases
        deadline = min(deadline + case.seconds, end)
        while True:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                report.failure(case.name, "not done by its deadline")
                return rest
            try:
                method, arguments, named = connection.recv()
            except EOFError:
                report.failure(case.name, "its process died")
                return rest
            if method == "case_failed":
                report.failure(case.name, *arguments)
                return rest
            if method == "case_done":
                break
            getattr(report, method)(*arguments, **named)
        cases = rest
        deadline = time.monotonic()
    return cases


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--only", nargs="*", default=[""], help="beginnings of the names of the cases to run"
    )
    parser.add_argument(
        "--out", default=ROOT / "outputs" / "gpu_check", type=Path, help="folder of the results"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    on_gpu = arguments.device == "cuda"
    title = (
        "Kernels, training engine and weight export on one GPU"
        if on_gpu
        else "The GPU check at toy size on a CPU"
    )
    report = GpuReport("gpu_check", title)
    cases = [case for case in CASES if case.name.startswith(tuple(arguments.only))]
    measure(cases, arguments.device, report, arguments.out / "gpu_check.log")
    goals = [
        row["median"]
        for row in report.rows
        if row["what"].startswith("goal") and row.get("unit") == "tokens/s"
    ]
    if on_gpu and goals:
        report.target(
            "goal: tokens/s of the fastest, Qwen3-0.6B, one sequence of 16,384 a step",
            max(goals),
            ">=",
            GOAL,
        )
        report.note(
            "prime-rl's published figures for it: 11.9k tokens/s, MFU 11.1%, peak 12.5 GiB, one "
            "H100."
        )
    report.write(arguments.out)
    if report.failures:
        print(
            f"  FAILED: {', '.join(report.failures)}; {arguments.out / 'gpu_check.log'} says more"
        )
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
