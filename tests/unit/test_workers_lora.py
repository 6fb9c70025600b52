"""Low-rank adapters: what is trained, what travels, and what is written, against transformers and
peft alone."""

import dataclasses
import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_experts import write_experts
from tiny_worker_models import (
    critic_config,
    local_group,
    make_batch,
    parameters_of,
    policy_config,
    write_model,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from verl_like.export import export
from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import deep_equal
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker import reserve_port
from verl_like.trainer.memory.sums import ModelSize
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.engine import TrainedFsdpConfig
from verl_like.workers.copies import ActorCopyWorker, CriticCopyWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.models.lora import adapted_names, is_adapter, lora_config, without_adapter
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.pretrained import empty_model, load_pretrained
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.rollout import RolloutEngine, get_rollout_engine
from verl_like.workers.rollout.request import GenerationRequest, Sampling
from verl_like.workers.weights.arrival import WeightSyncError

RANK, ALPHA, TARGETS = 3, 5, ("q_proj", "down_proj")
TEMPERATURE = 0.7  # of `policy_config`


def with_adapter(config: Any, **settings: Any) -> Any:
    """The settings of a role whose model has an adapter."""
    adapter = {"lora_rank": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS} | settings
    return config.model_copy(update={"model": config.model.model_copy(update=adapter)})


def policy(path: str, micro: int = 3, **settings: Any) -> Any:
    config = with_adapter(policy_config(path, micro=micro), **settings)
    return config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"dtype": "float32", "name": "hf"})}
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("lora") / "model")


@pytest.fixture(scope="module")
def actor(path: str) -> LocalWorkerGroup:
    """An actor that two steps have trained."""
    group = local_group(ActorWorker, policy(path))
    for seed in (0, 1):
        group.update_actor(make_batch(seed=seed)).get()
    return group


def by_peft(path: str, adapter: dict[str, torch.Tensor]) -> PeftModel:
    """The same model, made by peft from an adapter's values, in float64."""
    settings = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), settings).double()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in adapter.items():
            parameters[f"base_model.model.{name}"].copy_(value)
    return model.eval()


@torch.no_grad()
def log_probs_of(model: Any, data: DataProto) -> torch.Tensor:
    """Log-probabilities of all response tokens, by transformers, one row at a time."""
    found = []
    for prompt, response in zip(
        data.batch["prompts"].unbind(), data.batch["responses"].unbind(), strict=True
    ):
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[
            0, -len(response) - 1 : -1
        ]
        log_probs = (logits.double() / TEMPERATURE).log_softmax(-1)
        found.append(log_probs.gather(-1, response[:, None])[:, 0])
    return torch.cat(found)


def test_only_the_adapter_is_trained_and_the_model_computes_as_by_peft(
    actor: LocalWorkerGroup, path: str
):
    adapter = parameters_of(actor.workers[0])
    assert len(adapter) == 2 * len(TARGETS) * 2 and all(".lora_" in name for name in adapter)
    assert all(value.abs().max() > 1e-4 for value in adapter.values())
    before = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    frozen = {
        name.replace(".base_layer.", "."): p
        for name, p in actor.workers[0].engine.model.hf.named_parameters()
    }
    assert all(torch.equal(frozen[name].full_tensor(), value) for name, value in before.items())
    model, data = by_peft(path, adapter), make_batch()
    log_probs = actor.compute_log_prob(data).get().batch["old_log_probs"].values().double()
    torch.testing.assert_close(log_probs, log_probs_of(model, data), atol=2e-5, rtol=0)
    # Injected in place
    assert (log_probs - log_probs_of(model.get_base_model(), data)).abs().max() < 2e-5
    with model.disable_adapter():
        assert (log_probs - log_probs_of(model, data)).abs().max() > 0.01


def test_the_reference_is_the_actor_without_its_adapter_bit_for_bit(
    actor: LocalWorkerGroup, path: str
):
    data = make_batch()
    reference = local_group(ReferenceWorker, policy(path))
    expected = reference.compute_ref_log_prob(data).get().batch["ref_log_prob"]
    before = actor.compute_log_prob(data).get().batch["old_log_probs"]
    assert deep_equal(actor.compute_ref_log_prob(data).get().batch["ref_log_prob"], expected)
    assert deep_equal(actor.compute_log_prob(data).get().batch["old_log_probs"], before)
    assert not deep_equal(before, expected)


