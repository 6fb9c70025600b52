"""verl_like's side of the benchmarks of agents: the groups of rollout and agents of a run's
configuration, and the driver's router between them."""

import contextlib
import gc
import time
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.serve import serve
from benchmarks.sides import agents_world as world
from benchmarks.sides.agents_cpu import seconds_below, seconds_of
from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_parts
from verl_like.single_controller.worker_group import CallEvent
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.main_ppo import WORKERS
from verl_like.trainer.ppo.inputs import check_inputs
from verl_like.trainer.ppo.workers import build_resource_pools, load_models, start_groups
from verl_like.trainer.run import worker_template
from verl_like.trainer.run.shell import start_ray_of

state: dict[str, Any] = {}


def ignore(event: CallEvent) -> None:
    """Does nothing with what is known of a call that has ended."""


def start(folder: str, overrides: list[str], rows: dict[str, int]) -> dict[str, Any]:
    """Starts Ray, the agents and the engine of a run. `rows` are the arguments of `world.rows`."""
    data = f"{folder}/{'_'.join(map(str, rows.values()))}.parquet"
    num_prompts = rows["number"]
    pq.write_table(pa.Table.from_pylist(world.rows(**rows)), data)
    settings = [
        "device=cpu",
        "trainer.n_gpus_per_node=1",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.train_batch_size={num_prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts}",
        f"actor_rollout_ref.model.path={folder}/model",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "trainer.total_training_steps=1",
    ]
    config = load_ppo_config([*settings, *overrides])
    inputs = check_inputs(config, contextlib.ExitStack())
    roles = ["rollout", "agent"]
    has_weights = config.actor_rollout_ref.rollout.name != "scripted"
    if has_weights:
        roles.append("actor")
    template = worker_template.start(WORKERS)
    start_ray_of(config, template)
    gc.freeze()  # as the driver of a run does
    mapping = {role: inputs.role_worker_mapping[role] for role in roles}
    groups, _ = start_groups(config, mapping, build_resource_pools(config, roles), ignore)
    load_models(groups, "cpu")
    if has_weights:
        groups["rollout"].load_weights(groups["actor"].export_weights(version=1), version=1)
    state["template"] = template
    state["groups"] = groups
    state["prompts"] = inputs.train_dataset
    return {}


def run(first: int, number: int, is_greedy: bool = False) -> dict[str, Any]:
    """The episodes of `number` prompts: their tokens, masks and scores, the CPU seconds of each
    part, and the seconds by the wall."""
    prompts = state["prompts"]
    batch = prompts.collate([prompts[first + i] for i in range(number)], epoch=0)
    batch.meta_info |= {"global_steps": 1, "validate": is_greedy}
    before = cpu_seconds()
    before["driver"] = time.process_time()
    started = time.perf_counter()
    made = state["groups"]["agent"].run_episodes(batch).get()
    seconds = time.perf_counter() - started
    cpu = {name: value - before[name] for name, value in cpu_seconds().items()}
    metrics = {name: metric.value for name, metric in made.meta_info["metrics"].items()}
    return {"cpu": cpu, "seconds": seconds, "metrics": metrics, **columns(made)}


def columns(made: DataProto) -> dict[str, np.ndarray]:
    """The rows one after the other, and their lengths."""
    values = {
        name: jagged_parts(made.batch[name])[0].numpy()
        for name in ("responses", "response_mask", "episode_scores")
    }
    lengths = jagged_parts(made.batch["responses"])[1].diff().numpy()
    is_failed = made.batch["is_failed"].numpy()
    return values | {"lengths": lengths, "is_failed": is_failed}


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far, of what is ours and of what is beside it.

    Hosts run the code of a user and its clients.
    """
    driver = time.process_time()  # first, since the rest takes some milliseconds
    groups = state["groups"]
    (agent,) = groups["agent"].worker_pids
    (engine,) = groups["rollout"].worker_pids
    named = {
        "driver": driver,
        "agent": seconds_of(psutil.Process(agent)),
        "hosts": seconds_below(psutil.Process(agent)),
        "engine": seconds_of(psutil.Process(engine)) + seconds_below(psutil.Process(engine)),
    }
    everything = driver + seconds_below(psutil.Process())
    return named | {"ray": everything - sum(named.values())}


if __name__ == "__main__":
    serve(start, run)
