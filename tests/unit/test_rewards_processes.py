"""How reward processes end, and what ends with them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_processes import is_running, sample, worker_pids

from verl_like.rewards import process
from verl_like.rewards.manager import RewardError, RewardFunctionSpec, RewardManager, RewardSample

LONG = "long wait" + "x" * 20_000  # four of these fill a pipe


def test_processes_killed_while_they_wait_are_replaced(reward_file: str) -> None:
    before = set(worker_pids(os.getpid()))
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=2)
    workers = set(worker_pids(os.getpid())) - before
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert (
        manager.submit([sample(LONG, index) for index in range(60)]).get().scores.tolist()
        == [1.0] * 60
    )
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
    """A manager of one process, and the file that says how often its replacements die while they
    import."""
    (tmp_path / "dying_reward.py").write_text(DYING_IMPORT)
    spec = RewardFunctionSpec(str(tmp_path / "dying_reward.py"))
    manager = RewardManager(spec, num_workers=1, timeout_s=3.0, on_error="skip")
    yield manager, tmp_path / "how_often_an_import_dies"
    manager.close()


def test_a_process_that_dies_while_it_imports_costs_no_sample(
    dying: tuple[RewardManager, Path],
) -> None:
    manager, how_often = dying
    how_often.write_text("2")
    result = manager.submit(
        [sample("exit"), *[sample(LONG, index) for index in range(1, 60)]]
    ).get()
    assert how_often.read_text() == "0"
    assert result.scores.tolist() == [0.0] + [1.0] * 59 and (
        result.num_errors,
        result.num_timeouts,
    ) == (1, 0)


def test_processes_that_can_no_longer_import_are_an_error_of_the_run(
    dying: tuple[RewardManager, Path],
) -> None:
    manager, how_often = dying
    how_often.write_text("9")
    pending = manager.submit([sample("exit"), *[sample(LONG, index) for index in range(1, 60)]])
    with pytest.raises(
        RewardError, match=r"3 reward processes in a row ended before .*exit code 7.*out of memory"
    ):
        pending.get()


def test_a_function_that_can_no_longer_be_loaded_is_an_error_of_the_run(
    dying: tuple[RewardManager, Path],
) -> None:
    manager, how_often = dying
    how_often.write_text("no number")
    with pytest.raises(
        RewardError, match=r"cannot be loaded any more: .*invalid literal for int.*'no number'"
    ):
        manager.submit([sample("exit"), sample("a")]).get()


def test_a_file_that_changes_while_a_run_uses_it_scores_no_sample(
    dying: tuple[RewardManager, Path],
) -> None:
    manager, how_often = dying
    assert manager.submit([sample("a")]).get().scores.tolist() == [1.0]
    file = how_often.with_name("dying_reward.py")
    file.write_text(file.read_text().replace("return 1.0", "return 2.0"))
    assert manager.submit([sample("b")]).get().scores.tolist() == [1.0], (
        "its process has loaded the function"
    )
    pending = manager.submit([sample("exit"), sample("c")])
    with pytest.raises(
        RewardError, match=r"cannot be loaded any more: .*dying_reward\.py is not the file any more"
    ):
        pending.get()


def test_a_stopped_process_that_waits_is_replaced(
    reward_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_stop_kills_a_stopped_process_though_a_program_below_it_has_ended_meanwhile(
    reward_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = process.RewardProcess(RewardFunctionSpec(reward_file), 60.0, 4.0)
    each.start()
    assert each._popen is not None
    pid = each._popen.pid
    os.kill(pid, signal.SIGSTOP)
    has_ended = subprocess.Popen(["true"])
    has_ended.wait()
    below = process.descendants
    monkeypatch.setattr(process, "descendants", lambda pid: [has_ended.pid, *below(pid)])
    monkeypatch.setattr(process, "EXIT_S", 1.0)
    assert each.stop() == -signal.SIGKILL
    assert not is_running(pid)


def test_close_does_not_wait_for_a_hung_sample_and_leaves_no_process(reward_file: str) -> None:
    before = set(worker_pids(os.getpid()))
    manager = RewardManager(RewardFunctionSpec(reward_file), num_workers=2, timeout_s=600.0)
    pending = manager.submit([RewardSample("row 9", "x", "hang", "1" * 100_000) for _ in range(20)])
    assert len(set(worker_pids(os.getpid())) - before) == 2
    manager.close()
    assert set(worker_pids(os.getpid())) == before
    with pytest.raises(RuntimeError, match="row 9 was not scored: the manager was closed"):
        pending.get()


def test_a_sample_that_times_out_leaves_no_program_that_its_function_started(
    reward_file: str, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    manager = RewardManager(
        RewardFunctionSpec(reward_file), num_workers=1, timeout_s=2.0, on_error="skip"
    )
    assert manager.submit([sample(f"start {file}")]).get().num_timeouts == 1
    manager.close()
    status, deadline = Path(f"/proc/{file.read_text()}/stat"), time.monotonic() + 30
    # It was killed, and ends when it is next given a core; until its new parent has seen it, it is
    # a Z.
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(("how", "counts"), [("hang", (0, 1)), ("exit", (1, 0))])
def test_a_program_with_its_own_session_and_no_parent_ends_with_the_process(
    reward_file: str, tmp_path: Path, how: str, counts: tuple[int, int]
) -> None:
    file = tmp_path / "pid"
    manager = RewardManager(
        RewardFunctionSpec(reward_file), num_workers=1, timeout_s=6.0, on_error="skip"
    )
    result = manager.submit([sample(f"daemon {how} {file}"), sample("a")]).get()
    assert (result.num_errors, result.num_timeouts) == counts and result.scores[1] == 1.0
    # The supervisor waits for the end of each before its own
    assert not is_running(int(file.read_text()))
    manager.close()


def test_a_killed_driver_leaves_no_worker_behind(reward_file: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import time
        from verl_like.rewards.manager import RewardFunctionSpec, RewardManager, RewardSample
        if __name__ == "__main__":
            manager = RewardManager(RewardFunctionSpec({reward_file!r}), num_workers=2, timeout_s=600.0)
            samples = ["hang", "daemon hang {tmp_path}/pid"]
            manager.submit([RewardSample("0-0", "x", solution, "1") for solution in samples])
            print("submitted", flush=True)
            time.sleep(600)
        """)
    )
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None and driver.stdout.readline() == "submitted\n"
    workers = worker_pids(driver.pid)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    started = int((tmp_path / "pid").read_text())
    driver.kill()
    driver.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in [*workers, started]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(is_running(pid) for pid in [*workers, started])


