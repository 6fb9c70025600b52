"""How a mixture's experts are computed: by one grouped matrix product, or in a loop over them.

transformers chooses it when it makes a model, as `choose_attention` chooses the attention: torch's
`grouped_mm` for all models whose classes have its interface for experts. Where a GPU lacks it,
transformers' own product loops over the experts. Other models have loops of their own.
"""

from typing import Any

from transformers import PretrainedConfig

from verl_like.workers.config.models import ModelConfig

GROUPED = "grouped_mm"


def experts_notes(
    config: ModelConfig, hf_config: PretrainedConfig, auto_class: Any, key: str
) -> list[str]:
    """Returns what the start of a run says of how experts are computed.

    It is nothing if there is no choice: for a model without experts, or with its own code.

    Args:
        config: the settings of the model.
        hf_config: its own configuration.
        auto_class: transformers' class for the task.
        key: the configuration key of `config`.
    """
    model_class = auto_class._model_mapping.get(type(hf_config), None)
    has_choice = getattr(model_class, "_can_set_experts_implementation", None)
    if has_choice is None or not has_choice():
        return []
    chosen = config.experts_implementation or GROUPED
    return [f"Experts of {key}: {chosen}"]
