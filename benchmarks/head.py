"""Log-probabilities and entropies from hidden states: time and peak memory, forward, and forward
with backward.

N tokens, a vocabulary of V, hidden size H; gradients of hidden states and weight, from both
outputs. Memory is the peak of a process of its own over what it held with the inputs (GPU: the
allocator's peak), less the weight's gradient, which every contender makes. The limit of time is
that of the matrix products alone, timed in turn with the contenders: one forward, three more
backward (the logits once again, and both gradients), 2 N V H operations each. The limit of memory
is one chunk of logits. On a GPU only what is in the project's environment runs, in bfloat16.
"""

import argparse
import statistics

import numpy as np

from benchmarks.harness import Report, Side, interleave, sized

ROUNDS = sized(3, 1)
CONTENDERS = {
    "ours": ("head_ours.py", "project", "ours"),
    "naive": ("head_ours.py", "project", "naive"),
    "verl logits": ("head_verl.py", "peers", "logits"),
    "verl fused": ("head_verl.py", "peers", "fused"),
    "TRL logits": ("head_trl.py", "peers", "logits"),
    "TRL fused": ("head_trl.py", "peers", "fused"),
    "products": ("head_ours.py", "project", "products"),
    "float64": ("head_ours.py", "project", "float64"),
}
CHUNK_BYTES = 64 << 20
"""The largest chunk on a CPU: LOGITS_PER_CHUNK in float32."""


def check(sides: dict[str, Side], shape: list[int], device: str) -> None:
    """Asserts that all heads return the same, on a small shape: ours to 1e-5 of float64, the others
    to 1e-4 of it."""
    small = [min(shape[0], 300), min(shape[1], 5000), shape[2]]
    for name, side in sides.items():
        side.call("prepare", head=CONTENDERS[name][2], shape=small, device=device)
    expected = sides["float64"].call("results")
    for name, side in sides.items():
        if name != "products":
            tolerance = 3e-2 if device == "cuda" else 1e-5 if name == "ours" else 1e-4
            compare(name, side.call("results"), expected, tolerance)


def compare(
    name: str, got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float
) -> None:
    for output, values in expected.items():
        error = np.abs(got[output] - values).max() / np.abs(values).max()
        assert error < tolerance, f"{name}: {output} is off by {error:.1e}, more than {tolerance}"


def show_memory(report: Report, sides: dict[str, Side], shape: list[int], device: str) -> None:
    """Peaks of the contenders one after the other, and whether ours is the least and near one
    chunk."""
    bytes_per_number = 2 if device == "cuda" else 4
    chunk = CHUNK_BYTES * bytes_per_number / 4
    for backward, what in [(False, "forward"), (True, "forward and backward")]:
        weight_gradient = shape[1] * shape[2] * bytes_per_number if backward else 0
        peaks = {
            name: side.call("peak", backward=backward)["bytes"] - weight_gradient
            for name, side in sides.items()
            if name != "products"
        }
        for name, peak in peaks.items():
            report.row(f"{what}: memory of {name}", "MiB", [peak / 2**20], of_chunk=peak / chunk)
        report.target(f"{what}: memory of ours over a chunk", peaks["ours"] / chunk, "<=", 1.3)
        others = min(peak for name, peak in peaks.items() if name != "ours")
        report.target(
            f"{what}: memory of ours over the least of the others", peaks["ours"] / others, "<=", 1
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default=sized("4096,65536,256", "64,2048,64"), help="N,V,H")
    parser.add_argument("--threads", default=2, type=int)
    arguments = parser.parse_args()
    shape = [int(size) for size in arguments.shape.split(",")]
    title = f"Log-probability and entropy head, N,V,H = {arguments.shape}"
    report = Report(
        "head" if arguments.device == "cpu" else "head_cuda",
        f"{title}, {arguments.threads} threads",
    )
    sides = {
        name: Side(name, script, environment, threads=arguments.threads)  # type: ignore[arg-type]
        for name, (script, environment, _) in CONTENDERS.items()
        if arguments.device == "cpu" or environment == "project"
    }
    check(sides, shape, arguments.device)
    sides.pop("float64").close()
    for name, side in sides.items():
        side.call("prepare", head=CONTENDERS[name][2], shape=shape, device=arguments.device)
    sides["products"].call("run", backward=True)
    show_memory(report, sides, shape, arguments.device)
    for backward, what in [(False, "forward"), (True, "forward and backward")]:
        times = interleave(list(sides.values()), ROUNDS, "run", warm_up=0, backward=backward)
        seconds = {
            name: [result["seconds"] for result in results] for name, results in times.items()
        }
        limit = statistics.median(seconds["products"])
        for name, values in seconds.items():
            report.row(
                f"{what}: {name}", "s", values, of_products=statistics.median(values) / limit
            )
        ratio = statistics.median(seconds["ours"]) / limit
        report.target(f"{what}: time of ours over the products'", ratio, "<=", 1.35)
    for side in sides.values():
        side.close()
    report.note(
        "TRL fused is what its trainers' models do; its torch path is used, as no Triton exists on "
        "a CPU."
        if arguments.device == "cpu"
        else "The peers' environment has no GPU build: ours against plain torch."
    )
    report.write()


if __name__ == "__main__":
    main()
