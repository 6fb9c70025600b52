"""The model families for which tests show that vLLM computes what the trainer does, and that its
weights can be checked."""

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SERVED = frozenset(
    {
        "arcee",
        "cohere",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hyperclovax",
        "jais2",
        "llama",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    }
)
"""By `model_type`. `docs/models.md` has the proof, `make proofs` makes it anew."""


def shown_by_numbers(hf_config: PretrainedConfig) -> bool:
    """Returns True for a family outside of `SERVED`. vLLM may have a parameter of it whose layout
    is not known here; log-probabilities then show whether its weights arrived."""
    return hf_config.get_text_config().model_type not in SERVED


def require_served(hf_config: PretrainedConfig, setting: str, model: str) -> None:
    """Raises ValueError for a family of transformers that is not in `SERVED`; of others nothing is
    known before a run.

    `setting` is the engine's key and value, `model` the model's, for the message.
    """
    model_type = hf_config.get_text_config().model_type
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in SERVED:
        raise ValueError(
            f"{setting}: {model} is a {model_type}, which vLLM does not load, or of which it makes "
            "other log-probabilities than the trainer (docs/models.md, families): set "
            "actor_rollout_ref.rollout.name=hf, or choose a model of another family."
        )
