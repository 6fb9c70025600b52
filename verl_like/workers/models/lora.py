"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) by peft: a frozen matrix W becomes W +
alpha / rank * B A.

peft is imported where an adapter is made: models without one do not wait for it.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.models.packed_models import head_name


def is_adapter(name: str) -> bool:
    """Whether the parameter of that name is trained, and not of the frozen model."""
    return ".lora_" in name or ".modules_to_save." in name


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The adapter's parameters, or all where there is no adapter; tied ones once."""
    parameters = list(model.named_parameters())
    return [each for each in parameters if is_adapter(each[0])] or parameters


def model_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model as its parameters do, since its checkpoints hold them;
    tied ones once.

    Under an adapter there are none: then they are those of the frozen model, which everybody reads
    for himself.
    """
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        return []
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in computed]


def lora_config(hf: PreTrainedModel, config: TrainedModelConfig) -> Any:
    """peft's settings of the adapter. A head that is not a language model's is trained whole."""
    from peft import LoraConfig

    targets = config.target_modules
    path = os.path.expanduser(config.path)
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=None if hf.can_generate() else [head_name(hf)],
        base_model_name_or_path=os.path.abspath(path) if os.path.isdir(path) else path,
    )


def add_adapter(
    hf: PreTrainedModel, layers: Sequence[nn.Module], config: ModelConfig, key: str
) -> None:
    """Where `config` asks for an adapter, freezes the model and adds one: B is zero, torch's
    generator draws A.

    Raises ValueError for targets that match nothing, or something outside of the decoder `layers`;
    `key` is the configuration key of the model.
    """
    if not isinstance(config, TrainedModelConfig) or not config.lora_rank:
        return
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets = config.target_modules
    within = {
        module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)
    }
    possible = {name.rpartition(".")[2] for name, module in hf.named_modules() if module in within}
    what = f"{key}.target_modules={targets}"
    advice = f"give some of {', '.join(sorted(possible))}, or all-linear."
    try:
        inject_adapter_in_model(lora_config(hf, config), hf)
    except ValueError as error:
        raise ValueError(f"{what}: {error} Linear layers get adapters: {advice}") from error
    for _, parameter in trained_parameters(hf):
        parameter.data = parameter.to(hf.dtype)  # as peft does, but not on the meta device
    adapted = {
        name: module for name, module in hf.named_modules() if isinstance(module, BaseTunerLayer)
    }
    names = [] if isinstance(targets, str) else targets
    if unused := [
        name for name in names if not any(f".{each}".endswith(f".{name}") for each in adapted)
    ]:
        raise ValueError(f"{what}: {type(hf).__name__} has no layer {', '.join(unused)}; {advice}")
    if outside := [
        name for name, module in adapted.items() if module.get_base_layer() not in within
    ]:
        raise ValueError(
            f"{what}: {', '.join(outside)} cannot have an adapter, only decoder layers can; "
            f"{advice}"
        )


@contextmanager
def without_adapter(hf: nn.Module) -> Iterator[None]:
    """Within it the model computes as the frozen one."""
    layers: list[Any] = [module for module in hf.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        # Enable_adapters changes requires_grad too, which FSDP2 must not see
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def with_scale(
    parameters: Iterable[tuple[str, torch.Tensor]], config: TrainedModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters as engines and copies hold them: B with the factor alpha / rank. Without
    gradients."""
    for name, parameter in parameters:
        is_b = ".lora_B." in name
        yield (
            name,
            parameter.detach() * (config.lora_alpha / config.lora_rank) if is_b else parameter,
        )


def merged_weights(
    hf: PreTrainedModel, settings: Any, trained: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The weights of the model that `settings` (peft's) names, with the adapter's values in its own
    matrices.

    `hf` is of its class. `trained` are the adapter, and further parameters, which stay as they are
    but for the dtype. Buffers keep theirs.
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
    others = {name: value for name, value in trained.items() if not is_adapter(name)}
    merged: Any = tuner.merge_and_unload()
    parameters = dict(merged.named_parameters()) | others
    return {name: value.detach().to(dtype) for name, value in parameters.items()} | dict(
        model_buffers(merged)
    )
