"""Weights on their way from a trainer to several makers, by each transport and under one
version."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from forked_workers import start_ray
from runs import AHEAD, APART, metrics_of, run_apart, tiny_run_settings
from test_local_step import local_trainer
from test_maker_and_learner import SETTINGS

from verl_like.protocol import Part
from verl_like.single_controller.failure import WorkerDied, WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.shard import ForwardedFuture
from verl_like.trainer.config.detached import DetachedBlock, DetachedConfig
from verl_like.trainer.detached.maker_holder import ExperienceMakerHolder, maker_models
from verl_like.trainer.detached.side import PushedWeights, SideRecorder

pytestmark = pytest.mark.ray


def pushed(groups: dict[str, Any], version: int) -> PushedWeights:
    """What the groups of this process export; a worker of this process takes the results
    themselves."""
    sent = {}
    for role in ("actor", "critic"):
        future = groups[role].export_weights(version=version)
        parts = tuple(Part(ray.put(b""), part.payload) for part in future.parts)
        sent[role] = ForwardedFuture(parts, future.collect)
    return PushedWeights(version, sent)


@pytest.fixture
def empty_ray() -> Iterator[None]:
    start_ray(num_cpus=1)
    yield
    ray.shutdown()


def test_a_maker_for_which_a_part_was_overwritten_takes_all_parts_of_the_newest_weights(
    empty_ray: None, tmp_path: Path, tiny_llama: Callable
):
    shared_memory = "actor_rollout_ref.rollout.weight_transport=shared_memory"
    with local_trainer(tmp_path, tiny_llama, *SETTINGS, shared_memory) as trainer:
        config = DetachedConfig.model_construct(**dict(trainer.config), detached=DetachedBlock())
        models = maker_models(config, trainer.role_worker_mapping)
        groups = {role: LocalWorkerGroup(models[role], role=role) for role in ("actor", "critic")}
        for group in groups.values():
            group.init_model()
        groups["rollout"] = trainer.groups["rollout"]
        late, critic = pushed(trainer.groups, 1), trainer.groups["critic"]
        for _, parameter in critic.workers[0].engine.named_parameters():
            parameter.detach().to_local().add_(0.5)
        critic.export_weights(version=2)
        # The critic's are where those of version 1 were, the actor's are not
        newest = pushed(trainer.groups, 3)

        holder = object.__new__(ExperienceMakerHolder.__ray_metadata__.modified_class)
        holder.run, holder.config = SimpleNamespace(maker=trainer.maker, groups=groups), config
        holder.recorder, holder.trainer_names = SideRecorder("maker_0"), ["trainer_0"]
        holder.version, holder.validated, holder.index = 0, 0, 1
        holder.pushed, holder.has_pushed = late, threading.Condition()

        def versions() -> tuple[Any, ...]:
            rollout, *copies = (groups[role].workers[0] for role in ("rollout", "actor", "critic"))
            return (
                rollout.rollout.policy_version,
                *(worker.version for worker in copies),
                holder.version,
            )

        with pytest.raises(WorkerDied, match="trainer_0"):  # there is none
            holder.load_newest_weights()
        rollout, _, critic_copy, own = versions()
        assert (rollout, critic_copy, own) == (1, 0, -1)  # nothing is generated with these

        @ray.remote(num_cpus=0)
        class Trainer:
            def push(self, pushes: list[PushedWeights]) -> None:
                self.pushes = pushes

            def newest_weights(self) -> PushedWeights:
                return self.pushes.pop(0)

        holding = Trainer.options(name="trainer_0").remote()
        ray.get(holding.push.remote([newest]), timeout=60)
        holder.load_newest_weights()
        assert versions() == (3, 3, 3, 3)

        holder.version, holder.pushed = 0, late
        with pytest.raises(WorkerError, match="version 1 was sent to an engine that already had 3"):
            holder.load_newest_weights()  # newer weights would not help

        pushes = []
        for version in range(4, 10):  # all but the last two are overwritten
            for _, parameter in critic.workers[0].engine.named_parameters():
                parameter.detach().to_local().add_(0.5)
            pushes.append(pushed(trainer.groups, version))
        ray.get(holding.push.remote(pushes[1:]), timeout=60)
        holder.pushed = pushes[0]
        with pytest.raises(
            WorkerError, match="StaleWeightsError: Weights of version 6 changed on their way"
        ):
            holder.load_newest_weights()
        assert holder.version == -1
        ray.kill(holding)


@pytest.mark.proof
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_two_makers_take_the_weights_of_actor_and_critic_one_step_late(
    transport: str, tmp_path: Path, tiny_llama: Callable
):
    settings = [*tiny_run_settings(tmp_path, tiny_llama), *APART, *AHEAD, "detached.num_makers=2"]
    settings += [
        "algorithm.rollout_correction.rollout_is=token",
        "detached.experience_batch_size=1",
    ]
    assert run_apart([*settings, f"actor_rollout_ref.rollout.weight_transport={transport}"]) == 0
    steps = [row for row in metrics_of(tmp_path) if "actor/loss" in row]
    assert steps[-1]["detached/trained"] == 20 and len(steps) == 5
    assert max(row["training/staleness/max"] for row in steps) <= 1
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/latest/timeline.jsonl").read_text().splitlines()
    ]
    loads = [(row["pool"], row["role"]) for row in rows if row["method"] == "load_weights"]
    assert {(pool, role) for pool, role in loads} == {
        (f"maker_{index} maker_pool", role)
        for index in range(2)
        for role in ("rollout", "actor", "critic")
    }
