"""The buffer of a trainer: whole groups in, the groups of a step out, and waits that end."""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.trainer.config.detached import DetachedBlock
from verl_like.trainer.detached.buffer import ExperienceBuffer
from verl_like.trainer.detached.ledger import PromptLedger, Ticket
from verl_like.trainer.detached.record import DetachedRecord
from verl_like.trainer.detached.side import SideRecorder

N = 3  # samples of a prompt


def groups(tickets: list[Ticket], *versions: int) -> DataProto:
    """N rows of each ticket; row i of ticket t has the value 10 t + i. The last row's second span
    is the newest."""
    rows = [(ticket.number, row) for ticket in tickets for row in range(N)]
    spans = [((version, 0, 4), (version + row, 4, 6)) for version in versions for row in range(N)]
    values = torch.tensor([[10.0 * number + row] for number, row in rows])
    column = np.empty(len(rows), dtype=object)
    column[:] = spans
    return DataProto.from_dict(
        {"values": values}, {"policy_version": column}, {"global_steps": tickets[0].number}
    )


def groups_with_turns(*tickets: Ticket) -> DataProto:
    """N samples of each ticket, the second of which has two rows, of one and two tokens; others
    have one of three.

    Rows i = 0 to 3 of ticket t have the response tokens 10 t + i.
    """
    rows = [(ticket.number, row) for ticket in tickets for row in range(N + 1)]
    responses = jagged_from_lists(
        [[10 * number + row] * (3, 1, 2, 3)[row] for number, row in rows], torch.int64
    )
    sample_of_row = [
        sample for place in range(len(tickets)) for sample in (N * place + i for i in (0, 1, 1, 2))
    ]
    tensors = {"prompts": jagged_from_lists([[1]] * len(rows), torch.int64), "responses": responses}
    tensors["sample_id"] = torch.tensor(sample_of_row)
    column = np.empty(len(rows), dtype=object)
    column[:] = [((0, 0, 3),)] * len(rows)
    return DataProto.from_dict(
        tensors, {"policy_version": column}, {"global_steps": 1, "padding": (1, 3, 0)}
    )


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Starts it in a thread; the function returned waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(timeout=20)
        assert not thread.is_alive()
        return results[0]

    return result


def test_a_step_is_taken_in_parts_each_in_the_order_of_the_prompts():
    ledger = PromptLedger(num_steps=5, batch_size=4, detached=DetachedBlock())
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    tickets = ledger.take("maker", 0, 9)
    assert buffer.extend(
        "maker", [tickets[3], tickets[1]], groups([tickets[3], tickets[1]], 0, 0), {}
    ) == [3, 1]
    assert len(buffer) == 2
    numbers, batch = buffer.take(2, version=0, deadline_s=5)
    assert numbers == [1, 3]
    assert batch.batch["values"].flatten().tolist() == [10, 11, 12, 30, 31, 32]
    assert batch.non_tensor_batch["policy_version"][2] == ((0, 0, 4), (2, 4, 6))
    buffer.extend("maker", [tickets[0]], groups([tickets[0]], 0), {})
    buffer.extend("maker", [tickets[2]], groups([tickets[2]], 0), {})
    assert buffer.take(2, version=0, deadline_s=5)[1].batch["values"][:, 0].tolist() == [
        0,
        1,
        2,
        20,
        21,
        22,
    ]
    assert len(buffer) == 0


def test_groups_that_came_together_in_the_order_of_their_prompts_are_taken_where_they_lie():
    ledger = PromptLedger(num_steps=2, batch_size=4, detached=DetachedBlock(), max_staleness=1)
    buffer = ExperienceBuffer(ledger, trainer=0, limit=8)
    first, second, third, *rest = ledger.take("maker", 0, 8)
    come = [groups([third, first, second], 0, 0, 0), groups(rest, 0, 0, 0, 0, 0)]
    for tickets, batch in zip(([third, first, second], rest), come, strict=True):
        buffer.extend("maker", tickets, batch, 5)
    numbers, together = buffer.take(2, version=0, deadline_s=5)
    assert numbers == [0, 2] and together.batch["values"].flatten().tolist() == [
        0,
        1,
        2,
        20,
        21,
        22,
    ]
    numbers, mixed = buffer.take(2, version=0, deadline_s=5)
    assert numbers == [1, 3] and mixed.batch["values"].flatten().tolist() == [
        10,
        11,
        12,
        30,
        31,
        32,
    ]
    numbers, together = buffer.take(4, version=1, deadline_s=5)
    assert numbers == [4, 5, 6, 7] and together.batch["values"][:, 0].tolist() == [
        40,
        41,
        42,
        50,
        51,
        52,
        60,
        61,
        62,
        70,
        71,
        72,
    ]
    assert together.batch["values"].data_ptr() == come[1].batch["values"][N:].data_ptr()


