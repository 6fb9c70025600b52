"""A maker of detached training, in one process: its replicas, its tickets, and which weights it
takes and validates."""

import inspect
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from rollout_requests import StepByStep
from test_detached_config import IN_FLIGHT, config_of
from tiny_worker_models import write_model
from transformers import LlamaForCausalLM

from verl_like.data.sampler import EpochSampler
from verl_like.protocol import DataProto, Metric
from verl_like.protocol.row_ops import deep_equal, jagged_from_lists
from verl_like.single_controller.failure import CallTimeout
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.detached.ledger import PromptLedger
from verl_like.trainer.detached.maker_holder import ExperienceMakerHolder, InFlight
from verl_like.trainer.detached.side import PushedWeights, SideRecorder
from verl_like.trainer.loop.training_loop import TrainingLoop
from verl_like.trainer.ppo import ray_trainer as ppo_trainer
from verl_like.trainer.ppo.experience_maker import ExperienceMaker
from verl_like.trainer.ppo.inputs import PPOInputs
from verl_like.trainer.ppo.maker_driver import MakerDriver
from verl_like.workers.rollout_worker import RolloutWorker
from verl_like.workers.weights.exports import collect_weights


def maker(**fields: Any) -> Any:
    """The maker itself, without the actor that it is."""
    holder = object.__new__(ExperienceMakerHolder.__ray_metadata__.modified_class)
    vars(holder).update(fields)
    return holder


def prompts(*numbers: int) -> DataProto:
    tensors = {
        "prompts": jagged_from_lists([[2 + number, 3, 4] for number in numbers], torch.int64)
    }
    uids = [f"0-{number}" for number in numbers]
    return DataProto.from_dict(
        tensors, {"uid": uids}, {"global_steps": 1, "epoch": 0, "padding": (3, 9, 0)}
    )


