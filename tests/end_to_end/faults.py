"""The faults of docs/reliability.md: how each is made to happen in a real run, and what the run has
to say."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from runs import metrics_of

from verl_like.trainer.state import checkpoint

SYNCHRONOUS, DETACHED = "synchronous", "detached"
PLACEMENT = {
    SYNCHRONOUS: ["trainer.n_gpus_per_node=2"],
    DETACHED: ["placement=detached", "trainer.n_gpus_per_node=1", "trainer.max_staleness=1"],
}
RUN = [
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.bypass_mode=true",
    "reward.num_workers=2",
    "trainer.total_training_steps=1000",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=2",
    "reward.timeout_s=4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
]
DEADLINE_S = 300.0
NUM_STEPS = 40
"""Of a run that is to end by itself."""
REWARD = """
import os
import time


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if os.path.exists({flag!r}):
        {statement}
    return len(set(solution_str)) / 4
"""
ENGINE = """
import math
import os
from dataclasses import replace

import numpy as np
import torch

from verl_like.workers.rollout import register_rollout_engine
from verl_like.workers.rollout.hf_engine import HfEngine


@register_rollout_engine("faulty")
class FaultyEngine(HfEngine):
    def _step(self):
        ended = super()._step()
        if ended and os.path.exists({flag!r}):
            name, completion = ended[0]
            {statement}
        return ended

    def _load(self, exports, version):
        super()._load(exports, version)
        if os.path.exists({flag!r}):
            parameter = next(iter(self.model.parameters()))
            {at_load}
"""
TRACKER = """
import os
import time


class Run:
    id = "a_run"

    def log(self, metrics, step):
        if os.path.exists({flag!r}):
            {statement}

    def finish(self):
        pass


def init(**_):
    return Run()
