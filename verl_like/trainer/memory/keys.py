"""Names the configuration keys that lower the memory of a role. The error of a role that has too
little memory names them."""

from dataclasses import dataclass

from verl_like.trainer.config.roles import Role


@dataclass(frozen=True)
class MemoryKeys:
    """The keys of the settings of one role."""

    passes: str
    """The key of the size of its micro-batches."""
    engine: str
    """The key of its fsdp_config."""
    trained_model: str | None = None
    """The key of its model, or None for a model that is not trained."""


OF_ROLE = {
    Role.Actor: MemoryKeys(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.fsdp_config",
        "actor_rollout_ref.model",
    ),
    Role.RefPolicy: MemoryKeys(
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.fsdp_config",
    ),
    Role.Teacher: MemoryKeys(
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.fsdp_config",
    ),
    Role.Critic: MemoryKeys(
        "critic.ppo_micro_batch_size_per_gpu", "critic.model.fsdp_config", "critic.model"
    ),
    Role.RewardModel: MemoryKeys(
        "reward_model.micro_batch_size_per_gpu", "reward_model.model.fsdp_config"
    ),
    # The model of a trainer on examples
    "model": MemoryKeys("training.micro_batch_size_per_gpu", "model.fsdp_config", "model"),
}


def keys_that_lower(memory: str, roles: str) -> str:
    """Returns a sentence with the keys that lower the memory of some roles.

    Args:
        memory: "host" or "device".
        roles: the names of the roles, joined by plus signs.
    """
    names = roles.split("+")
    of_roles = [OF_ROLE[role] for role in names if role in OF_ROLE]
    trained = [keys for keys in of_roles if keys.trained_model]
    offload = "false"
    if memory == "device":
        offload = "true"
    advice = [f"a smaller {keys.passes}" for keys in of_roles]
    advice += [f"{keys.trained_model}.enable_gradient_checkpointing=true" for keys in trained]
    advice += [f"{keys.engine}.param_offload={offload}" for keys in of_roles]
    advice += [f"{keys.engine}.optimizer_offload={offload}" for keys in trained]
    if roles != "model":
        advice.append("a smaller actor_rollout_ref.rollout.gpu_memory_utilization")
    if memory == "device":
        advice.append("more processes by trainer.n_gpus_per_node")
    else:
        advice += [
            "a smaller data.train_batch_size",
            "fewer processes on a node by trainer.n_gpus_per_node",
        ]
    each_once = dict.fromkeys(advice)
    ways = "; ".join(each_once)
    return f"What lowers the memory of the {memory}: {ways}. See docs/memory.md."