def test_responses_in_flight_are_divided_among_replicas_young_ones_renewed_once_and_all_given_to_their_tickets(
    tmp_path: Path,
):
    path = write_model(tmp_path)
    short = [
        "data.max_prompt_length=3",
        "data.max_response_length=9",
        "actor_rollout_ref.rollout.ignore_eos=true",
    ]
    short += [f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.rollout.name=hf"]
    config = config_of(
        *IN_FLIGHT, *short, "detached.restart_below=3", "algorithm.adv_estimator=grpo"
    )
    worker = ClassWithInitArgs(RolloutWorker, config=config.actor_rollout_ref, seed=1)
    rollout = LocalWorkerGroup(worker, world_size=2, role="rollout")
    rollout.init_model()

    def load(version: int) -> None:
        parameters = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters()
        export = collect_weights(
            parameters, dtype=torch.float32, rank=0, world_size=1, version=version
        )
        for each in rollout.workers:
            each.engine_thread.load_weights([export], version, drain=False)

    load(0)
    expected = rollout.generate_sequences(prompts(0, 1, 2, 3, 4)).get()
    threads = [each.engine_thread for each in rollout.workers]
    replicas = [StepByStep(thread) for thread in threads]

    def advance(num_steps: int) -> None:
        for replica in replicas:
            replica.advance(num_steps)

    ledger = PromptLedger(
        3, batch_size=5, detached=config.detached, max_staleness=config.trainer.max_staleness
    )
    sent: list[Any] = []
    of_rows = SimpleNamespace(
        sample=lambda *args: (args[0], args[2].get()), complete=lambda generated: generated
    )
    run = SimpleNamespace(groups={"rollout": rollout}, maker=of_rows)
    own = {"name_in_ledger": "maker_0", "in_flight": {}, "recorder": SideRecorder("maker_0")}
    holder = maker(
        config=config,
        ledger=ledger,
        run=run,
        version=0,
        send=lambda *args: sent.append(args),
        **own,
    )
    tickets = ledger.take("maker_0", 0, 5)
    holder.submit(tickets[:3], prompts(0, 1, 2))
    # The four of a prompt stay together
    for replica, num_requests in zip(replicas, (8, 4), strict=True):
        replica.wait_for(num_requests)
    advance(4)
    holder.submit(tickets[3:], prompts(3, 4))
    for replica in replicas:
        replica.wait_for(4)
    advance(1)
    load(1)
    holder.version = 1
    holder.restart_young()
    assert ledger.deliver("maker_0", [(ticket, 0) for ticket in tickets[:3]]) == [0, 1, 2]
    for ticket in tickets[3:]:
        with pytest.raises(ValueError, match=f"asked for prompt {ticket.number} with version 1"):
            ledger.deliver("maker_0", [(ticket, 0)])
    for replica in replicas:
        replica.wait_for(4)
    advance(1)
    assert sorted(threads[0].ages().values()) == [1] * 4 + [6] * 8
    assert sorted(threads[1].ages().values()) == [1] * 4 + [6] * 4
    load(2)
    holder.restart_young()  # they were already
    advance(3)  # to the ninth token of the first three
    for uid in ("0-0", "0-1", "0-2"):
        holder.in_flight[uid].responses.get(timeout=60)
    assert holder.advance() == 1 and len(holder.in_flight) == 2
    assert holder.advance() == 0 and len(sent) == 1
    advance(5)
    for uid in ("0-3", "0-4"):
        holder.in_flight[uid].responses.get(timeout=60)
    assert holder.advance() == 1 and not holder.in_flight

    assert [of_tickets for of_tickets, _ in sent] == [tickets[:3], tickets[3:]]
    for of_tickets, (of_prompts, generated) in sent:
        uids = [f"0-{ticket.number}" for ticket in of_tickets]
        assert (
            uids == of_prompts.non_tensor_batch["uid"].tolist()
            and of_prompts.meta_info["global_steps"] == 1
        )
        rows = [4 * ticket.number + k for ticket in of_tickets for k in range(4)]
        assert deep_equal(
            generated.batch["responses"], expected.select_idxs(rows).batch["responses"]
        )
        spans = {0: ((0, 0, 5), (1, 5, 6), (2, 6, 9)), 3: ((1, 0, 1), (2, 1, 9))}[
            of_tickets[0].number
        ]
        assert generated.non_tensor_batch["policy_version"].tolist() == [spans] * len(rows)


@pytest.mark.parametrize(
    ("ages", "is_renewed", "age"),
    [
        ({"a": 2, "b": 5, "of another prompt": 9}, False, 5),
        ({"a": 2, "b": 5}, True, math.inf),
        ({"a": 2}, False, 2),  # the other one has ended, or waits for a place
        ({}, False, math.inf),
    ],
)
def test_a_prompt_is_as_old_as_the_oldest_of_its_unfinished_responses_and_begun_again_once(
    ages: dict[str, int], is_renewed: bool, age: float
):
    responses: Any = SimpleNamespace(call=SimpleNamespace(requests={"a": None, "b": None}))
    ticket: Any = None
    assert InFlight(ticket, prompts(0), responses, is_renewed).age(ages) == age


def test_a_maker_has_a_driver_that_is_no_trainer_and_the_prompts_in_the_order_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ppo_trainer.TRAINERS, "entries", {})
    config, rows = config_of("data.train_batch_size=12", "trainer.seed=3"), list(range(24))
    inputs = PPOInputs(config, None, rows, [], {}, None, [], None)
    side = SideRecorder("maker_0", node="")
    own = {"pools": SimpleNamespace(), "cleanup": None, "recorder": side, "fingerprints": None}
    holder = maker(
        config=config,
        model_fn=lambda config: {},
        ledger=SimpleNamespace(kl_coef=lambda: 0.25),
        **own,
    )
    names = inspect.unwrap(type(holder).start).__globals__
    monkeypatch.setitem(names, "check_inputs", lambda *_: inputs)
    monkeypatch.setitem(names, "maker_models", lambda *_: {})
    loaded: list[Any] = []
    monkeypatch.setitem(names, "load_models", lambda *given: loaded.extend(given))
    built = object.__new__(ExperienceMaker)
    built.kl_controller = SimpleNamespace(value=0.0)
    monkeypatch.setattr(MakerDriver, "start_groups", lambda driver: {"rollout": driver})
    monkeypatch.setattr(MakerDriver, "build_maker", lambda driver: built)
    loader = holder.start()
    assert type(holder.run) is MakerDriver and not isinstance(holder.run, TrainingLoop)
    assert holder.run.groups == {"rollout": holder.run} and holder.run.recorder is side
    assert loaded[0] is holder.run.groups and loaded[2] == holder.run.show_episodes
    assert holder.run.maker is built and built.kl_controller.value == 0.25
    order = EpochSampler(24, 12, seed=3, shuffle=config.data.shuffle)
    assert loader.dataset is rows and [loader.sampler.batch(k) for k in range(3)] == [
        order.batch(k) for k in range(3)
    ]


