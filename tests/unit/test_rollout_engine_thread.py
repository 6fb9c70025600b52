"""A rollout engine on a thread of its own, shown on the small reference engine, whose steps these
tests let begin."""

import dataclasses
import gc
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from rollout_requests import SAMPLING, assert_drawn_by, make_requests, openmp_limit, run, scaled
from test_rollout_requests import PROMPTS, export, make_engine, tokens
from transformers import LlamaForCausalLM

from verl_like.protocol.row_ops import deep_equal
from verl_like.workers.rollout import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    RolloutError,
    engine_thread,
)
from verl_like.workers.rollout.engine_thread import EngineThread
from verl_like.workers.weights.arrival import WeightSyncError

ModelAndFolder = tuple[str, LlamaForCausalLM]
REQUESTS = make_requests(
    {**PROMPTS, "f": [40, 41], "g": [50]},
    dataclasses.replace(SAMPLING, stop_token_ids=tuple(range(1, 68, 8))),
)
LENGTHS = {"a": 2, "b": 4, "c": 4, "d": 6, "e": 3, "f": 2, "g": 12}
"""Of the responses, as the engine that is stepped by hand draws them."""
LIMIT_S = 120.0
"""Of each wait, in which a test fails that would else never end."""


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., ModelAndFolder]) -> ModelAndFolder:
    return tiny_llama()


@pytest.fixture(scope="module")
def changed(model: ModelAndFolder) -> LlamaForCausalLM:
    """The same model with other weights."""
    return scaled(model[1], 0.8)


@pytest.fixture(scope="module")
def expected(model: ModelAndFolder) -> dict[str, Completion]:
    """What the engine draws that is stepped by hand."""
    completions = run(make_engine(model), REQUESTS)
    assert {name: len(each.token_ids) for name, each in completions.items()} == LENGTHS
    return completions


class Gate:
    """Lets the steps of an engine begin one by one."""

    def __init__(self) -> None:
        self.arrived, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def guard(self, engine: RolloutEngine) -> RolloutEngine:
        step = engine._step

        def guarded_step() -> list[tuple[str, Completion]]:
            self.arrived.release()
            assert self.allowed.acquire(timeout=LIMIT_S)
            return step()

        engine._step = guarded_step
        return engine

    def wait(self) -> None:
        """Until a step is about to begin."""
        assert self.arrived.acquire(timeout=LIMIT_S)

    def steps(self, number: int) -> None:
        """Some steps; another one is about to begin, before and after."""
        for _ in range(number):
            self.allowed.release()
            self.wait()

    def open(self) -> None:
        self.allowed.release(1000)


def gated(model: ModelAndFolder) -> tuple[EngineThread, Gate]:
    gate = Gate()
    return EngineThread(lambda: gate.guard(make_engine(model))), gate


def later(call: Callable, *args: Any, **kwargs: Any) -> Future:
    """A call on a thread of its own."""
    answer: Future = Future()

    def run() -> None:
        try:
            answer.set_result(call(*args, **kwargs))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def ask(thread: EngineThread, call: Callable, *args: Any, **kwargs: Any) -> Future:
    """A call on another thread, which is done between two steps; it is in line when this
    returns."""
    before = len(thread._commands)
    answer = later(call, *args, **kwargs)
    with thread._changed:
        assert thread._changed.wait_for(lambda: len(thread._commands) > before, timeout=LIMIT_S)
    return answer


def collect_later(thread: EngineThread, names: Collection[str] | None = None) -> Future:
    """A call of `collect` on another thread; it waits when this returns."""
    is_waiting, wait_for = threading.Event(), thread._changed.wait_for

    def told_wait_for(*args: Any, **kwargs: Any) -> Any:
        is_waiting.set()  # with the lock, which the engine needs before it can end the wait
        return wait_for(*args, **kwargs)

    thread._changed.wait_for = told_wait_for
    answer = later(thread.collect, LIMIT_S, names)
    assert is_waiting.wait(LIMIT_S)
    thread._changed.wait_for = wait_for
    return answer


def named(*names: str) -> list[GenerationRequest]:
    return [request for request in REQUESTS if request.name in names]


