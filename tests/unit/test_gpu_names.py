"""What the source calls of torch and vLLM fits the CUDA builds, as `make gpu-rehearsal` found them,
and the CPU's."""

import json
import re
import subprocess
import sys

import pytest

from scripts.null_gpu.names import COMMITTED, ROOT, faults_of, uses_in, uses_of_source

RESOLVE = """
import json, sys
from scripts.null_gpu.names import resolve_all
print(json.dumps(resolve_all(set(json.load(sys.stdin)))))
"""


def test_each_name_of_the_source_exists_in_the_cuda_builds_and_each_call_fits_its_signature_there():
    known = json.loads(COMMITTED.read_text())
    uses = uses_of_source()
    assert {"vllm.LLM", "torch.cuda.mem_get_info", "torch.distributed.all_reduce"} <= {
        use.name for use in uses
    }
    assert faults_of(uses, known) == []
    assert known.keys() == {use.name for use in uses}, (
        "the list has names that the source does not use any more"
    )


def test_the_calls_fit_the_cpu_builds_too():
    uses = uses_of_source()
    names = json.dumps(sorted({use.name for use in uses}))
    # In a process of its own, since importing vLLM changes more than its modules.
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=names,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    known = json.loads(done.stdout.splitlines()[-1])
    here = [use for use in uses if use.name in known]
    assert len(here) > 0.9 * len(uses)
    assert faults_of(here, known) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("dist.all_reduce(t, group=g)", None),
        (
            "dist.all_reduce(t, groupe=g)",
            "the call of torch.distributed.all_reduce does not fit, .* 'groupe'",
        ),
        ("dist.all_reduce(*tensors, groupe=g)", "does not fit, .* 'groupe'"),
        ("dist.all_reduce()", "missing a required argument: 'tensor'"),
        ("dist.all_reduced(t)", "torch.distributed.all_reduced does not exist"),
        ("torch.cuda.memory.now()", "torch.cuda.memory.now does not exist"),
        ("Loader(1)", "vllm.weights.Loader does not exist"),
        ("torch.zeros(1, 2, three=4)", None),  # not of these packages
    ],
)
def test_a_missing_name_and_a_call_that_does_not_fit_are_named_with_their_place(
    line: str, fault: str | None
):
    head = "import torch.distributed as dist\nimport torch\n"
    source = head + ("from vllm.weights import Loader\n" if "Loader" in line else "") + line + "\n"
    known = {
        "torch.distributed.all_reduce": [
            ["tensor", "b", ""],
            ["op", "b", "="],
            ["group", "b", "="],
        ],
        "torch.distributed.barrier": None,
    }
    faults = faults_of(list(uses_in(source, "workers/example.py")), known)
    if fault is None:
        assert faults == []
    else:
        assert faults and all(each.startswith("workers/example.py:") for each in faults)
        assert any(re.search(fault, each) for each in faults)
