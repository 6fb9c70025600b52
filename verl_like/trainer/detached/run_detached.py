"""A run of detached training. It starts makers and trainers, records what they report, and restarts
makers that fail."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from inspect import getattr_static
from typing import Any

import ray
from ray.exceptions import RayTaskError

from verl_like.rewards.manager import RewardError
from verl_like.single_controller.failure import CallTimeout, PlacementError, WorkerDied, WorkerError
from verl_like.single_controller.network import open_store
from verl_like.single_controller.ray.process_handles import START_DEADLINE_S
from verl_like.single_controller.ray.resource_pool import (
    RayResourcePool,
    ResourcePoolManager,
    reserve,
)
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.config.roles import Role
from verl_like.trainer.detached.detached_trainer import DetachedPPOTrainer
from verl_like.trainer.detached.ledger import PromptLedger
from verl_like.trainer.detached.maker_holder import ExperienceMakerHolder
from verl_like.trainer.detached.record import DetachedRecord
from verl_like.trainer.detached.side import GONE, LEDGER, SideRecorder, ask, side_died
from verl_like.trainer.ppo import choice_of_replay
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.inputs import PPOInputs, check_inputs
from verl_like.trainer.ppo.maker_driver import MakerDriver, get_maker_driver
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, get_trainer
from verl_like.trainer.ppo.workers import build_resource_pools
from verl_like.trainer.run.errors import EngineMismatch
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.run.shell import run
from verl_like.trainer.run.worker_template import WorkerTemplate
from verl_like.trainer.state.resume import read_fingerprints
from verl_like.trainer.state.run_state import DetachedState
from verl_like.workers.agents.episode import AgentsFailed

ANSWER_S = 20.0
"""A maker or trainer that does not answer for so many seconds counts as stopped or dead."""
STATUS_S = 5.0
"""For so many seconds a run that fails waits until makers and trainers say what they are doing."""
POLL_S = 0.5
"""How long one wait lasts before the run looks again."""
DISPLAY = replace(
    PPO_DISPLAY,
    step_line=(
        *PPO_DISPLAY.step_line,
        ("idle maker", ("detached/idle/maker_0",), "{:.0%}"),
        ("idle trainer", ("detached/idle/trainer_0",), "{:.0%}"),
    ),
    charts=(
        *PPO_DISPLAY.charts,
        ("Waiting for others, and the brake", ("detached/idle/", "detached/brake"), "share"),
    ),
    phases=("waiting_for_experience", "update", "export_weights", "save_checkpoint"),
)
"""Shows what a run of PPO shows, but the phases of a trainer, and how long makers and trainers wait
for each other."""
OF_MAKERS = {name for name in vars(MakerDriver) if not name.startswith("_")}
"""The methods and attributes that a maker's driver has."""
WOULD_FAIL_AGAIN = ("__init__", "init_model", "its loop")
"""An error in one of these would happen again, because its cause is wrong input or the program. The
death of a process might not happen again."""


def run_detached(config: DetachedConfig, template: WorkerTemplate | None = None) -> int:
    """Runs detached training and returns the exit code of the process."""
    return run(config, check_detached_inputs, fit, DISPLAY, template, DetachedState)


def check_detached_inputs(config: DetachedConfig, cleanup: contextlib.ExitStack) -> PPOInputs:
    """Checks all inputs, and fills in what they decide: the number of training steps, and router
    replay. Each maker checks them again. Raises ValueError or RewardError for what the user has to
    change."""
    check_trainer(get_trainer())
    with contextlib.ExitStack() as until_checked:
        inputs = check_inputs(config.with_all_pools(), until_checked)
    checked = inputs.config
    chosen = {
        "trainer.total_training_steps": checked.trainer.total_training_steps,
        choice_of_replay.MODE: checked.actor_rollout_ref.actor.router_replay.mode,
    }
    config = config.updated(chosen)
    return replace(inputs, config=config, scorer=None)


