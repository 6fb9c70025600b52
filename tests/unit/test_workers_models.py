"""The models over packed sequences, against transformers' own unpadded forward and a float64
reference."""

import copy
import importlib.util
from dataclasses import replace

import pytest
import torch
from tiny_worker_models import VOCABULARY, make_batch, write_model, write_reward_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4Config,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteSWAConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.workers.config.engine import ForwardFsdpConfig
from verl_like.workers.config.models import ModelConfig, PolicyModelConfig
from verl_like.workers.engine.micro_batch import MicroBatch
from verl_like.workers.models import linear_log_prob
from verl_like.workers.models.attention import (
    Queries,
    Sequences,
    choose_attention,
    packed_varlen,
    settle_sinks,
)
from verl_like.workers.models.packed_models import PolicyModel, RewardModel, ValueModel
from verl_like.workers.models.packing import SEQUENCE_COLUMNS, Rows, pack
from verl_like.workers.models.pretrained import (
    check_sequence_length,
    load_hf_config,
    load_pretrained,
)

FLOAT32 = ForwardFsdpConfig(dtype="float32")
TINY = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "policy")


def load(auto_class, path, **kwargs):
    kwargs = {"weights": True, "key": "actor_rollout_ref.model", "device": "cpu", **kwargs}
    return load_pretrained(auto_class, ModelConfig(path=path), FLOAT32, **kwargs)


def rows_of(data):
    return Rows.of(data.select(batch_keys=SEQUENCE_COLUMNS))


def by_row(rows, packed, scored):
    """What a model returns of scored tokens, (B, R)."""
    return MicroBatch(rows, "cpu").of_rows(packed.of_tokens(scored))


def unpadded(rows, row):
    """(1, length) token ids of one row, and the number of its response tokens."""
    return torch.cat([rows["prompts"][row], rows["responses"][row]])[None], int(
        rows["response_mask"][row].sum()
    )


def reference_scores(hf, rows, row, temperature):
    """Log-probabilities and entropies of one row's response tokens, by the model's own forward,
    without padding."""
    tokens, count = unpadded(rows, row)
    log_probs = torch.log_softmax(hf(tokens).logits[0] / temperature, dim=-1)[-count - 1 : -1]
    return log_probs.gather(-1, tokens[0, -count:, None])[:, 0], -(log_probs.exp() * log_probs).sum(
        -1
    )


