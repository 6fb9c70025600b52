"""Checks that the data of a step fits into the object store of a Ray that starts on this
machine."""

import shutil

import torch
from ray._common.utils import get_default_system_temp_dir
from ray._private.utils import (
    estimate_available_memory,
    get_shared_memory_bytes,
    resolve_object_store_memory,
)

from verl_like.protocol.columns import COLUMNS
from verl_like.protocol.padded import VERL_COLUMNS
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.memory.sums import ModelSize
from verl_like.trainer.ppo.choice_of_replay import empty_policy
from verl_like.trainer.ppo.workers import transport_to_copies
from verl_like.workers.models.packed_models import PolicyModel, ValueModel
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS
from verl_like.workers.models.router_replay import shape_of


def step_bytes(config: PPOConfig) -> dict[str, int]:
    """Returns the most bytes that the object store holds at the end of a step, by a description of
    what they are.

    Every column is there twice: as its worker returned it, and as the driver passes it on.
    """
    data = config.data
    length_of = {"P": data.max_prompt_length, "R": data.max_response_length, "B": 1}
    correction = config.algorithm.rollout_correction
    loss_needs = config.plan.loss_needs
    times_made = {
        "compute_values": config.plan.needs_critic,
        "compute_ref_log_prob": bool(config.plan.role_of_reference),
        "compute_log_prob": config.plan.needs_old_log_probs,
        "compute_log_prob, with router_replay.mode=R3": (
            config.actor_rollout_ref.actor.router_replay.chosen == "R3"
        ),
        "run_episodes": bool(config.agent.way),
        "run_episodes, as is_skipped": bool(config.agent.way),
        "compute_rm_score": len(config.plan.reward_models_by_role),
        "compute_log_prob, for the estimator": "sum_pi_squared" in config.plan.estimator_needs,
        "driver, by rollout_is": bool(correction.rollout_is),
        "driver, by rollout_rs": bool(correction.rollout_rs),
        "driver, by the policy loss": "selected_tokens" in loss_needs,
        "compute_teacher_log_prob, or a custom role": "teacher_log_prob" in loss_needs,
    }
    row_bytes = 0
    for column in COLUMNS.values():
        if column.kind == "tensor" and column.name not in (*VERL_COLUMNS, ROUTED_EXPERTS):
            dtype = getattr(torch, column.dtype)
            length = length_of[column.dims[-1]]
            row_bytes += times_made.get(column.writer, 1) * length * dtype.itemsize
    if config.actor_rollout_ref.actor.router_replay.chosen != "disabled":
        longest = data.max_prompt_length + data.max_response_length
        row_bytes += longest * shape_of(empty_policy(config)).token_bytes
    rollout = config.actor_rollout_ref.rollout
    num_rows = data.train_batch_size * rollout.n
    needed = {f"2 * {num_rows} rows of at most {row_bytes:,} bytes": 2 * num_rows * row_bytes}
    if rollout.weight_transport == "object_store":
        model = config.actor_rollout_ref.model
        policy = ModelSize.of(model, "actor_rollout_ref.model", PolicyModel)
        needed |= _exported("policy", policy, rollout.dtype)
    has_copy = isinstance(config, DetachedConfig) and config.plan.needs_critic
    if has_copy and transport_to_copies(config) == "object_store":
        model_of_critic = config.critic.model
        critic = ModelSize.of(model_of_critic, "critic.model", ValueModel)
        needed |= _exported("critic", critic, model_of_critic.fsdp_config.dtype)
    return needed


def _exported(role: str, model: ModelSize, dtype: str) -> dict[str, int]:
    """Returns the bytes of a model's exported weights, or of its adapter alone if it has one, by a
    description of them."""
    what = "adapter" if model.has_adapter else "weights"
    num_bytes = model.trained * getattr(torch, dtype).itemsize
    return {f"{what} of the {role}, {dtype}": num_bytes}


def check_object_store(needed: dict[str, int]) -> str | None:
    """Raises ValueError, with all terms of the sum, if the bytes `needed` do not fit. Returns a
    warning if the store would be on disk, or else None.

    Ray takes a share of the memory for its store. The store is in /dev/shm if that has room for it,
    and else in a folder on disk.
    """
    size = resolve_object_store_memory(estimate_available_memory())
    shared = get_shared_memory_bytes()
    folder = get_default_system_temp_dir()
    on_disk = shared < size
    total = sum(needed.values())
    room = size
    where = f"/dev/shm, which has {_gib(shared)}"
    if on_disk:
        disk = shutil.disk_usage(folder)
        room = min(size, disk.free)
        where = f"{folder}, for /dev/shm has {_gib(shared)}"
    if total > room:
        terms = "\n".join(f"  {what:<60} {_gib(amount):>12}" for what, amount in needed.items())
        raise ValueError(
            f"the data of a step does not fit into Ray's object store:\n{terms}\n  "
            f"{'together':<60} {_gib(total):>12}\n"
            f"  {'room in ' + where:<60} {_gib(room):>12}\n"
            "Give the container a larger /dev/shm (docker run --shm-size), or lower "
            "data.train_batch_size."
        )
    if on_disk:
        return (
            f"Warning: /dev/shm has only {_gib(shared)}, so Ray keeps its objects in {folder}, "
            f"which may be slower; a step has at most {_gib(total)} of them. In a container: "
            f"docker run --shm-size={1.1 * size / 2**30:.2f}g."
        )
    return None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
