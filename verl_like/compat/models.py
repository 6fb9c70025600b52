"""The models of the ColossalAI way: transformers models in the script's memory."""

from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from verl_like.workers.models.hub import require_hub_model
from verl_like.workers.models.packed_models import head_name


class Model(nn.Module):
    """A transformers model in host memory, in float32 and without dropout.

    It has the weights of `pretrained`, a folder or hub name, or random ones of `config`. Without
    both it is made as the last actor in `model_init_context` was.
    """

    auto_class: ClassVar[Any]
    source: ClassVar[str | PretrainedConfig | None] = None

    def __init__(
        self, pretrained: str | None = None, config: PretrainedConfig | None = None
    ) -> None:
        super().__init__()
        source = pretrained or config or Model.source
        if source is None:
            raise ValueError(
                f"{type(self).__name__}() names no model, and no actor was made before it: give "
                "pretrained=<folder or hub name>, or config=<a configuration of transformers>"
            )
        if isinstance(source, str) and not Path(source).is_dir():
            require_hub_model(source, f"{type(self).__name__}(pretrained={source!r})")
        made = AutoConfig.from_pretrained(source) if isinstance(source, str) else deepcopy(source)
        if self.auto_class is AutoModelForCausalLM:
            Model.source = source
        else:
            made.num_labels = 1
        for name, value in list(vars(made).items()):
            if "drop" in name and isinstance(value, float):
                setattr(made, name, 0.0)
        self.hf: PreTrainedModel
        if isinstance(source, str):
            self.hf = self.auto_class.from_pretrained(source, config=made, dtype=torch.float32)
        else:
            self.hf = self.auto_class.from_config(made, dtype=torch.float32)

    @property
    def model(self) -> nn.Module:
        """The model below its head."""
        return self.hf.base_model

    def cuda(self, device: Any = None) -> "Model":
        """Stays: `fit` places the models."""
        return self


class Actor(Model):
    """A policy; `deepcopy(actor)` is its reference."""

    auto_class = AutoModelForCausalLM


class Critic(Model):
    """A critic."""

    auto_class = AutoModelForTokenClassification

    @property
    def value_head(self) -> nn.Module:
        return self.hf.get_submodule(head_name(self.hf))


class RewardModel(Model):
    """A reward model: `pretrained`, or a critic's model with its head, of no bias, which scores the
    last token."""

    auto_class = AutoModelForSequenceClassification

    def __init__(
        self, model: Any = None, value_head: Any = None, *, pretrained: str | None = None
    ) -> None:
        super().__init__(pretrained, model and model.config)
        if model is not None:
            if value_head.bias is not None and value_head.bias.any():
                raise ValueError(
                    f"RewardModel: the value head has a bias of {value_head.bias.item()}, and a "
                    "reward model's head has none: set it to 0, which moves all scores by as much"
                )
            self.model.load_state_dict(model.state_dict())
            own_head = self.hf.get_submodule("score")
            own_head.load_state_dict({"weight": value_head.weight})
