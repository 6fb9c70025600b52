"""Runs benchmarks at a size of seconds."""

import json
import os
import subprocess
import sys

from benchmarks.harness import ROOT

HELPERS = {"driver", "gpu_check", "harness", "serve", "table", "toy_world", "versions"}
"""Files of benchmarks/ that `make bench` does not run: gpu_check needs a GPU, driver and versions
another checkout."""
BENCHMARKS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - HELPERS
WITHOUT_A_SIDE_OF_OURS = {"algorithms_beside_verl"}
"""Our functions and verl's run in one process of the peers' environment. It writes no result."""
SLOW = {
    "advantages",
    "agents",
    "agents_step",
    "agents_vllm",
    "calls",
    "checkpoint",
    "detached",
    "detached_toy",
    "dispatch",
    "experts",
    "grpo_reward_curve",
    "grpo_step",
    "grpo_step_experts",
    "head",
    "overlap",
    "packing",
    "python_way",
    "resume",
    "rollout",
    "router_replay",
    "routing",
    "scaling",
    "training_on_examples",
    "weight_sync",
}
"""Those whose side of ours runs in `make proofs` alone, with its peers."""


def run_small(name: str, **variables: str) -> None:
    """Runs a benchmark at its small size and checks that its result is there."""
    result = ROOT / "build" / "benchmarks" / f"{name}.json"
    result.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BENCHMARK_SIZE": "small"} | variables
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    if name not in WITHOUT_A_SIDE_OF_OURS:
        contents = json.loads(result.read_text())
        assert contents["rows"] and contents["commit"] and contents["date"]
