"""A trainer of detached training, in one process: where it meets the others, and what it learns
from."""

import inspect
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from test_detached_config import IN_FLIGHT, config_of

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.detached.buffer import ExperienceBuffer
from verl_like.trainer.detached.detached_trainer import DetachedPPOTrainer
from verl_like.trainer.detached.ledger import PromptLedger
from verl_like.trainer.detached.side import PushedWeights, SideRecorder
from verl_like.trainer.detached.weight_turns import WeightTurns
from verl_like.trainer.ppo.learner import Update
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.planning.flops import ModelCost


class Seen(Exception):
    """Ends what a test looks into, with what it has seen."""


def trainer(config: DetachedConfig, **fields: Any) -> Any:
    """The trainer itself, without the actor that it is."""
    side = object.__new__(DetachedPPOTrainer.__ray_metadata__.modified_class)
    recorder = SideRecorder("trainer_2", node="", run_dir=Path(config.trainer.default_local_dir))
    vars(side).update(
        {"config": config, "model_fn": None, "pools": None, "recorder": recorder, **fields}
    )
    return side


def test_the_trainers_of_a_model_meet_at_the_address_that_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
):
    def start_groups(*arguments: Any) -> None:
        raise Seen(arguments[-1])

    env_info = {"rank": 2, "world_size": 3, "master_addr": "10.0.0.7", "master_port": "4321"}
    config = config_of("detached.num_trainers=3", "actor_rollout_ref.actor.ppo_mini_batch_size=12")
    side = trainer(config.of_trainer("trainer_2"), index=2, env_info=env_info)
    # Ray may have made the class again, whose functions then have a module's names of their own.
    names = inspect.unwrap(type(side).start).__globals__
    monkeypatch.setitem(names, "start_groups", start_groups)
    with pytest.raises(Seen) as seen:
        side.start()
    assert seen.value.args == (JointTrainer(2, 3, "10.0.0.7", 4321),)
    side.env_info = {"rank": 0, "world_size": 1}
    with pytest.raises(Seen) as seen:
        side.start()
    assert seen.value.args == (None,)


def test_a_trainer_waits_for_makers_as_long_as_three_calls_may_take(
    monkeypatch: pytest.MonkeyPatch,
):
    context = SimpleNamespace(get_actor_name=lambda: "trainer_0")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    side = DetachedPPOTrainer.__ray_metadata__.modified_class(
        config_of("trainer.call_timeout_s=8"), ["maker_0"]
    )
    assert (side.turns.name, side.turns.limit_s) == ("trainer_0", 24.0)


def taken(**columns: list[list[float]]) -> DataProto:
    """Two rows out of the buffer: prompts of three tokens, responses of two and one, and columns by
    response token."""
    tensors = {"prompts": jagged_from_lists([[1, 1, 1]] * 2, torch.int64)}
    tensors |= dict.fromkeys(
        ("responses", "response_mask"), jagged_from_lists([[1, 1], [1]], torch.int64)
    )
    tensors |= {name: jagged_from_lists(rows, torch.float32) for name, rows in columns.items()}
    return DataProto.from_dict(tensors, meta_info={"padding": (3, 2, 0)})


@pytest.mark.parametrize("bypass", [True, False])
def test_a_bypass_takes_the_log_probabilities_of_the_engine_for_the_actors(bypass: bool):
    def learn(experience: Any) -> None:
        raise Seen(experience.batch)

    settings = [*IN_FLIGHT, "algorithm.adv_estimator=grpo"] if bypass else []
    columns = {"rollout_log_probs": [[-0.5, -1.0], [-0.25]]}
    if not bypass:
        columns["old_log_probs"] = [[-0.75, -1.5], [-0.5]]
    batch = taken(**columns)
    side = trainer(
        config_of(*settings),
        learner=SimpleNamespace(version=0, learn=learn, trained={}),
        buffer=SimpleNamespace(take=lambda *_: ([0, 1], batch)),
        comparisons=SimpleNamespace(in_step=True),
        turns=WeightTurns("trainer_2", limit_s=5),
        model_cost=ModelCost(2.0, 3.0, ((4.0, None),)),
        start=lambda: None,
        push=lambda: None,
    )
    with pytest.raises(Seen) as seen:
        side.fit(total_steps=1)
    (learned,) = seen.value.args
    expected = columns["rollout_log_probs" if bypass else "old_log_probs"]
    assert [row.tolist() for row in learned.batch["old_log_probs"].unbind()] == expected


