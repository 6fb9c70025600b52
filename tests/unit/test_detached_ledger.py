"""The ledger of detached training: who may start what, what a trainer may take, and that nothing is
lost or too old."""

import json
import math
import random
from dataclasses import dataclass, field

import pytest

from verl_like.trainer.config.detached import DetachedBlock
from verl_like.trainer.detached.ledger import PromptLedger, Ticket
from verl_like.trainer.state.run_state import LedgerState


def deliver(ledger: PromptLedger, maker: str, tickets: list[Ticket], version: int) -> list[int]:
    return ledger.deliver(maker, [(ticket, version) for ticket in tickets])


def test_without_staleness_a_step_is_the_next_prompts_in_order_dealt_to_the_trainers_in_turn():
    ledger = PromptLedger(num_steps=2, batch_size=6, detached=DetachedBlock(num_trainers=2))
    first = ledger.take("maker", 0, 4) + ledger.take("maker", 0, 9)
    assert [(ticket.number, ticket.attempt, ticket.trainer) for ticket in first] == [
        *[(0, 0, 0), (1, 0, 1), (2, 0, 0), (3, 0, 1), (4, 0, 0), (5, 0, 1)]
    ]
    assert ledger.take("maker", 0, 1) == []
    assert deliver(ledger, "maker", first[::-1], 0) == [5, 4, 3, 2, 1, 0]
    assert ledger.choose(0, 0, 3) == [0, 2, 4]
    assert ledger.choose(1, 0, 3) == [1, 3, 5]
    ledger.trained([0, 2, 4], 0)
    assert ledger.take("maker", 0, 1) == [], "the old weights start nothing more"
    second = ledger.take("maker", 1, 99)
    assert [ticket.number for ticket in second] == [6, 7, 8, 9, 10, 11]
    assert ledger.counts() == {
        **{
            "trained": 3,
            "training": 3,
            "in_buffer": 0,
            "in_flight": 6,
            "again": 0,
            "not_started": 0,
        }
    }
    ledger.trained([1, 3, 5], 0)
    deliver(ledger, "maker", second, 1)
    for trainer in (0, 1):
        ledger.trained(ledger.choose(trainer, 1, 3), 1)
        assert (ledger.take("maker", 1, 1) is None) == (trainer == 1), (
            "None once all trainers are through"
        )


def test_a_maker_runs_ahead_by_the_bound_and_no_further_than_the_run():
    ledger = PromptLedger(num_steps=4, batch_size=5, detached=DetachedBlock(), max_staleness=2)
    assert len(ledger.take("maker", 0, 99)) == 15
    assert len(ledger.take("maker", 1, 99)) == 5
    assert ledger.take("maker", 2, 99) == []
    assert ledger.counts()["not_started"] == 0


def test_what_is_due_together_is_begun_early_enough():
    """Prompts 1 and 2 are both due at version 2, where one has a place: the other has to be trained
    at version 1."""
    ledger = PromptLedger(num_steps=9, batch_size=1, detached=DetachedBlock(), max_staleness=2)
    zero, one, two = ledger.take("slow", 0, 9)
    deliver(ledger, "slow", [zero], 0)
    ledger.trained(ledger.choose(0, 0, 1), 0)
    (three,) = ledger.take("fast", 1, 9)
    deliver(ledger, "fast", [three], 1)
    assert ledger.choose(0, 1, 1) is None
    deliver(ledger, "slow", [two], 0)
    assert ledger.choose(0, 1, 1) == [2]
    assert ledger.choose(0, 2, 1) is None
    deliver(ledger, "slow", [one], 0)
    assert ledger.choose(0, 2, 1) == [1], "though 3 came before it"


