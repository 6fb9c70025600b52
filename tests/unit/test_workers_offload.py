"""What is offloaded is on the device only while it is needed."""

import math
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_worker_models import local_group, make_batch, parameters_of, policy_config, write_model
from torch.distributed.tensor import DTensor

from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.workers.actor import ActorWorker
from verl_like.workers.engine.host_memory import HostMemory

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
    """What the actor's engine does from now on: each tensor's move, each backward pass and
    optimizer step."""
    engine, recorded, move, to_host = (
        actor.workers[0].engine,
        [],
        torch.Tensor.to,
        HostMemory.to_host,
    )

    def record_move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], str | torch.device):
            is_state = any(
                tensor is value
                for state in engine.optimizer.state.values()
                for value in state.values()
            )
            recorded.append(f"{'state' if is_state else 'parameter'} to {args[0]}")
        return move(tensor, *args, **kwargs)

    def record_move_to_host(places: HostMemory, name: Any, tensor: torch.Tensor) -> torch.Tensor:
        moved = to_host(places, name, tensor)
        if moved is not tensor:
            recorded.append(f"{'state' if isinstance(name, tuple) else 'parameter'} to cpu")
        return moved

    def record_calls(owner: Any, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **kwargs: recorded.append(name) or call(*args, **kwargs)
        )

    monkeypatch.setattr(torch.Tensor, "to", record_move)
    monkeypatch.setattr(HostMemory, "to_host", record_move_to_host)
    record_calls(engine, "backward")
    record_calls(engine.optimizer, "step")
    return recorded


def test_the_optimizer_state_is_on_the_device_during_the_step_alone(
    actor: LocalWorkerGroup, events: list[str]
):
    before = parameters_of(actor.workers[0])
    actor.update_actor(make_batch(rows=8)).get()
    of_optimizer = [event for event in events if not event.startswith("parameter")]
    order = [event for event, _ in groupby(of_optimizer)]
    assert order == ["backward", f"state to {DEVICE}", "step", "state to cpu"] * 2
    assert of_optimizer.count("backward") == 4
    # Both moments and the count, in two steps
    assert of_optimizer.count(f"state to {DEVICE}") == 2 * 3 * len(before)
    assert all(
        not torch.equal(value, before[name])
        for name, value in parameters_of(actor.workers[0]).items()
    )


def test_saving_takes_nothing_to_the_device(
    actor: LocalWorkerGroup, events: list[str], tmp_path: Path
):
    actor.save_checkpoint(str(tmp_path / "checkpoint"))
    actor.save_hf(str(tmp_path / "huggingface"))
    assert not [event for event in events if event.endswith(DEVICE)]
    actor.load_checkpoint(str(tmp_path / "checkpoint"))  # the parameters go, and come back
    assert [event for event, _ in groupby(events)][-2:] == [
        f"parameter to {DEVICE}",
        "parameter to cpu",
    ]


def test_what_is_offloaded_has_the_same_place_after_each_update(actor: LocalWorkerGroup):
    engine = actor.workers[0].engine

    def addresses() -> list[int]:
        states = [value for state in engine.optimizer.state.values() for value in state.values()]
        return [
            tensor.to_local().data_ptr()
            for tensor in [*engine.parameters, *states]
            if isinstance(tensor, DTensor)
        ]

    first = []
    for _ in range(3):
        actor.update_actor(make_batch(rows=8)).get()
        first = first or addresses()
        assert addresses() == first
    assert len(first) == len(set(first)) == 3 * len(engine.parameters)
    # Two pieces of memory: the parameters' and the optimizer's, of float32 and each at a multiple
    # of 64 bytes.
    num_bytes = sum(
        math.ceil(parameter.to_local().nbytes / 64) * 64 for parameter in engine.parameters
    )
    of_parameters, of_optimizer = first[: len(engine.parameters)], first[len(engine.parameters) :]
    assert max(of_parameters) - min(of_parameters) < num_bytes
    assert max(of_optimizer) - min(of_optimizer) < 2 * num_bytes + 64 * len(engine.parameters)


def test_a_place_has_the_values_the_shape_and_the_dtype_of_its_tensor_and_memory_that_no_other_has():
    tensors = {
        "a": torch.arange(35.0).view(5, 7).to(DEVICE),
        "b": torch.tensor(3, dtype=torch.int64).to(DEVICE),
        "c": torch.arange(6).to(torch.bfloat16).to(DEVICE),
        "none": torch.empty(0, 4).to(DEVICE),
    }
    memory = HostMemory(tensors)
    placed = {name: memory.to_host(name, tensor) for name, tensor in tensors.items()}
    for name, place in placed.items():
        assert place.dtype == tensors[name].dtype
        assert torch.equal(place, tensors[name].to("cpu"))
        assert memory.to_host(name, place) is place
    assert "a" in memory and "d" not in memory
