"""Every fault of docs/reliability.md in a real run: no hang, no silent loss, one error, and the
last checkpoint whole.

Each test gives rows of that page, which `make proofs` writes.
"""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from agent_faults import (
    AGENT_FAULTS,
    ALL_FAILED,
    SERVER_SETTINGS,
    agent_settings,
    has_episodes,
    serving_episodes,
)
from faults import DETACHED, FAULTS, NUM_STEPS, PLACEMENT, RUN, SYNCHRONOUS, Fault, Run
from runs import data_row, metrics_of, tiny_run_settings

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.detached.run_detached import run_detached
from verl_like.trainer.ppo.run_ppo import run_ppo

pytestmark = [pytest.mark.ray, pytest.mark.proof, pytest.mark.timeout(900)]
MODES = (SYNCHRONOUS, DETACHED)
WITHIN_S = 30.0


class Page:
    """Gives rows of docs/reliability.md to `make proofs`."""

    def __init__(self, record_property: Callable[[str, object], None]) -> None:
        self.record_property = record_property

    def add(
        self,
        number: int,
        done: str,
        mode: str,
        seconds: float | None,
        message: str,
        lost: str,
        kept: str,
    ) -> None:
        after = "" if seconds is None else f"{seconds:.0f} s"
        cells = [str(number), done, mode, after, message.replace("|", "/"), lost, kept]
        self.record_property("reliability", cells)


@pytest.fixture
def page(record_property: Callable[[str, object], None]) -> Page:
    return Page(record_property)


@pytest.fixture
def new_run(tmp_path: Path, tiny_llama: Callable) -> Iterator[Callable[[str], Run]]:
    """Makes the folder of a run of a kind; what is left of the run is killed after the test."""
    runs: list[Run] = []

    def make(mode: str) -> Run:
        folder = tmp_path / mode
        folder.mkdir()
        runs.append(Run(folder, mode, tiny_run_settings(folder, tiny_llama)))
        return runs[-1]

    yield make
    for run in runs:
        if run.process and run.process.poll() is None:
            run.kill()


def line_of(run: Run, says: str) -> str:
    """The line that the run said, or its first one, without what differs from run to run."""
    found = re.search(says, run.text())
    assert found, run.text()
    start = run.text().rfind("\n", 0, found.start()) + 1
    line = run.text()[start:].splitlines()[0].removeprefix("verl_like: ")
    return re.sub(r"/\S*/", "", line)[:200]


def steps_of(run: Run) -> list[int]:
    """The training steps in the run's metrics."""
    return [row["step"] for row in metrics_of(run.folder) if "actor/loss" in row]


def num_steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def cases_of(faults: Sequence[Fault]) -> list[Any]:
    """Each fault in each kind of run."""
    return [
        pytest.param(fault, mode, id=f"{fault.number} {fault.done}, {mode}")
        for fault in faults
        for mode in fault.modes
    ]


def check_fault(fault: Fault, run: Run, page: Page) -> list[dict]:
    """A run in which the fault happens ends with an error that says it, or goes on without a
    loss; the rows of its metrics."""
    if fault.disk_of:
        mount_disk(run.folder / "runs", fault.disk_of)
    overrides = fault.prepare(run)
    run.start(*overrides, **dict(fault.environment))
    run.wait_for_rows(2)
    fault.strike(run)
    struck = time.monotonic()
    while not re.search(fault.says, run.text()):
        assert run.process.poll() is None or re.search(fault.says, run.text()), run.text()
        assert time.monotonic() - struck < 200, run.text()
        time.sleep(0.1)
    seconds = time.monotonic() - struck
    goes_on = run.mode in fault.goes_on
    assert run.end() == (0 if goes_on else fault.exit_code), run.text()
    newest, steps = run.whole_checkpoint(), steps_of(run)
    assert steps == list(range(1, len(steps) + 1))
    lost = num_steps(steps[-1] - newest.step)
    if goes_on:
        assert steps[-1] == newest.step == NUM_STEPS
        lost = fault.lost
    elif fault.exit_code == 1:
        assert run.text().count("\nverl_like: ") == 1 or fault.disk_of, run.text()
        assert seconds < WITHIN_S or fault.environment, seconds
    page.add(
        fault.number, fault.done, run.mode, None if goes_on or fault.environment else seconds,
        line_of(run, fault.says), lost, f"of step {newest.step}, whole",
    )  # fmt: skip
    rows = metrics_of(run.folder)
    shutil.rmtree(run.folder / "runs", ignore_errors=True)
    return rows