def test_within_the_bound_the_first_to_come_is_taken_and_what_is_due_may_wait_for_the_last_part_of_a_step():
    ledger = PromptLedger(num_steps=9, batch_size=4, detached=DetachedBlock(), max_staleness=1)
    tickets = ledger.take("maker", 0, 9)
    deliver(ledger, "maker", [tickets[6], tickets[2]], 0)
    assert ledger.choose(0, 0, 3) is None, "two have come"
    assert ledger.choose(0, 0, 1) == [6]
    deliver(ledger, "maker", [tickets[0], tickets[1]], 0)
    assert ledger.choose(0, 0, 3) == [0, 1, 2]
    deliver(ledger, "maker", [tickets[7]], 0)
    late = ledger.take("maker", 1, 9)
    assert [ticket.number for ticket in late] == [8, 9, 10, 11]
    deliver(ledger, "maker", late, 1)
    assert ledger.choose(0, 1, 2) is None, (
        "3, 4 and 5 are due in this step, which would have two places for them"
    )
    assert ledger.choose(0, 1, 1) == [7]
    deliver(ledger, "maker", tickets[3:6], 0)
    assert ledger.choose(0, 1, 3) == [3, 4, 5], "though 8 to 11 came before"


def test_the_version_of_the_oldest_token_counts_not_that_of_the_ticket():
    ledger = PromptLedger(num_steps=9, batch_size=1, detached=DetachedBlock(), max_staleness=1)
    zero, one = ledger.take("maker", 0, 2)
    deliver(ledger, "maker", [zero], 0)
    ledger.trained(ledger.choose(0, 0, 1), 0)
    (two,) = ledger.take("other", 1, 1)
    deliver(ledger, "other", [two], 1)
    assert ledger.choose(0, 1, 1) is None, "1 is due"
    deliver(ledger, "maker", [one], 1)
    assert ledger.choose(0, 1, 1) == [2], "its first token was made by version 1, and 2 came first"
    (three,) = ledger.take("maker", 2, 1)
    with pytest.raises(
        ValueError,
        match="maker asked for prompt 3 with version 2, but its oldest token is of version 1",
    ):
        deliver(ledger, "maker", [three], 1)


def test_what_is_begun_again_with_newer_weights_is_due_later_and_may_no_longer_have_older_tokens():
    """Prompts 0 to 2 are due at version 1, where two have a place; begun again 2 is due at version
    2."""
    ledger = PromptLedger(num_steps=9, batch_size=2, detached=DetachedBlock(), max_staleness=1)
    zero, one, two, three = ledger.take("maker", 0, 9)
    deliver(ledger, "maker", [three], 0)
    assert ledger.choose(0, 0, 1) == [3] and ledger.choose(0, 0, 1) is None
    deliver(ledger, "maker", [zero], 0)
    ledger.trained([3, *ledger.choose(0, 0, 1)], 0)
    four, five = ledger.take("maker", 1, 9)
    deliver(ledger, "maker", [four, five], 1)
    assert ledger.choose(0, 1, 2) is None, "1 and 2 are due"
    ledger.renew("other", [one], 1)
    ledger.renew("maker", [Ticket(1, 1, 0)], 1)
    ledger.renew("maker", [two], 1)
    assert ledger.choose(0, 1, 1) == [4], (
        "one place is left for 1, which is with maker at its first attempt"
    )
    assert ledger.choose(0, 1, 1) is None
    with pytest.raises(ValueError, match="asked for prompt 2 with version 1"):
        deliver(ledger, "maker", [two], 0)
    ledger.renew("maker", [one], 1)
    assert ledger.choose(0, 1, 1) == [5]
    deliver(ledger, "maker", [one, two], 1)
    ledger.trained([4, 5], 1)
    assert ledger.choose(0, 2, 2) == [1, 2]


def test_what_a_dead_maker_had_is_given_out_again_first_and_its_late_delivery_is_refused():
    ledger = PromptLedger(num_steps=3, batch_size=4, detached=DetachedBlock(max_attempts=2))
    tickets = ledger.take("a", 0, 3)
    assert deliver(ledger, "a", tickets[1:2], 0) == [1]
    assert ledger.seconds_since_loss() == math.inf
    ledger.lost("a")
    assert 0 <= ledger.seconds_since_loss() < math.inf
    assert ledger.counts()["again"] == 2 and ledger.holders() == [(1, {})]
    assert ledger.take("a", 0, 9) is None, (
        "a process that was stopped and goes on gets none of them"
    )
    assert ledger.take("b", 0, 2) == [Ticket(0, 1, 0), Ticket(2, 1, 0)]
    assert ledger.take("c", 0, 9) == [Ticket(3, 0, 0)]
    assert deliver(ledger, "a", tickets, 0) == []
    assert ledger.holders() == [(1, {"b": [0, 2], "c": [3]})]
    assert deliver(ledger, "b", [Ticket(2, 1, 0)], 0) == [2]
    assert deliver(ledger, "b", [Ticket(2, 1, 0)], 0) == [], "a second time"
    ledger.lost("b")
    assert ledger.holders() == [(2, {"c": [3]})]
    assert ledger.counts() == {
        **{"trained": 0, "training": 0, "in_buffer": 2, "in_flight": 1, "again": 0},
        **{"dropped/maker_lost": 1, "not_started": 9},
    }
    assert ledger.take("c", 0, 9) == [Ticket(4, 0, 0)], "another prompt fills the place of 0"