def check_trainer(trainer: type[RayPPOTrainer]) -> None:
    """Raises ValueError for a trainer of a plugin, since detached training would not call it.

    There is an exception for a plugin that serves main_ppo and detached training: its trainer is
    accepted if it overrides only what a MakerDriver has, and the plugin registers a driver too.
    Whether that driver has the same methods is not checked. A trainer with a constructor of its own
    is always refused.
    """
    if trainer is RayPPOTrainer:
        return
    overridden = overridden_by(trainer)
    overridden_of_makers = [name for name in overridden if name in OF_MAKERS]
    has_own_driver = get_maker_driver() is not MakerDriver
    if has_own_driver and overridden == overridden_of_makers:
        return
    what = f"the plugin's trainer {trainer.__name__}"
    if overridden:
        what += f", which has its own {', '.join(overridden)}"
    advice = ""
    if overridden_of_makers:
        advice = (
            f"give {', '.join(overridden_of_makers)} to a subclass of MakerDriver that is "
            "registered with register_maker_driver of verl_like.trainer.ppo.maker_driver, too, "
        )
    raise ValueError(
        f"detached training does not call {what}: {advice}train with main_ppo, or without the "
        "plugin"
    )


def overridden_by(trainer: type[RayPPOTrainer]) -> list[str]:
    """Returns what a trainer overrides of RayPPOTrainer: public methods and attributes, and
    `__init__` and `__post_init__`. Names that are new in the trainer are not among them."""
    overridden = []
    for name in dir(RayPPOTrainer):
        if name.startswith("_") and name not in ("__init__", "__post_init__"):
            continue
        original = getattr_static(RayPPOTrainer, name)
        if getattr_static(trainer, name) is not original:
            overridden.append(name)
    return overridden


