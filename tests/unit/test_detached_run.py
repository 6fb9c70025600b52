"""The driver of a detached run: where its pools lie, which failed side is started again, and what
the others say."""

import concurrent.futures
import re
import time
from collections import Counter
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from test_detached_config import config_of

from verl_like.single_controller.failure import CallTimeout, PlacementError, WorkerDied, WorkerError
from verl_like.trainer.config.roles import Role
from verl_like.trainer.detached import run_detached
from verl_like.trainer.detached.run_detached import DetachedRun, check_shared_memory
from verl_like.trainer.detached.side import LEDGER, Question, SideRecorder, side_died


class Actors:
    """In the place of Ray's: makers that are started, and what is asked of the ledger."""

    def __init__(self) -> None:
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.killed: list[Any] = []

    def options(self, *, name: str, num_cpus: int) -> Any:
        assert num_cpus == 0  # all CPUs are the workers'

        def start(*given: Any, **arguments: Any) -> Any:
            self.started.append((name, {"given": given, **arguments}))
            return SimpleNamespace(workingloop=SimpleNamespace(remote=lambda: f"loop of {name}"))

        return SimpleNamespace(remote=start)

    def ask(self, *call: Any, timeout: float) -> None:
        self.asked.append(call)

    def get_actor(self, name: str) -> None:
        raise ValueError(f"there is no {name}")


def get(reference: Future, timeout: float) -> Any:
    try:
        return reference.result(timeout)
    except concurrent.futures.TimeoutError:
        raise GetTimeoutError from None


def wait(references: list[Future], *, num_returns: int = 1, timeout: float) -> None:
    until = ALL_COMPLETED if num_returns == len(references) else FIRST_COMPLETED
    concurrent.futures.wait(references, timeout, until)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    actors = Actors()
    monkeypatch.setattr(run_detached, "ExperienceMakerHolder", actors)
    monkeypatch.setattr(run_detached, "ask", actors.ask)
    monkeypatch.setattr(ray, "get_actor", actors.get_actor)
    monkeypatch.setattr(ray, "kill", actors.killed.append)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    return actors


def run_of(num_makers: int, said: list[str]) -> DetachedRun:
    """A run whose makers and trainer have started, without its files."""
    config = config_of(f"detached.num_makers={num_makers}", "detached.max_restarts=2")
    names = [*config.detached.trainer_names, *config.detached.maker_names]
    pool = SimpleNamespace(resource_pool_dict={}, create_resource_pool=lambda: None)
    run = object.__new__(DetachedRun)
    run.config, run.fingerprints, run.resumed, run.failure = config, {}, None, None
    run.pools = dict.fromkeys(names, pool)
    run.actors = {name: SimpleNamespace(name=name) for name in (*names, LEDGER)}
    run.loops, run.reports = (
        {},
        {name: SideRecorder(name, node="10.0.0.9", pid=77) for name in names},
    )
    run.restarts_left, run.starts = (
        Counter(dict.fromkeys(config.detached.maker_names, 2)),
        Counter(),
    )
    run.record = SimpleNamespace(validated=4, validations={7: {}, 5: {}})
    run.recorder = SimpleNamespace(say=said.append)
    return run


