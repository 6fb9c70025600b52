"""Expert parallelism: each rank has whole experts, and tokens travel to the ranks of their experts.

transformers sends the tokens, by all-to-all (`ep_dispatch_experts`). The rest of the model is
sharded as it is without this, and each rank has its own rows of a batch.
"""

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_expert_parallelism

_DISPATCH = "ep_dispatch_experts"
"""The name of the style in transformers' plans by which tokens travel."""


def experts_of(hf: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules of experts that transformers can distribute, in the model's order."""
    styles = hf.ep_plan
    found = []
    for name, module in hf.named_modules():
        pattern = _with_any_layer(name)
        if styles.get(pattern) == _DISPATCH:
            found.append(module)
    return found


def _with_any_layer(name: str) -> str:
    """Returns the name of a module with a star for each number, as plans have it."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    return ".".join(parts)


def require_expert_parallel(
    hf: PreTrainedModel, expert_parallel_size: int, num_shards: int, *, key: str
) -> None:
    """Raises ValueError unless `expert_parallel_size` ranks can share the experts of a model.

    Args:
        hf: the model, which may be on the meta device.
        expert_parallel_size: how many ranks have different experts.
        num_shards: how many ranks share one copy of the parameters.
        key: the configuration key of `expert_parallel_size`, for messages.
    """
    what = f"{key}={expert_parallel_size}"
    experts = experts_of(hf)
    if not experts:
        raise ValueError(
            f"{what}: {type(hf).__name__} has no experts that transformers distributes; set it to "
            "1, so that experts are sharded as all other parameters"
        )
    if num_shards % expert_parallel_size:
        raise ValueError(
            f"{what} does not divide the {num_shards} ranks that share the parameters; possible "
            f"are {_divisors(num_shards)}"
        )
    for module in experts:
        num_experts = len(next(module.parameters()))
        if num_experts % num_shards:
            raise ValueError(
                f"{what}: the {num_shards} ranks that share the parameters do not get equal "
                f"numbers of the {num_experts} experts of a layer; set fsdp_size to a divisor of "
                f"{num_experts}, or {key} to 1"
            )


def _divisors(number: int) -> Sequence[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def distribute_experts(hf: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Gives each rank of a mesh its experts of each layer, and makes tokens travel to them.

    The parameters of experts, which are on the meta device, become DTensors. The first of n ranks
    has the first experts of E, those with ids below E / n, and so on.
    """
    plan = dict(hf.ep_plan)
    apply_expert_parallelism(hf, mesh, None, plan)
