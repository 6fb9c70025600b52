"""Faults of detached training: what a side loses is made again, or the run ends and says who
failed."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import forked_workers
import psutil
import pytest
import ray
from runs import (
    AHEAD,
    GRPO,
    kill_once,
    metrics_of,
    num_steps_logged,
    processes_of_ours,
    run_apart,
    tiny_run_settings,
)
from test_local_step import local_trainer
from test_maker_and_learner import SETTINGS, prompts_of

from verl_like.protocol import Part
from verl_like.single_controller.ray.resource_pool import ResourcePoolManager
from verl_like.single_controller.ray.start import start_ray
from verl_like.single_controller.shard import ForwardedFuture
from verl_like.trainer.detached import run_detached
from verl_like.trainer.detached.maker_holder import ExperienceMakerHolder
from verl_like.trainer.detached.side import PushedWeights, SideRecorder
from verl_like.trainer.run import worker_template

pytestmark = pytest.mark.ray
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str != ground_truth:  # unlike the check before Ray starts
        {statement}
    return 1.0
"""


def assert_all_prompts_are_counted(output: str, num_steps: int) -> None:
    """The last line about the prompts counts the four of each step, those with the sides
    included."""
    (line,) = re.findall(r"^Prompts: (.*)$", output, re.MULTILINE)
    counts = {name: int(count) for count, name in (part.split(" ") for part in line.split(", "))}
    assert counts["trained"] >= 8 and "dropped/maker_lost" not in counts
    assert sum(counts.values()) == 4 * num_steps, line


@pytest.mark.proof
def test_an_interrupted_run_shows_what_became_of_every_prompt(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture
):
    def interrupt() -> None:
        while num_steps_logged(tmp_path) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *GRPO,
        *AHEAD,
        "trainer.total_training_steps=1000",
    ]
    threading.Thread(target=interrupt, daemon=True).start()
    assert run_apart(settings) == 130
    assert_all_prompts_are_counted(capsys.readouterr().out, num_steps=1000)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("title", "number", "reason"),
    [
        ("ExperienceMakerHolder", signal.SIGSTOP, r"maker_0\.report did not finish within 10 s"),
        (
            "rollout rank",
            signal.SIGKILL,
            r"rollout rank 0 \(node [\d.]+, pid \d+\) died during \w+",
        ),
        (
            "rollout rank",
            signal.SIGSTOP,
            r"rollout rank 0 \(node [\d.]+, pid \d+\) was stopped, such as by SIGSTOP, ",
        ),
    ],
)
def test_a_maker_that_is_stopped_or_loses_a_worker_is_started_again_and_no_prompt_is_lost(
    title: str,
    number: int,
    reason: str,
    tmp_path: Path,
    tiny_llama: Callable,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(run_detached, "ANSWER_S", 10.0)
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *GRPO,
        *AHEAD,
        "detached.experience_batch_size=1",
    ]
    settings += ["detached.min_effective_sample_size=1"]  # more than any step has
    settings += ["trainer.total_training_steps=60"]  # a step takes a tenth of a second
    before, family = processes_of_ours(), list[psutil.Process]()

    def is_time() -> bool:
        if num_steps_logged(tmp_path) >= 2:
            family.extend(processes_of_ours() - before)
        return bool(family)

    killer = kill_once(title, number, when=is_time)
    assert run_apart(settings) == 0
    assert not killer.is_alive()
    output = capsys.readouterr().out
    assert re.search(f"maker_0 failed and is started again: {reason}", output), output
    assert output.count("is started again") == 1
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 61))
    counts = {
        name: steps[-1][f"detached/{name}"]
        for name in ("trained", "in_buffer", "in_flight", "again")
    }
    assert counts == {"trained": 240, "in_buffer": 0, "in_flight": 0, "again": 0}
    assert [row["detached/brake"] for row in steps] == [1] * 60
    assert [row["training/staleness/max"] for row in steps][2:] == [0] * 58, (
        "what was begun before is trained at step 2"
    )
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


@pytest.mark.proof
@pytest.mark.parametrize(
    ("title", "number", "reason"),
    [
        (
            "DetachedPPOTrainer",
            signal.SIGKILL,
            r"trainer_0 rank 0 \(node [\d.]+, pid [1-9]\d*\) died during",
        ),
        ("DetachedPPOTrainer", signal.SIGSTOP, r"trainer_0\.report did not finish within 10 s"),
        (
            "PromptLedger",
            signal.SIGKILL,
            r"ledger rank 0 \(node [\d.]+, pid [1-9]\d*\) died during",
        ),
        ("PromptLedger", signal.SIGSTOP, r"ledger\.counts did not finish within 10 s"),
    ],
)
def test_a_trainer_or_ledger_that_is_killed_or_stopped_ends_the_run_and_the_error_says_what_others_waited_for(
    title: str,
    number: int,
    reason: str,
    tmp_path: Path,
    tiny_llama: Callable,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(run_detached, "ANSWER_S", 10.0)
    before, family = processes_of_ours(), list[psutil.Process]()
    killed: list[float] = []

    def is_time() -> bool:
        if num_steps_logged(tmp_path) >= 2:
            family.extend(processes_of_ours() - before)
            killed.append(time.monotonic())
        return bool(family)

    kill_once(title, number, when=is_time)
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *GRPO,
        *AHEAD,
        "trainer.total_training_steps=1000",
    ]
    assert run_apart(settings) == 1
    assert time.monotonic() - killed[0] < 60
    output, message = capsys.readouterr()
    assert re.search(reason, message), message
    assert "is started again" not in output
    if title == "PromptLedger":
        assert re.search(
            r"This ended ledger.\ntrainer_0: .* for \d+ s\n(.*\n)*maker_0: .* for \d+ s\n", message
        ), message
    else:
        ended = (
            r"This ended trainer_0.\ntrainer_0 does not answer: it is stopped or "
            r"dead\nmaker_0: .* for \d+ s\n"
        )
        assert re.search(rf"{ended}(.*\n)*.* in workingloop\n", message), message
        assert_all_prompts_are_counted(output, num_steps=1000)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert re.search(reason, (tmp_path / "runs/latest/report.html").read_text())


