"""What the source calls of torch and vLLM fits the CUDA builds, as `make gpu-rehearsal` found them.
`test_vllm_rollout` has the CPU builds."""

import json
import re

import pytest

from scripts.null_gpu.names import COMMITTED, faults_of, uses_in, uses_of_source


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
