"""Calls of a rollout group as requests, on two real replicas in this process."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_requests import StepByStep, generate_sequences
from test_rollout_engine_thread import Gate, ask
from tiny_worker_models import PROMPT, RESPONSE, local_group, make_batch, policy_config, write_model

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import deep_equal, jagged_from_lists
from verl_like.single_controller import (
    Dispatch,
    Ordered,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.single_controller.failure import CallTimeout, WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import CallEvent, ClassWithInitArgs
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.config.rollout import SamplingConfig
from verl_like.workers.rollout import RolloutError, get_rollout_engine
from verl_like.workers.rollout.router import RequestRouter
from verl_like.workers.rollout_worker import PROMPT_COLUMNS, RolloutWorker

ENDS = tuple(range(3, 1000, 4))
"""Tokens that end a response, so that lengths differ."""
N, NUM_SLOTS, SEED = 3, 2, 11
LIMIT_S = 120.0
ROUTINGS = ("fixed", "least_loaded")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ActorRolloutRefConfig:
    config = policy_config(write_model(tmp_path_factory.mktemp("policy")), prompts=2)
    validation = SamplingConfig(temperature=1.3, top_k=9, n=2)
    settings = {"name": "hf", "n": N, "dtype": "float32", "val_kwargs": validation}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=settings)})


@pytest.fixture(scope="module")
def actor(config: ActorRolloutRefConfig) -> LocalWorkerGroup:
    return local_group(ActorWorker, config)


MakeGroup = Callable[..., LocalWorkerGroup]


@pytest.fixture
def make_group(config: ActorRolloutRefConfig, actor: LocalWorkerGroup) -> MakeGroup:
    def make(
        routing: str = "least_loaded",
        num_replicas: int = 2,
        worker: type = RolloutWorker,
        num_slots: int = NUM_SLOTS,
        **arguments: Any,
    ) -> LocalWorkerGroup:
        rollout = config.rollout.model_copy(update={"routing": routing, "max_num_seqs": num_slots})
        init = ClassWithInitArgs(
            worker, config=config.model_copy(update={"rollout": rollout}), seed=SEED
        )
        group = LocalWorkerGroup(init, num_replicas, role="rollout", **arguments)
        group.deadline_s = LIMIT_S
        group.init_model()
        for each in group.workers:
            each.rollout.eos_token_ids = ENDS
        group.load_weights(actor.export_weights(version=3), version=3)
        return group

    return make


@pytest.fixture(scope="module")
def by_hand(
    config: ActorRolloutRefConfig, actor: LocalWorkerGroup
) -> Callable[[DataProto], DataProto]:
    """What one engine draws that is stepped by hand."""
    engine_class = get_rollout_engine("hf")
    engine = engine_class(
        config.rollout, config.model, rank=0, world_size=1, seed=SEED, device="cpu"
    )
    engine.eos_token_ids = ENDS
    engine.load_weights(actor.export_weights(version=3).get(), 3)
    return lambda prompts: generate_sequences(engine, prompts)


def prompts(num_rows: int = 5, step: int = 1, **meta_info: Any) -> DataProto:
    rows = make_batch(rows=num_rows, seed=step)
    return DataProto.from_dict(
        tensors={"prompts": rows.batch["prompts"]},
        non_tensors={"uid": [f"{step}-{row}" for row in range(num_rows)]},
        meta_info=rows.meta_info | {"global_steps": step} | meta_info,
    )


def assert_same_rows(batch: DataProto, expected: DataProto) -> None:
    assert len(batch) == len(expected) and batch.columns().keys() == expected.columns().keys()
    for name in ("prompts", "responses", "response_mask"):
        assert deep_equal(batch.batch[name], expected.batch[name]), name
    one, other = (each.batch["rollout_log_probs"].values() for each in (batch, expected))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert (
        batch.non_tensor_batch["policy_version"].tolist()
        == expected.non_tensor_batch["policy_version"].tolist()
    )


def let_go(steps: StepByStep) -> None:
    """The engine takes steps on its own from now on."""
    steps.num_left = -1
    steps.thread._ask(steps.engine.resume)


def told_by(call: Any) -> dict[tuple[str, int], list[int]]:
    """The tokens of what a call's stream gives, each once, by uid and number."""
    told = [each for ended in call.stream() for each in ended]
    tokens = {
        (request.uid, request.index): completion.token_ids.tolist() for request, completion in told
    }
    assert len(tokens) == len(told)
    return tokens


