"""What a step's calls put into the object store, and that it is released, by the store's own
statistics."""

import ctypes
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from forked_workers import start_ray
from ray._private.internal_api import node_stats
from store_workers import Reader, ones

from verl_like.protocol import DataProto
from verl_like.single_controller import Ordered
from verl_like.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl_like.single_controller.ray.column_store import COLUMN_STORE
from verl_like.single_controller.ray.message import fetch

pytestmark = pytest.mark.ray

ROWS, LENGTH = 32, 8192
COLUMN_BYTES = ROWS * LENGTH * 4  # 1 MiB
SLACK = 64 * 1024  # headers of objects, meta_info


def store() -> Any:
    """The raylet's statistics of its object store."""
    (node,) = ray.nodes()
    return node_stats(
        node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
    ).store_stats


def created_bytes() -> int:
    return store().cumulative_created_bytes


def used_bytes_once_at_most(limit: int) -> int:
    """Bytes in the store once they are no more than `limit`, or after 20 s: objects are freed with
    a delay."""
    gc.collect()
    deadline = time.monotonic() + 20
    while (used := store().object_store_bytes_used) > limit and time.monotonic() < deadline:
        time.sleep(0.05)
    return used


def resident_bytes_without_shared() -> int:
    """What the process holds, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * 4096


@pytest.fixture(scope="module")
def groups(ray_cluster: None) -> Iterator[list[RayWorkerGroup]]:
    """Two groups on the same two processes, and one of one rank."""
    pools = [RayResourcePool([size], use_gpu=False) for size in (2, 1)]
    reader = RayClassWithInitArgs(Reader)
    host = RayWorkerGroup(
        pools[0], create_colocated_worker_cls({"actor": reader, "critic": reader})
    )
    single = RayWorkerGroup(pools[1], reader, role="reference")
    yield [*host.spawn(["actor", "critic"]).values(), single]
    for group, pool in zip([host, single], pools, strict=True):
        group.shutdown()
        pool.release()


def run_step(groups: list[Any], length: int = LENGTH) -> DataProto:
    """The calls of a PPO step: 6 columns of the driver or of replies, each read by several methods
    of three groups."""
    actor, critic, reference = groups
    batch = DataProto.from_dict({"input_ids": ones(ROWS, length), "responses": ones(ROWS, length)})
    order = torch.arange(ROWS).flip(0)
    pending = [
        actor.compute_log_prob.remote(Ordered(batch, order)),
        critic.compute_values.remote(batch),
        reference.whole_shard.remote(batch.select(batch_keys=["responses"])),
    ]
    for future in pending:
        batch = batch.union(future.get(timeout=300))
    batch.batch["returns"] = batch.batch["values"] + 1
    batch.batch["advantages"] = batch.batch["returns"] - batch.batch["values"]
    for update in [
        critic.update_critic.remote(Ordered(batch, order)),
        actor.update_actor.remote(batch),
    ]:
        update.get(timeout=300)
    return batch


def put_and_read(batch: DataProto) -> DataProto:
    return fetch([COLUMN_STORE.put(batch)], 60)[0]


@pytest.fixture(scope="module")
def batch_of_an_earlier_ray() -> list[DataProto]:
    """In a list, from which a test takes it: the store keeps the columns of what is alive."""
    batch = DataProto.from_dict({"responses": ones(ROWS, LENGTH)})
    start_ray(num_cpus=1)
    put_and_read(batch)
    ray.shutdown()
    return [batch]


# The file's first test: no Ray may run before its first fixture.
def test_columns_that_an_earlier_ray_of_this_process_had_are_put_again(
    batch_of_an_earlier_ray: list[DataProto], ray_cluster: None
):
    batch = batch_of_an_earlier_ray.pop()
    assert put_and_read(batch).equal(batch)


def test_a_column_of_any_kind_that_was_written_into_is_put_again(ray_cluster: None):
    base = ones(ROWS, LENGTH)
    lengths = torch.full((ROWS,), LENGTH // 2)
    kinds = {
        "view": (base, base[::2]),
        "bfloat16": (half := base.bfloat16(), half),
        "trained": (weight := ones(ROWS, LENGTH).requires_grad_(), weight),
        "ragged": (
            flat := base.flatten().clone(),
            torch.nested.nested_tensor_from_jagged(flat, lengths=lengths * 2),
        ),
        "ragged with holes": (
            wide := ones(ROWS, LENGTH),
            torch.nested.narrow(wide, 1, lengths // 2, lengths, layout=torch.jagged),
        ),
    }
    for kind, (written, column) in kinds.items():
        batch = DataProto.from_dict({"responses": column})
        assert put_and_read(batch).equal(batch)
        with torch.no_grad():
            written.mul_(3)
        assert put_and_read(batch).equal(batch), kind


def test_a_step_puts_each_column_once_and_again_only_if_it_was_written_into(groups):
    actor, critic, _ = groups
    before = created_bytes()
    batch = run_step(groups)
    # input_ids, responses, old_log_probs, values, returns, advantages by the driver; three columns
    # of replies.
    assert created_bytes() - before == pytest.approx(9 * COLUMN_BYTES, abs=SLACK)
    assert batch.batch["returns"].eq(3).all() and batch.batch["old_log_probs"].eq(0.5).all()

    before = created_bytes()
    actor.update_actor(batch.rows(0, ROWS // 2))
    assert created_bytes() - before == pytest.approx(4 * COLUMN_BYTES / 2, abs=SLACK), (
        "other tensors, other rows"
    )

    before = created_bytes()
    batch.batch["responses"].mul_(3)
    assert (
        critic.sums(batch.select(batch_keys=["responses", "input_ids"]))[1]["responses"]
        == 3 * ROWS * LENGTH / 2
    )
    assert created_bytes() - before == pytest.approx(COLUMN_BYTES, abs=SLACK), (
        "only the column that changed"
    )


@pytest.mark.proof
def test_two_hundred_steps_leave_nothing_in_the_store_nor_in_the_driver(groups):
    def steps(count: int) -> None:
        for _ in range(count):
            run_step(groups, length=1024)

    step_bytes = 6 * ROWS * 1024 * 4  # replies of less than 100 KiB travel inside the answer
    steps(200)  # the allocator and Ray's tables grow to their size
    resident, created = resident_bytes_without_shared(), created_bytes()
    steps(200)
    assert created_bytes() - created >= 200 * step_bytes, "these steps did use the store"
    assert used_bytes_once_at_most(SLACK) <= SLACK
    assert resident_bytes_without_shared() - resident <= 4 * step_bytes, (
        "of the 200 steps, four would show"
    )


def test_columns_stay_in_the_store_as_long_as_the_driver_has_them(groups):
    actor, critic, _ = groups
    batch = DataProto.from_dict({"input_ids": ones(ROWS, LENGTH), "responses": ones(ROWS, LENGTH)})
    actor.only_count(batch)
    assert used_bytes_once_at_most(2 * COLUMN_BYTES + SLACK) >= 2 * COLUMN_BYTES
    future = critic.whole_shard.remote(batch)
    del batch
    assert future.get(timeout=300).batch["responses"].eq(1).all(), (
        "a call in flight has them as well"
    )
    del future
    assert used_bytes_once_at_most(SLACK) <= SLACK


def test_a_future_is_forwarded_by_reference_and_split_anew_on_the_workers(groups):
    first, second, single = groups
    batch = DataProto.from_dict(
        {"responses": torch.arange(ROWS * LENGTH, dtype=torch.float32).view(ROWS, LENGTH)}
    )
    future = first.whole_shard.remote(batch)
    for shard, part in zip(second.split(future, 2), future.parts, strict=True):
        assert shard.parts[shard.index].payload is part.payload, (
            "the worker is given the other worker's object"
        )
    ray.wait([part.payload for part in future.parts], num_returns=2, timeout=300)
    before, private = created_bytes(), resident_bytes_without_shared()
    assert second.only_count(future).meta_info["rows"] == ROWS // 2
    assert single.sums(future)[0]["responses"] == pytest.approx(
        float(batch.batch["responses"].sum()), rel=1e-5
    )
    assert created_bytes() - before <= SLACK, "nothing was copied into the store for these calls"
    assert resident_bytes_without_shared() - private <= COLUMN_BYTES // 2, "nor into the driver"
    assert future.get(timeout=300).equal(batch)


def test_ragged_columns_travel_without_padding(groups):
    actor, _, _ = groups
    lengths = torch.randint(1, LENGTH // 4, (ROWS,), generator=torch.Generator().manual_seed(0))
    values = torch.arange(int(lengths.sum()), dtype=torch.float32)
    ragged = torch.nested.nested_tensor_from_jagged(values, lengths=lengths)
    batch = DataProto.from_dict({"responses": ragged, "input_ids": ragged.clone()})
    before = created_bytes()
    result = actor.whole_shard(batch)
    assert result.equal(batch)
    assert created_bytes() - before == pytest.approx(2 * 2 * values.nbytes, abs=SLACK), (
        "there and back, two columns"
    )
    assert ROWS * int(lengths.max()) > 1.5 * len(values), "padding would show"


def test_small_batches_travel_inside_the_call(groups):
    actor, _, _ = groups
    before = store().cumulative_created_objects
    batch = DataProto.from_dict({"responses": ones(8, 64)}, meta_info={"temperature": 0.5})
    assert actor.whole_shard(batch).equal(batch)
    assert store().cumulative_created_objects == before


def test_many_objects_in_a_column_travel_once_through_the_store(groups):
    actor, _, _ = groups
    batch = DataProto.from_dict(non_tensors={"raw_prompt": [f"{i} " * 1000 for i in range(ROWS)]})
    before = created_bytes()
    assert actor.only_count(batch).meta_info["rows"] == ROWS // 2
    size = sum(map(len, batch.non_tensor_batch["raw_prompt"]))
    assert size <= created_bytes() - before <= size + SLACK
