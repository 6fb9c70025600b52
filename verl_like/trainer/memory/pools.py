"""The models and engines that lie on the GPUs of a run, for the sums of `sums.py`."""

from collections.abc import Sequence
from typing import Any

import torch

from verl_like.single_controller.ray.start import cluster_address
from verl_like.trainer.config.detached import TRAINED, DetachedConfig
from verl_like.trainer.config.roles import Role, reward_model_key
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.config.supervised import DPOConfig, ILQLConfig, RMConfig, SupervisedConfig
from verl_like.trainer.memory.sums import (
    ASLEEP,
    ModelSize,
    Phase,
    PlannedModel,
    PlannedPool,
    RolloutShare,
    require_memory,
)
from verl_like.workers.config.engine import ForwardFsdpConfig
from verl_like.workers.models.ilql import ILQLModel
from verl_like.workers.models.packed_models import PackedModel, PolicyModel, RewardModel, ValueModel
from verl_like.workers.models.pretrained import TEACHER_PATH
from verl_like.workers.planning.partition import MicroBatching, log_prob_micro_batching

POLICY_PATH = "actor_rollout_ref.model"


def planned_pools(config: RunConfig, device_bytes: float) -> list[PlannedPool]:
    """Return the pools of a run of any entry point, on GPUs of `device_bytes`.

    Of detached makers and trainers, the first ones stand for all. Custom roles are not counted.
    """
    if isinstance(config, SupervisedConfig):
        trainer = config.trainer
        nodes = [trainer.n_gpus_per_node] * trainer.nnodes
        return [PlannedPool("model_pool", config, nodes, _models_of_examples(config))]
    assert isinstance(config, PPOConfig)
    if isinstance(config, DetachedConfig):
        of_trainer = config.of_trainer(config.detached.trainer_names[0])
        of_maker = config.of_maker(config.detached.maker_names[0])
        pools = _pools_of(of_trainer, config.plan.trainer_roles, device_bytes)
        return pools + _pools_of(of_maker, config.plan.maker_roles, device_bytes, copied=TRAINED)
    return _pools_of(config, config.plan.active_roles, device_bytes)


def memory_phases(config: RunConfig, device_bytes: float) -> list[Phase]:
    """Return all phases of all pools."""
    return [phase for pool in planned_pools(config, device_bytes) for phase in pool.phases()]


def check_memory(config: RunConfig) -> list[str]:
    """Say what a GPU of each pool holds at most, if the run starts on a machine that has GPUs.

    Raises ValueError if what is certain does not fit. Returns nothing for a run that joins a
    cluster, whose GPUs the driver cannot see.
    """
    if not isinstance(config, PPOConfig | SupervisedConfig):  # a trainer of somebody's own
        return []
    joins_cluster = cluster_address(config.ray_kwargs.ray_init.address)
    if config.trainer.device != "cuda" or not torch.cuda.is_available() or joins_cluster:
        return []
    devices = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    device_bytes = min(device.total_memory for device in devices)
    return [require_memory(planned_pools(config, device_bytes), device_bytes)]


def _pools_of(
    config: PPOConfig, roles: Sequence[str], device_bytes: float, copied: Sequence[str] = ()
) -> list[PlannedPool]:
    """Return the pools of these roles. Roles in `copied` have copies of their models."""
    models = {
        role: _model_of(config, role, is_copy=role in copied)
        for role in roles
        if _has_model(config, role)
    }
    pools = []
    for name in dict.fromkeys(config.role_mapping[role] for role in roles):
        its_roles = [role for role in roles if config.role_mapping[role] == name]
        rollout = _rollout_share(config, device_bytes) if Role.Rollout in its_roles else None
        its_models = [models[role] for role in its_roles if role in models]
        if its_models or rollout:  # a pool may have custom roles alone
            pools.append(
                PlannedPool(name, config, config.resource_pool_spec[name], its_models, rollout)
            )
    return pools


def _rollout_share(config: PPOConfig, device_bytes: float) -> RolloutShare:
    rollout = config.actor_rollout_ref.rollout
    working = {"engine's share": rollout.gpu_memory_utilization * device_bytes}
    asleep = {"sleeping engine*": ASLEEP}
    if rollout.name == "hf":  # has a whole model, reserves nothing, and sleeps in host memory
        policy = ModelSize.of(config.actor_rollout_ref.model, POLICY_PATH, PolicyModel)
        weights = policy.parameters * getattr(torch, rollout.dtype).itemsize + policy.buffers
        working = {"engine's weights": weights}
        asleep = {}
    return RolloutShare(working, asleep if rollout.free_cache_engine else working)


def _has_model(config: PPOConfig, role: str) -> bool:
    """Return whether the role is a built-in one that has a model in a training process."""
    if role == Role.Teacher:
        return config.actor_rollout_ref.teacher_model is not None
    return (
        role in (Role.Actor, Role.RefPolicy, Role.Critic)
        or role in config.plan.reward_models_by_role
    )


