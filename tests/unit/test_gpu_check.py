"""The GPU check: it runs here at toy size, and one case that goes wrong does not stop the
others."""

import json
import subprocess
import time

import pytest
from forked_ranks import ranks

from benchmarks import gpu_check
from benchmarks.gpu_check import GpuReport, follow, measure
from benchmarks.harness import ROOT
from benchmarks.sides.gpu_kernels import head
from benchmarks.sides.gpu_process import Case, run_cases
from verl_like.workers.models import linear_log_prob


def run_script(folder, *arguments):
    """The script's exit status and output, and its rows by name."""
    command = [
        "bash",
        str(ROOT / "scripts" / "gpu_check.sh"),
        "--device",
        "cpu",
        "--out",
        str(folder),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder)
    rows = {row["what"]: row for row in json.loads((folder / "gpu_check.json").read_text())["rows"]}
    return done.returncode, done.stdout + done.stderr, rows


def test_one_case_of_each_kind_runs_at_toy_size(tmp_path):
    only = (
        "attention, sdpa",
        "goal, activations kept",
        "head, 896",
        "engine, both",
        "checkpoint",
        "packing",
        "export, 1.5B",
        "experts, replay",
    )
    cases = [case for case in gpu_check.CASES if case.name.startswith(only)]
    report = GpuReport("trial", "A trial")
    # In a process that has imported most of what the cases need.
    ours, theirs = ranks().Pipe(duplex=False)
    log = str(tmp_path / "log")
    process = ranks().Process(target=run_cases, args=(cases, "cpu", theirs, log))
    process.start()
    theirs.close()  # so that the connection ends with the process
    left = follow(ours, cases, report, end=time.monotonic() + 200)
    process.join(60)
    assert not left and not report.failures, (tmp_path / "log").read_text()
    rows = {row["what"]: row for row in report.rows}
    for what in (
        "attention, sdpa, 16/8 heads of 128, window 128: largest relative error",
        "goal, activations kept: update",
        "head, 256 x 3000 x 56, chunks of 2^28 logits",
        "engine, both offloaded: update",
        "checkpoint: load",
        "packing, packed",
        "export, 1.5B: weights",
        "experts, replay: update",
    ):
        assert rows[what]["median"] > 0
    assert {what for what, row in rows.items() if row.get("why") == "cuda only"} >= {
        "goal, activations kept, compiled",
        "engine, both offloaded: peak memory",
    }


@pytest.mark.proof
def test_the_whole_check_runs_at_toy_size(tmp_path):
    status, output, rows = run_script(tmp_path)
    assert status == 0, output
    cases = {case.name.split(", act")[0] for case in gpu_check.CASES} - {
        "machine",
        "head, 896",
        "head, 1536",
    }
    heads = {"head, 256 x 3000 x 56", "head, 256 x 3000 x 96"}  # a sixteenth of their size
    assert not {name for name in cases | heads if not any(what.startswith(name) for what in rows)}


def test_a_case_that_raises_hangs_or_dies_becomes_a_row_and_the_others_go_on(tmp_path):
    report = GpuReport("trial", "A trial")
    cases = [
        Case("raises", "gpu_check_cases.raises", 30),
        Case("works", "gpu_check_cases.gives_a_row", 30, {"value": 2.5}),
        Case("hangs", "gpu_check_cases.hangs", 0.5),
        Case("dies", "gpu_check_cases.dies", 30),
        Case("works too", "gpu_check_cases.gives_a_row", 30, {"value": 3.5}),
    ]
    measure(cases, "cpu", report, tmp_path / "log")
    assert report.failures == ["raises", "hangs", "dies"]
    assert [row["median"] for row in report.rows if "median" in row] == [1.0, 2.5, 3.5]
    assert [row["why"] for row in report.rows if "why" in row] == [
        "FAILED: MemoryError: no room for 3 GiB",
        "FAILED: not done by its deadline",
        "FAILED: its process died",
    ]
    assert "no room for 3 GiB" in (tmp_path / "log").read_text()


def test_cases_that_have_no_time_left_are_failures(tmp_path):
    report = GpuReport("trial", "A trial")
    measure(
        [Case("late", "gpu_check_cases.gives_a_row", 1, {"value": 1.0})],
        "cpu",
        report,
        tmp_path / "log",
        budget=0,
    )
    assert report.failures == ["late"]


def test_a_case_whose_numbers_are_not_those_of_the_first_is_a_failure(tmp_path):
    report = GpuReport("trial", "A trial")
    cases = [
        Case(str(value), "gpu_check_cases.agrees", 30, {"value": value})
        for value in (2.0, 2.01, 2.1)
    ]
    measure(cases, "cpu", report, tmp_path / "log")
    assert report.failures == ["value 2.1: the loss"]
    assert report.rows[-1]["why"] == "FAILED: 2.1, but 2 in value 2.0"


def test_cases_after_the_head_run_with_the_chunks_that_training_has():
    """They share its process, and the peaks of the engine include a chunk."""
    chunks = dict(linear_log_prob.LOGITS_PER_CHUNK)
    head(GpuReport("trial", "A trial"), "cpu", hidden_size=896)
    assert chunks == linear_log_prob.LOGITS_PER_CHUNK
