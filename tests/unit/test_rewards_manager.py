"""The reward manager with real worker processes and reward functions that go wrong in every way."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from verl_like.rewards import process
from verl_like.rewards.manager import RewardError, RewardFunctionSpec, RewardManager, RewardSample

REWARD_FILE = """
import asyncio, os, sys, time

class OwnError(Exception):
    def __init__(self, one, two):  # cannot be unpickled
        super().__init__(f"{one} and {two}")

def inner(number):
    return 1 / number

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str.startswith("long wait"): time.sleep(0.01)
    if solution_str == "divide": return inner(0)
    if solution_str == "own error": raise OwnError("this", "that")
    if solution_str == "leave": sys.exit(0)
    if solution_str == "hang":
        while True: pass
    if solution_str == "segfault":
        import ctypes
        ctypes.string_at(0)
    if solution_str.startswith("exit "): os._exit(int(solution_str[5:]))
    if solution_str.startswith("start "):
        import subprocess
        program = subprocess.Popen(["sleep", "600"])
        open(solution_str[6:], "w").write(str(program.pid))
        program.wait()
    if solution_str.startswith("sleep "): time.sleep(float(solution_str[6:]))
    if solution_str.startswith("return "):
        import numpy as np
        return {"nan": float("nan"), "inf": float("inf"), "huge": 1e39, "text": "1.0", "list": [1.0], "none": None,
                "true": True, "int": 3, "float32": np.float32(0.5), "no score": {"acc": 1.0}, "array": np.ones(2),
                "none score": {"score": None, "why": "x"}, "odd extra": {"score": 1.0, "thing": {1}},
                "nan score": {"score": float("nan")}}[solution_str[7:]]
    return {"score": float(ground_truth) + bonus, "length": len(solution_str), "said": solution_str,
            "loaded": ",".join(m for m in ("torch", "ray", "pytest", "numpy") if m in sys.modules)}

class Judge:
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return inner(len(solution_str))

judge = Judge()

async def compute_async(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.001)
    return extra_info["index"] + 0.5
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rewards") / "my_reward.py"
    file.write_text(REWARD_FILE)
    return str(file)


@pytest.fixture(scope="module")
def skipping(reward_file: str) -> Iterator[RewardManager]:
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=2, timeout_s=3.0, on_error="skip")
    yield manager
    manager.close()


@pytest.fixture(scope="module")
def failing(reward_file: str) -> Iterator[RewardManager]:
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=1, timeout_s=3.0)
    yield manager
    manager.close()


def sample(solution_str: str, index: int = 0, ground_truth: str = "1") -> RewardSample:
    return RewardSample(f"sample uid '0-{index}'", "test/source", solution_str, ground_truth, {"index": index})


def test_scores_and_extra_metrics_come_back_in_order(skipping: RewardManager) -> None:
    samples = [sample("x" * (index % 5), index, ground_truth=str(index)) for index in range(256)]
    result = skipping.submit(samples).get()
    assert result.scores.dtype == np.float32
    np.testing.assert_array_equal(result.scores, np.arange(256))
    np.testing.assert_array_equal(result.extra["length"], np.arange(256) % 5)
    assert list(result.extra["said"][:3]) == ["", "x", "xx"]
    assert not result.skipped.any() and (result.num_errors, result.num_timeouts) == (0, 0)