def test_makers_and_trainer_that_share_memory_have_to_be_on_one_node(
    monkeypatch: pytest.MonkeyPatch,
):
    nodes = [
        {"NodeID": f"id {number}", "NodeManagerAddress": f"10.0.0.{number}"} for number in (1, 2)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(
        ray.util, "placement_group_table", lambda bundles: {"bundles_to_node_id": bundles}
    )

    def pool(name: str, *numbers: int) -> Any:
        groups = [{bundle: f"id {number}"} for bundle, number in enumerate(numbers)]
        return SimpleNamespace(name=name, get_placement_groups=lambda: groups)

    check_shared_memory([pool("trainer_pool", 2, 2), pool("maker_pool", 2)])
    with pytest.raises(
        PlacementError,
        match=r"are trainer_pool on 10\.0\.0\.1; maker_pool on 10\.0\.0\.1, 10\.0\.0\.2: ",
    ):
        check_shared_memory([pool("trainer_pool", 1), pool("maker_pool", 2, 1)])


def test_a_maker_that_is_started_again_has_the_next_number_and_goes_on_after_the_last_validation(
    actors: Actors,
):
    said: list[str] = []
    run = run_of(2, said)
    run.start_maker("maker_1")
    for number in (1, 2):
        run.failed(
            "maker_1",
            WorkerError(
                "maker_1", 0, "10.0.0.9", 77, "make", f"Traceback\nOSError: fault {number}"
            ),
        )
    assert actors.asked == [(LEDGER, "lost", "maker_1.1"), (LEDGER, "lost", "maker_1.2")]
    assert [(name, given["start"], given["validated"]) for name, given in actors.started] == [
        ("maker_1", 1, 7), ("maker_1", 2, 7), ("maker_1", 3, 7),
    ]  # fmt: skip
    assert all(given["env_info"] == {"rank": 1, "world_size": 2} for _, given in actors.started)
    assert all(
        given["given"] == (run.config, run.config.detached.trainer_names)
        for _, given in actors.started
    )
    assert [re.sub(".*: ", "", line) for line in said] == ["fault 1", "fault 2"]
    with pytest.raises(WorkerError, match="fault 3"):
        run.failed("maker_1", WorkerError("maker_1", 0, "10.0.0.9", 77, "make", "OSError: fault 3"))
    assert len(actors.started) == 3


@pytest.mark.parametrize(
    ("transport", "checked"), [("shared_memory", [["trainer", "maker_1"]]), ("object_store", [])]
)
def test_a_maker_that_shares_memory_with_the_trainers_starts_after_a_check_of_their_nodes(
    actors: Actors, monkeypatch: pytest.MonkeyPatch, transport: str, checked: list[list[str]]
):
    run = run_of(2, [])
    run.config = run.config.updated({"actor_rollout_ref.rollout.weight_transport": transport})
    pool_of_trainer = SimpleNamespace(resource_pool_dict={"pool": "trainer"})
    pools_of_maker = SimpleNamespace(
        create_resource_pool=lambda: None,
        get_resource_pool=lambda role: {Role.Rollout: "maker_1"}[role],
    )
    run.pools = {"trainer_0": pool_of_trainer, "maker_1": pools_of_maker}
    given: list[list[str]] = []

    def check(pools: list[Any]) -> None:
        assert actors.started == []
        given.append(pools)

    monkeypatch.setattr(run_detached, "check_shared_memory", check)
    run.start_maker("maker_1")
    assert given == checked
    assert [name for name, _ in actors.started] == ["maker_1"]


@pytest.mark.parametrize(
    ("step", "note"),
    [
        (4, "SIGTERM: the run ends with the checkpoint of step 5; a second one ends it without."),
        (
            5,
            "SIGTERM: the run has its last checkpoint and ends after its last validation; a second "
            "one ends it.",
        ),
    ],
)
def test_after_a_signal_the_run_says_with_which_step_it_ends(
    actors: Actors, monkeypatch: pytest.MonkeyPatch, step: int, note: str
):
    said: list[str] = []
    run = run_of(1, said)
    run.record.step = step
    monkeypatch.setattr(run_detached, "ask", lambda *call, timeout: {(LEDGER, "end"): 5}[call])
    run.end_early()
    assert said == [note]
    assert run.last_step == 5


def test_a_ledger_that_does_not_answer_is_removed_and_ends_the_run_with_its_place(
    actors: Actors, monkeypatch: pytest.MonkeyPatch
):
    run = run_of(1, [])
    run.ledger_place = SideRecorder(LEDGER, node="10.0.0.8", pid=66)
    died = WorkerDied(LEDGER, 0, "?", 0, "counts", "killed")
    for error in (died, CallTimeout(LEDGER, "counts", 9.0, LEDGER)):

        def ask(*_: Any, timeout: float, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(run_detached, "ask", ask)
        with pytest.raises(type(error), match="counts") as ended:
            run.counts()
        assert ended.value.__notes__ == ["This ended ledger."]
        assert [actor.name for actor in actors.killed] == [LEDGER]
        actors.killed.clear()
        if error is died:
            found = ended.value
            assert (found.role, found.node, found.pid, found.method) == (
                LEDGER,
                "10.0.0.8",
                66,
                "counts",
            )


def ended(cause: Exception) -> Future:
    """A loop that ended by this."""
    loop: Future = Future()
    loop.set_exception(
        RayTaskError(
            "workingloop", "the stack of the loop", cause, proctitle="", pid=1, ip="10.0.0.9"
        )
    )
    return loop


def test_a_loop_that_ends_by_a_worker_is_its_own_sides_failure_and_by_another_side_that_sides(
    actors: Actors, monkeypatch: pytest.MonkeyPatch
):
    run, failed = run_of(1, []), []
    monkeypatch.setattr(run, "failed", lambda name, error: failed.append((name, error)))
    died = WorkerDied("rollout", 3, "10.0.0.9", 78, "generate_sequences", "killed")
    late = CallTimeout("rollout", "generate_sequences", 9.0, "rank 3")
    for cause in (died, late):
        run.end_of_loop("maker_0", ended(cause))
        assert failed.pop() == ("maker_0", cause)
    for cause in (
        WorkerDied("trainer_0", 0, "?", 0, "extend", "killed"),
        CallTimeout(LEDGER, "take", 9.0, LEDGER),
    ):
        run.end_of_loop("maker_0", ended(cause))
        assert failed.pop() == (cause.role, cause)
    run.end_of_loop("maker_0", ended(ZeroDivisionError("of the program")))
    ((name, error),) = failed
    assert name == "maker_0" and (error.role, error.node, error.pid, error.method) == (
        "maker_0",
        "10.0.0.9",
        77,
        "its loop",
    )
    assert "the stack of the loop" in error.cause


def test_a_side_that_answers_late_says_what_it_does_and_one_that_does_not_is_removed(
    actors: Actors, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_detached, "STATUS_S", 1.0)
    monkeypatch.setattr(run_detached, "POLL_S", 0.05)
    run = run_of(2, [])
    with concurrent.futures.ThreadPoolExecutor() as threads:

        def late() -> Future:
            return threads.submit(lambda: time.sleep(0.4) or "maker_0: making experience for 3 s\n")

        done: Future = Future()
        done.set_result("trainer_0: update for 2 s\n")
        for name, answer in (("trainer_0", lambda: done), ("maker_0", late), ("maker_1", Future)):
            run.actors[name].status = SimpleNamespace(remote=answer)
        said = run.statuses()
    assert said.splitlines() == [
        "trainer_0: update for 2 s",
        "maker_0: making experience for 3 s",
        "maker_1 does not answer: it is stopped or dead",
    ]
    assert [actor.name for actor in actors.killed] == ["maker_1"]


def test_the_placement_is_shown_when_all_sides_have_told_theirs_and_again_only_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
):
    run = run_of(1, [])
    shown: list[list[dict[str, str]]] = []

    def show(rows: list[dict[str, str]]) -> None:
        run.recorder.placement = rows
        shown.append(rows)

    run.recorder.placement, run.recorder.show_placement = [], show
    run.record.add = lambda name, report: None
    on_node: dict[str, str] = {}

    def ask(name: str, method: str, timeout: float) -> SideRecorder:
        assert method == "report"
        rows = [{"role": name, "node": on_node[name]}] if name in on_node else []
        return SideRecorder(name, node="10.0.0.9", pid=77, placement=rows)

    monkeypatch.setattr(run_detached, "ask", ask)
    on_node["trainer_0"] = "10.0.0.9"
    run.collect("trainer_0")
    run.collect("maker_0")
    assert shown == []  # the maker's workers have not started
    on_node["maker_0"] = "10.0.0.8"
    run.collect("maker_0")
    run.collect("trainer_0")
    on_node["maker_0"] = "10.0.0.7"  # the maker was started again
    run.collect("maker_0")
    assert [[(row["role"], row["node"]) for row in rows] for rows in shown] == [
        [("trainer_0", "10.0.0.9"), ("maker_0", node)] for node in ("10.0.0.8", "10.0.0.7")
    ]


def test_a_side_that_is_gone_is_named_with_the_last_line_of_what_ray_says():
    error = side_died(
        "maker_1", "extend", ValueError("The actor died.\nIts process exited with 7.\n")
    )
    assert (error.role, error.rank, error.node, error.pid) == ("maker_1", 0, "?", 0)
    assert (error.method, error.cause) == ("extend", "Its process exited with 7.")


def test_a_question_that_gets_no_answer_names_the_side_and_the_call(
    monkeypatch: pytest.MonkeyPatch,
):
    question = Question("maker_1", "extend", answer="the answer", timeout=2.5)

    def no_answer(error: Exception) -> None:
        def get(answer: str, timeout: float) -> None:
            assert (answer, timeout) == ("the answer", 2.5)
            raise error

        monkeypatch.setattr(ray, "get", get)

    no_answer(GetTimeoutError())
    with pytest.raises(CallTimeout) as late:
        question.get()
    assert str(late.value) == "maker_1.extend did not finish within 2.5 s: waiting for maker_1"
    no_answer(RayActorError(error_msg="The actor died.\nIts process exited with 7."))
    with pytest.raises(WorkerDied) as died:
        question.get()
    assert (died.value.role, died.value.method, died.value.cause) == (
        "maker_1",
        "extend",
        "Its process exited with 7.",
    )
