"""Worker classes for the tests of the single controller; both backends run them."""

import asyncio
import os
import time

import torch
import torch.distributed as dist

from verl_like.protocol import DataProto, Metric
from verl_like.single_controller import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)


def deal_like_cards(group, values):
    return ([values[rank :: group.world_size] for rank in range(group.world_size)],), {}


def gather_like_cards(group, outputs):
    assert len(outputs) == group.world_size
    return [outputs[i % len(outputs)][i // len(outputs)] for i in range(sum(map(len, outputs)))]


register_dispatch_mode("TOY_CARDS", deal_like_cards, gather_like_cards)
GRID = make_nd_compute_dataproto_dispatch_fn("grid")


def pad_mask(batch: DataProto) -> torch.Tensor:
    """(B,) bool; all False where the caller marked no row as padding."""
    return (
        batch.batch["is_pad"]
        if "is_pad" in batch.batch
        else torch.zeros(len(batch), dtype=torch.bool)
    )


class ToyWorker(Worker):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def one_to_all_on_rank_zero(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=["x"], writes=["y"])
    def double_and_tell(self, batch: DataProto, wait_for: str | None = None, fail: bool = False):
        """Yields its rows; between the first and the others rank 1 waits for the file
        `wait_for`."""
        rows = batch.batch["x"][~pad_mask(batch)].tolist()
        yield rows[:1]
        deadline = time.monotonic() + 60
        while self.rank == 1 and wait_for and not os.path.exists(wait_for):
            assert time.monotonic() < deadline, f"nobody made {wait_for}"
            time.sleep(0.01)
        if fail and self.rank == 1:
            raise ArithmeticError("rank 1 gives up")
        yield rows[1:]
        return DataProto.from_dict(tensors={"y": 2 * batch.batch["x"]})

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, x, y=None):
        return self.rank, x, y

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def all_to_all_on_rank_zero(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, x, factor):
        return x * factor

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=["values", "uid?"], writes=["scaled"])
    def scale_values(self, batch: DataProto, shift: float = 0.0) -> DataProto:
        result = DataProto.from_dict({"scaled": batch.batch["values"] * self.scale + shift})
        result.batch["rank"] = torch.full((len(batch),), self.rank)
        if "uid" in batch.non_tensor_batch:
            result.non_tensor_batch["uid"] = batch.non_tensor_batch["uid"]
        result.meta_info["columns"] = sorted(batch.batch.keys())
        return result

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def two_outputs_per_row(self, batch: DataProto) -> DataProto:
        return batch.repeat(2)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def one_output_per_rank(self, batch: DataProto) -> DataProto:
        return batch[:1]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_up(self, batch: DataProto) -> DataProto:
        real = ~pad_mask(batch)
        return DataProto(
            meta_info={"metrics": {"sum": Metric.sum(float(batch.batch["values"][real].sum()))}}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count_real_rows(self, batch: DataProto) -> dict:
        return {"rank": self.rank, "rows": len(batch), "real": int((~pad_mask(batch)).sum())}

    @register(dispatch_mode=Dispatch.TOY_CARDS)
    def cards(self, values):
        return [(self.rank, value) for value in values]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make_grid(self, tensor_parallel: int) -> None:
        dp_rank, tp_rank = divmod(self.rank, tensor_parallel)
        self._register_dispatch_collect_info("grid", dp_rank, is_collect=tp_rank == 0)

    @register(dispatch_mode=GRID)
    def grid_compute(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"scaled": batch.batch["values"] * self.scale,
                                    "rank": torch.full((len(batch),), self.rank)})  # fmt: skip

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe(self, value) -> str:
        return f"{type(value).__name__} of {len(value)}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait_and_say(self, x):
        await asyncio.sleep(0.01)
        return self.rank, x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def not_blocking(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def write_in_place(self, batch: DataProto) -> DataProto:
        batch.batch["values"].add_(1)
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def replace_column(self, batch: DataProto) -> DataProto:
        batch.batch["values"] = batch.batch["values"] + 1
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, writes=["scaled"])
    def forget_to_write(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=["advantages"])
    def read_advantages(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def return_a_number(self, batch: DataProto) -> float:
        return 1.0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError("no such thing")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> dict:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "pid": os.getpid(),
            "device": self.device,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float) -> tuple[float, float]:
        started = time.time()
        time.sleep(seconds)
        return started, time.time()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_process_group(self) -> None:
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        total = torch.tensor(float(self.rank + 1))
        dist.all_reduce(total)
        return total.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_while_rank_sleeps(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(300)
        dist.all_reduce(torch.zeros(1))


class Grandchild(ToyWorker):
    """Overrides a registered method without registering it again."""

    def rank_zero(self, x):
        return "overridden", x


class BrokenConstructor(Worker):
    def __init__(self) -> None:
        raise ValueError("the constructor refuses")


class Policy(Worker):
    """One weight w, policy loss (w - mean advantage)^2, plain gradient descent."""

    def __init__(self) -> None:
        self.weight = 1.0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=["prompts"], writes=["responses"])
    def generate_sequences(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"responses": batch.batch["prompts"] * self.weight + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=["advantages"], blocking=False)
    def update_actor(self, batch: DataProto) -> DataProto:
        mean = float(batch.batch["advantages"][~pad_mask(batch)].mean())
        self.weight -= 0.1 * 2 * (self.weight - mean)
        return DataProto(meta_info={"metrics": {"actor/weight": Metric.mean(self.weight)}})


class Value(Worker):
    """One bias b, value of a response r is r / 2 + b."""

    def __init__(self) -> None:
        self.bias = 0.0

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        reads=["responses"],
        writes=["values"],
        blocking=False,
    )
    def compute_values(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"values": batch.batch["responses"] / 2 + self.bias})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=["returns"], blocking=False)
    def update_critic(self, batch: DataProto) -> DataProto:
        self.bias += 0.1 * float(batch.batch["returns"][~pad_mask(batch)].mean())
        return DataProto(meta_info={"metrics": {"critic/bias": Metric.mean(self.bias)}})