class Saver(Worker):
    """Writes a folder for a model, and has written a checkpoint when it is waited for."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, path: str, wait: bool) -> None:
        assert not wait

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_result(self, wait: bool) -> dict | None:
        return {"rank_0.safetensors": {"bytes": 7}} if wait else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        Path(path).mkdir(parents=True)


def test_models_are_written_after_the_last_step_alone_and_weights_are_pushed_after_every_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    batch = taken()
    learned: list[tuple[int, int]] = []
    pushed: list[int] = []

    def learn(experience: Any) -> Update:
        learned.append(experience.batch.meta_info["part_of_step"])
        side.learner.version += 1
        return Update([], {})

    group = LocalWorkerGroup(ClassWithInitArgs(Saver), role="actor")
    settings = [f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=2"]
    side = trainer(
        config_of(*settings),
        learner=SimpleNamespace(version=0, learn=learn, trained={"actor": group}),
        buffer=SimpleNamespace(take=lambda *_: ([0, 1], batch), metrics=deque()),
        ledger=SimpleNamespace(
            trained=lambda *_: {"trained": 2}, last_step=lambda: 5, state=lambda: {"next": 9}
        ),
        comparisons=SimpleNamespace(in_step=True, awaited=(), begin_step=list),
        turns=WeightTurns("trainer_2", limit_s=5),
        model_cost=ModelCost(2.0, 3.0, ((4.0, None),)),
        start=lambda: None,
        push=lambda: pushed.append(side.learner.version),
    )
    monkeypatch.setitem(
        inspect.unwrap(type(side).metrics_of).__globals__, "batch_metrics", lambda *_: {}
    )
    assert side.fit(total_steps=7, update_steps=2) == 5  # the ledger says that the run ends early
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["global_step_5.partial"]
    assert (tmp_path / "global_step_5.partial/actor/huggingface").is_dir()
    assert learned == [(1, 1)] * 5 and pushed == [0, 2, 4]
    assert [step for step, *_ in side.recorder.rows] == [1, 2, 3, 4, 5]
    assert list(side.recorder.states) == [(step, {"ledger": {"next": 9}}) for step in (2, 4, 5)]
    # Which would not come to its turn if the last step had not ended
    side.turns.begin_loading("maker_0.1")
    written = {"actor/checkpoint/rank_0.safetensors": {"bytes": 7}}
    assert list(side.recorder.files) == [(step, written) for step in (2, 4, 5)]


class Running:
    """An update that runs until it is waited for."""

    def __init__(self, done: list[str], name: str, **metrics: float) -> None:
        self.done, self.name = done, name
        self.metrics = {
            name.replace("__", "/"): Metric.mean(value) for name, value in metrics.items()
        }

    def get(self) -> DataProto:
        self.done.append(f"wait for {self.name}")
        return DataProto(meta_info={"metrics": self.metrics})


def test_a_step_in_parts_is_accounted_for_once_with_all_its_groups_and_what_makers_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = [
        "trainer.max_staleness=1",
        "algorithm.rollout_correction.bypass_mode=true",
        "trainer.save_freq=1",
    ]
    settings += ["detached.min_effective_sample_size=0.75", f"trainer.default_local_dir={tmp_path}"]
    config = config_of(*settings)
    assert config.plan.num_parts_of_step == 2
    ledger = PromptLedger(3, 12, config.detached, max_staleness=1)
    buffer = ExperienceBuffer(ledger, 0, limit=24)
    done: list[str] = []

    def arrive(num_groups: int, entropy: float) -> None:
        tickets = ledger.take("maker_0.1", 0, num_groups)
        tensors = {"prompts": jagged_from_lists([[1, 1]] * 4 * num_groups, torch.int64)}
        numbers = [[ticket.number] for ticket in tickets for _ in range(4)]
        tensors |= dict.fromkeys(
            ("responses", "response_mask"), jagged_from_lists(numbers, torch.int64)
        )
        tensors["rollout_log_probs"] = jagged_from_lists([[-1.0]] * 4 * num_groups, torch.float32)
        versions = np.empty(4 * num_groups, dtype=object)
        versions[:] = [((0, 0, 1),)] * 4 * num_groups
        batch = DataProto.from_dict(tensors, {"policy_version": versions}, {"padding": (2, 1, 0)})
        buffer.extend(
            "maker_0.1", tickets, batch, {"actor/entropy": Metric.mean(entropy, weight=num_groups)}
        )

    def learn(experience: Any) -> Update:
        part, num_parts = experience.batch.meta_info["part_of_step"]
        done.append(f"learn part {part} of {num_parts}")
        # Pooled over the parts: 2.0 ** 2 / 8.0, where the mean of the parts' own shares would be
        # 0.625.
        ratios = {
            "actor__rollout_ratio": (1.0, 3.0)[part - 1],
            "actor__rollout_ratio_square": (1.0, 15.0)[part - 1],
        }
        if part == 1:
            arrive(9, entropy=4.0)  # three of which are left for the next step
            ledger.end()  # after this step
        return Update([Running(done, f"part {part}", **ratios)], {})

    def count_rows(batch: DataProto, *_: int) -> dict[str, Metric]:
        done.append(f"measure {len(batch)} rows")
        return {"rows": Metric.sum(len(batch))}

    side = trainer(
        config,
        index=0,
        learner=SimpleNamespace(
            version=0, learn=learn, trained={"actor": LocalWorkerGroup(ClassWithInitArgs(Saver))}
        ),
        buffer=buffer,
        ledger=ledger,
        comparisons=SimpleNamespace(in_step=False, awaited=(), begin_step=list),
        turns=WeightTurns("trainer_0", limit_s=5),
        model_cost=ModelCost(2.0, 3.0, ((4.0, None),)),
        start=lambda: None,
        push=lambda: done.append(f"push with {ledger.counts()['trained']} trained"),
    )
    arrive(6, entropy=1.0)
    monkeypatch.setitem(
        inspect.unwrap(type(side).metrics_of).__globals__, "batch_metrics", count_rows
    )
    assert side.fit(total_steps=3) == 1
    parts = [
        "learn part 1 of 2",
        "wait for part 1",
        "learn part 2 of 2",
        "measure 48 rows",
        "wait for part 2",
    ]
    assert [entry for entry in dict.fromkeys(done) if not entry.startswith("push")] == parts
    assert [entry for entry in done if entry.startswith("push")] == [
        "push with 0 trained",
        "push with 12 trained",
    ]
    assert not side.comparisons.in_step
    ((step, metrics, _),) = side.recorder.rows
    values = {name: metric.value for name, metric in metrics.items()}
    assert (
        step == 1 and values["rows"] == 48 and values["actor/entropy"] == (6 * 1.0 + 9 * 4.0) / 15
    )
    assert (values["detached/trained"], values["detached/in_buffer"]) == (12, 3)
    assert values["actor/eff_sample_size"] == 2.0**2 / 8.0 and ledger.is_braking
    ((step, saved),) = side.recorder.states
    assert (
        step == 1 and saved["ledger"]["trained"] == [12] and len(saved["ledger"]["unfinished"]) == 3
    )


class Sender(Worker):
    """Notes to whom it is to send."""

    calls: list[tuple[str, int]] = []  # noqa: RUF012

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def address_for(self, receivers: str) -> tuple[str, int] | None:
        return None if self.rank else ("10.0.0.7", 4000 + len(receivers))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, num_receivers: int, receivers: str) -> None:
        if receivers == "maker_1.3":
            raise RuntimeError("NCCL: a peer is gone")
        self.calls.append((receivers, num_receivers))


def sending_trainer(version: int, pushed: PushedWeights | None) -> Any:
    actor = LocalWorkerGroup(ClassWithInitArgs(Sender), world_size=2, role="actor")
    side = trainer(
        config_of(),
        learner=SimpleNamespace(version=version),
        groups={"actor": actor},
        turns=WeightTurns("trainer_0", limit_s=60),
        comparisons=SimpleNamespace(in_step=False, awaited=(), begin_step=list),
        pushed=pushed,
    )
    side.export = lambda: vars(side).update(
        pushed=PushedWeights(side.learner.version, {"actor": "newest"})
    )
    return side


@pytest.mark.parametrize(("version", "exports"), [(4, "pushed"), (5, "newest")])
def test_a_maker_gets_the_weights_that_the_actor_has_and_the_next_step_comes_after_it_has_loaded_them(
    version: int, exports: str
):
    side = sending_trainer(version, PushedWeights(4, {"actor": "pushed"}))
    Sender.calls.clear()
    held = side.hold_weights("maker_1.2")
    assert held == PushedWeights(version, {"actor": exports}, ("10.0.0.7", 4009))
    step = threading.Thread(target=side.wait_for_makers, args=(version,), daemon=True)
    step.start()
    step.join(0.1)
    assert step.is_alive() and not Sender.calls
    side.send_weights("maker_1.2", 3)
    step.join(60)
    assert not step.is_alive() and Sender.calls == [("maker_1.2", 3)] * 2  # both ranks gather


def test_weights_that_do_not_reach_a_maker_end_the_trainer():
    side = sending_trainer(2, None)
    side.hold_weights("maker_1.3")
    with pytest.raises(WorkerError, match="a peer is gone"):
        side.send_weights("maker_1.3", 1)
    with pytest.raises(WorkerError, match="failed in send_weights"):
        side.wait_for_makers(2)
    buffer = ExperienceBuffer(SimpleNamespace(), 0, limit=4)
    # Also where it waits for experience
    with pytest.raises(WorkerError, match="failed in send_weights"):
        buffer.take(1, 2, 60.0, side.turns.raise_failure)


@pytest.mark.parametrize(("version", "num_pushes"), [(4, 0), (5, 1)])
def test_makers_that_are_to_be_compared_get_the_actors_weights_unless_they_have_been_pushed(
    version: int, num_pushes: int
):
    side = sending_trainer(version, PushedWeights(4, {"actor": "pushed"}))
    side.comparisons.awaited = ("maker_0",)
    pushes = []
    side.push = lambda: pushes.append(side.learner.version)
    side.wait_for_makers(version)
    assert pushes == [version] * num_pushes