@pytest.mark.proof
@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "raise KeyError('no such unit')",
            r"no such unit(.*\n)*trainer_0: waiting for experience for \d+ s\n(.*\n)*maker_0: .* "
            r"for \d+ s\n",
        ),
        (
            "import time; time.sleep(900)",
            r"trainer_0 rank 0 .* each trainer needs 4 groups .* by maker: \{'maker_0.1': \[0, 1, "
            r"2, 3\]\}"
            r"(.*\n)*trainer_0: waiting for experience for \d+ s\n  Its loop has ended.\n"
            r"maker_0: making experience for \d+ s\n(.*\n)*.*rewards/manager.py.* in answers\n",
        ),
    ],
)
def test_a_reward_function_that_raises_or_never_ends_ends_the_run_without_a_restart(
    statement: str,
    message: str,
    tmp_path: Path,
    tiny_llama: Callable,
    capsys: pytest.CaptureFixture,
):
    settings = [
        *tiny_run_settings(tmp_path, tiny_llama),
        *GRPO,
        "trainer.test_freq=-1",
        "trainer.call_timeout_s=30",
    ]
    settings += ["reward.timeout_s=1000", "trainer.val_before_train=false"]
    (tmp_path / "reward.py").write_text(REWARD.format(statement=statement))
    assert run_apart(settings) == 1
    output = capsys.readouterr()
    assert re.search(message, output.err), output.err
    assert "is started again" not in output.out


@pytest.mark.proof
def test_a_side_that_is_stopped_ends_though_ray_ends_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_detached, "ANSWER_S", 1.0)
    template = worker_template.start([])
    start_ray(None, 1, template.command)

    @ray.remote(num_cpus=0)
    class Stopped:
        def status(self) -> str:
            return ""

        def report(self) -> SideRecorder:
            return SideRecorder("trainer_0")

    run = object.__new__(run_detached.DetachedRun)
    run.actors, run.pools = (
        {"trainer_0": Stopped.remote()},
        {"trainer_0": ResourcePoolManager({}, {})},
    )
    run.reports = {"trainer_0": ray.get(run.actors["trainer_0"].report.remote(), timeout=60)}
    process = psutil.Process(run.reports["trainer_0"].pid)
    process.suspend()
    assert run.statuses() == "trainer_0 does not answer: it is stopped or dead\n"
    ray.shutdown()
    template.close()
    _, alive = psutil.wait_procs([process], timeout=30)
    assert not alive


def test_a_maker_stays_on_its_version_where_the_trainer_died_in_mid_push(
    tmp_path: Path, tiny_llama: Callable
):
    forked_workers.start_ray(num_cpus=1)

    @ray.remote(num_cpus=0)
    class Exporting:
        """Owns what it exports, as a trainer does."""

        def export(self) -> list[Part]:
            return [Part(ray.put("header"), ray.put(b"weights"))]

    exporting = Exporting.remote()
    parts = ray.get(exporting.export.remote(), timeout=60)
    ray.kill(exporting)
    deadline = time.monotonic() + 60
    for ref in (parts[0].header, parts[0].payload):
        with pytest.raises(ray.exceptions.OwnerDiedError):
            # Ray hands the object out until it has noticed the owner's death
            while time.monotonic() < deadline:
                ray.get(ref, timeout=60)
    with local_trainer(tmp_path, tiny_llama, *SETTINGS) as trainer:
        holder_class = ExperienceMakerHolder.__ray_metadata__.modified_class
        holder = object.__new__(holder_class)
        holder.run, holder.config, holder.recorder = (
            trainer,
            trainer.config,
            SideRecorder("maker_0"),
        )
        holder.trainer_names = ["trainer_0"]
        holder.version, holder.pushed = (
            0,
            PushedWeights(1, {"actor": ForwardedFuture(parts, lambda results: results)}),
        )
        started = time.monotonic()
        holder.load_newest_weights()
        assert time.monotonic() - started < 30
        assert holder.version == 0
        made = trainer.maker.make(prompts_of(trainer, 1))
        assert {
            span[0] for spans in made.batch.non_tensor_batch["policy_version"] for span in spans
        } == {0}
    ray.shutdown()
