"""What an adapter of the actor demands, and a language-model loss beside the policy's (PPO-ptx)."""

from collections.abc import Iterator

from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.roles import Role


def ptx_rows_are_even(config: PPOConfig) -> Iterator[str]:
    actor, data, processes = config.actor_rollout_ref.actor, config.data, config.num_processes(Role.Actor)
    files, shared_by = list(data.ptx_files), actor.ulysses_sequence_parallel_size
    if bool(actor.ptx_coef) != bool(files):
        yield (
            f"actor_rollout_ref.actor.ptx_coef={actor.ptx_coef} weighs the loss on data.ptx_files={files}: give both "
            "or neither"
        )
    elif files and data.ptx_batch_size * shared_by % processes:
        yield (
            f"data.ptx_batch_size={data.ptx_batch_size} does not divide by {processes // shared_by}, the processes of "
            f"the pool {config.role_mapping[Role.Actor]} over those that share a sequence: every one gets as many rows"
        )


def a_reference_in_the_actor_computes_as_the_actor(config: PPOConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    dtype, own = policy.actor.fsdp_config.dtype, policy.ref.fsdp_config.dtype
    if config.role_of_reference == Role.Actor and own != dtype:
        yield (
            f"actor_rollout_ref.ref.fsdp_config.dtype={own}: with model.lora_rank={policy.model.lora_rank} the "
            f"reference is the actor without its adapter, which computes in {dtype}; set it to that"
        )