def test_workers_load_neither_torch_nor_the_main_module_of_the_driver(reward_file: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from verl_like.rewards.manager import RewardFunctionSpec, RewardManager, RewardSample
        if __name__ == "__main__":
            manager = RewardManager(RewardFunctionSpec({reward_file!r}), num_workers=1)
            print(manager.submit([RewardSample("0-0", "x", "fine", "1")]).get().extra["loaded"].tolist())
            manager.close()
        """)
    )
    driver = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (driver.stdout, driver.stderr) == ("['']\n", "")


def test_reward_kwargs_and_async_functions(reward_file: str) -> None:
    manager = RewardManager(RewardFunctionSpec(reward_file, reward_kwargs={"bonus": 0.5}), num_workers=1)
    assert manager.submit([sample("fine")]).get().scores.tolist() == [1.5]
    manager.close()
    manager = RewardManager(RewardFunctionSpec(reward_file, "compute_async"), num_workers=1)
    assert manager.submit([sample("fine", index) for index in range(5)]).get().scores.tolist() == [
        0.5,
        1.5,
        2.5,
        3.5,
        4.5,
    ]
    manager.close()


def test_a_callable_object_is_a_reward_function(reward_file: str) -> None:
    manager = RewardManager(RewardFunctionSpec(reward_file, "judge"), num_workers=1)
    assert manager.submit([sample("four")]).get().scores.tolist() == [0.25]
    with pytest.raises(RewardError, match=r"ZeroDivisionError: division by zero\n  at .*my_reward.py:9 in inner"):
        manager.submit([sample("")]).get()
    manager.close()


def test_the_default_function_scores_by_data_source_and_names_an_unknown_one() -> None:
    manager = RewardManager(RewardFunctionSpec(), num_workers=1)
    right = RewardSample("0-0", "openai/gsm8k", "so #### 72", "72")
    assert manager.submit([right]).get().scores.tolist() == [1.0]
    with pytest.raises(
        RewardError, match=r"reward of row 1 \(data_source 'unheard/of'\).*no reward is registered"
    ) as error:
        manager.submit([RewardSample("row 1", "unheard/of", "so #### 72", "72")]).get()
    assert "\n  at " not in str(error.value)  # no reward was called, so there is no place in it
    manager.close()


def test_submit_returns_at_once(failing: RewardManager) -> None:
    pending = failing.submit([sample("sleep 1")])
    ((_, future),) = pending._submitted.values()
    assert not future.done()
    assert pending.get().scores.tolist() == [1.0]
    assert future.done() and pending.get().scores.tolist() == [1.0]


def test_the_deadline_of_a_batch_is_a_named_error_that_a_run_reports(failing: RewardManager) -> None:
    pending = failing.submit([sample("sleep 1", 4), sample("fine", 5)])
    assert pending._longest_s > 2 * failing.timeout_s  # both may hang
    pending._longest_s = 0.05
    with pytest.raises(RewardError, match=r"2 of 2 samples were not scored within 0 s, the first is sample uid '0-4'"):
        pending.get()
    pending._longest_s = 60
    assert pending.get().scores.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("cause", ["divide", "own error", "leave", "exit 3", "segfault", "return nan", "return text"])
def test_a_failing_sample_is_skipped_and_the_others_are_scored(skipping: RewardManager, cause: str) -> None:
    result = skipping.submit([sample("a"), sample(cause), sample("b")]).get()
    assert result.skipped.tolist() == [False, True, False]
    assert result.scores.tolist() == [1.0, 0.0, 1.0]
    assert np.isnan(result.extra["length"]).tolist() == [False, True, False] and result.extra["said"][1] is None
    assert (result.num_errors, result.num_timeouts) == (1, 0)


@pytest.mark.parametrize(("cause", "counts"), [("hang", (0, 1)), ("exit 0", (1, 0))])
def test_a_sample_without_an_answer_costs_only_its_own_worker(
    skipping: RewardManager, cause: str, counts: tuple[int, int]
) -> None:
    samples = [sample("a", index) for index in range(64)]
    samples[10] = sample(cause, 10)
    result = skipping.submit(samples).get()
    assert np.flatnonzero(result.skipped).tolist() == [10]
    assert (result.num_errors, result.num_timeouts) == counts
    assert skipping.submit(samples[:10]).get().scores.tolist() == [1.0] * 10


def test_on_error_score_scores_a_failed_sample_0(reward_file: str) -> None:
    manager = RewardManager(RewardFunctionSpec(reward_file), timeout_s=3.0, on_error="score")
    result = manager.submit([sample("divide"), sample("hang"), sample("return none"), sample("a")]).get()
    manager.close()
    assert result.scores.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert result.skipped.tolist() == [False, False, True, False]
    assert (result.num_errors, result.num_timeouts) == (1, 1)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("divide", ["ZeroDivisionError: division by zero", "in inner: return 1 / number", "my_reward.py:9"]),
        ("own error", ["OwnError: this and that"]),
        ("leave", ["SystemExit: 0"]),
        ("hang", ["no answer within reward.timeout_s=3 s"]),
        ("exit 3", ["its worker process is gone: it died with exit code 3"]),
        ("segfault", [f"it died with exit code {-signal.SIGSEGV}"]),
        ("return nan", ["the function returned nan (nan), expected a finite number"]),
        ("return inf", ["the function returned inf"]),
        ("return huge", ["the function returned 1e+39"]),
        ("return text", ["the function returned a str ('1.0')"]),
        ("return list", ["the function returned a list ([1.0])"]),
        ("return array", ["the function returned a ndarray"]),
        ("return no score", ["a dict without the key 'score' ({'acc': 1.0})"]),
        ("return nan score", ["the function returned nan ({'score': nan})"]),
        ("return odd extra", ["extra 'thing' of type set, which is no JSON value"]),
    ],
)
def test_on_error_fail_names_the_sample_the_cause_and_the_way_out(
    failing: RewardManager, cause: str, words: list[str]
) -> None:
    pending = failing.submit([sample("a", 0), sample(cause, 7)])
    with pytest.raises(RewardError) as error:
        pending.get()
    fixes = ["reward.on_error=skip", "reward.on_error=score"]
    for word in ["uid '0-7'", "data_source 'test/source'", *words, *fixes]:
        assert word in str(error.value)
    with pytest.raises(RewardError, match="uid '0-7'"):
        pending.get()


@pytest.mark.parametrize(
    ("returned", "score", "skipped"),
    [
        ("true", 1.0, False),
        ("int", 3.0, False),
        ("float32", 0.5, False),
        ("none", 0.0, True),
        ("none score", 0.0, True),
    ],
)
def test_results_that_are_accepted(failing: RewardManager, returned: str, score: float, skipped: bool) -> None:
    result = failing.submit([sample(f"return {returned}")]).get()
    assert (result.scores.tolist(), result.skipped.tolist()) == ([score], [skipped])
    assert result.num_errors == 0


@pytest.mark.parametrize("manager_name", ["failing", "skipping"])
def test_a_check_refuses_every_sample_that_fails_or_warns_where_the_run_would_skip_it(
    manager_name: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    manager = request.getfixturevalue(manager_name)
    manager.check([sample("fine"), sample("return none")])
    assert not caplog.messages
    samples = [sample("divide", 3), sample("fine", 4), sample("return text", 5)]
    if manager_name == "failing":
        with pytest.raises(RewardError) as error:
            manager.check(samples)
        text = str(error.value)
    else:
        manager.check(samples)
        (text,) = caplog.messages
    for word in ["failed for 2 of 3", "uid '0-3'", "ZeroDivisionError", "uid '0-5'", "the function returned a str"]:
        assert word in text


LONG = "long wait" + "x" * 20_000  # four of these fill a pipe


def test_processes_killed_while_they_wait_are_replaced(reward_file: str) -> None:
    before = set(worker_pids(os.getpid()))
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=2)
    workers = set(worker_pids(os.getpid())) - before
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert manager.submit([sample(LONG, index) for index in range(60)]).get().scores.tolist() == [1.0] * 60
    manager.close()


def test_processes_killed_while_they_score_cost_one_sample_each(reward_file: str) -> None:
    before = set(worker_pids(os.getpid()))
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=2, on_error="skip")
    workers = set(worker_pids(os.getpid())) - before
    pending = manager.submit([sample(LONG, index) for index in range(60)])
    while not any(future.done() for _, future in pending._submitted.values()):
        time.sleep(0.001)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    result = pending.get()
    manager.close()
    assert result.num_errors == result.skipped.sum() <= 2 and result.num_timeouts == 0
    assert result.scores.sum() == 60 - result.num_errors


DYING_IMPORT = """
import os, pathlib
marker = pathlib.Path(__file__).with_name("how_often_an_import_dies")
num_deaths = int(marker.read_text()) if marker.exists() else 0
if num_deaths:
    marker.write_text(str(num_deaths - 1))
    os._exit(7)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "exit": os._exit(3)
    return 1.0
"""


@pytest.fixture
def dying(tmp_path: Path) -> Iterator[tuple[RewardManager, Path]]:
    """A manager of one process, and the file that says how often its replacements die while they import."""
    (tmp_path / "dying_reward.py").write_text(DYING_IMPORT)
    spec = RewardFunctionSpec(str(tmp_path / "dying_reward.py"))
    manager = RewardManager(spec, num_workers=1, timeout_s=3.0, on_error="skip")
    yield manager, tmp_path / "how_often_an_import_dies"
    manager.close()


def test_a_process_that_dies_while_it_imports_costs_no_sample(dying: tuple[RewardManager, Path]) -> None:
    manager, how_often = dying
    how_often.write_text("2")
    result = manager.submit([sample("exit"), *[sample(LONG, index) for index in range(1, 60)]]).get()
    assert how_often.read_text() == "0"
    assert result.scores.tolist() == [0.0] + [1.0] * 59 and (result.num_errors, result.num_timeouts) == (1, 0)


def test_processes_that_can_no_longer_import_are_an_error_of_the_run(dying: tuple[RewardManager, Path]) -> None:
    manager, how_often = dying
    how_often.write_text("9")
    pending = manager.submit([sample("exit"), *[sample(LONG, index) for index in range(1, 60)]])
    with pytest.raises(RewardError, match=r"3 reward processes in a row ended before .*exit code 7.*out of memory"):
        pending.get()


def test_a_function_that_can_no_longer_be_loaded_is_an_error_of_the_run(dying: tuple[RewardManager, Path]) -> None:
    manager, how_often = dying
    how_often.write_text("no number")
    with pytest.raises(RewardError, match=r"cannot be loaded any more: .*invalid literal for int.*'no number'"):
        manager.submit([sample("exit"), sample("a")]).get()


def test_a_file_that_changes_while_a_run_uses_it_scores_no_sample(dying: tuple[RewardManager, Path]) -> None:
    manager, how_often = dying
    assert manager.submit([sample("a")]).get().scores.tolist() == [1.0]
    file = how_often.with_name("dying_reward.py")
    file.write_text(file.read_text().replace("return 1.0", "return 2.0"))
    assert manager.submit([sample("b")]).get().scores.tolist() == [1.0], "its process has loaded the function"
    pending = manager.submit([sample("exit"), sample("c")])
    with pytest.raises(RewardError, match=r"cannot be loaded any more: .*dying_reward\.py is not the file any more"):
        pending.get()


def test_a_stopped_process_that_waits_is_replaced(reward_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(worker_pids(os.getpid()))
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=1)
    (worker,) = set(worker_pids(os.getpid())) - before
    os.kill(worker, signal.SIGSTOP)
    monkeypatch.setattr(process, "START_S", 0.3)
    pending = manager.submit([sample(LONG)])
    while is_running(worker):
        time.sleep(0.01)
    monkeypatch.undo()  # its replacement may take longer
    assert pending.get().scores.tolist() == [1.0]
    manager.close()


def test_close_does_not_wait_for_a_hung_sample_and_leaves_no_process(reward_file: str) -> None:
    before = set(worker_pids(os.getpid()))
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=2, timeout_s=600.0)
    pending = manager.submit([RewardSample("row 9", "x", "hang", "1" * 100_000) for _ in range(20)])
    assert len(set(worker_pids(os.getpid())) - before) == 2
    manager.close()
    assert set(worker_pids(os.getpid())) == before
    with pytest.raises(RuntimeError, match="row 9 was not scored: the manager was closed"):
        pending.get()


def test_a_sample_that_times_out_leaves_no_program_that_its_function_started(reward_file: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=1, timeout_s=2.0, on_error="skip")
    assert manager.submit([sample(f"start {file}")]).get().num_timeouts == 1
    manager.close()
    status, deadline = Path(f"/proc/{file.read_text()}/stat"), time.monotonic() + 30
    # It was killed, and ends when it is next given a core; until its new parent has seen it, it is a Z.
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_driver_leaves_no_worker_behind(reward_file: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import time
        from verl_like.rewards.manager import RewardFunctionSpec, RewardManager, RewardSample
        if __name__ == "__main__":
            manager = RewardManager(RewardFunctionSpec({reward_file!r}), num_workers=2, timeout_s=600.0)
            manager.submit([RewardSample("0-0", "x", "hang", "1") for _ in range(2)])
            print("submitted", flush=True)
            time.sleep(600)
        """)
    )
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None and driver.stdout.readline() == "submitted\n"
    workers = worker_pids(driver.pid)
    driver.kill()
    driver.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(is_running(pid) for pid in workers)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def score(): pass", "compute_score", "has no function 'compute_score'"),
        (
            "import no_such_module",
            "compute_score",
            "fails on import: ModuleNotFoundError: No module named 'no_such_mod",
        ),
        ("def broken(:", "compute_score", "fails on import: SyntaxError"),
        ("import os; os._exit(7)", "compute_score", "did not survive loading it"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_once(
    tmp_path: Path, source: str, name: str, message: str
) -> None:
    file = tmp_path / "bad_reward.py"
    file.write_text(source)
    with pytest.raises(ValueError, match=message):
        RewardManager(RewardFunctionSpec(str(file), name), num_workers=1)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward.num_workers=0 and reward.timeout_s=30.0 must be at least 1"):
        RewardManager(RewardFunctionSpec(), num_workers=0)


def worker_pids(driver: int) -> list[int]:
    """The reward workers among a process's children."""
    children = [pid for task in Path(f"/proc/{driver}/task").glob("*/children") for pid in task.read_text().split()]
    return [int(pid) for pid in children if b"rewards.scoring_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    """False also for a zombie, which nobody may be there to collect."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_samples_may_come_one_by_one_in_any_order(failing: RewardManager):
    pending = failing.expect(3)
    pending.submit(2, sample("c", 2, ground_truth="30"))
    assert pending.missing() == [0, 1]
    pending.submit(0, sample("a", 0, ground_truth="10"))
    pending.submit(1, sample("b", 1, ground_truth="20"))
    result = pending.get()
    assert result.scores.tolist() == [10, 20, 30] and result.extra["said"].tolist() == ["a", "b", "c"]
    pids, starts, ends = zip(*result.ran, strict=True)
    assert len(set(pids)) == 1 and all(start <= end for start, end in zip(starts, ends, strict=True))
    assert ends[2] <= starts[0] and ends[0] <= starts[1]  # one process, in the order in which they came


def test_of_samples_that_come_in_any_order_the_first_one_that_fails_is_named(failing: RewardManager):
    pending = failing.expect(2)
    pending.submit(1, sample("own error", 1))
    pending.submit(0, sample("divide", 0))
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        pending.get()