def test_a_reference_pass_before_the_first_update_changes_nothing(path: str):
    first, second = (local_group(ActorWorker, policy(path)) for _ in range(2))
    first.compute_ref_log_prob(make_batch()).get()
    for group in (first, second):
        group.update_actor(make_batch()).get()
    one, other = (parameters_of(group.workers[0]) for group in (first, second))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_checkpoint_and_export_have_the_adapter_and_the_merged_model(
    actor: LocalWorkerGroup, path: str, tmp_path: Path
):
    actor.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    other = local_group(ActorWorker, policy(path))
    other.load_checkpoint(str(tmp_path / "actor/checkpoint"))
    data, adapter = make_batch(seed=2), parameters_of(actor.workers[0])
    for group in (actor, other):
        group.update_actor(data).get()
    after = parameters_of(actor.workers[0])
    assert all(
        torch.equal(after[name], value) for name, value in parameters_of(other.workers[0]).items()
    )
    for group in (actor, other):
        group.load_checkpoint(str(tmp_path / "actor/checkpoint"))
    num_values = sum(value.numel() for value in adapter.values())
    files = list((tmp_path / "actor/checkpoint").glob("*.safetensors"))
    # With two moments each
    assert sum(file.stat().st_size for file in files) < 3 * 4 * num_values + 20_000

    actor.save_hf(str(tmp_path / "written"))
    export(tmp_path / "actor", tmp_path / "exported")
    written, base = (
        load_file(tmp_path / "written/model.safetensors"),
        load_file(f"{path}/model.safetensors"),
    )
    exported = load_file(tmp_path / "exported/model.safetensors")
    assert exported.keys() == written.keys() == base.keys()
    assert all(torch.equal(exported[name], value) for name, value in written.items())
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.default.weight" in adapter:
            a, b = (adapter[f"{module}.lora_{x}.default.weight"].double() for x in "AB")
            weight = weight.double() + ALPHA / RANK * b @ a
            assert (weight - base[name]).abs().max() > 1e-4
        torch.testing.assert_close(written[name].double(), weight.double(), atol=1e-6, rtol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    log_probs = actor.compute_log_prob(make_batch()).get().batch["old_log_probs"].values().double()
    torch.testing.assert_close(log_probs_of(loaded, make_batch()), log_probs, atol=2e-5, rtol=0)


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """The logits of two rows of twelve tokens."""
    ids = torch.arange(24).view(2, 12)
    return model(input_ids=ids).logits


def test_the_exported_adapter_on_its_model_computes_as_the_merged_export(
    actor: LocalWorkerGroup, path: str, tmp_path: Path
):
    actor.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    export(tmp_path / "actor", tmp_path / "merged")
    export(tmp_path / "actor", tmp_path / "adapter", adapter_only=True)
    base = AutoModelForCausalLM.from_pretrained(path)
    of_base = logits_of(base)
    of_merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    of_adapter = logits_of(PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
    torch.testing.assert_close(of_adapter, of_merged, atol=1e-5, rtol=0)
    assert (of_adapter - of_base).abs().max() > 0.01


def test_the_exported_adapter_has_pefts_files_with_pefts_names_and_the_trained_values(
    actor: LocalWorkerGroup, path: str, tmp_path: Path
):
    actor.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    export(tmp_path / "actor", tmp_path / "adapter", adapter_only=True)
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"config.json", "model.safetensors"} & names
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (RANK, ALPHA)
    assert set(settings["target_modules"]) == set(TARGETS)
    assert settings["base_model_name_or_path"] == path
    assert settings["task_type"] == "CAUSAL_LM"
    assert settings["inference_mode"]
    values = load_file(tmp_path / "adapter/adapter_model.safetensors")
    trained = parameters_of(actor.workers[0])
    expected = {}
    for name, value in trained.items():
        expected["base_model.model." + name.replace(".default", "")] = value
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in expected
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    # What peft itself writes of the same adapter
    by_peft(path, trained).float().save_pretrained(tmp_path / "peft")
    assert load_file(tmp_path / "peft/adapter_model.safetensors").keys() == values.keys()


def test_the_adapter_alone_has_the_dtype_that_is_asked_for(actor: LocalWorkerGroup, tmp_path: Path):
    actor.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    export(tmp_path / "actor", tmp_path / "adapter", "bfloat16", adapter_only=True)
    values = load_file(tmp_path / "adapter/adapter_model.safetensors")
    trained = parameters_of(actor.workers[0])
    for name, value in trained.items():
        in_file = values["base_model.model." + name.replace(".default", "")]
        assert in_file.dtype == torch.bfloat16
        assert torch.equal(in_file, value.bfloat16())


def test_targets_of_all_linear_layers_are_written_by_their_names(path: str, tmp_path: Path):
    group = local_group(ActorWorker, policy(path, target_modules="all-linear"))
    group.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    export(tmp_path / "actor", tmp_path / "adapter", adapter_only=True)
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    in_layer = [f"self_attn.{name}" for name in attention]
    in_layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    expected = {f"model.layers.0.{name}" for name in in_layer}
    expected |= {f"model.layers.1.{name}" for name in in_layer}
    assert set(settings["target_modules"]) == expected


def test_a_critics_exported_adapter_has_its_head(path: str, tmp_path: Path):
    critic = local_group(CriticWorker, with_adapter(critic_config(path)), seed=3)
    critic.update_critic(make_batch()).get()
    critic.save_checkpoint(str(tmp_path / "critic/checkpoint"))
    export(tmp_path / "critic", tmp_path / "merged")
    export(tmp_path / "critic", tmp_path / "adapter", adapter_only=True)
    base = AutoModelForTokenClassification.from_pretrained(path, num_labels=1)
    of_adapter = logits_of(PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
    merged = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(of_adapter, logits_of(merged), atol=1e-5, rtol=0)
    values = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert torch.equal(values["base_model.model.score.weight"], merged.score.weight)
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["score"]
    assert settings["task_type"] is None


def test_an_adapter_is_exported_alone_where_its_model_is_gone(path: str, tmp_path: Path):
    model = shutil.copytree(path, tmp_path / "model")
    group = local_group(ActorWorker, policy(str(model)))
    group.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    shutil.rmtree(model)
    export(tmp_path / "actor", tmp_path / "adapter", adapter_only=True)
    values = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(values) == 2 * len(TARGETS) * 2


def test_the_layers_with_an_adapter_alone_are_told_to_leave_it_out(actor: LocalWorkerGroup):
    hf = actor.workers[0].engine.model.hf

    def told() -> set[str]:
        return {
            name
            for name, module in hf.named_modules()
            if getattr(module, "_disable_adapters", False)
        }

    with without_adapter(hf):
        layers = [f"model.layers.{layer}" for layer in (0, 1)]
        assert told() == {
            f"{layer}.{name}" for layer in layers for name in ("self_attn.q_proj", "mlp.down_proj")
        }
    assert told() == set()


def test_an_adapter_whose_model_is_gone_is_not_exported(path: str, tmp_path: Path):
    model = shutil.copytree(path, tmp_path / "model")
    local_group(ActorWorker, policy(str(model))).save_checkpoint(str(tmp_path / "actor/checkpoint"))
    shutil.rmtree(model)
    message = (
        rf"actor/checkpoint has an adapter of {model}, which cannot be read \(.*\): put that "
        r"model there"
    )
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "actor", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_an_adapter_and_its_model_are_merged_in_float32_and_rounded_once(path: str, tmp_path: Path):
    settings = policy(path)
    own = settings.actor.fsdp_config.model_copy(update={"dtype": "bfloat16"})
    actor = local_group(ActorWorker, settings.updated({"actor.fsdp_config": own}))
    actor.update_actor(make_batch()).get()
    actor.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    actor.save_hf(str(tmp_path / "written"))
    export(tmp_path / "actor", tmp_path / "exported")
    base, adapter = load_file(f"{path}/model.safetensors"), parameters_of(actor.workers[0])
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("written", "exported")]
    num_merged = 0
    for name, weight in base.items():
        if f"{name.removesuffix('.weight')}.lora_A.default.weight" not in adapter:
            continue
        factors = [f"{name.removesuffix('.weight')}.lora_{x}.default.weight" for x in "BA"]
        b, a = (adapter[factor].float() for factor in factors)
        expected = weight + ALPHA / RANK * (b @ a)
        for merged in files:
            assert merged[name].dtype == torch.bfloat16
            # The order of the product's sums may move a number over the middle between two of
            # bfloat16.
            assert (merged[name] != expected.bfloat16()).float().mean() < 0.005, name
        num_merged += 1
    assert num_merged == 2 * len(TARGETS)


def engine_of(config: Any) -> RolloutEngine:
    return get_rollout_engine("hf")(
        config.rollout, config.model, rank=0, world_size=1, seed=5, device="cpu"
    )


def complete(engine: RolloutEngine) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of two responses."""
    sampling = Sampling(
        temperature=TEMPERATURE, top_k=-1, top_p=1.0, max_tokens=6, stop_token_ids=()
    )
    requests = [
        GenerationRequest(f"r{i}", ids, i, sampling) for i, ids in enumerate([[5, 9, 12], [7]])
    ]
    engine.submit(requests)
    ended = sorted((pair for pairs in engine.stream() for pair in pairs), key=lambda pair: pair[0])
    return [(each.token_ids.tolist(), each.log_probs.tolist()) for _, each in ended]


def test_an_engine_has_the_frozen_model_and_gets_the_adapter_or_says_that_it_did_not(
    actor: LocalWorkerGroup, path: str
):
    engine = engine_of(policy(path))
    exported = actor.export_weights(version=4).get()
    fingerprint = engine.load_weights(exported, 4)
    adapter = parameters_of(actor.workers[0])
    assert sum(each.num_bytes for each in exported) == 4 * sum(
        value.numel() for value in adapter.values()
    )
    model = by_peft(path, adapter)
    for prompt, (tokens, log_probs) in zip([[5, 9, 12], [7]], complete(engine), strict=True):
        logits = (
            model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            / TEMPERATURE
        )
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(log_probs, dtype=torch.float64), expected, atol=2e-5, rtol=0
        )

    first, second = (
        f"model.layers.{layer}.mlp.down_proj.lora_B.default.weight" for layer in (0, 1)
    )
    load = engine._load
    engine._load = lambda exports, version: None
    actor.update_actor(make_batch(seed=3)).get()
    newer = actor.export_weights(version=5).get()
    with pytest.raises(
        WeightSyncError,
        match=r"Weights of version 5 did not arrive at rollout rank 0: 8 of 8 tensors",
    ):
        engine.load_weights(newer, 5)  # the adapter of version 4 is still there
    engine._load = lambda exports, version: load(
        [swapped(each, first, second) for each in exports], version
    )
    with pytest.raises(
        WeightSyncError, match=f"2 of 8 tensors differ from the trainer's: {first}, {second}"
    ):
        engine.load_weights(newer, 5)
    engine._load = load
    assert engine.load_weights(newer, 5) != fingerprint


def swapped(export: Any, first: str, second: str) -> Any:
    """The export with the names of two parameters exchanged, but not their fingerprints."""
    other = {first: second, second: first}
    (bucket,) = export.buckets
    names = tuple(other.get(name, name) for name in bucket.names)
    return dataclasses.replace(export, buckets=(dataclasses.replace(bucket, names=names),))


def test_a_copy_of_the_actor_computes_what_the_actor_does_with_the_adapter_and_without(
    actor: LocalWorkerGroup, path: str
):
    copy, data = local_group(ActorCopyWorker, policy(path)), make_batch()
    copy.workers[0].version = None  # as after a load that failed
    with pytest.raises(WorkerError, match="no verified weights"):
        copy.compute_ref_log_prob(data).get()
    copy.load_weights(actor.export_weights(version=7).get(), version=7)
    pairs = [
        (group.compute_log_prob(data).get(), group.compute_ref_log_prob(data).get())
        for group in (actor, copy)
    ]
    for (one, one_reference), (other, other_reference) in [pairs]:
        of_both = [each.batch["old_log_probs"].values() for each in (one, other)]
        torch.testing.assert_close(*of_both, atol=1e-5, rtol=0)
        assert deep_equal(
            one_reference.batch["ref_log_prob"], other_reference.batch["ref_log_prob"]
        )


def test_the_critic_trains_an_adapter_and_its_new_head(path: str, tmp_path: Path):
    config = with_adapter(critic_config(path))
    critic = local_group(CriticWorker, config, seed=3)
    copy, data = local_group(CriticCopyWorker, config, seed=3), make_batch()
    before = critic.compute_values(data).get().batch["values"]
    assert deep_equal(copy.compute_values(data).get().batch["values"], before)
    critic.update_critic(data).get()
    names = {name.split(".lora_")[0] for name in parameters_of(critic.workers[0])}
    head = {f"score.modules_to_save.default.{leaf}" for leaf in ("weight", "bias")}
    assert names == head | {
        f"model.layers.{layer}.{name}"
        for layer in (0, 1)
        for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    copy.load_weights(critic.export_weights(version=1).get(), version=1)
    values = critic.compute_values(data).get().batch["values"]
    of_copy = copy.compute_values(data).get().batch["values"]
    torch.testing.assert_close(of_copy.values(), values.values(), atol=1e-5, rtol=0)
    assert (values.values() - before.values()).abs().max() > 0.01

    critic.save_checkpoint(str(tmp_path / "critic/checkpoint"))
    export(tmp_path / "critic", tmp_path / "exported")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "exported")
    prompt, response = (data.batch[name][0] for name in ("prompts", "responses"))
    expected = model(input_ids=torch.cat([prompt, response])[None]).logits[
        0, -len(response) - 1 : -1, 0
    ]
    torch.testing.assert_close(values[0], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("targets", [("query_key_value",), "all-linear"])
def test_a_critics_new_head_is_trained_by_any_name(targets: Any, path: str, tmp_path: Path):
    shutil.copytree(path, tmp_path / "model")  # for its tokenizer
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_hidden_layers=2)).save_pretrained(
        tmp_path / "model"
    )
    config = with_adapter(critic_config(str(tmp_path / "model")), target_modules=targets)
    critic = local_group(CriticWorker, config, seed=3)
    name = "classifier.modules_to_save.default.weight"
    before = parameters_of(critic.workers[0])
    critic.update_critic(make_batch()).get()
    assert (parameters_of(critic.workers[0])[name] - before[name]).abs().max() > 0.001
    assert len(before) == 2 + 2 * 2 * (1 if targets != "all-linear" else 4)


def test_the_model_under_an_adapter_is_named_by_its_whole_path(
    path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(Path(path).parent)
    hf = empty_model(policy("./model").model, AutoModelForCausalLM, key="m")
    assert hf.peft_config["default"].base_model_name_or_path == path
    # Of the hub
    settings = lora_config(hf, policy("some/name").model, "all-linear")
    assert settings.base_model_name_or_path == "some/name"


def test_ranks_that_read_weights_and_ranks_that_get_them_store_an_adapter_alike(path: str):
    config, fsdp = policy(path).model, TrainedFsdpConfig(model_dtype="bfloat16")
    read, empty = (
        load_pretrained(AutoModelForCausalLM, config, fsdp, key="m", device="cpu", weights=weights)
        for weights in (True, False)
    )
    assert {name: value.dtype for name, value in read.named_parameters()} == dict.fromkeys(
        [name for name, _ in empty.named_parameters()], torch.bfloat16
    )
    assert {value.dtype for value in empty.parameters()} == {torch.bfloat16}


def test_a_teacher_has_no_adapter(path: str):
    loss = {"loss_mode": "distillation", "teacher_path": "elsewhere"}
    teacher = with_adapter(policy_config(path, policy_loss=loss)).teacher_model
    assert (teacher.path, teacher.lora_rank) == ("elsewhere", 0)


def trained_on_rank(
    rank: int, port: int, path: str, folder: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the `actor` above does, as one of two ranks; its adapter, and its half of the
    reference's log-probs."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
    }
    torch.set_num_threads(1)
    worker = ActorWorker(policy(path, micro=1))
    worker.init_model()
    for seed in (0, 1):
        reference = worker.compute_ref_log_prob(half(rank)).batch["ref_log_prob"].values()
        worker.update_actor(half(rank, seed))
    worker.save_hf(folder)
    found = parameters_of(worker), reference
    dist.destroy_process_group()
    return found


def half(rank: int, seed: int = 0) -> DataProto:
    return make_batch(seed=seed).select_idxs(list(range(4 * rank, 4 * rank + 4)))


def test_two_ranks_train_the_adapter_that_one_rank_trains(path: str, tmp_path: Path):
    one = local_group(ActorWorker, policy(path))
    for seed in (0, 1):
        one.update_actor(make_batch(seed=seed)).get()
    one.save_hf(str(tmp_path / "one"))
    holder, port = reserve_port()
    with holder, ProcessPoolExecutor(2, mp_context=forked_ranks.ranks()) as pool:
        arguments = [port] * 2, [path] * 2, [str(tmp_path / "two")] * 2
        (adapter, first), (_, second) = pool.map(trained_on_rank, range(2), *arguments, timeout=240)
    for name, value in parameters_of(one.workers[0]).items():
        torch.testing.assert_close(adapter[name], value, atol=1e-5, rtol=1e-4)
    expected = one.compute_ref_log_prob(make_batch()).get().batch["ref_log_prob"].values()
    torch.testing.assert_close(torch.cat([first, second]), expected, atol=1e-5, rtol=0)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert all((files[0][name] - value).abs().max() < 1e-4 for name, value in files[1].items())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ("q_proj", "w_proj"),
            r"LlamaForCausalLM has no layer w_proj; give some of down_proj, gate_proj, k_proj",
        ),
        (
            ("w_proj",),
            r"Target modules \{'w_proj'\} not found in the base model.*give some of down_proj, "
            r"gate_proj",
        ),
        (r".*\.x_proj", r"Target modules .*x_proj not found in the base model.*or all-linear"),
        (
            ("q_proj", "lm_head"),
            r"lm_head cannot have an adapter, only decoder layers can; give some of down_proj",
        ),
        (
            ("self_attn",),
            r"(.|\n)*LlamaAttention(.|\n)*Linear layers get adapters: give some of down_proj",
        ),
    ],
)
def test_targets_that_match_nothing_or_no_decoder_layer_are_refused(
    path: str, targets: Any, message: str
):
    with pytest.raises(ValueError, match=rf"^actor_rollout_ref.model.target_modules=.*{message}"):
        ModelSize.of(
            policy(path, target_modules=targets).model, "actor_rollout_ref.model", PolicyModel
        )


def test_adapters_do_not_travel_where_they_could_not_be_checked(path: str):
    config = policy(path).model_dump()
    config["rollout"]["tensor_model_parallel_size"] = 2
    with pytest.raises(ValueError, match=r"lora_rank=3 with rollout.tensor_model_parallel_size=2"):
        type(policy(path)).model_validate(config)


def test_all_linear_means_the_attention_of_a_mixture_of_experts(tmp_path: Path):
    for family, latent in (("glm4_moe", False), ("qwen3_moe", False), ("deepseek_v3", True)):
        folder = write_experts(tmp_path / family, family)
        config = policy(folder, target_modules="all-linear").model
        hf = empty_model(config, AutoModelForCausalLM, key="m")
        names = ["k_proj", "o_proj", "q_proj", "v_proj"]
        if latent:
            names = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
        assert adapted_names(hf) == names
        adapted = [name for name, _ in hf.named_parameters() if "lora_A" in name]
        assert len(adapted) == 3 * len(names)
        assert all(".self_attn." in name for name in adapted)


@pytest.mark.parametrize(
    ("targets", "refused"),
    [
        (
            ("q_proj", "gate_proj", "up_proj"),
            r"model.layers.1.mlp.experts,.* cannot have an adapter, only the attention of a "
            r"mixture of experts can;",
        ),
        (
            r".*mlp\.experts",
            r"Target module Glm4MoeExperts(.|\n)* Linear layers of the attention get adapters:",
        ),
    ],
)
def test_adapters_of_experts_are_refused_by_their_names(tmp_path: Path, targets: Any, refused: str):
    folder = write_experts(tmp_path, "glm4_moe")
    message = rf"^m.target_modules=.*{refused}.* give some of k_proj, o_proj, q_proj, v_proj, or"
    with pytest.raises(ValueError, match=message):
        empty_model(policy(folder, target_modules=targets).model, AutoModelForCausalLM, key="m")


def test_the_adapter_of_a_mixture_of_experts_is_trained_alone_and_merged(tmp_path: Path):
    folder = write_experts(tmp_path / "model", "qwen3_moe")
    group = local_group(ActorWorker, policy(folder, target_modules="all-linear"))
    worker = group.workers[0]
    data = make_batch()
    group.update_actor(data).get()
    group.save_hf(str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    before = load_file(Path(folder) / "model.safetensors")
    changed = {name for name, each in before.items() if not torch.equal(merged[name], each)}
    assert merged.keys() == before.keys() and changed
    assert all(".self_attn." in name for name in changed)
    exported = local_group(ActorWorker, policy_config(str(tmp_path / "merged")))
    scored = [each.compute_log_prob(data).get().batch for each in (group, exported)]
    adapted, expected = (each["old_log_probs"].values() for each in scored)
    torch.testing.assert_close(adapted, expected, rtol=0, atol=1e-5)
    assert all(is_adapter(name) for name, _ in worker.engine.named_parameters())