def tokens_of(batch: DataProto, uids: Sequence[str]) -> dict[tuple[str, int], list[int]]:
    rows = [row.tolist() for row in batch.batch["responses"].unbind()]
    n = len(rows) // len(uids)
    return {(uids[i // n], i % n): row for i, row in enumerate(rows)}


def test_rows_are_the_same_however_many_replicas_there_are_and_whichever_takes_them(
    make_group: MakeGroup, by_hand: Callable
) -> None:
    expected = by_hand(prompts())
    lengths = expected.batch["responses"].offsets().diff().tolist()
    assert len(expected) == 5 * N and min(lengths) < RESPONSE == max(lengths)
    assert len({tuple(row.tolist()) for row in expected.batch["responses"].unbind()}) > N
    for routing in ROUTINGS:
        for num_replicas in (1, 2):
            group = make_group(routing, num_replicas)
            assert_same_rows(group.generate_sequences(prompts()).get(), expected)


def test_replicas_take_equal_parts_or_what_they_have_room_for(make_group: MakeGroup) -> None:
    for routing in ROUTINGS:
        taken: list[list] = [[], []]
        group = make_group(routing)
        for worker, of_worker in zip(group.workers, taken, strict=True):
            worker.engine_thread.submit = recording(worker.engine_thread.submit, of_worker)
        group.generate_sequences(prompts()).get()
        names = [[(request.uid, request.index) for request in requests] for requests in taken]
        assert sorted(name for each in names for name in each) == [
            (f"1-{row}", k) for row in range(5) for k in range(N)
        ]
        if routing == "fixed":
            assert names == [
                [(f"1-{row}", k) for row in rows for k in range(N)] for rows in ((0, 1, 2), (3, 4))
            ]
        else:
            first = [name for each in names for name in each[:NUM_SLOTS]]
            assert sorted(first) == [("1-0", 0), ("1-0", 1), ("1-0", 2), ("1-1", 0)]


def recording(submit: Callable, requests: list) -> Callable:
    def record(new: Sequence) -> None:
        requests.extend(new)
        submit(new)

    return record


@pytest.mark.parametrize("routing", ROUTINGS)
def test_several_calls_are_drawn_at_once_and_each_gets_its_own_rows(
    make_group: MakeGroup, by_hand: Callable, routing: str
) -> None:
    group = make_group(routing)
    batches = [
        prompts(5, step=1),
        prompts(2, step=2),
        prompts(1, step=3),
        prompts(2, step=2, validate=True),
    ]
    batches.append(batches[1])
    calls = [group.generate_sequences(batch) for batch in batches]
    for batch, call in zip(batches[::-1], calls[::-1], strict=True):
        assert_same_rows(call.get(), by_hand(batch))
    assert all(call.done() for call in calls)


def test_a_call_ends_though_one_before_it_has_not(make_group: MakeGroup, by_hand: Callable) -> None:
    group, batches = make_group(), [prompts(1, step=step, greedy=True) for step in (1, 2, 3)]
    first, second = (StepByStep(worker.engine_thread) for worker in group.workers)
    # Of a response each, in turn to each replica
    calls = [group.generate_sequences(batch) for batch in batches]
    first.wait_for(2)
    second.wait_for(1)
    second.advance(RESPONSE)
    assert_same_rows(calls[1].get(), by_hand(batches[1]))
    assert [call.done() for call in calls] == [False, True, False]
    first.advance(RESPONSE)
    for call, batch in zip(calls, batches, strict=True):
        assert_same_rows(call.get(), by_hand(batch))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_stream_gives_every_response_of_its_call_once_as_it_stands_in_the_batch(
    make_group: MakeGroup, routing: str
) -> None:
    group = make_group(routing)
    first, second = (group.generate_sequences(prompts(step=step)) for step in (1, 2))
    told = [told_by(call) for call in (first, second)]
    for step, call, of_call in ((1, first, told[0]), (2, second, told[1])):
        assert of_call == tokens_of(call.get(), [f"{step}-{row}" for row in range(5)])
        assert told_by(call) == {}


def test_validation_greedy_decoding_and_padding_are_as_the_batch_says(
    make_group: MakeGroup, by_hand: Callable
) -> None:
    group = make_group()
    validation = group.generate_sequences(prompts(validate=True)).get()
    assert len(validation) == 10
    assert_same_rows(validation, by_hand(prompts(validate=True)))
    greedy = group.generate_sequences(prompts(greedy=True)).get()
    assert len(greedy) == 5
    assert_same_rows(greedy, by_hand(prompts(greedy=True)))
    assert not deep_equal(validation[::2].batch["responses"], greedy.batch["responses"])

    # A row that repeats another one, with its uid
    padded = DataProto.concat([prompts(3), prompts(3)[:1]])
    padded = padded.union(
        DataProto.from_dict(tensors={"is_pad": torch.tensor([False, False, False, True])})
    )
    call = group.generate_sequences(padded)
    assert Counter(uid for uid, _ in told_by(call)) == {"1-0": N, "1-1": N, "1-2": N}
    batch = call.get()
    assert_same_rows(batch, by_hand(padded))
    assert deep_equal(batch[-N:].batch["responses"], batch[:N].batch["responses"])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_batch_without_rows_has_no_responses(make_group: MakeGroup, routing: str) -> None:
    call = make_group(routing).generate_sequences(prompts()[:0])
    assert told_by(call) == {} and call.done()
    batch = call.get()
    assert (
        len(batch) == 0
        and {"responses", "rollout_log_probs", "policy_version"} <= batch.columns().keys()
    )


class OwnWorker(RolloutWorker):
    """Has a method of its own in the place of the registered one."""

    def generate_sequences(self, prompts):
        self.seen = prompts.non_tensor_batch["uid"].tolist()
        batch = yield from super().generate_sequences(prompts)
        batch.batch["own"] = torch.full((len(batch),), float(self.rank))
        return batch


class OwnRegisteredWorker(OwnWorker):
    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"),
        blocking=False,
        reads=PROMPT_COLUMNS,
        jagged=True,
    )
    def generate_sequences(self, prompts):
        return (yield from super().generate_sequences(prompts))


class WorkerWithMore(RolloutWorker):
    """Has another method beside the registered ones."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def answer(self):
        return 42


@pytest.mark.parametrize("worker", [OwnWorker, OwnRegisteredWorker])
def test_a_subclasss_own_method_is_called_on_the_ranks(
    make_group: MakeGroup, by_hand: Callable, worker: type
) -> None:
    group = make_group(worker=worker)
    call = group.generate_sequences(prompts())
    batch, expected = call.get(), by_hand(prompts())
    assert [each.seen for each in group.workers] == [["1-0", "1-1", "1-2"], ["1-3", "1-4"]]
    assert batch.batch.pop("own").tolist() == [0.0] * 3 * N + [1.0] * 2 * N
    assert_same_rows(batch, expected)
    assert told_by(call) == tokens_of(expected, [f"1-{row}" for row in range(5)])
    assert group.caller is None


def test_a_subclass_with_other_methods_has_its_calls_made_of_requests(
    make_group: MakeGroup, by_hand: Callable
) -> None:
    group = make_group(worker=WorkerWithMore)
    assert_same_rows(group.generate_sequences(prompts()).get(), by_hand(prompts()))
    assert isinstance(group.caller, RequestRouter) and group.answer() == [42, 42]


class Source(Worker):
    """Makes prompts."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, jagged=True)
    def load(self, data):
        return data


def test_an_ordered_batch_and_the_future_of_one_are_generated_on_the_ranks(
    make_group: MakeGroup, by_hand: Callable
) -> None:
    group, expected = make_group(), by_hand(prompts(greedy=True))
    order = [4, 2, 0, 1, 3]
    ordered = group.generate_sequences(Ordered(prompts(greedy=True), order, sizes=[1, 4])).get()
    assert_same_rows(ordered, expected)
    source = LocalWorkerGroup(ClassWithInitArgs(Source), 2)
    assert_same_rows(group.generate_sequences(source.load(prompts())).get(), by_hand(prompts()))
    assert group.caller is None


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_future_of_a_call_is_an_argument_of_another_groups_call(
    make_group: MakeGroup, actor: LocalWorkerGroup, routing: str
) -> None:
    call = make_group(routing).generate_sequences(prompts())
    scored = actor.compute_log_prob(call).get().batch["old_log_probs"]
    again = actor.compute_log_prob(call).get().batch["old_log_probs"]
    log_probs = call.get().batch["rollout_log_probs"]
    torch.testing.assert_close(scored.values(), log_probs.values(), rtol=0, atol=1e-4)
    assert deep_equal(scored, again)
    assert call.parts[0] is call.parts[0], "it is stored once"


def with_long_prompt(num_rows: int, row: int) -> DataProto:
    batch = prompts(num_rows, step=9)
    tokens = [each.tolist() for each in batch.batch["prompts"].unbind()]
    tokens[row] = [5] * (PROMPT + 1)
    batch.batch["prompts"] = jagged_from_lists(tokens, torch.int64)
    return batch


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_prompt_that_is_refused_fails_the_calls_under_way_and_none_later(
    make_group: MakeGroup, by_hand: Callable, routing: str
) -> None:
    group = make_group(routing)
    for row in (0, 3):  # of the first and of the second replica, where each takes an equal part
        call = group.generate_sequences(with_long_prompt(4, row))
        with pytest.raises(
            WorkerError, match=r"(?s)rollout rank \d .* failed in generate_sequences.*6 tokens"
        ) as error:
            call.get()
        assert error.value.method == "generate_sequences" and call.done()
        with pytest.raises(WorkerError):
            list(call.stream())
        assert_same_rows(group.generate_sequences(prompts()).get(), by_hand(prompts()))
        assert [worker.engine_thread.ages() for worker in group.workers] == [{}, {}]
        assert not any(worker.engine_thread._ended for worker in group.workers)


def test_replicas_forget_the_requests_of_calls_that_failed(
    make_group: MakeGroup, by_hand: Callable
) -> None:
    group = make_group("fixed")
    steps = StepByStep(group.workers[0].engine_thread)
    with pytest.raises(WorkerError, match="6 tokens"):
        # The first replica has taken its part
        group.generate_sequences(with_long_prompt(4, 3)).get()
    later = group.generate_sequences(prompts(2))
    steps.wait_for(N)
    assert steps.thread.ages().keys() == {name for name in later.call.requests if "uid 1-0" in name}
    let_go(steps)
    assert_same_rows(later.get(), by_hand(prompts(2)))


def test_an_engine_that_fails_is_an_error_of_every_call_under_way_and_later(
    make_group: MakeGroup,
) -> None:
    group = make_group(num_slots=2 * N)
    steps = [StepByStep(worker.engine_thread) for worker in group.workers]
    calls = [group.generate_sequences(prompts(2, step=step)) for step in (1, 2)]
    for each in steps:
        each.wait_for(2 * N)
    group.workers[1].rollout._has_work = lambda: False
    with pytest.raises(Exception, match="lost 6 requests"):
        steps[1].advance(1)
    calls.append(group.generate_sequences(prompts(2, step=3)))
    for call in calls:
        with pytest.raises(
            WorkerError, match=r"(?s)rollout rank 1 .* failed in generate_sequences.*lost 6 req"
        ) as error:
            call.get()
        assert (error.value.role, error.value.rank, error.value.method) == (
            "rollout",
            1,
            "generate_sequences",
        )


@pytest.mark.parametrize("num_slots", [2, 2 * N])
def test_a_call_that_is_begun_again_is_drawn_anew_and_others_go_on(
    make_group: MakeGroup, actor: LocalWorkerGroup, by_hand: Callable, num_slots: int
) -> None:
    group, expected = (
        make_group(num_slots=num_slots),
        [by_hand(prompts(2, step=step)) for step in (1, 2)],
    )
    steps = [StepByStep(worker.engine_thread) for worker in group.workers]
    first, second = (group.generate_sequences(prompts(2, step=step)) for step in (1, 2))
    for each in steps:
        each.wait_for(num_slots)
        each.advance(1)  # of both calls, or, where there is no room, of the first one
    group.load_weights(actor.export_weights(version=4), version=4, drain=False)  # of equal values
    first.call.begin_again()
    for each in steps:
        let_go(each)
    assert told_by(first) == tokens_of(expected[0], ["1-0", "1-1"])
    for call, of_call, is_old in zip(
        (first, second), expected, (False, num_slots > 2), strict=True
    ):
        batch = call.get()
        rows = batch.batch["responses"]
        assert deep_equal(rows, of_call.batch["responses"])
        for spans, row in zip(batch.non_tensor_batch["policy_version"], rows.unbind(), strict=True):
            of_both = ((3, 0, 1), (4, 1, len(row))) if len(row) > 1 else ((3, 0, 1),)
            assert spans == (of_both if is_old else ((4, 0, len(row)),))


def test_what_a_replica_told_as_a_call_was_begun_again_does_not_count(
    make_group: MakeGroup, actor: LocalWorkerGroup, by_hand: Callable
) -> None:
    group, exported = make_group(), actor.export_weights(version=4).get()
    steps = [StepByStep(worker.engine_thread) for worker in group.workers]
    call, collect, told = group.generate_sequences(prompts()), group.collect_completions, []

    def collect_and_begin_again(wait_s: float) -> Any:
        answers = collect(wait_s)
        if not told and (names := [name for completions, _ in answers for name in completions]):
            told.extend(names)
            group.load_weights(exported, version=4, drain=False)
            call.call.begin_again()
        return answers

    group.collect_completions = collect_and_begin_again
    for each in steps:
        let_go(each)
    batch = call.get()
    assert told and deep_equal(batch.batch["responses"], by_hand(prompts()).batch["responses"])
    assert {span[0] for spans in batch.non_tensor_batch["policy_version"] for span in spans} == {4}


def test_a_call_that_has_ended_can_be_begun_again(
    make_group: MakeGroup, actor: LocalWorkerGroup
) -> None:
    group = make_group("fixed")
    call = group.generate_sequences(prompts()).call
    batches = call.wait(None)
    group.load_weights(actor.export_weights(version=4), version=4)
    call.begin_again()
    batches += call.wait(None)
    assert deep_equal(batches[0].batch["responses"], batches[1].batch["responses"])
    versions = [
        {span[0] for spans in batch.non_tensor_batch["policy_version"] for span in spans}
        for batch in batches
    ]
    assert versions == [{3}, {4}]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_weights_come_after_the_responses_of_earlier_calls_and_before_those_of_later_ones(
    make_group: MakeGroup, actor: LocalWorkerGroup, by_hand: Callable, routing: str
) -> None:
    group, exported = make_group(routing), actor.export_weights(version=4)
    # More than there is room for
    calls = [group.generate_sequences(prompts(step=step)) for step in (1, 2)]
    group.load_weights(exported, version=4)
    calls.append(group.generate_sequences(prompts(step=3)))
    for step, version, call in zip((1, 2, 3), (3, 3, 4), calls, strict=True):
        batch = call.get()
        assert deep_equal(batch.batch["responses"], by_hand(prompts(step=step)).batch["responses"])
        lengths = batch.batch["responses"].offsets().diff().tolist()
        assert batch.non_tensor_batch["policy_version"].tolist() == [
            ((version, 0, length),) for length in lengths
        ]


def test_weights_that_do_not_wait_come_between_two_tokens(
    make_group: MakeGroup, actor: LocalWorkerGroup
) -> None:
    group, exported, gate = (
        make_group(num_replicas=1, num_slots=8),
        actor.export_weights(version=4).get(),
        Gate(),
    )
    (worker,) = group.workers
    gate.guard(worker.rollout)
    call = group.generate_sequences(prompts(2))
    gate.wait()
    gate.steps(1)
    loading = ask(worker.engine_thread, partial(group.load_weights, drain=False), exported, 4)
    gate.open()
    loading.result(LIMIT_S)
    batch = call.get()
    lengths = batch.batch["responses"].offsets().diff().tolist()
    # The second had begun
    spans = [((3, 0, min(2, length)), (4, 2, length))[: 1 + (length > 2)] for length in lengths]
    assert max(lengths) > 2 and batch.non_tensor_batch["policy_version"].tolist() == spans


def test_what_becomes_of_the_prompts_after_the_call_does_not_matter(
    make_group: MakeGroup, by_hand: Callable
) -> None:
    group, batch, expected = make_group(), prompts(), by_hand(prompts())
    call = group.generate_sequences(batch)
    batch.batch["prompts"] = prompts(step=2).batch["prompts"]
    batch.non_tensor_batch["uid"][:] = "another"
    assert_same_rows(call.get(), expected)


def test_a_request_that_a_replica_has_lost_fails_the_call(
    make_group: MakeGroup, by_hand: Callable
) -> None:
    group = make_group("fixed")
    steps = StepByStep(group.workers[1].engine_thread)
    call = group.generate_sequences(prompts())
    steps.wait_for(2 * N)
    steps.thread.abort(list(call.call.requests))
    with pytest.raises(RolloutError, match=r"Replica 1 of rollout lost 6 requests: .*uid 1-3"):
        call.get()
    let_go(steps)
    assert_same_rows(group.generate_sequences(prompts()).get(), by_hand(prompts()))


def test_a_call_that_takes_longer_than_the_deadline_says_which_replica_it_waits_for(
    make_group: MakeGroup, by_hand: Callable
) -> None:
    group = make_group("fixed")
    steps = StepByStep(group.workers[1].engine_thread)
    call = group.generate_sequences(prompts())
    group.deadline_s = 0.2
    message = (
        r"rollout.generate_sequences did not finish within 0.2 s: waiting for rank\(s\) \[1\] of 2"
    )
    for wait in (call.get, lambda: told_by(call), call.finish):
        while len(call.call.completions) < 3 * N:  # the first replica has ended
            time.sleep(0.01)
        with pytest.raises(CallTimeout, match=message) as error:
            wait()
        assert (error.value.role, error.value.method) == ("rollout", "generate_sequences")
    group.deadline_s = math.inf
    with pytest.raises(CallTimeout, match=r"within 0.1 s"):
        call.get(timeout=0.1)
    steps.advance(100)
    assert_same_rows(call.get(), by_hand(prompts()))


def test_a_call_that_is_late_names_the_replicas_that_have_requests_of_its_own(
    make_group: MakeGroup,
) -> None:
    group = make_group()
    steps = [StepByStep(worker.engine_thread) for worker in group.workers]
    # Each to one replica
    calls = [group.generate_sequences(prompts(1, step=step, greedy=True)) for step in (1, 2)]
    for rank, (call, each) in enumerate(zip(calls, steps, strict=True)):
        each.wait_for(1)
        with pytest.raises(CallTimeout, match=rf"waiting for rank\(s\) \[{rank}\] of 2"):
            call.get(timeout=0.0)
    for each in steps:
        let_go(each)
    assert [len(call.get()) for call in calls] == [1, 1]


def test_the_timeline_has_a_call_once_for_each_replica_that_drew(make_group: MakeGroup) -> None:
    events: list[CallEvent] = []
    group = make_group("fixed", on_call=events.append)
    events.clear()
    begun = time.time()
    call = group.generate_sequences(prompts())
    other = group.generate_sequences(prompts(1, step=2))  # the second replica has no part in it
    for each in (other, call, call):
        each.get()
        each.finish()
    ended = time.time()
    once = {"query_dispatch_collect_info", "request_rules"}  # before the first call
    calls = [event for event in events if event.method not in once]
    assert [(each.role, each.pool, each.method, each.rank) for each in calls] == [
        ("rollout", "local", "generate_sequences", rank) for rank in (0, 0, 1)
    ]
    assert all(begun <= each.started < each.finished <= ended for each in calls)


def test_in_the_timeline_a_call_begins_with_its_first_request(make_group: MakeGroup) -> None:
    events: list[CallEvent] = []
    group = make_group(on_call=events.append)
    steps = [StepByStep(worker.engine_thread) for worker in group.workers]
    call = group.generate_sequences(prompts())
    for each in steps:
        each.wait_for(NUM_SLOTS)
    first_were_sent = time.time()
    for each in steps:
        let_go(each)
    call.get()
    spans = [
        (each.started, each.finished) for each in events if each.method == "generate_sequences"
    ]
    assert len(spans) == 2 and all(
        started < first_were_sent < finished for started, finished in spans
    )


def test_what_a_replica_has_lost_costs_no_response_that_another_one_ended() -> None:
    router = object.__new__(RequestRouter)
    completion: Any = object()
    router.group = SimpleNamespace(
        role="rollout",
        runs_at_once=False,
        collect_completions=lambda wait_s: [({}, 0), ({"of the second": completion}, 0)],
    )
    router.mesh = SimpleNamespace(collect_ranks=[0, 1])
    router.changed = threading.Condition()
    router.collect_s = 0.1
    router.sent = {"of the first", "of the second"}
    router.queue = SimpleNamespace(replica_of={"of the first": 0, "of the second": 1})
    ended = []

    def end(replica: int, name: str, given: Any) -> None:
        ended.append((replica, name, given))
        router.sent.discard(name)

    router._ended = end
    with pytest.raises(RolloutError, match=r"Replica 0 of rollout lost 1 requests: .*of the first"):
        router._collect()
    assert ended == [(1, "of the second", completion)]