@pytest.mark.parametrize(
    ("version", "validated", "is_due"),
    [
        (-1, -1, False),
        (0, -1, True),
        (0, 0, False),
        (2, 0, False),
        (3, 0, True),
        (4, 0, True),
        (5, 3, False),
        (5, 4, False),
        (6, 5, True),
        (2, -1, False),
    ],
)
def test_the_first_version_after_every_test_freq_is_validated_by_one_maker(
    version: int, validated: int, is_due: bool
):
    state = {"version": version, "validated": validated}
    assert (
        maker(config=config_of("trainer.test_freq=3"), index=0, **state).validation_is_due()
        is is_due
    )
    assert not maker(config=config_of("trainer.test_freq=3"), index=1, **state).validation_is_due()
    other = config_of("trainer.test_freq=-1", "trainer.val_before_train=false")
    assert not maker(config=other, index=0, **state).validation_is_due()


def test_a_push_that_comes_late_does_not_take_the_place_of_a_newer_one():
    holder = maker(pushed=None, has_pushed=threading.Condition())
    for version in (1, 3, 2):
        holder.update_experience_maker(PushedWeights(version, {}))
    assert holder.pushed.version == 3


def test_weights_that_do_not_come_are_named_with_their_version_and_trainer(
    monkeypatch: pytest.MonkeyPatch,
):
    def get(references: list[Any], timeout: float) -> None:
        assert timeout == 7.0
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    config = config_of("trainer.call_timeout_s=7")
    own = {"name": "maker_1", "version": 2, "recorder": SideRecorder("maker_1", node="")}
    holder = maker(config=config, pushed=PushedWeights(3, {}), trainer_names=["trainer_0"], **own)
    with pytest.raises(
        CallTimeout,
        match=r"maker_1\.load_newest_weights did not .* 7 s: .* weights of version 3, from "
        r"trainer_0",
    ):
        holder.load_newest_weights()


def test_a_maker_that_waits_for_newer_weights_for_too_long_names_them_unless_a_side_was_lost_lately():
    holder = maker(
        name="maker_1",
        config=config_of("trainer.call_timeout_s=7"),
        version=2,
        trainer_names=["trainer_0"],
        recorder=SideRecorder("maker_1", node=""),
        has_pushed=threading.Condition(),
        ledger=SimpleNamespace(seconds_since_loss=lambda: 22.0),
    )
    began = time.monotonic()
    holder.wait_for_weights(began - 20)
    with pytest.raises(
        CallTimeout,
        match=r"maker_1\.workingloop did not .* 21 s: .* weights newer than version 2, from "
        r"trainer_0",
    ):
        holder.wait_for_weights(began - 22)
    holder.ledger.seconds_since_loss = lambda: 20.0
    holder.wait_for_weights(began - 22)


