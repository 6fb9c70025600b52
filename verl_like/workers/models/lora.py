"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) by peft: a frozen matrix W becomes W +
alpha / rank * B A.

peft is imported only in functions that make an adapter, so that other models do not wait for it.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.models.packed_models import decoder_layers, head_name


def is_adapter(name: str) -> bool:
    """Returns True for the name of an adapter's parameter, False for one of the frozen model."""
    return ".lora_" in name or ".modules_to_save." in name


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns names and parameters of the adapter, or all parameters of a model without one.

    Tied parameters come once.
    """
    parameters = list(model.named_parameters())
    of_adapter = [named for named in parameters if is_adapter(named[0])]
    return of_adapter or parameters


def model_buffers(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Returns names and tensors of the buffers that are in the model's checkpoints.

    Tied buffers come once. For a model with an adapter there are none: its buffers are those of the
    frozen model, which every process reads from the model's folder.
    """
    parameters = model.named_parameters()
    if any(is_adapter(name) for name, _ in parameters):
        return []
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return [named for named in model.named_buffers() if named[0] not in computed]


def parts_with_experts(hf: PreTrainedModel) -> set[str]:
    """Returns the names of those parts of decoder layers that have experts in any of the layers.

    It is empty for a model without experts.
    """
    names = set()
    for layer in decoder_layers(hf):
        for name, part in layer.named_children():
            inner = {path.split(".")[-1] for path, _module in part.named_modules()}
            if "experts" in inner | {name}:
                names.add(name)
    return names


def _possible_targets(hf: PreTrainedModel) -> dict[nn.Module, str]:
    """Returns the linear modules of decoder layers that can have an adapter, with their short
    names, such as q_proj.

    In a mixture of experts they are those of the attention: an adapter of a router would be read
    by its experts, and engines read experts otherwise than peft writes them.
    """
    left_out = parts_with_experts(hf)
    possible: dict[nn.Module, str] = {}
    for layer in decoder_layers(hf):
        for name, module in layer.named_modules():
            part, _, _ = name.partition(".")
            if isinstance(module, nn.Linear) and part not in left_out:
                _, _, short_name = name.rpartition(".")
                possible[module] = short_name
    return possible


def adapted_names(hf: PreTrainedModel) -> list[str]:
    """Returns the short names of the modules that have an adapter, sorted."""
    names = set()
    for name, _module in hf.named_modules():
        parent, _, last = name.rpartition(".")
        if last == "lora_A":
            names.add(parent.split(".")[-1])
    return sorted(names)


def lora_config(hf: PreTrainedModel, config: TrainedModelConfig, all_linear: Any) -> Any:
    """Returns peft's settings of the adapter.

    The whole head is trained if the model is not a language model. `all_linear` is what stands for
    the target all-linear.
    """
    from peft import LoraConfig

    targets = config.target_modules
    if targets == "all-linear":
        targets = all_linear
    path = config.expanded_path
    if os.path.isdir(path):  # otherwise it is the name of a model of the hub
        path = os.path.abspath(path)
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=None if hf.can_generate() else [head_name(hf)],
        base_model_name_or_path=path,
    )


def add_adapter(hf: PreTrainedModel, config: ModelConfig, key: str) -> None:
    """Freezes the model and adds an adapter, if `config` has one.

    B is zero, and torch's generator draws A. Raises ValueError for targets that match nothing, or
    something outside of the decoder layers. `key` is the configuration key of the model.
    """
    if not isinstance(config, TrainedModelConfig) or not config.lora_rank:
        return
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets = config.target_modules
    within = _possible_targets(hf)
    possible = sorted(set(within.values()))
    has_experts = bool(parts_with_experts(hf))
    # peft would adapt the experts of a mixture, too.
    all_linear = possible if has_experts else "all-linear"
    what = f"{key}.target_modules={targets}"
    advice = f"give some of {', '.join(possible)}, or all-linear."
    try:
        inject_adapter_in_model(lora_config(hf, config, all_linear), hf)
    except ValueError as error:
        layers_with_adapter = "Linear layers of the attention" if has_experts else "Linear layers"
        raise ValueError(f"{what}: {error} {layers_with_adapter} get adapters: {advice}") from error
    for _name, parameter in trained_parameters(hf):
        parameter.data = parameter.to(hf.dtype)  # peft does this, but not on the meta device
    adapted = []
    outside = []
    for name, module in hf.named_modules():
        if isinstance(module, BaseTunerLayer):
            adapted.append(f".{name}")
            if module.get_base_layer() not in within:
                outside.append(name)
    unused = []
    names = () if isinstance(targets, str) else targets
    for target in names:
        if not any(name.endswith(f".{target}") for name in adapted):
            unused.append(target)
    if outside:
        allowed = "the attention of a mixture of experts" if has_experts else "decoder layers"
        raise ValueError(
            f"{what}: {', '.join(outside)} cannot have an adapter, only {allowed} can; {advice}"
        )
    if unused:
        raise ValueError(f"{what}: {type(hf).__name__} has no layer {', '.join(unused)}; {advice}")


@contextmanager
def without_adapter(hf: nn.Module) -> Iterator[None]:
    """Makes a context in which the model computes without its adapter, as the frozen model."""
    layers: list[Any] = [module for module in hf.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        # peft's enable_adapters would also change requires_grad, which FSDP2 does not allow.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def with_scale(
    parameters: Iterable[tuple[str, Tensor]], config: TrainedModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters in the form that rollout engines and copies load.

    In it B has the factor alpha / rank. Such a parameter is a detached copy.
    """
    for name, parameter in parameters:
        if ".lora_B." in name:
            factor = config.lora_alpha / config.lora_rank
            yield name, parameter.detach() * factor
        else:
            yield name, parameter


def merged_weights(
    hf: PreTrainedModel, settings: Any, trained: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the weights of a model with its adapter merged into its matrices, in `dtype`.

    Buffers keep their dtype.

    Args:
        hf: a model of the same class.
        settings: peft's settings of the adapter, which name the folder of the frozen model.
        trained: the parameters of the adapter, and further ones, of which only the dtype changes.
        dtype: the dtype of the result.
    """
    from peft import LoraModel

    path = settings.base_model_name_or_path
    model_class = type(hf)
    hf = model_class.from_pretrained(path, config=hf.config, dtype=torch.float32)
    tuner: Any = LoraModel(hf, settings, "default")
    parameters = dict(trained_parameters(hf))
    assert parameters.keys() == set(filter(is_adapter, trained)), "an adapter of other settings"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(trained[name])
    merged: Any = tuner.merge_and_unload()
    weights: dict[str, Tensor] = dict(merged.named_parameters())
    for name, value in trained.items():
        if not is_adapter(name):
            weights[name] = value
    weights = {name: value.detach().to(dtype) for name, value in weights.items()}
    return weights | dict(model_buffers(merged))
