"""Every strategy on real processes: what each rank holds at which time and where, and that all
learn the same."""

import json
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import start_method
from safetensors.torch import load_file, save_file
from tiny_worker_models import make_batch, parameters_of, policy_config, write_model
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from verl_like.protocol import Metric, merge_metrics, metric_values
from verl_like.single_controller.worker import reserve_port
from verl_like.workers.actor import ActorWorker
from verl_like.workers.engine.fsdp import FsdpEngine
from verl_like.workers.engine.host_memory import HostMemory

pytestmark = pytest.mark.proof  # test_workers_two_ranks.py has ddp and zero3

PAGE = Path(__file__).parents[2] / "docs/memory.md"
STRATEGIES = {"single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2}
"""Each with its number of ranks."""
OFFLOADS: dict[str, dict[str, bool]] = {
    "nothing": {},
    "Adam": {"optimizer_offload": True},
    "all": {"optimizer_offload": True, "param_offload": True},
}
DEVICE = "cpu:0"  # for torch another place than "cpu": tensors are copied between the two


def numbers_in(tensors: Iterable[Any]) -> int:
    """How many of their numbers this process holds."""
    return sum(
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() for tensor in tensors
    )


class Watch:
    """Looks at what an engine holds, and where, at the times that the page's table names."""

    def __init__(self, engine: FsdpEngine) -> None:
        self.engine, self.holds, self.places = engine, {}, defaultdict(dict)
        self.place = {"parameters": "", "Adam": ""}
        engine.device = DEVICE
        backward, move, keep = engine.backward, torch.Tensor.to, HostMemory.to_host

        def watched(loss: torch.Tensor, *, is_last: bool) -> None:
            self.look("forward to backward pass")
            backward(loss, is_last=is_last)
            if not is_last:
                self.look("between micro-batches")

        def moves(tensor: torch.Tensor, place: str) -> None:
            for what, tensors in (
                ("parameters", engine.model.parameters()),
                ("Adam", self.moments()),
            ):
                if any(tensor is other for other in tensors):
                    self.place[what] = place

        def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args and isinstance(args[0], str | torch.device):
                moves(tensor, str(args[0]))
            return move(tensor, *args, **kwargs)

        def record_host(memory: HostMemory, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
            moves(tensor, "cpu")
            return keep(memory, name, tensor)

        engine.backward, torch.Tensor.to, HostMemory.to_host = watched, record, record_host
        engine.optimizer.register_step_pre_hook(lambda *_: self.look("optimizer step"))

    def moments(self) -> list[torch.Tensor]:
        return [
            moment
            for state in self.engine.optimizer.state.values()
            for moment in state.values()
            if moment.ndim
        ]

    def look(self, when: str) -> None:
        parameters = {
            id(p): p for p in (*self.engine.model.parameters(), *self.engine.parameters)
        }.values()
        gradients = [p.grad for p in parameters if p.grad is not None]
        # Shards of which the copies are not yet added up are not yet the parameters' own.
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in self.engine.units]
        gradients += [
            group._partial_reduce_output
            for group in groups
            if group._partial_reduce_output is not None
        ]
        self.holds[when] = {
            "parameters": numbers_in(self.engine.model.parameters()),
            "gradients": numbers_in(gradients),
            "Adam": numbers_in(self.moments()) / 2,
        }
        self.places[when] = dict(self.place)


def train_on_rank(rank: int, ranks: int, port: int, folder: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "RANK": str(rank),
    }
    torch.set_num_threads(1)
    # In each of the two mini-batches the same rows as one rank has.
    own = torch.arange(8).view(2, ranks, -1)[:, rank].flatten().tolist()
    move, keep = torch.Tensor.to, HostMemory.to_host
    for strategy in [name for name, its_ranks in STRATEGIES.items() if its_ranks == ranks]:
        for offload, keys in OFFLOADS.items():
            settings = {
                "prompts": 4,
                "micro": 1,
                "optim": {"lr": 1e-3},
                "grad_clip": 0.5,
                "use_kl_loss": True,
            }
            fsdp = {"strategy": strategy, **keys}
            actor = ActorWorker(policy_config(str(Path(folder, "model")), fsdp=fsdp, **settings))
            actor.init_model()
            watch = Watch(actor.engine)
            updates = [
                actor.update_actor(make_batch(rows=8, seed=seed).select_idxs(own))
                for seed in range(2)
            ]
            watch.look("between calls")
            torch.Tensor.to, HostMemory.to_host = move, keep
            layers = [
                parameter.numel()
                for layer in actor.engine.units[:-1]
                for parameter in layer.parameters()
            ]
            told = {
                "metrics": [
                    [(n, m.value, m.reduction, m.weight) for n, m in u.meta_info["metrics"].items()]
                    for u in updates
                ],
                "holds": watch.holds,
                "places": watch.places,
                "model": {
                    "layers": sum(layers),
                    "all": sum(p.numel() for p in actor.engine.parameters),
                },
            }
            save_file(parameters_of(actor), Path(folder, f"{strategy} {offload} {rank}"))
            Path(folder, f"{strategy} {offload} {rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks of every strategy wrote."""
    folder = tmp_path_factory.mktemp("strategies")
    write_model(folder / "model")
    for ranks in sorted(set(STRATEGIES.values())):
        holder, port = reserve_port()
        with holder:
            start_processes(
                train_on_rank, (ranks, port, str(folder)), nprocs=ranks, start_method=start_method()
            )
    return folder


def told_by_ranks(folder: Path, strategy: str, offload: str) -> list[dict[str, Any]]:
    return [
        json.loads((folder / f"{strategy} {offload} {rank}.json").read_text())
        for rank in range(STRATEGIES[strategy])
    ]


def page_rows() -> dict[str, list[str]]:
    """The cells of the page's table, by strategy."""
    lines = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith(tuple(f"| `{s}`" for s in STRATEGIES))
    ]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name.strip("`"): row for name, *row in cells}


