"""Finds the models and engines that are on the GPUs of a run, for the sums of `sums.py`."""

from collections.abc import Sequence
from typing import Any

import torch

from verl_like.trainer.config.detached import TRAINED, DetachedConfig
from verl_like.trainer.config.roles import POLICY_KEY, Role, reward_model_key
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.config.supervised import DPOConfig, ILQLConfig, RMConfig, SupervisedConfig
from verl_like.trainer.memory.sums import (
    ASLEEP,
    ModelSize,
    PlannedModel,
    PlannedPool,
    RolloutShare,
    require_memory,
)
from verl_like.workers.config.engine import ForwardFsdpConfig
from verl_like.workers.config.models import ModelConfig
from verl_like.workers.models.ilql import ILQLModel
from verl_like.workers.models.packed_models import PackedModel, PolicyModel, RewardModel, ValueModel
from verl_like.workers.models.pretrained import TEACHER_PATH
from verl_like.workers.planning.partition import (
    MicroBatching,
    log_prob_micro_batching,
    update_micro_batching,
)

OF_POLICY_OR_CRITIC = (Role.Actor, Role.RefPolicy, Role.Teacher, Role.Critic)
"""Roles that have a model in a training process, besides reward models."""


def planned_pools(config: RunConfig, device_bytes: float) -> list[PlannedPool]:
    """Returns the pools of a run of any command, on GPUs of `device_bytes`.

    In detached training the first maker stands for all makers, and the first trainer for all
    trainers. Custom roles are not counted.
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


def check_memory(config: RunConfig) -> list[str]:
    """Returns a note with the largest sum of each pool, if the run starts on a machine with GPUs.

    Raises ValueError if a sum does not fit for certain. For a run that joins a cluster there is no
    note, because the driver cannot see the GPUs.
    """
    if not isinstance(config, PPOConfig | SupervisedConfig):  # the trainer of a plugin
        return []
    has_gpus = config.trainer.device == "cuda" and torch.cuda.is_available()
    if config.cluster_address or not has_gpus:
        return []
    numbers = range(torch.cuda.device_count())
    device_bytes = min(torch.cuda.get_device_properties(n).total_memory for n in numbers)
    return [require_memory(planned_pools(config, device_bytes), device_bytes)]


def _pools_of(
    config: PPOConfig, roles: Sequence[str], device_bytes: float, copied: Sequence[str] = ()
) -> list[PlannedPool]:
    """Returns the pools of these roles. The models of roles in `copied` are not trained."""
    pools = []
    names = [config.role_mapping[role] for role in roles]
    for name in dict.fromkeys(names):
        models = []
        rollout = None
        for role in roles:
            if config.role_mapping[role] != name:
                continue
            if role == Role.Rollout:
                rollout = _rollout_share(config, device_bytes)
            elif role in OF_POLICY_OR_CRITIC or role in config.plan.reward_models_by_role:
                models.append(_model_of(config, role, is_copy=role in copied))
        if models or rollout:  # a pool may have only custom roles
            nodes = config.resource_pool_spec[name]
            pools.append(PlannedPool(name, config, nodes, models, rollout))
    return pools


def _rollout_share(config: PPOConfig, device_bytes: float) -> RolloutShare:
    """The memory that the rollout engine takes of a GPU."""
    rollout = config.actor_rollout_ref.rollout
    working = {"engine's share": rollout.gpu_memory_utilization * device_bytes}
    asleep = {"sleeping engine*": ASLEEP}
    if rollout.name == "hf":  # it has a whole model, reserves nothing, and sleeps in host memory
        policy = ModelSize.of(config.actor_rollout_ref.model, POLICY_KEY, PolicyModel)
        itemsize = getattr(torch, rollout.dtype).itemsize
        weights = policy.parameters * itemsize + policy.buffers
        working = {"engine's weights": weights}
        asleep = {}
    return RolloutShare(working, asleep if rollout.free_cache_engine else working)


def _model_of(config: PPOConfig, role: str, is_copy: bool) -> PlannedModel:
    """The model of a built-in role of PPO."""
    policy = config.actor_rollout_ref
    ranks = config.num_processes(role)
    lengths: dict[str, Any] = {
        "sequence_length": config.data.max_prompt_length + config.data.max_response_length,
        "scored_length": config.data.max_response_length,
    }
    if role == Role.Critic:
        critic = config.critic
        forward_passes = MicroBatching(
            critic.forward_micro_batch_size_per_gpu,
            critic.forward_max_token_len_per_gpu,
            critic.use_dynamic_bsz,
        )
        return _planned(
            role,
            critic.model,
            "critic.model",
            ValueModel,
            critic.model.fsdp_config,
            ranks,
            is_copy=is_copy,
            forward_passes=forward_passes,
            update_passes=update_micro_batching(critic),
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
        return _planned(
            role,
            reward.model,
            reward_model_key(role),
            RewardModel,
            reward.model.fsdp_config,
            ranks,
            forward_passes=forward_passes,
            **lengths,
        )
    lengths["ranks_of_sequence"] = policy.actor.ulysses_sequence_parallel_size
    if role == Role.Actor:
        return _planned(
            role,
            policy.model,
            POLICY_KEY,
            PolicyModel,
            policy.actor.fsdp_config,
            ranks,
            is_copy=is_copy,
            forward_passes=log_prob_micro_batching(policy.rollout),
            update_passes=update_micro_batching(policy.actor),
            has_ema=policy.actor.ema_decay is not None,
            export_dtype=policy.rollout.dtype,
            **lengths,
        )
    model: ModelConfig = policy.model
    key = POLICY_KEY
    if role == Role.Teacher:
        assert policy.teacher_model
        model = policy.teacher_model
        key = TEACHER_PATH
    return _planned(
        role,
        model,
        key,
        PolicyModel,
        policy.ref.fsdp_config,
        ranks,
        forward_passes=log_prob_micro_batching(policy.ref),
        **lengths,
    )


def _planned(
    name: str,
    model: ModelConfig,
    key: str,
    model_class: type[PackedModel],
    fsdp: Any,
    ranks: int,
    *,
    is_copy: bool = False,
    **more: Any,
) -> PlannedModel:
    """The model of a role on so many ranks. A copy is not trained, and is stored in the data type
    in which it computes."""
    if is_copy:
        fsdp = ForwardFsdpConfig(param_offload=fsdp.param_offload, dtype=fsdp.dtype)
        more |= {"update_passes": None, "has_ema": False, "export_dtype": None}
    shards = ranks if fsdp.num_shards == -1 else fsdp.num_shards
    size = ModelSize.of(model, key, model_class)
    return PlannedModel(name, size, model, fsdp, shards, **more)


def _models_of_examples(config: SupervisedConfig) -> list[PlannedModel]:
    """The model that is trained, and before it the reference model of DPO."""
    training = config.training
    model = config.model
    classes: dict[type, type[PackedModel]] = {RMConfig: RewardModel, ILQLConfig: ILQLModel}
    length = config.data.max_length
    if isinstance(config, RMConfig | DPOConfig):
        length *= 2  # an example has two conversations
    passes = MicroBatching(
        training.micro_batch_size_per_gpu, training.max_token_len_per_gpu, training.use_dynamic_bsz
    )
    shared: dict[str, Any] = {
        "model": model,
        "key": "model",
        "model_class": classes.get(type(config), PolicyModel),
        "fsdp": model.fsdp_config,
        "ranks": config.num_processes_of_run,
        "forward_passes": passes,
        "sequence_length": length,
        "scored_length": length,
        "ranks_of_sequence": training.ulysses_sequence_parallel_size,
    }
    has_reference = isinstance(config, DPOConfig) and not model.lora_rank
    trained = _planned("model", **shared, update_passes=passes, runs_reference=has_reference)
    if not has_reference:
        return [trained]
    reference = _planned("reference", **shared, is_copy=True)
    return [reference, trained]
