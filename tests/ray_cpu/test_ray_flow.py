"""One toy PPO flow gives the same numbers for every placement of its two roles."""

from typing import Any

import pytest
import torch
from toy_workers import Policy, Value

from verl_like.protocol import DataProto, Metric
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

POLICY, VALUE = RayClassWithInitArgs(Policy), RayClassWithInitArgs(Value)


def run_flow(actor: Any, critic: Any) -> tuple[DataProto, list[dict[str, Metric]]]:
    """Three steps; every independent call is submitted before one is waited for."""
    metrics = []
    for step in range(3):
        batch = DataProto.from_dict({"prompts": torch.arange(6.0) + step})
        responses = actor.generate_sequences.remote(batch)
        values = critic.compute_values(responses)  # a future handed on
        batch = batch.union(responses.get()).union(values.get())
        batch.batch["returns"] = batch.batch["responses"] * 2
        batch.batch["advantages"] = batch.batch["returns"] - batch.batch["values"]
        updates = [critic.update_critic(batch), actor.update_actor(batch)]
        metrics += [update.get().meta_info["metrics"] for update in updates]
    return batch, metrics


def run_colocated() -> tuple[DataProto, list[dict[str, Metric]]]:
    pool = RayResourcePool([2], use_gpu=False)
    host = RayWorkerGroup(pool, create_colocated_worker_cls({"actor": POLICY, "critic": VALUE}))
    groups = host.spawn(["actor", "critic"])
    try:
        return run_flow(groups["actor"], groups["critic"])
    finally:
        host.shutdown()
        pool.release()


def run_split() -> tuple[DataProto, list[dict[str, Metric]]]:
    pools = [RayResourcePool([2], use_gpu=False), RayResourcePool([2], use_gpu=False)]
    groups = [
        RayWorkerGroup(pools[0], POLICY, role="actor"),
        RayWorkerGroup(pools[1], VALUE, role="critic"),
    ]
    try:
        return run_flow(*groups)
    finally:
        for group, pool in zip(groups, pools, strict=True):
            group.shutdown()
            pool.release()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_colocated_split_and_local_runs_of_one_flow_give_equal_results():
    local = run_flow(
        LocalWorkerGroup(POLICY, 2, role="actor"), LocalWorkerGroup(VALUE, 2, role="critic")
    )
    colocated, split = run_colocated(), run_split()
    assert colocated[0].equal(split[0]) and colocated[0].equal(local[0])
    assert colocated[1] == split[1] == local[1]
    # Step 1 by hand: responses r = p + 1 (weight 1), values r / 2, advantages 1.5 r, whose halves
    # have the means 1.5 * (1 + 2 + 3) / 3 = 3 and 1.5 * (4 + 5 + 6) / 3 = 7.5: weights 1 - .2 * (1
    # - 3) = 1.4 and 2.3, mean 1.85.
    assert local[1][1]["actor/weight"].value == pytest.approx(1.85)