def mount_disk(folder: Path, size: str) -> None:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.decode().strip()}")


@pytest.mark.parametrize(("fault", "mode"), cases_of(FAULTS))
def test_a_fault_of_a_run_that_trains_is_told_and_loses_no_checkpoint(
    fault: Fault, mode: str, new_run: Callable[[str], Run], page: Page
):
    run = new_run(mode)
    try:
        check_fault(fault, run, page)
    finally:
        if (run.folder / "runs").is_mount():
            subprocess.run(["umount", "--lazy", str(run.folder / "runs")], check=True)


@pytest.mark.vllm
@pytest.mark.parametrize(("fault", "mode"), cases_of(AGENT_FAULTS))
def test_a_fault_of_a_run_of_episodes_is_told_or_made_good(
    fault: Fault, mode: str, new_run: Callable[[str], Run], page: Page, tiny_llama: Callable
):
    run = new_run(mode)
    run.settings += agent_settings(tiny_llama)
    for row in check_fault(fault, run, page):
        assert not row.get("agent/num_failed") or fault.number == 29, row
        assert not row.get("agent/num_dropped_prompts") or fault.number == 29, row


def failures_of(run: Run) -> tuple[int, int]:
    """How many attempts at episodes have failed so far, and how many episodes."""
    num_attempts = 0
    num_episodes = 0
    for row in metrics_of(run.folder):
        num_episodes += int(row.get("agent/num_failed", 0))
        for name, value in row.items():
            if name.startswith("agent/num_failures/"):
                num_attempts += int(value)
    return num_attempts, num_episodes


