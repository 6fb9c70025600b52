"""Expert parallelism: each rank has whole experts, and tokens travel to the ranks of their experts.

transformers sends the tokens, by all-to-all (`ep_dispatch_experts`). The rest of the model is
sharded as it is without this, and each rank has its own rows of a batch.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    apply_expert_parallelism,
    replace_layer_number_by_wildcard,
)

from verl_like.workers.config.engine import TrainedFsdpConfig
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.models.packed_models import PackedModel
from verl_like.workers.models.pretrained import empty_model

_DISPATCH = "ep_dispatch_experts"
"""The name of the style in transformers' plans by which tokens travel."""


def experts_of(hf: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules of experts that transformers can distribute, in the model's order."""
    styles = hf.ep_plan
    found = []
    for name, module in hf.named_modules():
        if styles.get(replace_layer_number_by_wildcard(name)) == _DISPATCH:
            found.append(module)
    return found


def require_distributed_experts(
    config: TrainedModelConfig,
    fsdp: TrainedFsdpConfig,
    model_class: type[PackedModel],
    num_ranks: int,
    *,
    key: str,
    fsdp_key: str,
) -> None:
    """Raises ValueError if the experts of a model cannot be distributed as `fsdp` says.

    Args:
        config: the settings of the model, of which no weights are read.
        fsdp: how it is sharded.
        model_class: the role's class of the model.
        num_ranks: the number of ranks of the role.
        key: the configuration key of `config`, for messages.
        fsdp_key: that of `fsdp`.
    """
    if fsdp.expert_parallel_size == 1:
        return
    setting = f"{fsdp_key}.expert_parallel_size"
    what = f"{setting}={fsdp.expert_parallel_size}"
    hf = empty_model(config, model_class.auto_class, key=key)
    experts = experts_of(hf)
    if not experts:
        raise ValueError(
            f"{what}: {type(hf).__name__} of {key}.path={config.path} has no experts that "
            f"transformers can distribute; set {setting}=1, so that experts are sharded as all "
            "other parameters"
        )
    num_shards = num_ranks if fsdp.num_shards == -1 else fsdp.num_shards
    for module in experts:
        first_parameter = next(module.parameters())
        num_experts = len(first_parameter)
        if num_experts % num_shards:
            raise ValueError(
                f"{what}: {num_shards} ranks share the parameters of {key}.path={config.path}, "
                f"and the {num_experts} experts of a layer cannot be divided equally among them; "
                f"set {fsdp_key}.fsdp_size to a divisor of {num_experts}, or {setting}=1"
            )


def distribute_experts(hf: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Gives each rank of a mesh its experts of each layer, and makes tokens travel to them.

    The parameters of experts, which are on the meta device, become DTensors. The first of n ranks
    has the first experts of E, those with ids below E / n, and so on.
    """
    dispatched = [name for name, style in hf.ep_plan.items() if style == _DISPATCH]
    plan = {}
    for name, style in hf.ep_plan.items():
        module = name if name in dispatched else name.rpartition(".")[0]
        if module in dispatched:
            plan[name] = style
    no_tensor_parallelism: Any = None
    apply_expert_parallelism(hf, mesh, no_tensor_parallelism, plan)