def check_shared_memory(pools: Sequence[RayResourcePool]) -> None:
    """Raises PlacementError unless all processes of the pools are on one node. The pools must be
    reserved already."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    all_nodes = set()
    places = []
    for pool in pools:
        nodes = set()
        for placement_group in pool.get_placement_groups():
            table = ray.util.placement_group_table(placement_group)
            for node in table["bundles_to_node_id"].values():
                nodes.add(addresses[node])
        all_nodes.update(nodes)
        places.append(f"{pool.name} on {', '.join(sorted(nodes))}")
    if len(all_nodes) > 1:
        raise PlacementError(
            "actor_rollout_ref.rollout.weight_transport=shared_memory is for one node, but there "
            f"are {'; '.join(places)}: set gloo or object_store"
        )


def fit(inputs: PPOInputs, recorder: RunRecorder) -> None:
    """Starts the makers and trainers, and trains until the last step. If training fails, the error
    gets a note that says what each of them was doing."""
    # Makers check their inputs again. With an address they skip the checks for a Ray that would be
    # started on this machine.
    address = ray.get_runtime_context().gcs_address
    values = {
        "trainer.default_local_dir": str(recorder.run_dir),
        "ray_kwargs.ray_init.address": address,
    }
    config: Any = inputs.config.updated(values)
    run = DetachedRun(config, recorder)
    run.start()
    if run.resumed:
        run.show_counts()
    recorder.console.start_training(config.num_steps_of_run)
    try:
        run.watch()
        run.finish()
    except Exception as error:
        error.add_note(run.statuses())
        raise
    finally:
        with contextlib.suppress(CallTimeout, WorkerDied):
            run.show_counts()


class DetachedRun:
    """The ledger, makers and trainers of a run, which it starts and watches.

    Experience and weights travel between makers and trainers. This process gets only numbers and
    metrics. A maker or a trainer is called a side.
    """

    def __init__(self, config: DetachedConfig, recorder: RunRecorder) -> None:
        self.config = config
        self.recorder = recorder
        self.fingerprints = read_fingerprints(recorder.run_dir)
        self.pools: dict[str, ResourcePoolManager] = {}
        """The pools of each side, by name."""
        for name in config.detached.trainer_names:
            of_trainer = config.of_trainer(name)
            self.pools[name] = build_resource_pools(of_trainer, config.plan.trainer_roles)
        for name in config.detached.maker_names:
            of_maker = config.of_maker(name)
            self.pools[name] = build_resource_pools(of_maker, config.plan.maker_roles)
        self.actors: dict[str, Any] = {}
        """The Ray actors of the ledger and of all sides, by name."""
        self.loops: dict[str, Any] = {}
        """The reference to the result of each side's loop, as long as the loop runs."""
        max_restarts = config.detached.max_restarts
        self.restarts_left = Counter(dict.fromkeys(config.detached.maker_names, max_restarts))
        """How often each maker may still be started again. A trainer is not in it, which counts as
        0."""
        self.starts: Counter[str] = Counter()
        """How often each maker was started."""
        self.reports: dict[str, SideRecorder] = {}
        """The last report of each side."""
        self.resumed = None
        if recorder.resumed:
            self.resumed = recorder.resumed.checkpoint
        self.record = DetachedRecord(config, recorder)
        self.last_step = -1
        """The step after which the run ends, if SIGTERM has come, or -1."""
        self.failure: Exception | None = None
        """The error of a maker that failed after all steps were trained. It ends the run when the
        trainers have written their files."""

    def start(self) -> None:
        """Starts the ledger, the trainers and the makers, and the loops of both."""
        config = self.config
        detached = config.detached
        steps = config.trainer.total_training_steps
        all_pools: list[RayResourcePool] = []
        for pools in self.pools.values():
            all_pools.extend(pools.resource_pool_dict.values())
        # All pools are reserved together. Otherwise one side could take the only node that has room
        # for another side.
        reserve(all_pools)
        ledger_class: Any = ray.remote(PromptLedger)
        saved = None
        if self.resumed:
            saved = self.resumed.state["ledger"]
        ledger = ledger_class.options(name=LEDGER, num_cpus=0).remote(
            steps,
            config.data.train_batch_size,
            detached,
            saved,
            max_staleness=config.trainer.max_staleness,
        )
        self.actors[LEDGER] = ledger
        trainer_class: Any = DetachedPPOTrainer
        host = ray.util.get_node_ip_address()
        port = 0
        count = detached.num_trainers
        if count > 1:
            # The processes of all trainers meet in this store. It lives as long as this object.
            self.store = open_store(host)
            port = self.store.port
        for index, name in enumerate(detached.trainer_names):
            env_info = {
                "rank": index,
                "world_size": count,
                "master_addr": host,
                "master_port": port,
            }
            actor = trainer_class.options(name=name, num_cpus=0).remote(
                config,
                detached.maker_names,
                env_info=env_info,
                pools=self.pools[name],
                fingerprints=self.fingerprints,
            )
            self.actors[name] = actor
            self.loops[name] = actor.fit.remote(steps, detached.update_steps, resumed=self.resumed)
        for name in detached.maker_names:
            self.start_maker(name)
        place = ledger.__ray_call__.remote(lambda _: SideRecorder(LEDGER))
        self.ledger_place = ray.get(place, timeout=START_DEADLINE_S)

    def start_maker(self, name: str) -> None:
        """Starts a maker and its loop, for the first time or again."""
        self.starts[name] += 1
        config = self.config
        maker_names = config.detached.maker_names
        trainer_names = config.detached.trainer_names
        env_info = {"rank": maker_names.index(name), "world_size": len(maker_names)}
        maker_class: Any = ExperienceMakerHolder
        pools = self.pools[name]
        # This reserves pools only after a failure, for which `remove` has released them. The first
        # time they are reserved already, by `start`.
        pools.create_resource_pool()
        if config.actor_rollout_ref.rollout.weight_transport == "shared_memory":
            pools_of_trainer = self.pools[trainer_names[0]]
            trainer_pools = pools_of_trainer.resource_pool_dict.values()
            rollout_pool = pools.get_resource_pool(Role.Rollout)
            check_shared_memory([*trainer_pools, rollout_pool])
        # The newest version that was validated: the last one whose validation is written to the
        # record, or one of those whose validations are still to be written.
        validated = max([self.record.validated, *self.record.validations])
        actor = maker_class.options(name=name, num_cpus=0).remote(
            config,
            trainer_names,
            env_info=env_info,
            start=self.starts[name],
            validated=validated,
            pools=pools,
            fingerprints=self.fingerprints,
        )
        self.actors[name] = actor
        self.loops[name] = actor.workingloop.remote()

    def watch(self) -> None:
        """Collects reports, and restarts makers that fail, until all loops have ended.

        Raises the error of a trainer, and that of a maker which failed more often than
        `max_restarts`. A maker's error after all steps were trained is raised only when the last
        checkpoint is complete. Raises KeyboardInterrupt if SIGTERM ends the run before its last
        step.
        """
        while self.loops:
            names = {loop: name for name, loop in self.loops.items()}
            ended, _running = ray.wait(list(names), timeout=POLL_S)
            for loop in ended:
                self.end_of_loop(names[loop], loop)
            for name in list(self.loops):
                self.collect(name)
            self.record.log()
            if self.record.step == self.last_step < self.config.num_steps_of_run:
                raise KeyboardInterrupt
            self.counts()
            if self.recorder.is_ending and self.last_step < 0:
                self.end_early()
        if self.failure:
            raise self.failure

    def end_early(self) -> None:
        """Has the ledger end the run after the first step that no trainer has done. If all steps
        are done, the run ends after its last validation. This is called when SIGTERM has come."""
        self.last_step = ask(LEDGER, "end", timeout=ANSWER_S)
        if self.record.step == self.last_step:
            said = (
                "SIGTERM: the run has its last checkpoint and ends after its last validation; a "
                "second one ends it."
            )
        else:
            said = (
                f"SIGTERM: the run ends with the checkpoint of step {self.last_step}; a second "
                "one ends it without."
            )
        self.recorder.say(said)

    def counts(self) -> Any:
        """The ledger's counts of prompts. Raises CallTimeout or WorkerDied if it does not
        answer."""
        try:
            return ask(LEDGER, "counts", timeout=ANSWER_S)
        except (CallTimeout, WorkerDied) as error:
            self.remove(LEDGER)
            self.failed(LEDGER, error)

    def show_counts(self) -> None:
        """Tells the user how many prompts are in which state."""
        said = [f"{count} {name}" for name, count in self.counts().items()]
        self.recorder.say(f"Prompts: {', '.join(said)}")

    def end_of_loop(self, name: str, loop: Any) -> None:
        """Collects the last report of a side whose loop has ended. If the loop failed, `failed` or
        `give_up` decides what happens."""
        try:
            ray.get(loop, timeout=ANSWER_S)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RewardError | AgentsFailed | EngineMismatch):
                self.give_up(name, cause)
                return
            # The loop may have ended because another side is dead or does not answer.
            others = (LEDGER, *self.config.detached.trainer_names)
            if isinstance(cause, WorkerDied | CallTimeout) and cause.role in others:
                name = cause.role
            if not isinstance(cause, WorkerError | CallTimeout):
                node, pid = self.place_of(name)
                cause = WorkerError(name, 0, node, pid, "its loop", str(error))
            self.failed(name, cause)
        except GONE as error:
            self.failed(name, side_died(name, "its loop", error))
        else:
            del self.loops[name]
            self.collect(name)

    def collect(self, name: str) -> None:
        """Asks a side for its report, and gives it to the record. The first report may take longer,
        because the side is still starting."""
        timeout = ANSWER_S
        if name not in self.reports:
            timeout = START_DEADLINE_S
        try:
            report: SideRecorder = ask(name, "report", timeout=timeout)
        except (CallTimeout, WorkerDied) as error:
            self.failed(name, error)
            return
        self.reports[name] = report
        self.show_placement()
        self.record.add(name, report)

    def show_placement(self) -> None:
        """Shows where the workers of all sides are, once all have started, and again if that
        changes."""
        rows = []
        for report in self.reports.values():
            if not report.placement:
                return
            rows.extend(report.placement)
        is_complete = len(self.reports) == len(self.pools)
        if is_complete and rows != self.recorder.placement:
            self.recorder.show_placement(rows)

    def place_of(self, name: str) -> tuple[str, int]:
        """The node and the process id of a side, or ("?", 0) if it has not reported yet."""
        if name == LEDGER:
            report = self.ledger_place
        else:
            report = self.reports.get(name)
        if report is None:
            return "?", 0
        return report.node, report.pid

    def failed(self, name: str, error: WorkerError | CallTimeout) -> None:
        """Restarts a maker that failed. The ledger gives its prompts out again.

        If the side is not a maker, would fail in the same way again, or has failed too often, it
        gives the side up instead.
        """
        if isinstance(error, WorkerDied) and error.role == name:
            node, pid = self.place_of(name)
            error = replace(error, node=node, pid=pid)
        would_fail_again = False
        if type(error) is WorkerError:
            # If an allocation failed and no process was killed, the memory is too small for these
            # prompts, and would be too small again.
            would_fail_again = error.method in WOULD_FAIL_AGAIN or bool(error.shortage)
        if would_fail_again or not self.restarts_left[name]:
            error.add_note(f"This ended {name}.")
            self.give_up(name, error)
            return
        self.restarts_left[name] -= 1
        headline = str(error)
        if isinstance(error, WorkerError):
            headline = error.headline()
        self.recorder.say(f"{name} failed and is started again: {headline}")
        self.remove(name)
        self.wait_until_gone(name, error)
        self.loops.pop(name, None)
        self.reports.pop(name, None)
        ask(LEDGER, "lost", f"{name}.{self.starts[name]}", timeout=ANSWER_S)
        self.start_maker(name)

    def wait_until_gone(self, name: str, error: Exception) -> None:
        """Waits until Ray has no actor of this name any more. Raises `error` after `ANSWER_S`
        seconds."""
        deadline = time.monotonic() + ANSWER_S
        # Ray raises ValueError when there is none, which ends the loop.
        with contextlib.suppress(ValueError):
            while ray.get_actor(name):
                if time.monotonic() > deadline:
                    error.add_note(
                        f"{name} was killed, but its process did not end within {ANSWER_S:g} s."
                    )
                    raise error
                time.sleep(POLL_S)

    def give_up(self, name: str, error: Exception) -> None:
        """Raises the error, which ends the run. The error of a maker is kept instead if all steps
        are trained, and `watch` raises it at its end."""
        is_maker = name in self.config.detached.maker_names
        if not is_maker or not ask(LEDGER, "has_trained_all", timeout=ANSWER_S):
            raise error from None
        self.failure = self.failure or error
        self.loops.pop(name, None)

    def statuses(self) -> str:
        """Asks each side what it is doing, and returns the answers, with the stack of each loop.

        A side that does not answer is removed, because a stopped process would outlive Ray.
        """
        answers = {name: self.actors[name].status.remote() for name in self.pools}
        pending = list(answers.values())
        ray.wait(pending, num_returns=len(pending), timeout=STATUS_S)
        found = []
        for name, answer in answers.items():
            try:
                found.append(ray.get(answer, timeout=POLL_S))
            except ray.exceptions.RayError:
                found.append(f"{name} does not answer: it is stopped or dead\n")
                self.remove(name)
        return "".join(found)

    def remove(self, name: str) -> None:
        """Kills what is left of a side. The side's pools are released, which ends its workers at
        once. Otherwise Ray would end them later."""
        ray.kill(self.actors[name])
        node, pid = self.place_of(name)
        if node == ray.util.get_node_ip_address():
            with contextlib.suppress(OSError):  # raised if the process has ended
                # Ray's kill may miss the fork of a `WorkerTemplate`, and a stopped fork would
                # outlive Ray. It ends as soon as it is continued.
                os.kill(pid, signal.SIGCONT)
        if name in self.pools:
            for pool in self.pools[name].resource_pool_dict.values():
                pool.release()

    def finish(self) -> None:
        """Has the makers validate with the last weights. The checkpoint of the last step is
        complete by then, and gets the results."""
        steps = self.config.num_steps_of_run
        left = self.config.detached.maker_names
        while left:
            starts = Counter(self.starts)
            for name in left:
                self.loops[name] = self.actors[name].finish.remote(steps)
            self.watch()
            # A maker that failed meanwhile was started again. Its loop has ended by now, because
            # nothing is left to make, and it still has to do `finish`.
            left = [name for name in left if self.starts[name] > starts[name]]
        self.record.renew_checkpoint()