def test_a_prompt_that_its_maker_drops_is_counted_by_reason_and_another_one_takes_its_place():
    ledger = PromptLedger(num_steps=3, batch_size=4, detached=DetachedBlock(num_trainers=2))
    tickets = ledger.take("a", 0, 4)
    deliver(ledger, "a", tickets[3:], 0)
    ledger.drop("b", tickets[:1])  # another maker's
    not_given_out = [Ticket(0, 1, 0), Ticket(7, 0, 1)]
    ledger.drop("a", [*not_given_out, tickets[3]])  # the last is delivered
    assert ledger.counts()["in_flight"] == 3 and "dropped/agents_failed" not in ledger.counts()
    ledger.drop("a", [tickets[0], tickets[2]])
    assert ledger.counts() == {
        **{"trained": 0, "training": 0, "in_buffer": 1, "in_flight": 1, "again": 0},
        **{"dropped/agents_failed": 2, "not_started": 10},
    }
    assert ledger.take("b", 0, 9) == [Ticket(4, 0, 0), Ticket(5, 0, 0)], "of the same trainer"
    ledger.lost("a")
    assert ledger.counts()["again"] == 1, "only the one that it still had"
    saved = LedgerState.model_validate_json(json.dumps(ledger.state()))
    assert saved.dropped == {"agents_failed": 2}
    assert restored(ledger).counts()["dropped/agents_failed"] == 2


def test_a_prompt_that_is_given_out_again_is_taken_from_its_new_maker_and_attempt_alone():
    ledger = PromptLedger(num_steps=3, batch_size=1, detached=DetachedBlock())
    (first,) = ledger.take("a", 0, 1)
    ledger.lost("a")
    (second,) = ledger.take("b", 0, 1)
    assert (second.number, second.attempt) == (0, 1)
    assert deliver(ledger, "b", [first], 0) == []
    assert deliver(ledger, "a", [second], 0) == []
    assert deliver(ledger, "b", [second], 0) == [0]


def test_a_trainer_with_its_share_waits_until_the_others_have_theirs():
    ledger = PromptLedger(num_steps=2, batch_size=6, detached=DetachedBlock(num_trainers=3))
    tickets = ledger.take("maker", 0, 6)
    assert deliver(
        ledger, "maker", [tickets[0], tickets[3], tickets[1], tickets[2], tickets[5]], 0
    ) == [0, 3, 1, 2, 5]
    assert ledger.choose(0, 0, 2) is None and ledger.choose(2, 0, 2) is None, (
        "trainer 1 has one of two"
    )
    assert ledger.choose(0, 0, 1) == [0], "in parts of one group the first is there"
    assert ledger.choose(0, 0, 1) == [3], "the others have yet to take the first part"
    assert ledger.choose(1, 0, 1) == [1] and ledger.choose(1, 0, 1) is None
    deliver(ledger, "maker", [tickets[4]], 0)
    assert ledger.choose(1, 0, 1) == [4] and ledger.choose(2, 0, 2) == [2, 5]


def test_routing_is_in_turn_or_to_the_emptiest_buffer():
    def given(routing: str) -> list[int]:
        ledger = PromptLedger(
            num_steps=5,
            batch_size=6,
            detached=DetachedBlock(num_trainers=2, routing=routing),
            max_staleness=1,
        )
        first = ledger.take("maker", 0, 4)
        deliver(ledger, "maker", [ticket for ticket in first if ticket.trainer == 0], 0)
        return [ticket.trainer for ticket in [*first, *ledger.take("maker", 0, 9)]]

    assert given("round_robin") == [0, 1] * 6
    assert given("least_loaded") == [0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0], (
        "6 for each is the most at version 0"
    )