@pytest.mark.parametrize("cause", ["eat", "program eats"])
def test_a_process_above_its_memory_ends_and_the_other_samples_are_scored(
    reward_file: str, cause: str
) -> None:
    spec = RewardFunctionSpec(reward_file)
    manager = RewardManager(spec, num_workers=1, timeout_s=60.0, on_error="skip", max_memory_gb=1.0)
    samples = [sample("a"), sample(cause, 4), sample("b")]
    result = manager.submit(samples).get()
    assert result.scores.tolist() == [1.0, 0.0, 1.0] and (
        result.num_errors,
        result.num_timeouts,
    ) == (1, 0)
    manager.on_error = "fail"
    with pytest.raises(
        RewardError,
        match=r"uid '0-4'.*it used more memory than reward.max_memory_gb=1 and was ended",
    ):
        manager.submit(samples).get()
    manager.close()


def test_memory_that_the_import_takes_counts_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "eats.py").write_text("import time\nblock = b'x' * (700 << 20)\ntime.sleep(600)")
    with pytest.raises(
        ValueError,
        match=r"did not survive loading it \(it used more memory than .*max_memory_gb=0.5 and",
    ):
        RewardManager(
            RewardFunctionSpec(str(tmp_path / "eats.py")), num_workers=1, max_memory_gb=0.5
        )


def test_no_more_processes_are_started_than_the_machine_has_memory_for() -> None:
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // (64 << 20)
    with pytest.raises(
        ValueError, match=rf"reward.num_workers={most + 1} processes take .*: set at most {most}"
    ):
        RewardManager(RewardFunctionSpec(), num_workers=most + 1)