def test_a_maker_of_nccl_loads_the_weights_that_the_trainer_holds_for_it_and_has_them_sent(
    monkeypatch: pytest.MonkeyPatch,
):
    """What it was pushed is older by then."""
    asked: list[Any] = []

    class Asked:
        @classmethod
        def asked(cls, *call: Any, timeout: float) -> str:
            asked.append((*call, timeout))
            return "a future"

    def ask(*call: Any, timeout: float) -> PushedWeights:
        asked.append((*call, timeout))
        return PushedWeights(6, {"actor": SimpleNamespace(parts=[])}, ("10.0.0.7", 4321))

    loaded: list[Any] = []
    nccl = [
        "actor_rollout_ref.rollout.weight_transport=nccl",
        "trainer.device=cuda",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    config = config_of(
        *nccl, "algorithm.rollout_correction.bypass_mode=true", "trainer.call_timeout_s=7"
    )
    run = SimpleNamespace(
        maker=SimpleNamespace(load_weights=loaded.append), groups={"rollout": None}
    )
    own = {
        "name": "maker_1",
        "name_in_ledger": "maker_1.2",
        "version": 4,
        "trainer_names": ["trainer_0"],
    }
    holder = maker(
        config=config,
        pushed=PushedWeights(5, {}),
        run=run,
        recorder=SideRecorder("m", node=""),
        **own,
    )
    names = inspect.unwrap(type(holder).load_newest_weights).__globals__
    monkeypatch.setitem(names, "ask", ask)
    monkeypatch.setitem(names, "Question", Asked)
    monkeypatch.setattr(ray, "get", lambda references, timeout: None)
    holder.load_newest_weights()
    assert asked == [("trainer_0", "hold_weights", "maker_1.2", 21.0)]
    assert holder.version == 6 and (loaded[0].version, loaded[0].address) == (6, ("10.0.0.7", 4321))
    assert loaded[0].send(4) == "a future"
    assert asked[1] == ("trainer_0", "send_weights", "maker_1.2", 4, 7.0)
    holder.load_newest_weights()
    assert len(loaded) == 1  # it has the newest


def test_experience_is_sent_when_the_trainers_have_what_was_sent_before():
    events: list[str] = []
    config = config_of()
    holder = maker(config=config, name_in_ledger="maker_0", trainer_names=["trainer_0"], sent={})
    holder.unsent_metrics = {}
    holder.wait_for_sent = lambda: events.append("waited")
    rows = prompts(0).repeat(config.actor_rollout_ref.rollout.n)
    rows.non_tensor_batch["policy_version"] = rows.non_tensor_batch["uid"]
    rows.batch["old_log_probs"] = torch.zeros(len(rows), 2)
    holder.send([], SimpleNamespace(batch=rows, metrics={}))
    assert events == ["waited"]


def test_experience_that_does_not_arrive_in_the_time_left_is_named_with_its_trainer(
    monkeypatch: pytest.MonkeyPatch,
):
    given: list[tuple[str, float]] = []

    def get(reference: str, timeout: float) -> None:
        given.append((reference, timeout))
        if reference == "second answer":
            raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    config = config_of("trainer.call_timeout_s=7")
    own = {"name": "maker_1", "recorder": SideRecorder("maker_1", node="")}
    sent = {"first answer": "trainer_0", "second answer": "trainer_1"}
    holder = maker(config=config, sent=sent, **own)
    with pytest.raises(CallTimeout, match=r"maker_1\.send did not .* 7 s: .* arrive at trainer_1"):
        holder.wait_for_sent()
    (first, first_left), (second, second_left) = given
    assert (first, second) == ("first answer", "second answer")
    assert 0 < second_left <= first_left <= 7


def test_each_trainer_gets_all_rows_of_the_samples_of_its_tickets(monkeypatch: pytest.MonkeyPatch):
    config = config_of("actor_rollout_ref.rollout.n=2")
    came: dict[str, Any] = {}

    def side(name: str) -> Any:
        def remote(maker: str, tickets: Any, rows: DataProto, metrics: Any) -> str:
            came[name] = (
                [ticket.number for ticket in tickets],
                rows.non_tensor_batch["uid"].tolist(),
                metrics,
            )
            assert (
                rows.batch["sample_id"].tolist()
                == {"trainer_0": [7, 7, 3, 1, 4], "trainer_1": [5, 6, 6]}[name]
            )
            return name

        return SimpleNamespace(extend=SimpleNamespace(remote=remote))

    own = {"name_in_ledger": "maker_0", "trainer_names": ["trainer_0", "trainer_1"], "sent": {}}
    own["unsent_metrics"] = {"a": Metric.sum(4)}
    holder = maker(config=config, wait_for_sent=lambda: None, **own)
    monkeypatch.setitem(inspect.unwrap(type(holder).send).__globals__, "side_named", side)
    # Of each prompt two samples: the first one of 0 and the second one of 1 have two rows.
    uids = np.array(["0", "0", "0", "1", "1", "1", "2", "2"], dtype=object)
    columns = {
        "sample_id": torch.tensor([7, 7, 3, 5, 6, 6, 1, 4]),
        "old_log_probs": torch.zeros(8, 2),
    }
    rows = DataProto.from_dict(columns, {"uid": uids, "policy_version": uids})
    tickets = [SimpleNamespace(number=number, trainer=number % 2) for number in range(3)]
    holder.send(tickets, SimpleNamespace(batch=rows, metrics={"a": Metric.sum(1)}))
    assert came == {
        "trainer_0": ([0, 2], ["0"] * 3 + ["2"] * 2, {"a": Metric.sum(5)}),
        "trainer_1": ([1], ["1"] * 3, {}),
    }
    assert holder.sent == {"trainer_0": "trainer_0", "trainer_1": "trainer_1"}
    assert not holder.unsent_metrics


def test_metrics_of_prompts_that_were_all_dropped_travel_with_the_next_ones():
    """With responses in flight a prompt whose episodes failed mostly ends alone."""
    dropped: list[Any] = []
    holder = maker(
        config=config_of("actor_rollout_ref.rollout.n=2"),
        wait_for_sent=lambda: None,
        ledger=SimpleNamespace(drop=lambda *given: dropped.append(given)),
        name_in_ledger="maker_0",
        trainer_names=["trainer_0"],
        sent={},
        unsent_metrics={},
    )
    columns = {"old_log_probs": torch.zeros(2, 2), "is_failed": torch.tensor([True, True])}
    rows = DataProto.from_dict(columns, {"uid": ["0", "0"], "policy_version": [(), ()]})
    ticket = SimpleNamespace(number=5, trainer=0)
    for _ in range(2):
        metrics = {"agent/num_dropped_prompts": Metric.sum(1)}
        holder.send([ticket], SimpleNamespace(batch=rows, metrics=metrics))
    assert dropped == [("maker_0", [ticket])] * 2 and not holder.sent
    assert holder.unsent_metrics == {"agent/num_dropped_prompts": Metric.sum(2)}


def test_a_maker_that_is_to_make_experience_twice_ends_when_it_has(monkeypatch: pytest.MonkeyPatch):
    config = config_of(
        *IN_FLIGHT, "algorithm.adv_estimator=grpo", "detached.experience_batch_size=4"
    )
    ledger = PromptLedger(
        3, batch_size=4, detached=config.detached, max_staleness=config.trainer.max_staleness
    )
    own = {
        "name_in_ledger": "maker_1",
        "in_flight": {},
        "recorder": SideRecorder("maker_1", node=""),
    }
    own |= {
        "version": 0,
        "index": 1,
        "is_compared": True,
        "validated": 0,
        "sent": {},
        "trainer_names": ["trainer_0"],
    }
    holder = maker(
        config=config, ledger=ledger, start=lambda: None, load_newest_weights=lambda: None, **own
    )
    num_made, submitted = iter([0, 1, 1]), []

    def submit(tickets: Any, prompts: DataProto) -> None:
        submitted.extend(ticket.number for ticket in tickets)
        holder.in_flight |= dict.fromkeys(prompts.non_tensor_batch["uid"])

    def advance() -> int:
        if made := next(num_made):
            holder.in_flight.clear()
        return made

    holder.submit, holder.advance = submit, advance

    def load(tickets: Any) -> list[tuple[Any, DataProto]]:
        return [(tickets, prompts(*(ticket.number for ticket in tickets)))] if tickets else []

    # Ray may have made the class again, whose functions then have a module's names of their own.
    names = inspect.unwrap(type(holder).workingloop).__globals__
    monkeypatch.setitem(names, "ask", lambda *_, timeout: None)
    assert holder.workingloop(SimpleNamespace(load=load), num_steps=2) == 2
    # Of the first step and, one ahead, of the second
    assert submitted == list(range(8)) and not list(num_made)


def test_a_maker_that_has_to_validate_begins_nothing_until_what_is_in_flight_was_sent(
    monkeypatch: pytest.MonkeyPatch,
):
    overrides = ["trainer.val_before_train=true", "trainer.test_freq=1", "trainer.max_staleness=2"]
    overrides += ["algorithm.adv_estimator=grpo", "detached.experience_batch_size=8"]
    config = config_of(*IN_FLIGHT, *overrides)
    ledger = PromptLedger(
        3, batch_size=4, detached=config.detached, max_staleness=config.trainer.max_staleness
    )
    events: list[Any] = []
    versions = iter([0, 1, 1])

    def load_newest_weights() -> None:
        holder.version = next(versions)

    def submit(tickets: Any, prompts: DataProto) -> None:
        events.append(("begin", len(tickets)))
        holder.in_flight |= dict.fromkeys(prompts.non_tensor_batch["uid"])

    def advance() -> int:
        """Four prompts end in each round."""
        for uid in list(holder.in_flight)[:4]:
            del holder.in_flight[uid]
        events.append(("left", len(holder.in_flight)))
        return 1

    def validate() -> None:
        events.append(("validate", holder.version))
        holder.validated = holder.version

    own = {
        "name_in_ledger": "maker_0",
        "index": 0,
        "version": -1,
        "validated": -1,
        "is_compared": True,
        "in_flight": {},
        "sent": {},
        "recorder": SideRecorder("maker_0", node=""),
        "trainer_names": ["trainer_0"],
    }
    calls = {
        "start": lambda: None,
        "load_newest_weights": load_newest_weights,
        "submit": submit,
        "advance": advance,
        "validate": validate,
    }
    holder = maker(config=config, ledger=ledger, **own, **calls)

    def load(tickets: Any) -> list[tuple[Any, DataProto]]:
        return [(tickets, prompts(*(ticket.number for ticket in tickets)))] if tickets else []

    # Ray may have made the class again, whose functions then have a module's names of their own.
    names = inspect.unwrap(type(holder).workingloop).__globals__
    monkeypatch.setitem(names, "ask", lambda *_, timeout: None)
    assert holder.workingloop(SimpleNamespace(load=load), num_steps=3) == 3
    of_version_0 = [("validate", 0), ("begin", 8), ("left", 4)]
    # Version 1 is due, so the four free places stay empty until the other four have ended.
    of_version_1 = [("left", 0), ("validate", 1), ("begin", 4), ("left", 0)]
    assert events == of_version_0 + of_version_1