def test_while_the_effective_sample_size_of_a_trainer_is_too_small_makers_wait_for_newer_weights():
    ledger = PromptLedger(
        num_steps=9,
        batch_size=4,
        detached=DetachedBlock(num_trainers=2, min_effective_sample_size=0.6),
        max_staleness=3,
    )
    tickets = ledger.take("maker", 0, 6)
    deliver(ledger, "maker", tickets, 0)
    assert ledger.trained(ledger.choose(0, 0, 2), 0, 0.6) == {} and not ledger.is_braking
    counts = ledger.trained(ledger.choose(1, 0, 2), 0, 0.5)
    assert (counts["brake"], counts["trained"], counts["in_buffer"], counts["not_started"]) == (
        1,
        4,
        2,
        30,
    )
    assert ledger.take("maker", 0, 99) == [], (
        "without the brake 16 might have been started with the first weights"
    )
    assert len(ledger.take("maker", 1, 99)) == 2, "8 in all: as without staleness"
    deliver(ledger, "maker", [Ticket(6, 0, 0), Ticket(7, 0, 1)], 1)
    assert ledger.trained(ledger.choose(0, 1, 2), 1, 0.9) == {}
    assert ledger.is_braking, "the other trainer's last step counts too"
    assert ledger.trained(ledger.choose(1, 1, 2), 1, 0.9)["brake"] == 0
    assert len(ledger.take("maker", 1, 99)) == 12, "4 * (1 + 3 + 1) in all"


@pytest.mark.parametrize(("limit", "brakes"), [(0.6, True), (0.0, False)])
def test_an_effective_sample_size_that_is_not_a_number_brakes_too(limit: float, brakes: bool):
    ledger = PromptLedger(
        num_steps=9,
        batch_size=2,
        detached=DetachedBlock(min_effective_sample_size=limit),
        max_staleness=3,
    )
    deliver(ledger, "maker", ledger.take("maker", 0, 2), 0)
    assert ledger.trained(ledger.choose(0, 0, 2), 0, float("nan"))["brake"] == brakes


def restored(ledger: PromptLedger) -> PromptLedger:
    """The ledger of the run that goes on when all others are killed."""
    saved = json.loads(json.dumps(ledger.state()))
    num_prompts = ledger.share * ledger.detached.num_trainers
    return PromptLedger(
        ledger.num_steps, num_prompts, ledger.detached, saved, max_staleness=ledger.max_staleness
    )


def test_a_run_that_goes_on_gives_out_again_what_was_begun_and_not_trained_and_counts_it():
    settings = DetachedBlock(num_trainers=2, max_attempts=2, min_effective_sample_size=0.5)
    ledger = PromptLedger(num_steps=4, batch_size=4, detached=settings, max_staleness=1)
    zero, one, *rest = ledger.take("slow", 0, 2) + ledger.take("fast", 0, 5)
    ledger.lost("slow")
    assert ledger.take("next", 0, 1) == [Ticket(0, 1, 1)]
    ledger.lost("next")  # its second attempt
    deliver(ledger, "fast", rest, 0)
    for trainer in (0, 1):
        counts = ledger.trained(ledger.choose(trainer, 0, 2), 0, 0.4 + 0.2 * trainer)
    for version, kl_coef in ((0, 0.2), (0, 0.3), (1, 0.4)):  # the last of the step after this one
        ledger.keep_kl_coef(version, kl_coef)
    assert ledger.choose(0, 1, 1) is None
    assert (zero.number, one.number) == (0, 1)
    assert counts == {
        **{"trained": 4, "training": 0, "in_buffer": 1, "in_flight": 0, "again": 1},
        **{"dropped/maker_lost": 1, "not_started": 10, "brake": 1},
    }
    again = restored(ledger)
    assert again.counts() == {
        **{"trained": 4, "training": 0, "in_buffer": 0, "in_flight": 0, "again": 2},
        **{"dropped/maker_lost": 1, "not_started": 10},
    }
    assert again.is_braking and again.kl_coef() == 0.3
    tickets = again.take("maker", 1, 99)
    assert [(ticket.number, ticket.attempt) for ticket in tickets] == [
        (1, 1),
        (6, 0),
        (7, 0),
        (8, 0),
    ]
    deliver(again, "maker", tickets, 1)
    for trainer in (0, 1):
        again.trained(again.choose(trainer, 1, 2), 1)
    assert len(again.take("maker", 1, 99)) == 4, "the brake has ended, so 12 may be started"


