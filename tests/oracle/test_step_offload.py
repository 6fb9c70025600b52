"""Offload on and off: where the parameters and the optimizer state of each model lie, and where
they are used."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import step_runs
import step_table
import torch
from step_table import CRITIC_FSDP, FSDP

from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.workers.engine.fsdp import FsdpEngine
from verl_like.workers.engine.host_memory import HostMemory

DEVICE = "cpu:0"  # for torch another place than "cpu": tensors are copied between the two

WHAT_IS_OFFLOADED = {
    f"{FSDP}.param_offload": ("actor", "parameters"),
    f"{FSDP}.optimizer_offload": ("actor", "optimizer state"),
    "actor_rollout_ref.ref.fsdp_config.param_offload": ("ref", "parameters"),
    f"{CRITIC_FSDP}.param_offload": ("critic", "parameters"),
    f"{CRITIC_FSDP}.optimizer_offload": ("critic", "optimizer state"),
    "reward_model.model.fsdp_config.param_offload": ("reward_model", "parameters"),
}
# Each key is on in another selection of the cases, and in none of them always or never.
CASES = [
    [key for number, key in enumerate(WHAT_IS_OFFLOADED, start=1) if number >> bit & 1]
    for bit in range(3)
]


class Places:
    """Knows where every tensor of a model is, from the moves that are asked for; None where there
    was none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: dict[str, FsdpEngine] = {}
        self.place: dict[tuple[str, str], str] = {}
        self.used_at: dict[tuple[str, str], set[str | None]] = defaultdict(set)
        move, to_host = torch.Tensor.to, HostMemory.to_host

        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args and isinstance(args[0], str | torch.device):
                self.place |= dict.fromkeys(self.owners(tensor), str(args[0]))
            return move(tensor, *args, **kwargs)

        def record_to_host(memory: HostMemory, name: Any, tensor: torch.Tensor) -> torch.Tensor:
            self.place |= dict.fromkeys(self.owners(tensor), "cpu")
            return to_host(memory, name, tensor)

        monkeypatch.setattr(torch.Tensor, "to", record)
        monkeypatch.setattr(HostMemory, "to_host", record_to_host)

    def owners(self, tensor: torch.Tensor) -> list[tuple[str, str]]:
        found = []
        for role, engine in self.engines.items():
            states = engine.optimizer.state.values() if engine.optimizer else []
            kinds = {
                "parameters": engine.model.parameters(),
                "optimizer state": (v for s in states for v in s.values()),
            }
            found += [
                (role, kind)
                for kind, tensors in kinds.items()
                if any(tensor is other for other in tensors)
            ]
        return found

    def start(self, mapping: dict[str, RayClassWithInitArgs]) -> dict[str, WorkerGroup]:
        """Worker groups in this process whose models are watched from their start on."""
        groups = step_runs.start_local_groups(mapping)
        for role in mapping.keys() - {"rollout"}:
            worker = groups[role].workers[0]
            init_model = worker.init_model
            worker.init_model = lambda role=role, worker=worker, init_model=init_model: (
                init_model(),
                self.watch(role, worker.engine),
            )
        return groups

    def watch(self, role: str, engine: FsdpEngine) -> None:
        self.engines[role], engine.device = engine, DEVICE
        engine.model.register_forward_pre_hook(lambda *_: self.uses(role, "parameters"))
        if engine.optimizer:
            engine.optimizer.register_step_pre_hook(lambda *_: self.uses(role, "optimizer state"))

    def uses(self, *what: str) -> None:
        self.used_at[what].add(self.place.get(what))


@pytest.mark.parametrize("keys", CASES)
def test_exactly_what_a_key_offloads_lies_in_host_memory_and_is_used_on_the_device(
    keys: list[str], world_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    reward_model = {"reward_model.enable": True, "reward_model.model.path": "{folder}/reward"}
    settings = step_table.settings_of("gae", world_folder, **reward_model) | {
        "trainer.n_gpus_per_node": 1
    }
    places = Places(monkeypatch)
    step_runs.train(
        settings | {key: key in keys for key in WHAT_IS_OFFLOADED}, places.start, steps=1
    )
    offloaded = {WHAT_IS_OFFLOADED[key] for key in keys}
    assert places.place == dict.fromkeys(offloaded, "cpu")
    expected = {
        what: {DEVICE} if what in offloaded else {None} for what in WHAT_IS_OFFLOADED.values()
    }
    assert places.used_at == expected