def test_groups_whose_samples_have_one_or_two_rows_come_out_whole_with_their_samples_numbered_through():
    ledger = PromptLedger(num_steps=5, batch_size=4, detached=DetachedBlock())
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    first, second, third, fourth = ledger.take("maker", 0, 4)
    assert buffer.extend("maker", [third, first], groups_with_turns(third, first), {}) == [2, 0]
    assert buffer.extend("maker", [second, fourth], groups_with_turns(second, fourth), {}) == [1, 3]
    numbers, batch = buffer.take(4, version=0, deadline_s=5)
    assert numbers == [0, 1, 2, 3]
    tokens = [row.tolist() for row in batch.batch["responses"].unbind()]
    assert tokens == [[10 * n + row] * (3, 1, 2, 3)[row] for n in range(4) for row in range(4)]
    # The groups 0 and 3, and 1 and 2, had the same numbers in two batches.
    assert batch.batch["sample_id"].tolist() == [0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11]
    assert batch.meta_info == {"padding": (1, 3, 0)}


def test_groups_that_lack_a_sample_of_several_rows_are_refused():
    ledger = PromptLedger(num_steps=5, batch_size=4, detached=DetachedBlock())
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    tickets = ledger.take("maker", 0, 2)
    # As many for each ticket, but five samples and a part of one
    rows = groups_with_turns(*tickets).rows(0, 6)
    rows.batch["sample_id"][5] = 7
    with pytest.raises(ValueError, match="5 samples are not whole groups of 2 tickets"):
        buffer.extend("maker", tickets, rows, {})


def test_the_oldest_row_of_a_sample_counts():
    ledger = PromptLedger(num_steps=5, batch_size=1, detached=DetachedBlock(), max_staleness=1)
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    tickets = ledger.take("maker", 1, 2)
    batch = groups_with_turns(*tickets)
    batch.non_tensor_batch["policy_version"][:] = [((1, 0, 3),)] * 8
    # The second row of a sample of the second ticket
    batch.non_tensor_batch["policy_version"][6] = ((0, 0, 3),)
    with pytest.raises(
        ValueError, match="asked for prompt 1 with version 1, but its oldest token is of version 0"
    ):
        buffer.extend("maker", tickets, batch, {})


def test_the_oldest_token_of_a_group_decides_when_it_is_due():
    ledger = PromptLedger(num_steps=5, batch_size=1, detached=DetachedBlock(), max_staleness=1)
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    zero, one = ledger.take("maker", 0, 2)
    buffer.extend("maker", [zero], groups([zero], 0), {})
    ledger.trained(buffer.take(1, version=0, deadline_s=5)[0], 0)
    (two,) = ledger.take("maker", 1, 1)
    buffer.extend("maker", [two, one], groups([two, one], 1, 0), {})
    assert buffer.take(1, version=1, deadline_s=5)[0] == [1]
    assert buffer.take(1, version=2, deadline_s=5)[0] == [2]


def test_the_oldest_sample_of_a_group_counts_wherever_it_stands():
    ledger = PromptLedger(num_steps=5, batch_size=1, detached=DetachedBlock(), max_staleness=1)
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    (ticket,) = ledger.take("maker", 1, 1)
    batch = groups([ticket], 2)
    batch.non_tensor_batch["policy_version"][1] = ((0, 0, 3), (2, 3, 6))
    with pytest.raises(
        ValueError, match="asked for prompt 0 with version 1, but its oldest token is of version 0"
    ):
        buffer.extend("maker", [ticket], batch, 5)


def test_a_group_without_a_drawn_token_is_as_old_as_its_ticket():
    """So it is where no episode of a prompt has called the model."""
    ledger = PromptLedger(num_steps=5, batch_size=2, detached=DetachedBlock(), max_staleness=1)
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    zero, one = ledger.take("maker", 0, 2)
    batch = groups([zero, one], 0, 0)
    batch.non_tensor_batch["policy_version"][:N] = [()] * N
    assert buffer.extend("maker", [zero, one], batch, {}) == [0, 1]
    numbers, rows = buffer.take(2, version=0, deadline_s=5)
    assert numbers == [0, 1] and len(rows) == 2 * N
    assert ledger.trained(numbers, 0)["trained"] == 2


