"""Both sides of `shared_prompts`: an actor in this process, whose rows share prompts or do not."""

import time
from typing import Any

import numpy as np
import torch

from benchmarks.serve import serve
from verl_like.protocol import DataProto, metric_values
from verl_like.protocol.row_ops import jagged_from_lists, jagged_parts
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config import load_ppo_config
from verl_like.workers.actor import ActorWorker

ROWS_OF_PASS = 16
state: dict[str, Any] = {}


def start(
    model: str,
    shares: bool,
    num_prompts: int,
    num_samples: int,
    prompt_length: int,
    response_length: int,
) -> dict[str, Any]:
    """Makes the actor, and draws prompts and responses, the same on both sides."""
    torch.set_num_threads(1)
    policy = "actor_rollout_ref"
    config = load_ppo_config(
        [
            "device=cpu",
            "placement=colocated",
            "trainer.n_gpus_per_node=1",
            "data.train_files=none",
            "data.val_files=none",
            "algorithm.adv_estimator=grpo",
            f"data.max_prompt_length={prompt_length}",
            f"data.max_response_length={response_length}",
            f"data.train_batch_size={num_prompts}",
            f"{policy}.model.path={model}",
            f"{policy}.model.enable_gradient_checkpointing=false",
            f"{policy}.actor.ppo_mini_batch_size={num_prompts}",
            f"{policy}.actor.ppo_micro_batch_size_per_gpu={ROWS_OF_PASS}",
            f"{policy}.actor.optim.lr=1e-6",
            f"{policy}.actor.fsdp_config.strategy=single",
            f"{policy}.actor.use_prefix_grouper={shares}",
            f"{policy}.rollout.log_prob_micro_batch_size_per_gpu={ROWS_OF_PASS}",
            f"{policy}.rollout.n={num_samples}",
        ]
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 4000, (num_prompts, prompt_length)).repeat(num_samples, 0)
    shape = (num_prompts * num_samples, response_length)
    columns = {
        "prompts": prompts,
        "responses": rng.integers(1, 4000, shape),
        "response_mask": np.ones(shape, dtype=np.int64),
    }
    tensors = {name: jagged_from_lists(list(rows), torch.int64) for name, rows in columns.items()}
    tensors["advantages"] = jagged_from_lists(list(rng.standard_normal(shape)), torch.float32)
    state["batch"] = DataProto.from_dict(tensors)
    worker = ClassWithInitArgs(ActorWorker, config=config.actor_rollout_ref)
    state["group"] = LocalWorkerGroup(worker)
    state["group"].init_model()
    return {}


def score() -> dict[str, Any]:
    """Computes log-probabilities: their seconds, and themselves."""
    started = time.perf_counter()
    scored = state["group"].compute_log_prob(state["batch"]).get()
    seconds = time.perf_counter() - started
    values, _offsets = jagged_parts(scored.batch["old_log_probs"])
    return {"seconds": seconds, "values": values.numpy()}


def update() -> dict[str, Any]:
    """Does an optimizer step: its seconds, and loss and norm of the gradient."""
    started = time.perf_counter()
    output = state["group"].update_actor(state["batch"]).get()
    seconds = time.perf_counter() - started
    metrics = metric_values(output.meta_info["metrics"])
    values = [metrics["actor/pg_loss"], metrics["actor/grad_norm"]]
    return {"seconds": seconds, "values": np.array(values)}


if __name__ == "__main__":
    serve(start, score, update)