COLUMNS = (
    ("parameters", "between calls"),
    ("parameters", "forward to backward pass"),
    ("parameters", "between micro-batches"),
    ("gradients", "between micro-batches"),
    ("gradients", "optimizer step"),
    ("Adam", "optimizer step"),
)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_ranks_hold_what_the_page_says(folder: Path, strategy: str, offload: str):
    ranks = told_by_ranks(folder, strategy, offload)
    model = ranks[0]["model"]
    outer = model["all"] - model["layers"]
    whole, share = len(ranks) * model["all"], model["all"]
    expected = {
        "whole": whole,
        "1/N": share,
        "1/N of the layers": len(ranks) * outer + model["layers"],
    }
    for (what, when), cell in zip(COLUMNS, page_rows()[strategy], strict=True):
        held = sum(of_rank["holds"][when][what] for of_rank in ranks)
        # Shards of a buffer of several tensors are as long as the longest one.
        assert held == pytest.approx(expected[cell], rel=0.01), (what, when)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_offloaded_lies_in_host_memory_outside_of_its_use(folder: Path, strategy: str):
    for of_rank in told_by_ranks(folder, strategy, "nothing"):
        # Nothing is moved
        assert {place for at in of_rank["places"].values() for place in at.values()} == {""}
    for of_rank in told_by_ranks(folder, strategy, "Adam"):
        adam = {when: at["Adam"] for when, at in of_rank["places"].items()}
        assert adam.pop("optimizer step") == DEVICE and set(adam.values()) == {"cpu"}
        assert {at["parameters"] for at in of_rank["places"].values()} == {""}
    for of_rank in told_by_ranks(folder, strategy, "all"):
        parameters = {when: at["parameters"] for when, at in of_rank["places"].items()}
        assert parameters.pop("between calls") == "cpu" and set(parameters.values()) == {DEVICE}


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns_the_same(folder: Path, strategy: str, offload: str):
    start, single = (
        load_file(folder / "model/model.safetensors"),
        load_file(folder / "single nothing 0"),
    )
    learned = load_file(folder / f"{strategy} {offload} 0")
    for name, expected in single.items():
        torch.testing.assert_close(learned[name], expected, rtol=0, atol=1e-5)
        assert (expected - start[name]).abs().max() > 1e-3  # four optimizer steps of up to 1e-3
    (alone,), ranks = (
        told_by_ranks(folder, *of) for of in (("single", "nothing"), (strategy, offload))
    )
    for update, of_alone in enumerate(alone["metrics"]):
        of_ranks = [
            {name: Metric(*of) for name, *of in of_rank["metrics"][update]} for of_rank in ranks
        ]
        metrics = metric_values(merge_metrics(of_ranks))
        for name, value, *_ in of_alone:
            assert "perf/" in name or metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (
                name
            )
