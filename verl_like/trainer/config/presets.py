"""Values that follow other keys, such as
`${half_cluster:${trainer.nnodes},${trainer.n_gpus_per_node}}`."""

from collections.abc import Mapping
from typing import Any

from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.trainer.config.errors import ConfigError


def whole_cluster(nnodes: int, n_gpus_per_node: int) -> list[int]:
    """Processes per node of a pool on every device."""
    _require_positive_integers(nnodes, n_gpus_per_node)
    return [n_gpus_per_node] * nnodes


def half_cluster(nnodes: int, n_gpus_per_node: int) -> list[int]:
    """Processes per node of each of the two pools of placement=split: half of one node, or half of
    the nodes.

    Raises ConfigError if there are no two equal halves.
    """
    _require_positive_integers(nnodes, n_gpus_per_node)
    if nnodes == 1 and n_gpus_per_node % 2 == 0:
        return [n_gpus_per_node // 2]
    if nnodes > 1 and nnodes % 2 == 0:
        return [n_gpus_per_node] * (nnodes // 2)
    if nnodes == 1:
        key = "trainer.n_gpus_per_node"
        odd = n_gpus_per_node
        policy = [odd // 2 + 1]
        critic = [odd // 2]
    else:
        key = "trainer.nnodes"
        odd = nnodes
        policy = [n_gpus_per_node] * (odd // 2 + 1)
        critic = [n_gpus_per_node] * (odd // 2)
    problem = (
        "placement=split gives the policy and the critic half of the devices each, but "
        f"trainer.nnodes={nnodes} x trainer.n_gpus_per_node={n_gpus_per_node} has no two equal "
        "halves: several nodes are halved as whole nodes."
    )
    if odd == 1:
        raise ConfigError(f"{problem} Set {key}=2 or more, or placement=colocated.")
    raise ConfigError(
        f"{problem} Set {key}={odd - 1} or {key}={odd + 1}, or size the pools yourself, e.g. "
        f"'resource_pool_spec.actor_rollout_ref_pool={policy}' "
        f"'resource_pool_spec.critic_pool={critic}'."
    )


def float_of_device(device: str) -> str:
    """The data type in which a device computes by default."""
    return "float32" if device == "cpu" else "bfloat16"


def default_routing(device: str, max_staleness: int, *, _root_: Mapping[str, Any]) -> str:
    """`rollout.routing`: fixed on a CPU, unless makers may be ahead. `_root_` is the whole
    configuration."""
    is_ahead = "detached" in _root_ and max_staleness != 0
    return "fixed" if device == "cpu" and not is_ahead else "least_loaded"


def aggregation_of_loss(loss_mode: str) -> str:
    """The aggregation that a policy loss is defined with: the default of its parameter
    `loss_agg_mode`.

    token-mean for a loss without such a default, and for one of a plugin that is not yet imported.
    """
    if loss_mode not in POLICY_LOSSES.names():
        return "token-mean"
    return POLICY_LOSSES.facts(loss_mode).loss_agg_mode


RESOLVERS = (whole_cluster, half_cluster, float_of_device, aggregation_of_loss, default_routing)
"""These functions, under whose names YAML files and defaults call them."""


def _require_positive_integers(nnodes: object, n_gpus_per_node: object) -> None:
    given = {"trainer.nnodes": nnodes, "trainer.n_gpus_per_node": n_gpus_per_node}
    for key, value in given.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key}={value}: expected a positive integer")
