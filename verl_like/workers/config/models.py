"""Settings of a model: where it comes from and how its layers compute."""

import os
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, Strict, field_validator

from verl_like.config_model import ConfigModel, NonNegativeInt, PositiveInt

_DTYPE_SYNONYMS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


_IMPLEMENTATIONS = {
    "attn_implementation": ("sdpa", "varlen", "flash_attention_2"),
    "experts_implementation": ("grouped_mm", "eager"),
}
"""The choices of how a model is computed, and their values."""


def _spell_out_dtype(value: object) -> object:
    return _DTYPE_SYNONYMS.get(value, value) if isinstance(value, str) else value


# The names are torch's, so a worker turns one into a dtype with getattr(torch, name).
TrainingDtype = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_spell_out_dtype)]
RolloutDtype = Annotated[
    Literal["float32", "bfloat16", "float16"], BeforeValidator(_spell_out_dtype)
]


class ModelConfig(ConfigModel):
    """A pretrained model that is only run forward."""

    path: str
    """Folder or hub name of the pretrained model."""
    trust_remote_code: bool = False
    """Whether code that ships with the model may run on this machine. Keep it off for models you
    have not read."""
    override_config: dict[str, Any] = Field(default={})
    """Attributes that replace those of the model's own configuration, e.g. {attention_dropout:
    0.0}; attn_implementation, the attention over packed sequences: sdpa, varlen (torch) or
    flash_attention_2, by default the fastest there is; and experts_implementation, how a mixture's
    experts are computed: grouped_mm, the default, or eager, a loop over them."""

    @property
    def expanded_path(self) -> str:
        """`path`, in which ~ is the home folder."""
        return os.path.expanduser(self.path)

    @property
    def attn_implementation(self) -> str | None:
        """The requested attention; None picks the fastest."""
        return self.override_config.get("attn_implementation")

    @property
    def experts_implementation(self) -> str | None:
        """The requested computation of experts; None picks the fastest."""
        return self.override_config.get("experts_implementation")

    @property
    def hf_overrides(self) -> dict[str, Any]:
        """`override_config` without `_IMPLEMENTATIONS`, which are ours and not the model's."""
        return {
            name: value
            for name, value in self.override_config.items()
            if name not in _IMPLEMENTATIONS
        }

    @field_validator("override_config")
    @classmethod
    def implementations_are_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, choices in _IMPLEMENTATIONS.items():
            requested = value.get(name)
            if requested not in (None, *choices):
                raise ValueError(f"{name}={requested}: expected {', '.join(choices)} or none")
        return value


class TrainedModelConfig(ModelConfig):
    """A pretrained model that is also trained and saved."""

    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third more compute for far less
    memory."""
    enable_activation_offload: bool = False
    """Keep what the backward pass needs of each layer in host memory until it is needed."""
    use_torch_compile: bool = False
    """Compile the layers with torch.compile: a slow first step, then fewer and larger kernels."""
    lora_rank: NonNegativeInt = 0
    """Rank of a low-rank adapter (LoRA, arXiv:2106.09685), which alone is trained, beside a head
    that is new; 0 trains the whole model."""
    lora_alpha: PositiveInt = 16
    """The adapter's product is multiplied by lora_alpha / lora_rank."""
    target_modules: str | Annotated[tuple[str, ...], Strict(False), Field(min_length=1)] = (
        "all-linear"
    )
    """Linear layers of the decoder that get an adapter: all-linear, in a mixture of experts those
    of the attention; a list of names, e.g. [q_proj, v_proj]; or a regular expression that matches
    whole names."""

    @property
    def tokenizer(self) -> str:
        """Folder or hub name of the tokenizer that is saved with the model."""
        return self.path

    def with_scaled_adapter(self) -> Self:
        """For engines and copies, whose B comes with the factor lora_alpha / lora_rank in it."""
        return self.model_copy(update={"lora_alpha": self.lora_rank})


class PolicyModelConfig(TrainedModelConfig):
    """The policy's pretrained model."""

    tokenizer_path: str | None = None
    """Folder or hub name of the tokenizer; null means the model's own."""

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_path or self.path