def test_each_of_several_trainers_takes_what_is_its_own():
    ledger = PromptLedger(num_steps=5, batch_size=4, detached=DetachedBlock(num_trainers=2))
    tickets = ledger.take("maker", 0, 4)
    buffers = [ExperienceBuffer(ledger, trainer, limit=9) for trainer in (0, 1)]
    for trainer in (1, 0):
        own = [ticket for ticket in tickets if ticket.trainer == trainer]
        buffers[trainer].extend("maker", own, groups(own, 0, 0), {})
    assert [buffer.take(2, version=0, deadline_s=5)[0] for buffer in buffers] == [[0, 2], [1, 3]]


def test_late_groups_of_a_prompt_that_was_given_out_again_are_left_out():
    ledger = PromptLedger(num_steps=5, batch_size=2, detached=DetachedBlock())
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    late = ledger.take("a", 0, 1)
    ledger.lost("a")
    again = ledger.take("b", 0, 2)
    assert buffer.extend("a", late, groups(late, 0), {"reward/num_errors": Metric.sum(1)}) == []
    assert len(buffer) == 0 and not buffer.metrics
    batch = groups(again, 0, 0)
    batch.batch["values"] += 0.5
    assert buffer.extend("b", again, batch, {"reward/num_errors": Metric.sum(0)}) == [0, 1]
    assert list(buffer.metrics) == [{"reward/num_errors": Metric.sum(0)}]
    assert buffer.take(2, 0, 5)[1].batch["values"][:, 0].tolist() == [
        0.5,
        1.5,
        2.5,
        10.5,
        11.5,
        12.5,
    ]


def test_a_taker_waits_for_a_maker():
    ledger = PromptLedger(num_steps=5, batch_size=2, detached=DetachedBlock())
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    tickets = ledger.take("maker", 0, 9)
    result = in_thread(lambda: buffer.take(2, version=0, deadline_s=20))
    for ticket in tickets:
        buffer.extend("maker", [ticket], groups([ticket], 0), {})
    assert result()[0] == [0, 1]


def test_a_starved_trainer_says_what_it_has_and_who_holds_the_rest():
    ledger = PromptLedger(num_steps=5, batch_size=8, detached=DetachedBlock(num_trainers=2))
    buffer = ExperienceBuffer(ledger, trainer=1, limit=9)
    tickets = [ticket for ticket in ledger.take("a", 0, 4) if ticket.trainer == 1]
    ledger.take("b", 0, 2)
    buffer.extend("a", tickets[:1], groups(tickets[:1], 0), {})

    def starved() -> str:
        with pytest.raises(TimeoutError) as error:
            buffer.take(4, version=0, deadline_s=0.05)
        return str(error.value)

    message = in_thread(starved)()  # so that a wait without end fails
    assert re.search(r"each trainer needs 4 groups .* 0\. After 0.05 s trainer 0 has 0,", message)
    assert "{'a': [0, 2], 'b': [4]}; trainer 1 has 1," in message and message.endswith(
        "{'a': [3], 'b': [5]}"
    )
    idle = ExperienceBuffer(
        PromptLedger(num_steps=5, batch_size=8, detached=DetachedBlock()), trainer=0, limit=9
    )
    with pytest.raises(TimeoutError, match="none, no maker has started any"):
        idle.take(4, version=0, deadline_s=0.05)


def test_a_trainer_waits_anew_after_a_maker_was_given_up():
    since_loss = iter([0.1] * 9 + [0.3])

    class Losing(PromptLedger):
        """Its makers are given up again and again."""

        def seconds_since_loss(self) -> float:
            return next(since_loss)

    buffer = ExperienceBuffer(
        Losing(num_steps=5, batch_size=1, detached=DetachedBlock()), trainer=0, limit=9
    )
    with pytest.raises(TimeoutError, match="each trainer needs 1 groups"):
        buffer.take(1, version=0, deadline_s=0.2)
    assert next(since_loss, None) is None, (
        "it waited until the last loss was longer ago than its deadline"
    )


