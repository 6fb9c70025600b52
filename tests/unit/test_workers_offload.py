"""What is offloaded is on the device only while it is needed."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_worker_models import local_group, make_batch, parameters_of, policy_config, write_model

from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.workers.actor import ActorWorker

DEVICE = "cpu:0"  # for torch another place than "cpu": tensors are copied between the two


@pytest.fixture
def actor(tmp_path: Path) -> LocalWorkerGroup:
    """An actor with everything offloaded; an update is two optimizer steps of two micro-batches."""
    config = policy_config(
        write_model(tmp_path / "policy"),
        **{"prompts": 4, "micro": 2, "fsdp": {"param_offload": True, "optimizer_offload": True}},
    )
    group = local_group(ActorWorker, config)
    group.workers[0].engine.device = DEVICE
    return group


@pytest.fixture
def events(actor: LocalWorkerGroup, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the actor's engine does from now on: each tensor's move, each backward pass and optimizer step."""
    engine, recorded, move = actor.workers[0].engine, [], torch.Tensor.to

    def record_move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], str | torch.device):
            is_state = any(tensor is value for state in engine.optimizer.state.values() for value in state.values())
            recorded.append(f"{'state' if is_state else 'parameter'} to {args[0]}")
        return move(tensor, *args, **kwargs)

    def record_calls(owner: Any, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: recorded.append(name) or call(*args, **kwargs))

    monkeypatch.setattr(torch.Tensor, "to", record_move)
    record_calls(engine, "backward")
    record_calls(engine.optimizer, "step")
    return recorded


def test_the_optimizer_state_is_on_the_device_during_the_step_alone(actor: LocalWorkerGroup, events: list[str]):
    before = parameters_of(actor.workers[0])
    actor.update_actor(make_batch(rows=8)).get()
    of_optimizer = [event for event in events if not event.startswith("parameter")]
    order = [event for event, _ in groupby(of_optimizer)]
    assert order == ["backward", f"state to {DEVICE}", "step", "state to cpu"] * 2
    assert of_optimizer.count("backward") == 4
    assert of_optimizer.count(f"state to {DEVICE}") == 2 * 3 * len(before)  # both moments and the count, in two steps
    assert all(not torch.equal(value, before[name]) for name, value in parameters_of(actor.workers[0]).items())


def test_saving_takes_nothing_to_the_device(actor: LocalWorkerGroup, events: list[str], tmp_path: Path):
    actor.save_checkpoint(str(tmp_path / "checkpoint"))
    actor.save_hf(str(tmp_path / "huggingface"))
    assert not [event for event in events if event.endswith(DEVICE)]
    actor.load_checkpoint(str(tmp_path / "checkpoint"))  # the parameters go, and come back
    assert [event for event, _ in groupby(events)][-2:] == ["parameter to cpu", "state to cpu"]
