"""Models that would be computed wrongly, or not at all, are refused from their files and
configuration alone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_worker_models import VOCABULARY
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    DeepseekV3Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    GPTNeoConfig,
    GptOssConfig,
    JetMoeConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    NemotronConfig,
    PretrainedConfig,
    StableLmConfig,
)

from verl_like.workers.config.engine import ForwardFsdpConfig
from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.models.model_check import Trial, check_model
from verl_like.workers.models.packed_models import (
    PolicyModel,
    RewardModel,
    ValueModel,
    decoder_layers,
)
from verl_like.workers.models.pretrained import fetch_weights, load_pretrained, require_finite

TINY = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
NEO = TINY | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = DeepseekV3Config(
    **TINY | EXPERTS | {"num_key_value_heads": 4},
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)


def save(config: PretrainedConfig, folder: Path) -> ModelConfig:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def check(model: ModelConfig, model_class: type = PolicyModel, **options: object) -> None:
    check_model(model, model_class, fetch_weights(model, key="m"), key="m", **options)


@pytest.mark.parametrize("sequence_parallel_size", [1, 2, 4])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY),
        Gemma2Config(**TINY, head_dim=8, sliding_window=3),
        MixtralConfig(**TINY, num_local_experts=3),
        DEEPSEEK,
        GptOssConfig(**TINY, head_dim=8, num_local_experts=4),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_packed_attention_computes_pass(
    tmp_path: Path, config: PretrainedConfig, sequence_parallel_size: int
):
    check(save(config, tmp_path), sequence_parallel_size=sequence_parallel_size)


@pytest.mark.parametrize("sequence_parallel_size", [1, 2])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            DogeConfig(**TINY),
            "DogeAttention has an attention mask of its own, which packed attention does not "
            "compute",
        ),
        (StableLmConfig(**TINY), "StableLmAttention is not told where sequences begin"),
        (NemotronConfig(**TINY), "NemotronAttention is not told where sequences begin"),
        (
            FalconConfig(**TINY),
            "FalconForCausalLM does not compute attention by transformers' interface",
        ),
        (
            GPTNeoConfig(**NEO),
            "GPTNeoForCausalLM does not compute attention by transformers' interface",
        ),
        (
            BartConfig(
                **TINY, d_model=32, decoder_layers=2, decoder_ffn_dim=48, decoder_attention_heads=4
            ),
            "BartDecoderWrapper takes no position ids, so packed sequences would change each other",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_that_packed_attention_would_compute_wrongly_are_refused(
    tmp_path: Path, config: PretrainedConfig, reason: str, sequence_parallel_size: int
):
    with pytest.raises(ValueError, match=f"m.path={tmp_path}: {reason}"):
        check(save(config, tmp_path), sequence_parallel_size=sequence_parallel_size)


def test_a_layer_beside_others_that_does_not_attend_is_named():
    config = Lfm2Config(**TINY, layer_types=["full_attention", "conv"])
    with torch.device("meta"):
        trial = Trial(PolicyModel(AutoModelForCausalLM.from_config(config)))
    with pytest.raises(
        ValueError, match=r"^Lfm2DecoderLayer does not compute attention by transformers' interface"
    ):
        trial.run(1)


def read_values(module: torch.nn.Module, inputs: object, outputs: torch.Tensor) -> None:
    outputs.sum().item()


@pytest.mark.parametrize("layer_types", [["full_attention", "conv"], ["conv", "full_attention"]])
def test_a_layer_that_does_not_attend_is_named_also_if_the_pass_ends_for_want_of_values(
    layer_types: list[str],
):
    config = Lfm2Config(**TINY, layer_types=layer_types)
    with torch.device("meta"):
        trial = Trial(PolicyModel(AutoModelForCausalLM.from_config(config)))
    decoder_layers(trial.model.hf)[-1].register_forward_hook(read_values)
    with pytest.raises(
        ValueError, match=r"^Lfm2DecoderLayer does not compute attention by transformers' interface"
    ):
        trial.run(1)


def test_a_model_that_reads_values_passes_with_the_layers_that_attend():
    with torch.device("meta"):
        trial = Trial(PolicyModel(AutoModelForCausalLM.from_config(LlamaConfig(**TINY))))
    decoder_layers(trial.model.hf)[-1].register_forward_hook(read_values)
    trial.run(1)


def test_an_error_that_only_has_the_letters_meta_in_a_word_is_no_want_of_values():
    def refuse(module: torch.nn.Module, inputs: object) -> None:
        raise RuntimeError("the metadata of the cache is missing")

    with torch.device("meta"):
        trial = Trial(PolicyModel(AutoModelForCausalLM.from_config(LlamaConfig(**TINY))))
    decoder_layers(trial.model.hf)[-1].register_forward_pre_hook(refuse)
    with pytest.raises(
        ValueError, match=r"a pass over packed sequences fails \(RuntimeError: the metadata of"
    ):
        trial.run(1)


def test_a_model_that_cannot_compute_activations_again_is_refused_with_the_setting(tmp_path: Path):
    save(JetMoeConfig(**TINY, num_local_experts=2, kv_channels=8), tmp_path)
    model = TrainedModelConfig(path=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"JetMoeForCausalLM has no .* set m.enable_gradient_checkpointing=false"
    ):
        check(model)
    check(model.model_copy(update={"enable_gradient_checkpointing": False}))


@pytest.mark.parametrize(
    "config", [LlamaConfig(**TINY), MixtralConfig(**TINY)], ids=lambda config: config.model_type
)
@pytest.mark.parametrize(
    ("change", "name"),
    [({"vocab_size": 50}, "lm_head.weight is"), ({"intermediate_size": 40}, "model.layers.0.mlp")],
)
def test_weights_of_other_shapes_than_the_configuration_says_are_refused(
    tmp_path: Path, config: PretrainedConfig, change: dict[str, int], name: str
):
    model = save(config, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(
        ValueError, match=rf"m.path={tmp_path} does not fit its configuration: {name}"
    ):
        check(model)


def test_a_head_that_is_missing_is_refused_unless_the_role_makes_one(tmp_path: Path):
    model = save(LlamaConfig(**TINY), tmp_path)
    with pytest.raises(
        ValueError, match=r"lacks weights of LlamaForSequenceClassification: \['score.weight'\]"
    ):
        check(model, RewardModel)
    check(model, ValueModel, makes_head=True)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_with_file_and_tensor(tmp_path: Path, value: float):
    model = save(LlamaConfig(**TINY), tmp_path)
    (file,) = fetch_weights(model, key="m")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, file, {"format": "pt"})
    load = {"key": "m", "device": "cpu", "weights": True}
    with pytest.raises(
        ValueError, match=rf"NaN or infinite: model.layers.1.mlp.up_proj.weight of {file}; give"
    ):
        load_pretrained(AutoModelForCausalLM, model, ForwardFsdpConfig(dtype="float32"), **load)


def test_a_buffer_of_a_models_files_that_is_nan_is_refused_and_one_that_is_infinite_is_not(
    tmp_path: Path,
):
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    require_finite(layer, ModelConfig(path=str(tmp_path)), key="m")
    layer.mask[0] = float("nan")
    save_file({"mask": layer.mask}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"NaN or infinite: mask of {tmp_path}/model.safetensors; give"
    ):
        require_finite(layer, ModelConfig(path=str(tmp_path)), key="m")


@pytest.mark.parametrize("shard", ["1MB", "20KB"])
def test_weights_that_lie_there_twice_are_read_as_transformers_reads_them(
    tmp_path: Path, shard: str
):
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(
        tmp_path, max_shard_size=shard
    )
    save_file({"model.norm.weight": torch.ones(7)}, tmp_path / "consolidated.safetensors")
    check(ModelConfig(path=str(tmp_path)))


def test_of_weights_in_a_pickle_the_layers_alone_are_checked(tmp_path: Path):
    model = save(LlamaConfig(**TINY), tmp_path)
    (file,) = fetch_weights(model, key="m")
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    file.unlink()
    check(model)
    StableLmConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="StableLmAttention is not told"):
        check(model)