def test_a_trainer_notices_that_what_it_waits_for_was_given_up():
    """Prompts 0 to 3 are due at version 1, the last of which is not to come."""
    ledger = PromptLedger(num_steps=5, batch_size=2, detached=DetachedBlock(), max_staleness=1)
    buffer = ExperienceBuffer(ledger, trainer=0, limit=9)
    tickets = ledger.take("maker", 0, 4)
    buffer.extend("maker", tickets[:2], groups(tickets[:2], 0, 0), {})
    ledger.trained(buffer.take(2, version=0, deadline_s=5)[0], 0)
    late = ledger.take("maker", 1, 1)
    buffer.extend("maker", [tickets[2], *late], groups([tickets[2], *late], 0, 1), {})
    result = in_thread(lambda: buffer.take(2, version=1, deadline_s=600))
    with buffer._changed:  # it waits or has not begun
        ledger.lost("maker")
    assert result()[0] == [2, 4]


def test_parts_of_groups_are_refused():
    ledger = PromptLedger(num_steps=5, batch_size=4, detached=DetachedBlock())
    buffer = ExperienceBuffer(ledger, trainer=0, limit=2)
    tickets = ledger.take("maker", 0, 2)
    with pytest.raises(ValueError, match="5 samples are not whole groups of 2 tickets"):
        buffer.extend("maker", tickets, groups(tickets, 0, 0)[:5], 5)


def test_many_makers_and_a_trainer_in_threads_pass_on_every_group_once():
    num_steps, share = 6, 8
    ledger = PromptLedger(
        num_steps=num_steps, batch_size=share, detached=DetachedBlock(), max_staleness=1
    )
    buffer, lock, version = ExperienceBuffer(ledger, trainer=0, limit=16), threading.Lock(), [0]

    class Locked:
        """The ledger as an actor is: one call at a time."""

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                with lock:
                    return getattr(ledger, name)(*arguments)

            return call

    calls: Any = Locked()
    buffer.ledger = calls

    def work(maker: str) -> str:
        while (tickets := calls.take(maker, now := version[0], 3)) is not None:
            if tickets:
                buffer.extend(maker, tickets, groups(tickets, *[now] * len(tickets)), {})
        return maker

    results = [in_thread(lambda name=name: work(name)) for name in ("a", "b", "c")]
    rows: list[float] = []
    for step in range(num_steps):
        for size in (3, 1, 4):
            numbers, batch = buffer.take(size, version=step, deadline_s=20)
            rows += batch.batch["values"][:, 0].tolist()
            calls.trained(numbers, step)
        version[0] = step + 1
    assert [result() for result in results] == ["a", "b", "c"]
    assert sorted(rows) == [
        10.0 * number + row for number in range(num_steps * share) for row in range(N)
    ]


def test_a_side_says_what_it_waits_for_and_in_which_function_its_loop_stands():
    recorder, is_waiting, end = SideRecorder("trainer_7"), threading.Event(), threading.Event()

    def wait_for_the_test() -> bool:
        is_waiting.set()
        return end.wait(timeout=20)

    def loop() -> bool:
        with recorder.timer("waiting for experience"):
            return wait_for_the_test()

    result = in_thread(loop)
    assert is_waiting.wait(timeout=20)
    status = recorder.status_and_stack()
    assert re.match(
        r"trainer_7: waiting for experience for \d+ s\n(.*\n)*.* in wait_for_the_test\n", status
    ), status
    end.set()
    assert result()
    assert recorder.status_and_stack().endswith("Its loop has ended.\n")


def test_a_wait_that_lasts_is_reported_until_now_and_again_when_it_has_ended():
    recorder, before = SideRecorder("maker_3"), time.time()
    with recorder.timer("making experience"), recorder.timer("waiting for experience to arrive"):
        ((start, first_end),) = recorder.report().waits
        between = time.time()
    assert before <= start <= first_end <= between
    ((again, last_end),) = recorder.report().waits
    assert again == start and last_end >= between
    with recorder.timer("update_weights"):
        assert not recorder.report().waits


def test_the_idle_shares_of_a_step_are_of_its_own_time_also_where_a_report_tells_of_several_steps():
    record = object.__new__(DetachedRecord)
    # The maker waits over the end of the first step, and in a wait that lasts beyond the second.
    record.waits = {
        "maker_0": {99.0: 101.0, 102.0: 103.0, 109.0: 111.0, 113.0: 120.0},
        "trainer_0": {90.0: 95.0},
    }
    assert record.idle_shares(110.0, 10.0) == {
        "detached/idle/maker_0": 0.3,
        "detached/idle/trainer_0": 0.0,
    }
    assert record.idle_shares(114.0, 4.0) == {
        "detached/idle/maker_0": 0.5,
        "detached/idle/trainer_0": 0.0,
    }
    assert record.waits == {"maker_0": {109.0: 111.0, 113.0: 120.0}, "trainer_0": {}}, (
        "older ones are forgotten"
    )