def test_a_run_that_is_to_end_ends_after_the_step_that_no_trainer_has_done():
    settings = DetachedBlock(num_trainers=2)
    ledger = PromptLedger(num_steps=3, batch_size=4, detached=settings, max_staleness=1)
    deliver(ledger, "maker", ledger.take("maker", 0, 6), 0)
    assert ledger.last_step() == 3
    ledger.trained(ledger.choose(0, 0, 2), 0)
    assert ledger.end() == ledger.last_step() == 2, "trainer 0 may be in the second step"
    ledger.trained(ledger.choose(1, 0, 2), 0)
    assert ledger.end() == 2
    tickets = ledger.take("maker", 1, 99)
    assert len(tickets) == 2, "none for a step that is not trained"
    deliver(ledger, "maker", tickets, 1)
    for trainer in (0, 1):
        assert not ledger.has_trained_all()
        ledger.trained(ledger.choose(trainer, 1, 2), 1)
    assert ledger.has_trained_all() and ledger.take("maker", 2, 1) is None
    assert ledger.counts()["not_started"] == 4
    assert PromptLedger(num_steps=1, batch_size=2, detached=DetachedBlock()).end() == 1


@dataclass(eq=False)
class Maker:
    """A maker of random speed that loads weights late, and holds (ticket, version of its oldest
    token)."""

    name: str
    speed: float
    version: int
    held: list[tuple[Ticket, int]] = field(default_factory=list)


@dataclass
class World:
    """Makers and trainers that do one random thing after another; trainers train in step."""

    dice: random.Random
    ledger: PromptLedger
    share: int
    staleness: int
    makers: list[Maker]
    version: int = 0
    update_steps: int = 1
    resumed: int = 0
    """The version that was pushed first."""
    taken: list[list[int]] = field(default_factory=list)
    age: dict[int, int] = field(default_factory=dict)
    """Version of the oldest token of each prompt that was kept."""
    trained: list[int] = field(default_factory=list)
    ghosts: list[Maker] = field(default_factory=list)
    """Makers that were given up and still deliver."""

    def maker_acts(self, maker: Maker) -> None:
        dice, ledger = self.dice, self.ledger
        # That were pushed
        versions = sorted({self.resumed, *range(0, self.version + 1, self.update_steps)})
        pushed = versions[-1]
        if dice.random() < 0.2:
            maker.version = dice.choice(versions[versions.index(maker.version) :])
        if dice.random() < 0.5:
            started = ledger.take(maker.name, maker.version, dice.randint(1, 5)) or []
            assert not (started and maker in self.ghosts)
            # The first token may be drawn after weights were loaded in between.
            maker.held += [
                (ticket, dice.choice([maker.version, maker.version, pushed])) for ticket in started
            ]
        if dice.random() < 0.1 and maker.version == pushed:  # begins some again
            again = {ticket for ticket, _ in maker.held if dice.random() < 0.5}
            ledger.renew(maker.name, list(again), pushed)
            maker.held = [
                (ticket, pushed if ticket in again else oldest) for ticket, oldest in maker.held
            ]
        dice.shuffle(maker.held)
        if maker.held and dice.random() < 0.03:  # no episode of it could be trained
            ticket, _oldest = maker.held.pop()
            ledger.drop(maker.name, [ticket])
        while maker.held and dice.random() < maker.speed:
            ticket, oldest = maker.held.pop()
            if ledger.deliver(maker.name, [(ticket, oldest)]):
                assert ticket.number not in self.age, "kept twice"
                self.age[ticket.number] = oldest

    def maker_dies(self, index: int) -> None:
        dead = self.makers[index]
        self.ledger.lost(dead.name)
        self.ghosts.append(dead)
        self.makers[index] = Maker(
            f"maker {len(self.makers) + len(self.ghosts)}", dead.speed, dead.version
        )

    def run_dies(self) -> None:
        self.ledger, self.resumed = restored(self.ledger), self.version
        self.taken = [[] for _ in self.taken]
        self.makers = [
            Maker(f"maker {i}", maker.speed, self.version) for i, maker in enumerate(self.makers)
        ]
        self.ghosts = []
        self.age = {number: self.age[number] for number in self.trained}

    def trainer_acts(self, trainer: int) -> None:
        missing = self.share - len(self.taken[trainer])
        if missing and (
            numbers := self.ledger.choose(trainer, self.version, self.dice.randint(1, missing))
        ):
            assert numbers == sorted(numbers)
            assert all(0 <= self.version - self.age[number] <= self.staleness for number in numbers)
            self.taken[trainer] += numbers
        if all(len(numbers) == self.share for numbers in self.taken):
            for numbers in self.taken:
                self.ledger.trained(numbers, self.version, self.dice.random())
                self.trained += numbers
            self.taken = [[] for _ in self.taken]
            self.version += 1