def strike_server(run: Run, kind: str, server: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to a server in the middle of a step. Of a killed one no program is left."""
    process = psutil.Process(server.pid)
    run.wait_until(lambda: has_episodes(kind, process), "an episode runs in the server")
    programs = process.children(recursive=True)
    server.send_signal(number)
    if number == signal.SIGKILL:
        server.wait(timeout=60)
        for program in programs:
            with contextlib.suppress(psutil.NoSuchProcess):
                program.kill()


@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("kind", ["openenv", "verifiers"])
def test_a_server_that_comes_back_costs_no_episode_and_one_that_does_not_ends_the_run(
    kind: str, name: str, mode: str, new_run: Callable[[str], Run], page: Page, tiny_llama: Callable
):
    run = new_run(mode)
    run.settings += agent_settings(tiny_llama) + SERVER_SETTINGS
    sent = signal.Signals[name]
    done = f"{name} to a server of {kind}"
    with contextlib.ExitStack() as servers:
        address, server = servers.enter_context(serving_episodes(kind))
        run.start(f"agent.server={kind}://{address}")
        run.wait_for_rows(2)
        strike_server(run, kind, server, sent)
        if sent == signal.SIGKILL:
            port = int(address.partition(":")[2])
            _address, server = servers.enter_context(serving_episodes(kind, port))
        else:
            time.sleep(30)
            server.send_signal(signal.SIGCONT)
        run.wait_for_rows(len(metrics_of(run.folder)) + 3)
        num_attempts, num_episodes = failures_of(run)
        assert num_attempts and not num_episodes
        message = f"agent/num_failures/...: {num_attempts}, agent/num_failed: 0"
        page.add(30, f"{done}, which comes back", mode, None, message, "nothing", "")
        strike_server(run, kind, server, sent)
        struck = time.monotonic()
        assert run.end() == 1, run.text()
    seconds = time.monotonic() - struck
    newest = run.whole_checkpoint()
    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))
    assert run.text().count("\nverl_like: ") == 1, run.text()
    assert mode == SYNCHRONOUS or "Prompts: " in run.text(), "the ledger has added them up"
    message = line_of(run, ALL_FAILED)
    lost = num_steps(steps[-1] - newest.step)
    page.add(30, done, mode, seconds, message, lost, f"of step {newest.step}, whole")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable) -> Callable[[str], Run]:
    """A run of a kind whose driver was killed after some steps, as a copy that a test may
    change."""
    originals: dict[str, Run] = {}

    def copy(mode: str) -> Run:
        if mode not in originals:
            folder = tmp_path_factory.mktemp(mode)
            originals[mode] = run = Run(folder, mode, tiny_run_settings(folder, tiny_llama))
            run.start()
            run.wait_for_rows(5)
            run.kill()
        original = originals[mode]
        folder = tmp_path_factory.mktemp(f"{mode}_again")
        shutil.copytree(original.folder, folder, symlinks=True, dirs_exist_ok=True)
        return Run(folder, mode, list(original.settings))

    return copy


def continue_run(run: Run, *overrides: str) -> int:
    """Starts it again for two steps more than its newest checkpoint, or ends with its refusal; the
    exit code."""
    last = run.whole_checkpoint().step + 2
    run.start(f"trainer.total_training_steps={last}", *overrides)
    code = run.process.wait(timeout=300)
    if code == 0:
        assert steps_of(run) == list(range(1, last + 1))
        assert run.whole_checkpoint().step == last
    return code


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_driver_was_killed_goes_on_on_other_ranks(
    mode: str, killed: Callable[[str], Run], page: Page
):
    run = killed(mode)
    step, last = run.whole_checkpoint().step, steps_of(run)[-1]
    assert continue_run(run) == 0, run.text()
    lost, kept = num_steps(last - step), f"of step {step}, whole"
    page.add(
        3,
        "SIGKILL to the driver, the same command again",
        mode,
        None,
        line_of(run, "Continuing"),
        lost,
        kept,
    )
    other = 2 if mode == DETACHED else 1
    run = killed(mode)
    assert continue_run(run, f"trainer.n_gpus_per_node={other}") == 0, run.text()
    page.add(
        8,
        f"continued with {other} processes a pool",
        mode,
        None,
        line_of(run, "Continuing"),
        lost,
        kept,
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_killed_while_it_saves_goes_on(
    mode: str, new_run: Callable[[str], Run], page: Page
):
    run = new_run(mode)
    run.start()
    run.wait_for_rows(2)
    run.wait_until(
        lambda: list(run.run_dir.glob("global_step_*.partial/*/*/*.safetensors")),
        "a part is written",
    )
    run.kill()
    step, last = run.whole_checkpoint().step, steps_of(run)[-1]
    assert continue_run(run) == 0, run.text()
    lost, kept = num_steps(last - step), f"of step {step}, whole"
    page.add(
        5,
        "SIGKILL to the driver while a rank writes",
        mode,
        None,
        line_of(run, "Continuing"),
        lost,
        kept,
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_with_a_changed_byte_is_named_and_the_one_before_is_taken(
    mode: str, killed: Callable[[str], Run], page: Page
):
    run = killed(mode)
    step = run.whole_checkpoint().step
    (file, *_) = sorted(run.run_dir.glob(f"global_step_{step}/actor/checkpoint/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    run.start(f"trainer.total_training_steps={step + 2}")
    assert run.process.wait(timeout=300) == 0, run.text()
    assert f"after step {step - 1}" in run.text()
    assert steps_of(run) == list(range(1, step + 3))
    message = line_of(
        run, f"global_step_{step}/actor/checkpoint/{file.name} is not as it was written"
    )
    page.add(
        6,
        "a bit of the newest checkpoint is flipped",
        mode,
        None,
        message,
        "1 step",
        f"of step {step - 1}, whole",
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_not_continued_on_other_data(mode: str, killed: Callable[[str], Run], page: Page):
    run = killed(mode)
    step = run.whole_checkpoint().step
    (data,) = [
        Path(each.partition("=")[2])
        for each in run.settings
        if each.startswith("data.train_files=")
    ]
    before = data.read_bytes()
    pq.write_table(pa.Table.from_pylist(pq.read_table(data).to_pylist()[::-1]), data)
    started = time.monotonic()
    code = continue_run(run)
    data.write_bytes(before)
    assert code == 2, run.text()
    message = line_of(run, "read other files than there are now")
    seconds = time.monotonic() - started
    page.add(
        10,
        "continued after the data changed",
        mode,
        seconds,
        message,
        "nothing",
        f"of step {step}, whole",
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_with_a_whole_epoch_where_one_has_ended(
    mode: str, new_run: Callable[[str], Run], page: Page
):
    run = new_run(mode)
    run.start("trainer.total_training_steps=2")  # 8 rows are two steps
    assert run.process.wait(timeout=300) == 0, run.text()
    run.start("trainer.total_training_steps=4")
    assert run.process.wait(timeout=300) == 0, run.text()
    assert steps_of(run) == [1, 2, 3, 4] and run.whole_checkpoint().step == 4
    message = line_of(run, "Continuing .* after step 2")
    page.add(
        9, "continued at the end of an epoch", mode, None, message, "nothing", "of step 2, whole"
    )


def write_rows(folder: Path, rows: list[object]) -> str:
    (folder / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"data.train_files={folder}/bad.jsonl"


REFUSED = [
    (15, "a prompt is longer than data.max_prompt_length", "long", "max_prompt_length"),
    (16, "the data has 2 rows, a batch 4", "few", "fewer than data.train_batch_size=4"),
    (16, "the data has no row", "none", "bad.jsonl"),
    (17, "a row has no prompt", "no prompt", "row 1.*prompt"),
    (17, "a row has null as ground truth", "no truth", "row 1.*ground_truth"),
    (18, "trainer.save_frq=5", "+trainer.save_frq=5", "save_freq"),
    (20, "role_mapping.actor=no_pool", "role_mapping.actor=no_pool", "no_pool"),
    (21, "the machine has one CPU", "ray_kwargs.ray_init.num_cpus=1", "do not fit on this machine"),
    (14, "the reward file ends its process in its import", "import os; os._exit(3)", "reward"),
]


def refused_settings(how: str, folder: Path) -> list[str]:
    """The override of a run that is to be refused; the file it reads is written."""
    row = data_row(1)
    rows = {
        "long": [data_row(0, prompt="1+" * 30)] * 8,
        "few": [row] * 2,
        "none": [],
        "no prompt": [row, {"data_source": "exact_match"}] * 4,
        "no truth": [row, row | {"reward_model": {"style": "rule", "ground_truth": None}}] * 4,
    }
    if how in rows:
        return [write_rows(folder, rows[how])]
    if how.startswith("import"):
        (folder / "dies.py").write_text(f"{how}\n\ndef compute_score(*_):\n    return 1.0\n")
        return [f"custom_reward_function.path={folder}/dies.py"]
    return [how]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("number", "done", "how", "says"), REFUSED)
def test_bad_input_is_refused_before_ray_starts(
    number: int, done: str, how: str, says: str, mode: str, tmp_path: Path, tiny_llama: Callable,
    capsys: pytest.CaptureFixture, page: Page,
):  # fmt: skip
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *PLACEMENT[mode],
        *RUN,
        *refused_settings(how, tmp_path),
    ]
    started = time.monotonic()
    try:
        if mode == SYNCHRONOUS:
            code = run_ppo(load_ppo_config(settings))
        else:
            code = run_detached(load_config(DetachedConfig, broken_detached_rules, settings))
        message = capsys.readouterr().err
    except ValueError as error:  # main prints it
        code, message = 2, str(error)
    seconds = time.monotonic() - started
    assert code == 2 and re.search(says, message, re.DOTALL), message
    assert not ray.is_initialized() and not (tmp_path / "runs").exists()
    said = message.partition("verl_like: ")[2] or message  # progress bars come first
    line = re.sub(r"/\S*/", "", said.strip().splitlines()[0])[:200]
    page.add(number, done, mode, seconds, line, "nothing", "none yet")
    assert seconds < WITHIN_S
