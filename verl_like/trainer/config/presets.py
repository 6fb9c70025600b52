"""Pool sizes of the placement presets, computed from trainer.nnodes and trainer.n_gpus_per_node."""

from omegaconf import OmegaConf

from verl_like.trainer.config.errors import ConfigError


def register_pool_resolvers() -> None:
    """Makes `${whole_cluster:nodes,gpus}` and `${half_cluster:nodes,gpus}` available to the YAML presets."""
    OmegaConf.register_new_resolver("whole_cluster", whole_cluster, replace=True)
    OmegaConf.register_new_resolver("half_cluster", half_cluster, replace=True)


def whole_cluster(nnodes: int, n_gpus_per_node: int) -> list[int]:
    """Processes per node of a pool on every device."""
    _require_positive_integers(nnodes, n_gpus_per_node)
    return [n_gpus_per_node] * nnodes


def half_cluster(nnodes: int, n_gpus_per_node: int) -> list[int]:
    """Processes per node of each of the two pools of placement=split: half of one node, or half of the nodes.

    Raises:
        ConfigError: there are no two equal halves; a device would be left over or a pool empty.
    """
    _require_positive_integers(nnodes, n_gpus_per_node)
    if nnodes == 1 and n_gpus_per_node % 2 == 0:
        return [n_gpus_per_node // 2]
    if nnodes > 1 and nnodes % 2 == 0:
        return [n_gpus_per_node] * (nnodes // 2)
    key, odd = ("trainer.n_gpus_per_node", n_gpus_per_node) if nnodes == 1 else ("trainer.nnodes", nnodes)
    problem = (
        f"placement=split gives one half of the devices to the policy and the other half to the critic, but "
        f"trainer.nnodes={nnodes} x trainer.n_gpus_per_node={n_gpus_per_node} has no two equal halves: one node is "
        f"halved inside, several nodes as whole nodes."
    )
    if odd == 1:
        raise ConfigError(f"{problem} Set {key}=2 or more, or placement=colocated.")
    policy, critic = odd // 2 + 1, odd // 2
    pools = ([policy], [critic]) if nnodes == 1 else ([n_gpus_per_node] * policy, [n_gpus_per_node] * critic)
    raise ConfigError(
        f"{problem} Set {key}={odd - 1} or {key}={odd + 1}, or size the pools yourself, e.g. "
        f"'resource_pool_spec.actor_rollout_ref_pool={pools[0]}' 'resource_pool_spec.critic_pool={pools[1]}'."
    )


def _require_positive_integers(nnodes: object, n_gpus_per_node: object) -> None:
    for key, value in (("trainer.nnodes", nnodes), ("trainer.n_gpus_per_node", n_gpus_per_node)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key}={value}: expected a positive integer")