def test_a_packed_batch_expands_values_on_the_device_to_which_it_was_moved():
    packed = pack(rows_of(make_batch(rows=3))).on("meta")
    tensors = [value for value in vars(packed).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    values = torch.ones(len(packed.scored), device="meta")
    assert packed.of_tokens(values).device.type == "meta"


def test_packed_log_probs_and_entropies_are_those_of_single_unpadded_sequences(model_path):
    rows = rows_of(make_batch(rows=6))
    packed = pack(rows)
    log_probs, entropies = PolicyModel(load(AutoModelForCausalLM, model_path))(
        packed, 0.7, with_entropy=True
    )
    log_probs_BR, entropies_BR = by_row(rows, packed, log_probs), by_row(rows, packed, entropies)
    hf = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager")
    for row in range(6):
        expected_log_probs, expected_entropies = reference_scores(hf, rows, row, temperature=0.7)
        count = len(expected_log_probs)
        torch.testing.assert_close(log_probs_BR[row, :count], expected_log_probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropies_BR[row, :count], expected_entropies, rtol=0, atol=1e-5)
        assert not log_probs_BR[row, count:].any() and not entropies_BR[row, count:].any()


def test_gradients_of_log_probs_and_entropy_agree_with_float64(model_path):
    rows = rows_of(make_batch(rows=4))
    weights_BR = torch.linspace(-1, 1, 4 * 6).view(4, 6)
    policy = PolicyModel(load(AutoModelForCausalLM, model_path))
    packed = pack(rows)
    log_probs, entropies = policy(packed, 0.7, with_entropy=True)
    log_probs_BR, entropies_BR = by_row(rows, packed, log_probs), by_row(rows, packed, entropies)
    (log_probs_BR * weights_BR + entropies_BR * weights_BR.flip(0)).sum().backward()

    hf = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager").double()
    total = 0.0
    for row in range(4):
        log_prob, entropy = reference_scores(hf, rows, row, temperature=0.7)
        count = len(log_prob)
        total = (
            total
            + (log_prob * weights_BR[row, :count] + entropy * weights_BR.flip(0)[row, :count]).sum()
        )
    total.backward()
    expected = dict(hf.named_parameters())
    for name, parameter in policy.hf.named_parameters():
        error = (parameter.grad - expected[name].grad).norm() / expected[name].grad.norm()
        assert error < 2e-6, f"{name}: relative error {error}"


def test_chunks_of_the_vocabulary_projection_change_neither_values_nor_gradients(
    model_path, monkeypatch
):
    packed = pack(rows_of(make_batch(rows=4)))

    def run():
        policy = PolicyModel(load(AutoModelForCausalLM, model_path))
        log_probs, entropies = policy(packed, 1.0, with_entropy=True)
        (log_probs.sum() + 2 * entropies.sum()).backward()
        return (
            log_probs,
            entropies,
            policy.hf.lm_head.weight.grad,
            policy.hf.model.embed_tokens.weight.grad,
        )

    whole = run()
    monkeypatch.setattr(linear_log_prob, "LOGITS_PER_CHUNK", {"cpu": 3 * len(packed.labels)})
    for got, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


SHORT, LONG = [1.0, 1.5, 2.0, 2.5], [2.0, 4.0, 6.0, 8.0]
ROPES = {  # both are fixed functions for up to 11 tokens, the longest rows of `make_batch`
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 4.0,
        "original_max_position_embeddings": 11,
    },
}
FAMILIES = {
    "llama, dynamic": LlamaConfig(
        **TINY, max_position_embeddings=11, rope_parameters=ROPES["dynamic"]
    ),
    "llama, longrope": LlamaConfig(
        **TINY, max_position_embeddings=44, rope_parameters=ROPES["longrope"]
    ),
    "llama": LlamaConfig(**TINY, num_key_value_heads=2),
    "qwen2": Qwen2Config(
        **TINY,
        num_key_value_heads=2,
        sliding_window=3,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    "qwen3": Qwen3Config(**TINY, num_key_value_heads=2, head_dim=16),
    "mistral": MistralConfig(**TINY, num_key_value_heads=2, sliding_window=3),
    "gemma": GemmaConfig(**TINY, num_key_value_heads=1, head_dim=8),
    "gemma2": Gemma2Config(
        **TINY,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=3,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=2.0,
    ),
    "gemma3": Gemma3TextConfig(
        **TINY, num_key_value_heads=2, head_dim=8, sliding_window=3, sliding_window_pattern=2
    ),
    "granite": GraniteConfig(**TINY, num_key_value_heads=2, logits_scaling=3.0),
    "cohere": CohereConfig(**TINY, num_key_value_heads=2, logit_scale=0.3),
    # Layers alternate between a window and all tokens, with a sink of each head in both.
    "gpt_oss": GptOssConfig(
        **TINY,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=3,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    ),
    "granite_swa": GraniteSWAConfig(
        **TINY, num_key_value_heads=2, sliding_window=3, logits_scaling=3.0
    ),
}


def reference_and_packed(config):
    """The same random weights with transformers' own attention and with ours."""
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    for name, parameter in reference.named_parameters():
        if "sinks" in name:
            nn.init.normal_(parameter, mean=1.0)
    attention = choose_attention(None, "cpu", torch.float32)
    hf = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    hf.load_state_dict(reference.state_dict())
    return reference, hf


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_and_gradients_of_a_family_are_those_of_its_own_attention(family):
    reference, hf = reference_and_packed(FAMILIES[family])
    rows = rows_of(make_batch(rows=4))
    assert rows.lengths_B.max() > 6  # longer than the windows
    packed = pack(rows)
    log_probs_BR = by_row(rows, packed, PolicyModel(hf)(packed, 1.0)[0])
    log_probs_BR.sum().backward()
    for row in range(4):
        expected, _ = reference_scores(reference, rows, row, temperature=1.0)
        torch.testing.assert_close(log_probs_BR[row, : len(expected)], expected, rtol=0, atol=1e-5)
        expected.sum().backward()
    gradients = dict(hf.named_parameters())
    for name, parameter in reference.named_parameters():
        error = (gradients[name].grad - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{name}: relative error {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_changing_one_sequence_changes_no_other(family):
    policy = PolicyModel(reference_and_packed(FAMILIES[family])[1])
    rows = rows_of(make_batch(rows=3))
    before = by_row(rows, pack(rows), policy(pack(rows), 1.0)[0])
    changed = replace(rows, columns={**rows.columns, "prompts": rows["prompts"].clone()})
    changed["prompts"][1][-1] = 40 - changed["prompts"][1][-1]
    after = by_row(changed, pack(changed), policy(pack(changed), 1.0)[0])
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("requested", ["varlen", "flash_attention_2"])
def test_attention_that_has_no_sinks_is_refused_for_a_model_with_them_and_else_replaced(requested):
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(FAMILIES["gpt_oss"], attn_implementation="packed_fa2")
    with pytest.raises(
        ValueError, match=rf"{requested} does not compute attention sinks.*self_attn\.sinks"
    ):
        settle_sinks(hf, requested)
    settle_sinks(hf, None)
    assert hf.config._attn_implementation == "packed_torch"


def test_values_are_read_at_the_token_before_each_response_token(model_path):
    rows = rows_of(make_batch(rows=4))
    hf = load(AutoModelForTokenClassification, model_path, new_head_seed=3)
    packed = pack(rows)
    values_BR = by_row(rows, packed, ValueModel(hf)(packed))
    hf.set_attn_implementation("eager")
    hf.eval()
    for row in range(4):
        tokens, count = unpadded(rows, row)
        torch.testing.assert_close(
            values_BR[row, :count], hf(tokens).logits[0, -count - 1 : -1, 0], rtol=0, atol=1e-5
        )


def test_a_reward_model_scores_the_last_token(tmp_path):
    path = write_reward_model(tmp_path / "reward")
    rows = rows_of(make_batch(rows=4))
    scores = RewardModel(load(AutoModelForSequenceClassification, path))(pack(rows))
    hf = AutoModelForSequenceClassification.from_pretrained(
        path, attn_implementation="eager", num_labels=1
    )
    for row in range(4):
        torch.testing.assert_close(
            scores[row], hf(unpadded(rows, row)[0]).logits[0, 0], rtol=0, atol=1e-5
        )


def test_a_row_without_a_prompt_is_refused():
    rows = rows_of(make_batch(rows=2))
    prompts = jagged_from_lists([rows["prompts"][0].tolist(), []], torch.int64)
    with pytest.raises(
        ValueError, match=rf"every row needs a prompt token, but .* \[{len(prompts[0])}, 0\]"
    ):
        pack(replace(rows, columns={**rows.columns, "prompts": prompts}))


def test_padded_columns_are_refused_with_what_to_do():
    with pytest.raises(
        ValueError,
        match=r"has padded columns, but .* take jagged ones: register the method .*jagged=True",
    ):
        Rows.of(padded(make_batch(rows=2)))


def test_response_tokens_that_are_not_scored_are_read_and_have_no_log_prob(model_path):
    data = make_batch(rows=6)
    mask = data.batch["response_mask"]
    mask.values()[::2] = 0
    rows = rows_of(data)
    packed = pack(rows)
    log_probs_BR = by_row(
        rows, packed, PolicyModel(load(AutoModelForCausalLM, model_path))(packed, 0.7)[0]
    )
    hf = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager")
    for row, is_scored in enumerate(mask):
        tokens, count = (
            torch.cat([data.batch["prompts"][row], data.batch["responses"][row]]),
            len(is_scored),
        )
        log_probs = torch.log_softmax(hf(tokens[None]).logits[0] / 0.7, dim=-1)[-count - 1 : -1]
        expected = log_probs.gather(-1, tokens[-count:, None])[:, 0] * is_scored
        torch.testing.assert_close(log_probs_BR[row, :count], expected, rtol=0, atol=1e-5)


def test_a_path_without_a_model_is_refused_without_asking_the_hub(tmp_path):
    with pytest.raises(ValueError, match=r"critic\.model\.path=.*nothing-here: there is no model"):
        load_hf_config(ModelConfig(path=str(tmp_path / "nothing-here")), key="critic.model")


def test_layers_that_would_mix_packed_sequences_are_refused(tmp_path):
    Qwen3NextConfig(**TINY, layer_types=["full_attention", "linear_attention"]).save_pretrained(
        tmp_path
    )
    with pytest.raises(
        ValueError, match="has layers of linear_attention, which packed sequences do not support"
    ):
        load_hf_config(ModelConfig(path=str(tmp_path)), key="m")


@pytest.mark.parametrize("kind", ROPES)
def test_positions_that_depend_on_the_length_of_a_sequence_are_refused(kind):
    config = FAMILIES[f"llama, {kind}"]
    check_sequence_length(config, 11, "the model", "")
    which = (
        " before rope_type=longrope changes them by the longest .* pass"
        if kind == "longrope"
        else ""
    )
    with pytest.raises(
        ValueError, match=f"^m.path=p has 11 positions{which}; lower it, or choose another model"
    ):
        check_sequence_length(config, 12, "m.path=p", "lower it")
    nested, later = (
        copy.deepcopy(config),
        ROPES["longrope"] | {"original_max_position_embeddings": 30},
    )
    for others in ({"rope_type": "default"}, later):
        nested.rope_parameters = {"full_attention": ROPES[kind], "sliding_attention": others}
        with pytest.raises(ValueError, match=f"11 positions{which};"):
            check_sequence_length(nested, 50, "m.path=p", "lower it")
    check_sequence_length(
        LlamaConfig(**TINY, max_position_embeddings=12), 12, "m.path=p", "lower it"
    )


def test_a_model_that_trains_with_dropout_is_refused_with_the_overrides_that_switch_it_off(
    tmp_path,
):
    # Attn_pdrop, embd_pdrop and a head's dropout are 0.1
    GPT2Config(resid_pdrop=0.0).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"set m\.override_config\.\w+_pdrop=0\.0 and m\.override_config\.\w+=0\.0\.$",
    ):
        load_hf_config(PolicyModelConfig(path=str(tmp_path)), key="m")
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0}
    load_hf_config(PolicyModelConfig(path=str(tmp_path), override_config=off), key="m")
    load_hf_config(ModelConfig(path=str(tmp_path)), key="m")  # never trained


def test_an_override_the_model_does_not_know_is_refused(model_path):
    config = ModelConfig(path=model_path, override_config={"attention_dropuot": 0.0})
    with pytest.raises(ValueError, match="attention_dropuot"):
        load_pretrained(AutoModelForCausalLM, config, FLOAT32, key="m", device="cpu", weights=True)


def test_a_model_that_drops_attention_is_refused_when_it_trains(model_path):
    config = ModelConfig(path=model_path, override_config={"attention_dropout": 0.1})
    hf = load_pretrained(AutoModelForCausalLM, config, FLOAT32, key="m", device="cpu", weights=True)
    with pytest.raises(ValueError, match="attention_dropout=0"):
        PolicyModel(hf).train()(pack(rows_of(make_batch(rows=2))), 1.0)


def test_a_reward_model_without_a_trained_head_is_refused(model_path):
    with pytest.raises(ValueError, match=r"score\.weight"):
        load(AutoModelForSequenceClassification, model_path)


def test_a_new_value_head_depends_on_the_seed_alone(model_path):
    heads = [
        load(AutoModelForTokenClassification, model_path, new_head_seed=seed).score.weight
        for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_attention_kernels_that_need_a_gpu_are_refused_on_a_cpu():
    with pytest.raises(ValueError, match="on a GPU"):
        choose_attention("varlen", "cpu", torch.bfloat16)


@pytest.mark.parametrize("groups", [4, 2])
def test_the_varlen_kernel_takes_grouped_heads_and_windows(groups):
    """On the meta device: what is passed to torch's kernel is what its signature has."""
    query, key, value = (
        torch.empty(1, heads, 10, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, groups, groups)
    )
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    output = packed_varlen(query, key, value, Sequences([4, 6], starts, window=3))
    assert output.shape == (1, 10, 4, 64)
    gradients = torch.autograd.grad(output.sum(), (query, key, value))
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def test_the_varlen_kernel_takes_fewer_queries_than_keys_where_sequences_share_tokens():
    query, key, value = (
        torch.empty(1, 4, size, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for size in (7, 10, 10)
    )
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    sequences = Sequences([4, 6], starts, shared=Queries([4, 3], starts))
    output = packed_varlen(query, key, value, sequences)
    assert output.shape == (1, 7, 4, 64)
    gradients = torch.autograd.grad(output.sum(), (query, key, value))
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def test_a_kernel_that_cannot_bound_attention_logits_is_neither_chosen_nor_accepted():
    assert choose_attention(None, "cuda", torch.bfloat16, softcap=50.0) != choose_attention(
        None, "cuda", torch.bfloat16
    ) or importlib.util.find_spec("flash_attn")
    with pytest.raises(ValueError, match="cannot bound attention logits"):
        choose_attention("varlen", "cuda", torch.bfloat16, softcap=50.0)


def test_models_that_change_their_logits_in_unknown_ways_are_refused():
    for change, config in {
        "lm_head_multiplier": LlamaConfig(**TINY, lm_head_multiplier=2.0),
        "bias=True": PhiConfig(**TINY),
    }.items():
        with pytest.raises(ValueError, match=f"{change}.* support"):
            PolicyModel(AutoModelForCausalLM.from_config(config))


def test_the_bound_of_logits_is_that_of_the_language_model_in_a_model_that_also_sees_images():
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(
            Gemma4Config(text_config={**TINY, "final_logit_softcapping": 2.0})
        )
    assert PolicyModel(hf).softcap == 2.0


def test_a_greedy_temperature_has_no_log_probs(model_path):
    with pytest.raises(ValueError, match="temperature=0"):
        PolicyModel(load(AutoModelForCausalLM, model_path))(pack(rows_of(make_batch(rows=2))), 0.0)