def collect_all(thread: EngineThread) -> dict[str, Completion]:
    """All responses that have ended or are unfinished, each of which comes once."""
    completions: dict[str, Completion] = {}
    while ended := thread.collect(LIMIT_S):
        assert not ended.keys() & completions.keys()
        completions |= ended
    return completions


def draw(thread: EngineThread, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
    thread.submit(requests)
    return collect_all(thread)


def spans(completions: dict[str, Completion]) -> dict[str, tuple]:
    return {name: completion.versions for name, completion in completions.items()}


def test_tokens_are_those_of_the_engine_stepped_by_hand_whenever_requests_come(
    model: ModelAndFolder, expected: dict[str, Completion]
) -> None:
    thread = EngineThread(lambda: make_engine(model))
    assert tokens(draw(thread, REQUESTS)) == tokens(expected)
    assert tokens(draw(thread, REQUESTS[::-1])) == tokens(expected)
    for answer in [later(thread.submit, [request]) for request in REQUESTS]:
        answer.result(LIMIT_S)
    assert tokens(collect_all(thread)) == tokens(expected)
    thread, gate = gated(model)
    thread.submit(named("g"))
    gate.wait()
    for name in "dbafce":  # each between two steps
        gate.steps(1)
        answer = ask(thread, thread.submit, named(name))
    gate.open()
    answer.result(LIMIT_S)
    assert tokens(collect_all(thread)) == tokens(expected)


def test_the_engine_is_made_and_called_on_a_thread_of_its_own(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    threads: dict[str, set[threading.Thread]] = {}

    def make() -> RolloutEngine:
        threads["make"] = {threading.current_thread()}
        engine = make_engine(model)
        for name in (
            "submit",
            "step",
            "load_weights",
            "abort",
            "sleep",
            "wake",
            "forget_prompts",
            "agreed",
        ):
            setattr(engine, name, recorded(name, getattr(engine, name)))
        return engine

    def recorded(name: str, method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread())
            return method(*args, **kwargs)

        return call

    thread = EngineThread(make)
    draw(thread, REQUESTS)
    thread.abort(["unknown"])
    thread.load_weights(export(changed, 4), 4)
    thread.forget_prompts()
    thread.sleep()
    thread.wake()
    assert len(threads) == 9
    (own,) = set.union(*threads.values())
    assert own is not threading.current_thread() and own.is_alive() and own.daemon


def test_the_makers_limit_of_cpu_threads_and_no_grad_hold_in_the_thread(
    model: ModelAndFolder,
) -> None:
    found: list[tuple] = []

    def make() -> RolloutEngine:
        look()
        engine = make_engine(model)
        for name in ("_submit", "_step"):
            setattr(engine, name, looking(getattr(engine, name)))
        return engine

    def look() -> None:
        found.append((openmp_limit(), torch.get_num_threads(), torch.is_grad_enabled()))

    def looking(method: Callable) -> Callable:
        def call(*args: Any) -> Any:
            look()
            return method(*args)

        return call

    default = torch.get_num_threads()
    torch.set_num_threads(default + 2)
    try:
        thread = EngineThread(make)
    finally:
        torch.set_num_threads(default)
    draw(thread, REQUESTS)
    assert len(found) == 2 + max(LENGTHS.values())
    assert set(found) == {(default + 2, default + 2, False)}
    assert torch.get_num_threads() == default and torch.is_grad_enabled()


def test_an_engine_that_cannot_be_made_raises_for_its_maker(model: ModelAndFolder) -> None:
    with pytest.raises(ValueError, match="tensor_model_parallel_size=2"):
        EngineThread(lambda: make_engine(model, tensor_model_parallel_size=2))


def test_a_step_that_raises_fails_whatever_waits_for_the_engine_and_every_later_call(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    thread, gate = gated(model)
    thread.submit(named("a", "g"))
    gate.wait()
    waiting = [collect_later(thread), collect_later(thread, ["a"])]
    waiting.append(ask(thread, thread.load_weights, export(changed, 4), 4, drain=True))
    waiting += [ask(thread, thread.submit, named("b")), ask(thread, thread.sleep)]
    thread.engine._has_work = lambda: False  # when the step under way has ended
    gate.open()
    errors = [answer.exception(LIMIT_S) for answer in waiting]
    for method, *args in (
        ("submit", named("c")),
        ("collect", 0.0),
        ("collect", LIMIT_S, ["a"]),
        ("abort", ["a"]),
        ("ages",),
        ("load_weights", export(changed, 4), 4),
        ("sleep",),
        ("wake",),
        ("forget_prompts",),
    ):
        with pytest.raises(Exception) as error:
            getattr(thread, method)(*args)
        errors.append(error.value)
    with pytest.raises(Exception) as error:
        next(thread.stream(named("c")))
    errors.append(error.value)
    assert isinstance(errors[0], RolloutError) and "lost 2 requests: ['a', 'g']" in str(errors[0])
    assert all(error is errors[0] for error in errors)
    thread._fail(RuntimeError("a later failure"))  # it answers none of them again
    with pytest.raises(RolloutError, match="lost 2 requests"):
        thread.ages()


def test_collect_gives_what_has_ended_each_once_and_waits_no_longer_than_it_is_told(
    model: ModelAndFolder, expected: dict[str, Completion]
) -> None:
    thread, gate = gated(model)
    assert thread.collect(LIMIT_S) == {}, "nothing is unfinished"
    thread.submit(REQUESTS)
    gate.wait()
    assert thread.collect(0.0) == thread.collect(0.01) == {}
    gate.steps(3)
    assert tokens(thread.collect(0.0)) == {name: tokens(expected)[name] for name in "aef"}
    assert thread.collect(0.01) == {}
    gate.open()
    assert tokens(collect_all(thread)) == {name: tokens(expected)[name] for name in "bcdg"}


def test_collect_waits_until_a_response_ends(
    model: ModelAndFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "GATHER_S", 0.0)
    thread, gate = gated(model)
    thread.submit(REQUESTS)
    gate.wait()
    for steps, names in ((2, "af"), (1, "e"), (1, "bc"), (2, "d")):
        answer = collect_later(thread)
        gate.steps(steps)
        assert answer.result(LIMIT_S).keys() == set(names)
    gate.open()
    assert thread.collect(LIMIT_S).keys() == {"g"}


def test_what_has_ended_waits_for_other_responses_until_none_is_unfinished_but_not_for_longer_than_is_said(
    model: ModelAndFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "GATHER_S", LIMIT_S)
    thread, gate = gated(model)
    thread.submit(REQUESTS)
    gate.wait()
    answer = collect_later(thread, ["a", "b", "unknown"])
    gate.steps(3)
    assert thread.collect(0.01, ["e", "g"]).keys() == {"e"}
    gate.steps(1)
    assert answer.result(LIMIT_S).keys() == {"a", "b"}
    answer = collect_later(thread)
    gate.open()
    assert answer.result(LIMIT_S).keys() == {"c", "d", "f", "g"}


def test_collect_takes_the_names_that_it_is_told_and_no_others(
    model: ModelAndFolder, expected: dict[str, Completion]
) -> None:
    thread, gate = gated(model)
    thread.submit(REQUESTS)
    gate.wait()
    gate.steps(4)
    assert thread.collect(0.01, ["g"]) == thread.collect(LIMIT_S, ["unknown"]) == {}
    assert tokens(thread.collect(LIMIT_S, ["b", "e", "unknown"])) == {
        name: tokens(expected)[name] for name in "be"
    }
    assert thread.collect(LIMIT_S, ["b", "a"]).keys() == {"a"}
    gate.open()
    assert thread.collect(LIMIT_S, ["b", "e", "a"]) == {}
    assert tokens(collect_all(thread)) == {name: tokens(expected)[name] for name in "cdfg"}


def test_requests_that_are_aborted_are_forgotten_whether_they_have_ended_or_not(
    model: ModelAndFolder, expected: dict[str, Completion]
) -> None:
    thread, gate = gated(model)
    thread.submit(REQUESTS)
    gate.wait()
    gate.steps(2)  # a and f have ended
    aborted = ask(thread, thread.abort, ["a", "g", "unknown"])
    gate.open()
    aborted.result(LIMIT_S)
    assert tokens(collect_all(thread)) == {name: tokens(expected)[name] for name in "bcdef"}
    assert tokens(draw(thread, named("a", "g"))) == {name: tokens(expected)[name] for name in "ag"}


def test_weights_that_drain_come_after_the_last_unfinished_response_and_before_what_is_asked_later(
    model: ModelAndFolder, changed: LlamaForCausalLM, expected: dict[str, Completion]
) -> None:
    thread, gate = gated(model)
    thread.submit(named("a", "g"))
    gate.wait()
    gate.steps(2)
    early = ask(thread, thread.submit, named("b"))
    loaded = ask(thread, thread.load_weights, export(changed, 5), 5, drain=True)
    late = ask(thread, thread.submit, named("c", "d"))
    # It drains where nothing else is said
    again = ask(thread, thread.load_weights, export(model[1], 6), 6)
    last = ask(thread, thread.submit, named("e"))
    gate.steps(9)
    early.result(LIMIT_S)
    assert not loaded.done() and thread.ages().keys() == {"g"}
    gate.open()
    fingerprints = [loaded.result(LIMIT_S), again.result(LIMIT_S)]
    assert (
        fingerprints[0] == make_engine(model).load_weights(export(changed, 5), 5) != fingerprints[1]
    )
    late.result(LIMIT_S)
    last.result(LIMIT_S)
    completions = collect_all(thread)
    version_of = {"a": 3, "g": 3, "b": 3, "c": 5, "d": 5, "e": 6}
    lengths = {name: len(each.token_ids) for name, each in completions.items()}
    assert spans(completions) == {
        name: ((version, 0, lengths[name]),) for name, version in version_of.items()
    }
    weights = {3: model[1], 5: changed, 6: model[1]}
    for request in named(*version_of):
        assert_drawn_by(weights, request, completions[request.name], kv="recompute")
    assert {name: tokens(completions)[name] for name in "abeg"} == {
        name: tokens(expected)[name] for name in "abeg"
    }


def test_weights_that_do_not_drain_come_between_two_tokens(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    thread, gate = gated(model)
    thread.submit(named("a", "d", "g"))
    gate.wait()
    gate.steps(3)
    queued = ask(thread, thread.submit, named("b"))
    loaded = ask(thread, thread.load_weights, export(changed, 5), 5, drain=False)
    gate.open()
    queued.result(LIMIT_S)
    loaded.result(LIMIT_S)
    completions = collect_all(thread)
    lengths = {name: len(each.token_ids) for name, each in completions.items()}
    assert lengths["d"] > 4 and lengths["g"] > 4
    assert spans(completions) == {
        "a": ((3, 0, 2),),
        "b": ((5, 0, lengths["b"]),),
        **{name: ((3, 0, 4), (5, 4, lengths[name])) for name in "dg"},  # the fourth step had begun
    }
    for request in named("a", "b", "d", "g"):
        assert_drawn_by(
            {3: model[1], 5: changed}, request, completions[request.name], kv="recompute"
        )


def test_weights_for_an_engine_without_requests_come_at_once(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    thread = EngineThread(lambda: make_engine(model))
    for version, drain in ((4, True), (5, False)):
        thread.load_weights(export(changed, version), version, drain=drain)
        (completion,) = draw(thread, named("g")).values()
        assert [span[0] for span in completion.versions] == [version]


def test_what_the_engine_refuses_is_an_error_of_the_one_who_asked_and_others_go_on(
    model: ModelAndFolder, expected: dict[str, Completion]
) -> None:
    thread, gate = gated(model)
    thread.submit(named("b", "g"))
    gate.wait()
    refused = {
        "The prompt of x has 7 tokens": ask(
            thread, thread.submit, [*named("a"), *make_requests({"x": [2] * 7})]
        ),
        "2 requests are in flight; abort them before": ask(thread, thread.sleep),
        "Stale weights: version 2": ask(
            thread, thread.load_weights, export(model[1], 2), 2, drain=False
        ),
    }
    taken = ask(thread, thread.submit, named("c"))
    gate.open()
    for message, answer in refused.items():
        assert message in str(answer.exception(LIMIT_S))
    taken.result(LIMIT_S)
    assert collect_all(thread).keys() == {"b", "c", "g"}
    thread.sleep()
    thread.wake()
    assert tokens(draw(thread, REQUESTS)) == tokens(expected)


def test_an_age_is_the_number_of_steps_since_an_unfinished_request_came(
    model: ModelAndFolder,
) -> None:
    thread, gate = gated(model)
    thread.submit(named("a", "b", "g"))
    gate.wait()
    assert thread.ages() == {"a": 0, "b": 0, "g": 0}
    gate.steps(1)
    assert thread.ages() == {"a": 1, "b": 1, "g": 1}
    late = ask(thread, thread.submit, named("d"))
    gate.steps(1)  # a ends
    late.result(LIMIT_S)
    assert thread.ages() == {"b": 2, "g": 2, "d": 0}
    aborted = ask(thread, thread.abort, ["b"])
    gate.steps(3)
    aborted.result(LIMIT_S)
    assert thread.ages() == {"g": 5, "d": 3}
    gate.open()
    collect_all(thread)
    assert thread.ages() == {}


def test_a_stream_gives_each_response_once_with_its_request_and_leaves_others_alone(
    model: ModelAndFolder, expected: dict[str, Completion]
) -> None:
    thread = EngineThread(lambda: make_engine(model))
    thread.submit(named("f", "g"))
    given = [each for ended in thread.stream(named("a", "b", "c", "d", "e")) for each in ended]
    assert sorted(request.name for request, _ in given) == ["a", "b", "c", "d", "e"]
    assert all(request in REQUESTS for request, _ in given)
    assert deep_equal(
        {request.name: completion for request, completion in given},
        {name: expected[name] for name in "abcde"},
    )
    assert tokens(collect_all(thread)) == {name: tokens(expected)[name] for name in "fg"}


def test_a_stream_that_is_closed_early_leaves_no_request_behind(
    model: ModelAndFolder, expected: dict[str, Completion]
) -> None:
    thread, gate = gated(model)
    thread.submit(named("b"))
    gate.wait()
    stream = thread.stream(named("a", "d", "g"))
    first = ask(thread, next, stream)
    gate.steps(3)  # the stream's requests come after the first one
    assert [request.name for request, _ in first.result(LIMIT_S)] == ["a"]
    closed = ask(thread, stream.close)
    assert thread.ages().keys() == {"b", "d", "g"}
    gate.open()
    closed.result(LIMIT_S)
    assert thread.ages() == {}
    assert tokens(collect_all(thread)) == {"b": tokens(expected)["b"]}
    assert tokens(draw(thread, named("d", "g"))) == {name: tokens(expected)[name] for name in "dg"}


def test_a_stream_of_requests_that_are_refused_raises_and_leaves_none_behind(
    model: ModelAndFolder,
) -> None:
    thread = EngineThread(lambda: make_engine(model))
    with pytest.raises(ValueError, match="The prompt of x has 0 tokens"):
        next(thread.stream([*named("a"), *make_requests({"x": []})]))
    assert draw(thread, named("a")).keys() == {"a"}


class Rank(EngineThread):
    """One of the two ranks of a replica in this process; `numbers` is what the first one tells the
    second."""

    def __init__(
        self, model: ModelAndFolder, numbers: queue.Queue, rank: int, gate: Gate | None = None
    ) -> None:
        self.numbers, self.is_first = numbers, rank == 0
        self.done: list[tuple] = []
        """What the engine did, in order."""
        self.may_begin = threading.Event()
        super().__init__(
            lambda: self.recorded(gate.guard(make_engine(model)) if gate else make_engine(model))
        )

    def recorded(self, engine: RolloutEngine) -> RolloutEngine:
        submit, step, load_weights, abort = (
            engine.submit,
            engine.step,
            engine.load_weights,
            engine.abort,
        )

        def say(*what: Any) -> None:
            self.done.append(what)

        engine.submit = lambda requests: (
            say("submit", *(each.name for each in requests)),
            submit(requests),
        )[1]
        engine.abort = lambda names: (say("abort", *names), abort(names))[1]
        engine.step = lambda: (say("step"), step())[1]
        engine.load_weights = lambda exports, version, **kwargs: (
            say("load", version),
            load_weights(exports, version, **kwargs),
        )[1]
        engine.is_collect, engine.agreed = self.is_first, self.agreed
        return engine

    def agreed(self, number: int) -> int:
        if self.is_first:
            self.numbers.put(number)
            return number
        assert self.may_begin.wait(LIMIT_S)
        return self.numbers.get()


def test_ranks_do_the_same_between_the_same_steps_though_one_is_asked_later(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    gate, numbers = Gate(), queue.Queue()
    first, second = Rank(model, numbers, 0, gate), Rank(model, numbers, 1)

    def calls(rank: Rank) -> list[list]:
        """Calls with their arguments, of which each list is asked while one step is about to
        begin."""
        return [
            [(rank.submit, named("b", "c"))],
            [(rank.submit, named("g")), (rank.abort, ["c"])],
            [
                (partial(rank.load_weights, drain=False), export(changed, 5), 5),
                (rank.submit, named("d")),
            ],
            [(rank.load_weights, export(model[1], 6), 6), (rank.submit, named("a"))],
        ]

    answers = []
    first.submit(named("e", "f"))
    gate.wait()
    for together in calls(first):
        gate.steps(1)
        answers += [ask(first, call, *args) for call, *args in together]
    gate.open()
    [answer.result(LIMIT_S) for answer in answers]
    completions = collect_all(first)
    assert second.done == [] and first.done[:4] == [
        ("submit", "e", "f"),
        ("step",),
        ("step",),
        ("submit", "b", "c"),
    ]
    assert completions["a"].versions == ((6, 0, len(completions["a"].token_ids)),)
    assert [span[:2] for span in completions["b"].versions] == [(3, 0), (5, 2)]

    asked = [
        (second.submit, named("e", "f")),
        *(each for together in calls(second) for each in together),
    ]
    answers = [ask(second, call, *args) for call, *args in asked[:-1]]
    second.may_begin.set()
    answers.append(later(*asked[-1]))
    [answer.result(LIMIT_S) for answer in answers]
    assert deep_equal(collect_all(second), completions)
    assert second.done == first.done


def test_a_rank_that_is_not_asked_for_what_the_first_one_was_asked_for_says_so(
    model: ModelAndFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_COMMAND_S", 0.01)
    numbers: queue.Queue = queue.Queue()
    second = Rank(model, numbers, 1)
    second.may_begin.set()
    numbers.put(1)
    with second._changed:
        assert second._changed.wait_for(lambda: second._failure, timeout=LIMIT_S)
    with pytest.raises(
        TimeoutError, match=r"was asked for something 0\.01 s ago that this rank was not asked for"
    ):
        second.submit(named("a"))


def test_a_first_rank_without_work_tells_the_others_so_before_they_give_up(
    model: ModelAndFolder, expected: dict[str, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_IDLE_S", 0.01)
    numbers: queue.Queue = queue.Queue()
    first = Rank(model, numbers, 0)
    assert [numbers.get(timeout=LIMIT_S) for _ in range(3)] == [0, 0, 0] and first.done == []
    monkeypatch.undo()
    assert tokens(draw(first, named("a", "b"))) == {name: tokens(expected)[name] for name in "ab"}


def test_weights_that_changed_on_their_way_are_noticed_before_or_after_they_were_loaded_as_is_asked(
    model: ModelAndFolder, changed: LlamaForCausalLM, expected: dict[str, Completion]
) -> None:
    thread, exports = EngineThread(lambda: make_engine(model)), export(changed, 4)
    exports[0].buckets[0].data[0] ^= 1
    with pytest.raises(WeightSyncError, match="Weights of version 4 changed on their way"):
        thread.load_weights(exports, 4)
    assert thread.engine.policy_version == 3
    with pytest.raises(WeightSyncError, match="Weights of version 4 did not arrive"):
        thread.load_weights(exports, 4, checks_first=False)
    assert thread.engine.policy_version is None
    thread.load_weights(export(model[1], 4), 4)
    assert tokens(draw(thread, REQUESTS)) == tokens(expected)


def test_no_step_is_computed_while_the_last_weights_did_not_arrive(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    thread, gate = gated(model)
    thread.submit(named("g"))
    gate.wait()
    gate.steps(2)
    exports = export(changed, 4)
    exports[0].buckets[0].data[0] ^= 1
    failed = ask(thread, partial(thread.load_weights, checks_first=False, drain=False), exports, 4)
    gate.open()
    assert isinstance(failed.exception(LIMIT_S), WeightSyncError)
    with pytest.raises(RuntimeError, match="no verified weights"):
        thread.submit(named("a"))
    assert thread.ages() == {"g": 3} and thread.collect(0.01) == {}
    thread.load_weights(export(changed, 5), 5)  # it cannot wait for the response
    completions = collect_all(thread)
    assert [span[:2] for span in completions["g"].versions] == [(3, 0), (5, 3)]


def test_what_is_left_is_what_is_unfinished_and_what_was_not_collected(
    model: ModelAndFolder,
) -> None:
    thread, gate = gated(model)
    thread.submit(named("a", "b", "g"))
    gate.wait()
    gate.steps(4)  # a and b have ended
    assert thread.num_left() == 3
    assert thread.collect(0.0, ["a"]).keys() == {"a"} and thread.num_left() == 2
    gate.open()
    collect_all(thread)
    assert thread.num_left() == 0


def test_a_thread_that_is_closed_ends_after_its_step_and_fails_whatever_waits_for_it(
    model: ModelAndFolder,
) -> None:
    thread, gate = gated(model)
    thread.submit(named("g"))
    gate.wait()
    waiting = [collect_later(thread), ask(thread, thread.submit, named("a"))]
    closing = later(thread.close)
    errors = [str(answer.exception(LIMIT_S)) for answer in waiting]
    assert not thread._has_ended.is_set()
    gate.open()
    closing.result(LIMIT_S)
    assert thread._has_ended.is_set()
    with pytest.raises(RuntimeError) as error:
        thread.ages()
    assert {*errors, str(error.value)} == {"The rollout engine was closed."}


def test_a_thread_is_closed_before_its_process_ends(
    model: ModelAndFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []

    def register(function: Callable[..., None], *arguments: Any) -> None:
        at_exit.append(partial(function, *arguments))

    monkeypatch.setattr(engine_thread.atexit, "register", register)
    thread = EngineThread(lambda: make_engine(model))
    assert not thread._has_ended.is_set()
    for call in at_exit:
        call()
    assert thread._has_ended.is_set()


def test_a_thread_that_nobody_can_ask_any_more_ends(
    model: ModelAndFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "_IDLE_S", 0.01)
    thread = EngineThread(lambda: make_engine(model))
    draw(thread, named("a"))
    has_ended, engine = thread._has_ended, weakref.ref(thread.engine)
    assert not has_ended.wait(0.1), "it can still be asked"
    del thread
    assert has_ended.wait(LIMIT_S)
    gc.collect()
    assert engine() is None


def end_the_thread(*_: Any, **__: Any) -> Any:
    raise SystemExit(7)


def test_a_step_that_would_end_the_thread_fails_whatever_waits_for_the_engine(
    model: ModelAndFolder,
) -> None:
    thread, gate = gated(model)
    thread.submit(named("g"))
    gate.wait()
    thread.engine.step = end_the_thread
    waiting = [
        collect_later(thread),
        ask(thread, partial(thread.load_weights, drain=True), export(model[1], 4), 4),
    ]
    gate.open()
    for answer in waiting:
        with pytest.raises(RuntimeError, match=r"The rollout engine raised SystemExit\(7\)"):
            answer.result(LIMIT_S)


def test_a_command_that_would_end_the_thread_fails_alone(
    model: ModelAndFolder, expected: dict[str, Completion]
) -> None:
    thread, gate = gated(model)
    thread.submit(named("g"))
    gate.wait()
    thread.engine.load_weights = end_the_thread
    loading = ask(thread, partial(thread.load_weights, drain=False), export(model[1], 4), 4)
    late = ask(thread, thread.submit, named("a"))
    gate.open()
    with pytest.raises(RuntimeError, match=r"The rollout engine raised SystemExit\(7\)"):
        loading.result(LIMIT_S)
    late.result(LIMIT_S)
    assert tokens(collect_all(thread)) == {name: tokens(expected)[name] for name in "ag"}


def test_an_engine_whose_making_would_end_the_thread_raises_for_its_maker() -> None:
    with pytest.raises(RuntimeError, match=r"The rollout engine raised SystemExit\(7\)"):
        EngineThread(end_the_thread)