def _model_of(config: PPOConfig, role: str, is_copy: bool) -> PlannedModel:
    policy = config.actor_rollout_ref
    critic = config.critic
    data = config.data
    lengths: dict[str, Any] = {
        "sequence_length": data.max_prompt_length + data.max_response_length,
        "scored_length": data.max_response_length,
    }
    ranks = config.num_processes(role)
    if role == Role.Critic:
        forward_passes = MicroBatching(
            critic.forward_micro_batch_size_per_gpu,
            critic.forward_max_token_len_per_gpu,
            critic.use_dynamic_bsz,
        )
        return _planned(
            role,
            ModelSize.of(critic.model, "critic.model", ValueModel),
            critic.model,
            critic.model.fsdp_config,
            ranks,
            is_copy=is_copy,
            forward_passes=forward_passes,
            update_passes=_passes_of_updates(critic),
            ranks_of_sequence=critic.ulysses_sequence_parallel_size,
            **lengths,
        )
    if role in config.plan.reward_models_by_role:
        reward = config.plan.reward_models_by_role[role]
        forward_passes = MicroBatching(
            reward.micro_batch_size_per_gpu,
            reward.forward_max_token_len_per_gpu,
            reward.use_dynamic_bsz,
        )
        size = ModelSize.of(reward.model, reward_model_key(role), RewardModel)
        fsdp = reward.model.fsdp_config
        return _planned(
            role, size, reward.model, fsdp, ranks, forward_passes=forward_passes, **lengths
        )
    lengths["ranks_of_sequence"] = policy.actor.ulysses_sequence_parallel_size
    if role == Role.Actor:
        return _planned(
            role,
            ModelSize.of(policy.model, POLICY_PATH, PolicyModel),
            policy.model,
            policy.actor.fsdp_config,
            ranks,
            is_copy=is_copy,
            forward_passes=log_prob_micro_batching(policy.rollout),
            update_passes=_passes_of_updates(policy.actor),
            has_ema=policy.actor.ema_decay is not None,
            export_dtype=policy.rollout.dtype,
            **lengths,
        )
    model, key = (
        (policy.model, POLICY_PATH)
        if role == Role.RefPolicy
        else (policy.teacher_model, TEACHER_PATH)
    )
    assert model
    size = ModelSize.of(model, key, PolicyModel)
    fsdp = policy.ref.fsdp_config
    return _planned(
        role,
        size,
        model,
        fsdp,
        ranks,
        forward_passes=log_prob_micro_batching(policy.ref),
        **lengths,
    )


def _passes_of_updates(settings: Any) -> MicroBatching:
    """Return the micro-batches of the updates of an actor or a critic."""
    return MicroBatching(
        settings.ppo_micro_batch_size_per_gpu,
        settings.ppo_max_token_len_per_gpu,
        settings.use_dynamic_bsz,
    )


def _planned(
    name: str,
    size: ModelSize,
    model: Any,
    fsdp: Any,
    ranks: int,
    *,
    is_copy: bool = False,
    **more: Any,
) -> PlannedModel:
    """Return the model of a role on `ranks`. A copy is not trained, and stored in the data type in
    which it computes."""
    if is_copy:
        fsdp = ForwardFsdpConfig(param_offload=fsdp.param_offload, dtype=fsdp.dtype)
        more |= {"update_passes": None, "has_ema": False, "export_dtype": None}
    shards = ranks if fsdp.num_shards == -1 else fsdp.num_shards
    return PlannedModel(str(name), size, model, fsdp, shards, **more)


def _models_of_examples(config: SupervisedConfig) -> list[PlannedModel]:
    """Return the model that learns, and before it the reference model of DPO."""
    training = config.training
    model = config.model
    length = config.data.max_length
    classes: dict[type, type[PackedModel]] = {RMConfig: RewardModel, ILQLConfig: ILQLModel}
    is_of_pairs = isinstance(config, RMConfig | DPOConfig)
    passes = MicroBatching(
        training.micro_batch_size_per_gpu, training.max_token_len_per_gpu, training.use_dynamic_bsz
    )
    shared: dict[str, Any] = {
        "forward_passes": passes,
        "sequence_length": 2 * length if is_of_pairs else length,
        "scored_length": 2 * length if is_of_pairs else length,
        "ranks_of_sequence": training.ulysses_sequence_parallel_size,
    }
    size = ModelSize.of(model, "model", classes.get(type(config), PolicyModel))
    ranks = config.num_processes_of_run
    has_reference = isinstance(config, DPOConfig) and not model.lora_rank
    own = shared | {"update_passes": passes, "runs_reference": has_reference}
    trained = _planned("model", size, model, model.fsdp_config, ranks, **own)
    if not has_reference:
        return [trained]
    return [
        _planned("reference", size, model, model.fsdp_config, ranks, is_copy=True, **shared),
        trained,
    ]