@pytest.mark.parametrize("seed", range(60))
def test_in_any_order_of_events_every_step_is_full_nothing_is_too_old_and_the_sums_agree(seed: int):
    dice = random.Random(seed)
    num_trainers, share, staleness, num_steps = (
        dice.randint(1, 3),
        dice.randint(1, 7),
        dice.randint(0, 3),
        9,
    )
    update_steps = dice.randint(1, staleness + 1)
    settings = DetachedBlock(
        num_trainers=num_trainers,
        routing=dice.choice(["round_robin", "least_loaded"]),
        max_attempts=dice.randint(1, 3),
        update_steps=update_steps,
        min_effective_sample_size=dice.choice([0.0, 0.3, 1.0]),
    )
    ledger = PromptLedger(
        num_steps=num_steps,
        batch_size=num_trainers * share,
        detached=settings,
        max_staleness=staleness,
    )
    makers = [
        Maker(f"maker {index}", dice.choice([0.05, 0.4, 0.9]), 0)
        for index in range(dice.randint(1, 4))
    ]
    world = World(dice, ledger, share, staleness, makers, update_steps=update_steps)
    world.taken = [[] for _ in range(num_trainers)]
    for _ in range(20_000):
        if world.version == num_steps:
            break
        event = dice.random()
        if event < 0.01:
            world.maker_dies(dice.randrange(len(makers)))
        elif event < 0.02 and world.ghosts:
            world.maker_acts(dice.choice(world.ghosts[-5:]))
        elif 0.02 <= event < 0.021:
            world.run_dies()
        elif event < 0.6:
            world.maker_acts(dice.choice(world.makers))
        else:
            world.trainer_acts(dice.randrange(num_trainers))
        counts = world.ledger.counts()
        assert counts["trained"] == num_trainers * share * world.version
        assert counts["not_started"] >= 0
    assert world.version == num_steps, f"everybody waits: {world.ledger.counts()}, {world.makers}"
    assert all(world.ledger.take(maker.name, num_steps, 1) is None for maker in world.makers)
    assert len(world.trained) == len(set(world.trained)) == num_steps * num_trainers * share
    counts = world.ledger.counts()
    assert (
        counts["not_started"]
        == counts["in_flight"]
        == counts["in_buffer"]
        == counts["training"]
        == 0
    )


def test_a_resumed_run_has_the_newest_kl_coefficient_of_the_steps_that_are_trained():
    ledger = PromptLedger(num_steps=4, batch_size=2, detached=DetachedBlock(), max_staleness=1)
    for version in range(3):
        tickets = ledger.take("maker", version, 2)
        deliver(ledger, "maker", tickets, version)
        ledger.keep_kl_coef(version, 0.25 * (version + 1))
        ledger.trained(ledger.choose(0, version, 2), version)
    ledger.keep_kl_coef(3, 1.0)  # of experience that no step has trained on yet
    assert ledger.state()["kl_coefs"] == [(2, 0.75)]