"""


@dataclass
class Run:
    """A run in a process of its own, with everything it reads and writes in a folder."""

    folder: Path
    mode: str
    settings: list[str]
    process: subprocess.Popen | None = None
    family: list[psutil.Process] = field(default_factory=list)

    @property
    def flag(self) -> Path:
        """The file whose presence makes a reward, an engine or a tracker fail."""
        return self.folder / "flag"

    @property
    def run_dir(self) -> Path:
        (run_dir,) = (self.folder / "runs").glob("2*")
        return run_dir

    def start(self, *overrides: str, **environment: str) -> None:
        """Starts the run, or one that continues it."""
        main = "main_ppo" if self.mode == SYNCHRONOUS else "main_detached"
        settings = [
            *self.settings,
            *PLACEMENT[self.mode],
            *RUN,
            f"trainer.default_local_dir={self.folder}/runs",
        ]
        command = [sys.executable, "-m", f"verl_like.trainer.{main}", *settings, *overrides]
        environment = (
            os.environ
            | {"PYTHONPATH": f"{self.folder}:{os.environ.get('PYTHONPATH', '')}"}
            | environment
        )
        with open(self.folder / "out", "a") as out, open(self.folder / "err", "a") as err:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def text(self) -> str:
        """What the run has said."""
        return (self.folder / "err").read_text() + (self.folder / "out").read_text()

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process is not None and self.process.poll() is None, (what, self.text())
            assert time.monotonic() < deadline, (what, self.text())
            time.sleep(0.02)

    def wait_for_rows(self, num_rows: int) -> None:
        metrics = self.folder / "runs/latest/metrics.jsonl"
        self.wait_until(
            lambda: metrics.exists() and len(metrics_of(self.folder)) >= num_rows,
            f"{num_rows} rows",
        )
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def find(self, title: str) -> psutil.Process:
        """A process of the run, as soon as one has this in its title."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if title in " ".join(child.cmdline()):
                        found.append(child)
            return bool(found)

        self.wait_until(is_there, title)
        return found[0]

    def end(self) -> int:
        """The exit code, after which no process of the run is left."""
        code = self.process.wait(timeout=DEADLINE_S)
        _, alive = psutil.wait_procs(self.family, timeout=60)
        alive = [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
        assert not alive, alive
        return code

    def kill(self) -> None:
        """Kills the driver. Its workers end by themselves; Ray's agents would look for another
        minute."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(timeout=60)
        agents = [each for each in self.family if "gent" in " ".join(_command_line(each))]
        _, left = psutil.wait_procs(
            [each for each in self.family if each not in agents], timeout=60
        )
        assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE], left
        for agent in agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.kill()

    def whole_checkpoint(self) -> checkpoint.Checkpoint:
        """The newest checkpoint, every file of which is as it was written; no newer one is
        damaged."""
        newest, damages = checkpoint.newest(self.run_dir)
        assert newest is not None and not damages, damages
        return newest


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


Strike = Callable[[Run], None]


def send(number: int, title: str) -> Strike:
    """Sends a signal to a worker."""
    return lambda run: run.find(title).send_signal(number)


def raise_flag(run: Run) -> None:
    run.flag.touch()


def interrupt_driver_for_a_while(run: Run) -> None:
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(15)
    run.process.send_signal(signal.SIGCONT)


def while_it_saves(strike: Strike) -> Strike:
    """Strikes as soon as a checkpoint is begun."""

    def strike_then(run: Run) -> None:
        run.wait_until(
            lambda: list(run.run_dir.glob("global_step_*.partial")), "a checkpoint is begun"
        )
        strike(run)

    return strike_then


def fill_disk(run: Run) -> None:
    with open(run.folder / "runs/ballast", "wb", buffering=0) as file:
        room = os.statvfs(run.folder / "runs")
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)


@dataclass(frozen=True)
class Fault:
    """One fault of a run that trains."""

    number: int
    done: str
    says: str
    """What the run has to say, as a regular expression."""
    strike: Strike
    settings: tuple[str, ...] = ()
    file: tuple[str, str, dict[str, str]] | None = None
    """A file that the run reads: its name, and a template with what is put in."""
    environment: tuple[tuple[str, str], ...] = ()
    goes_on: tuple[str, ...] = ()
    """The kinds of run that go on to their end."""
    exit_code: int = 1
    lost: str = "nothing"
    """By a run that goes on."""
    modes: tuple[str, ...] = (SYNCHRONOUS, DETACHED)
    disk_of: str = ""
    """Size of a disk of its own that the run writes to."""

    def prepare(self, run: Run) -> list[str]:
        """Writes the file; returns the overrides of the run."""
        overrides = list(self.settings)
        if self.file:
            name, template, parts = self.file
            parts = {"statement": "pass", "at_load": "pass"} | parts
            (run.folder / name).write_text(template.format(flag=str(run.flag), **parts))
        if run.mode in self.goes_on:
            overrides.append(f"trainer.total_training_steps={NUM_STEPS}")
        return overrides


def of_reward(number: int, done: str, statement: str, says: str, **options: object) -> Fault:
    """A reward function that does this from some time on."""
    return Fault(
        number,
        done,
        says,
        raise_flag,
        file=("reward.py", REWARD, {"statement": statement}),
        **options,
    )


def of_engine(number: int, done: str, says: str, **parts: str) -> Fault:
    """A rollout engine that does this from some time on."""
    settings = ("plugins=[faulty_engine]", "actor_rollout_ref.rollout.name=faulty")
    return Fault(number, done, says, raise_flag, settings, ("faulty_engine.py", ENGINE, parts))


def of_tracker(done: str, statement: str) -> Fault:
    settings = ("trainer.logger=[console,wandb]",)
    file = ("wandb.py", TRACKER, {"statement": statement})
    return Fault(
        23, done, "Tracker wandb lacks", raise_flag, settings, file, goes_on=(SYNCHRONOUS, DETACHED)
    )


DIED, STOPPED = (
    r"rank \d \(node [\d.]+, pid \d+\) died during",
    r"rank \d \(node [\d.]+, pid \d+\) was stopped",
)
UPDATING, ENGINE_RANK = "update_actor", "rollout rank"
ENDED = f"Done: {NUM_STEPS} training steps"
VLLM = (
    "actor_rollout_ref.rollout.name=vllm_async",
    "actor_rollout_ref.rollout.weight_transport=shared_memory",
)
LOW_MEMORY = (("RAY_memory_usage_threshold", "0.001"), ("RAY_memory_monitor_refresh_ms", "60000"))
BOTH = (SYNCHRONOUS, DETACHED)
FAULTS = [
    Fault(
        1,
        "SIGKILL to a trainer's rank in an update",
        f"actor {DIED}",
        send(signal.SIGKILL, UPDATING),
    ),
    Fault(
        1,
        "SIGSTOP to a trainer's rank in an update",
        f"actor {STOPPED}",
        send(signal.SIGSTOP, UPDATING),
    ),
    Fault(
        2,
        "SIGKILL to an engine's rank",
        f"rollout {DIED}",
        send(signal.SIGKILL, ENGINE_RANK),
        goes_on=(DETACHED,),
    ),
    Fault(
        2,
        "SIGSTOP to an engine's rank",
        f"rollout {STOPPED}",
        send(signal.SIGSTOP, ENGINE_RANK),
        goes_on=(DETACHED,),
    ),
    Fault(
        2,
        "SIGSTOP to vLLM's engine process",
        rf"rollout {STOPPED}[^\n]*\n[^\n]*EngineCore",
        send(signal.SIGSTOP, "EngineCore"),
        VLLM,
        modes=(SYNCHRONOUS,),
    ),
    Fault(
        3,
        "SIGSTOP to the driver, SIGCONT after 15 s",
        ENDED,
        interrupt_driver_for_a_while,
        goes_on=BOTH,
    ),
    Fault(
        4,
        "SIGTERM",
        "SIGTERM: the run ends with the checkpoint of",
        lambda run: run.process.terminate(),
        exit_code=130,
    ),
    Fault(
        5,
        "SIGSTOP to a trainer's rank while it saves",
        f"actor {STOPPED}",
        while_it_saves(send(signal.SIGSTOP, "actor rank")),
    ),
    Fault(
        7, "the disk is full", "No space left on device|cannot be written", fill_disk, disk_of="16m"
    ),
    of_reward(11, "the reward function raises", "raise KeyError('no such unit')", "no such unit"),
    of_reward(
        11,
        "the reward function raises, with reward.on_error=skip",
        "if '1' in solution_str: raise KeyError",
        ENDED,
        settings=("reward.on_error=skip",),
        goes_on=BOTH,
        lost="the samples in reward/num_errors",
    ),
    of_reward(12, "the reward function never ends", "time.sleep(900)", r"reward\.timeout_s"),
    of_reward(13, "the reward function returns NaN", "return float('nan')", "reward .*nan"),
    of_reward(13, "the reward function returns a text", "return 'good'", "reward .*good"),
    of_reward(14, "the reward function ends its process", "os._exit(3)", "reward .*died"),
    of_reward(
        14, "the reward function fails in C", "import ctypes; ctypes.string_at(0)", "reward .*died"
    ),
    of_reward(
        14,
        "the reward function takes 3 GB, with reward.max_memory_gb=1",
        "taken = b'x' * (3 << 30); time.sleep(3)",
        "it used more memory than reward.max_memory_gb=1",
        settings=("reward.max_memory_gb=1",),
    ),
    of_engine(
        22,
        "an allocation of 1 EiB fails",
        "for want of host memory",
        statement="np.empty(1 << 60, np.uint8)",
    ),
    Fault(
        22,
        "Ray's memory monitor kills a process",
        "Ray's memory monitor killed it",
        lambda run: None,
        environment=LOW_MEMORY,
    ),
    of_tracker("the tracker never answers", "time.sleep(900)"),
    of_tracker("the tracker raises", "raise OSError('no network')"),
    of_engine(
        24,
        "the engine returns a token outside of the vocabulary",
        "has tokens outside of the vocabulary",
        statement="ended[0] = (name, replace(completion, token_ids=[10**6, "
        "*completion.token_ids[1:]]))",
    ),
    of_engine(
        24,
        "the engine returns NaN as log-probability",
        "tokens but log-probabilities",
        statement="ended[0] = (name, replace(completion, log_probs=[math.nan, "
        "*completion.log_probs[1:]]))",
    ),
    of_engine(
        24,
        "the engine returns no token",
        "has 0 tokens",
        statement="ended[0] = (name, replace(completion, token_ids=[], log_probs=[], versions=()))",
    ),
    of_engine(
        24, "the engine loses a request", "The rollout engine lost", statement="del ended[0]"
    ),
    of_engine(
        25,
        "the weights do not arrive",
        "did not arrive at rollout rank",
        at_load="parameter.mul_(2.0)",
    ),
]
