"""Buffers that belong to a model reach engines, copies, checkpoints and exports bit for bit, each
in its dtype."""

import json
import os
import shutil
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_worker_models import (
    VOCABULARY,
    critic_config,
    local_group,
    make_batch,
    policy_config,
    write_model,
)
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma4TextConfig, PreTrainedConfig

from verl_like.export import export
from verl_like.protocol.row_ops import deep_equal
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker import reserve_port
from verl_like.trainer.memory.sums import ModelSize, PlannedModel
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.engine import ForwardFsdpConfig
from verl_like.workers.copies import ActorCopyWorker, CriticCopyWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.models.lora import model_buffers
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.planning.partition import MicroBatching
from verl_like.workers.reference import ReferenceWorker
from verl_like.workers.rollout import get_rollout_engine
from verl_like.workers.rollout_worker import RolloutWorker
from verl_like.workers.weights.arrival import WeightSyncError, check_exports
from verl_like.workers.weights.exports import collect_weights
from verl_like.workers.weights.fingerprints import fingerprint_tensor

SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GEMMA = Gemma4TextConfig(
    **SIZES,
    head_dim=8,
    global_head_dim=8,
    hidden_size_per_layer_input=0,
    num_kv_shared_layers=0,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=4,
)
"""Dense Gemma 4: the output of each layer is multiplied by a buffer."""
DEEPSEEK = DeepseekV3Config(
    **SIZES | {"num_key_value_heads": 4},
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
)
"""DeepSeek-V3: experts are chosen with a buffer, which transformers keeps in float32 in a bfloat16
model."""
MODELS = {"gemma": GEMMA, "deepseek": DEEPSEEK}
SCALARS = [f"model.layers.{layer}.layer_scalar" for layer in range(2)]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
NAMES = {"gemma": SCALARS, "deepseek": [BIAS]}


def write(path: Path, config: PreTrainedConfig) -> str:
    """A random model with the tokenizer of the tiny ones."""
    write_model(path)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    shutil.rmtree(path / "model.safetensors", ignore_errors=True)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp(kind), MODELS[kind])


def buffers_of(group: LocalWorkerGroup) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in group.workers[0].engine.named_buffers()}


def change_buffers(group: LocalWorkerGroup) -> dict[str, torch.Tensor]:
    """Values that bfloat16 cannot hold, in place of those that were loaded."""
    for number, (_, buffer) in enumerate(group.workers[0].engine.named_buffers()):
        buffer.copy_(torch.linspace(0.7, 1.9, buffer.numel()) + number / 7)
    return buffers_of(group)


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    has_dtype = all(found[name].dtype == value.dtype for name, value in expected.items())
    return (
        len(expected) > 0
        and has_dtype
        and all(torch.equal(found[name], expected[name]) for name in expected)
    )


def bfloat16_config(path: str) -> Any:
    """Layers and rollout compute in bfloat16; what is trained is stored in float32."""
    config = policy_config(path, fsdp={"dtype": "bfloat16"})
    rollout = config.rollout.model_copy(update={"dtype": "bfloat16", "name": "hf"})
    return config.model_copy(update={"rollout": rollout})


def test_the_buffers_of_a_model_are_those_that_its_checkpoints_hold(kind: str, path: str) -> None:
    group = local_group(ActorWorker, policy_config(path))
    assert list(buffers_of(group)) == NAMES[kind]
    with safe_open(Path(path, "model.safetensors"), "pt") as file:
        assert {*NAMES[kind]} <= {*file.keys()}


@pytest.mark.parametrize("transport", ["object_store", "shared_memory", "gloo"])
def test_a_changed_buffer_reaches_the_engine_and_the_copy_bit_for_bit(
    kind: str, path: str, transport: str
) -> None:
    config = bfloat16_config(path)
    rollout = config.rollout.model_copy(update={"weight_transport": transport})
    config = config.model_copy(update={"rollout": rollout})
    group = local_group(ActorWorker, config)
    expected = change_buffers(group)
    assert {value.dtype for value in expected.values()} == {torch.float32}
    exports = group.export_weights(version=1).get()

    receiver = local_group(RolloutWorker, config, seed=0)
    receiver.load_weights(exports, version=1)
    engine = receiver.workers[0].rollout
    assert same_bits(dict(engine.model.named_buffers()), expected)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}

    copy = local_group(ActorCopyWorker, config)
    copy.load_weights(exports, version=1)
    assert same_bits(buffers_of(copy), expected)
    of_both = [
        each.compute_log_prob(make_batch()).get().batch["old_log_probs"] for each in (group, copy)
    ]
    assert deep_equal(*of_both)
    other = (
        local_group(ActorWorker, config).compute_log_prob(make_batch()).get().batch["old_log_probs"]
    )
    assert not deep_equal(other, of_both[0])  # the buffers matter


def test_a_buffer_that_an_engine_does_not_take_is_named(kind: str, path: str) -> None:
    config = bfloat16_config(path)
    group = local_group(ActorWorker, config)
    change_buffers(group)
    exports = group.export_weights(version=1).get()
    engine = get_rollout_engine("hf")(
        config.rollout, config.model, rank=0, world_size=1, seed=0, device="cpu"
    )
    load = engine._load

    def load_parameters(exports: Any, version: int) -> None:
        before = {name: dict(engine.model.named_buffers())[name].clone() for name in NAMES[kind]}
        load(exports, version)
        for name, value in before.items():
            dict(engine.model.named_buffers())[name].data = value

    engine._load = load_parameters
    with pytest.raises(
        WeightSyncError,
        match=f"{len(NAMES[kind])} of .* tensors differ.*: {', '.join(NAMES[kind])}",
    ):
        engine.load_weights(exports, 1)


def test_a_critics_buffers_reach_its_copy(tmp_path: Path) -> None:
    path = write(tmp_path, DEEPSEEK)  # transformers has no critic of Gemma 4
    arguments = {"config": critic_config(path), "seed": 5}
    group, copy = local_group(CriticWorker, **arguments), local_group(CriticCopyWorker, **arguments)
    expected = change_buffers(group)
    copy.load_weights(group.export_weights(version=1).get(), version=1)
    assert same_bits(buffers_of(copy), expected)


def test_a_checkpoint_holds_the_buffers_and_its_export_is_what_the_worker_writes(
    kind: str, path: str, tmp_path: Path
) -> None:
    config = policy_config(path, fsdp={"dtype": "bfloat16"}, ema_decay=0.5)
    group = local_group(ActorWorker, config)
    expected = change_buffers(group)
    group.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    group.save_hf(str(tmp_path / "written"))

    resumed = local_group(ActorWorker, config)
    assert not same_bits(buffers_of(resumed), expected)
    assert resumed.load_checkpoint(str(tmp_path / "actor/checkpoint")) == [[]]
    assert same_bits(buffers_of(resumed), expected)

    for options in ({}, {"ema": True}):
        out = tmp_path / f"exported {len(options)}"
        export(tmp_path / "actor", out, **options)
        assert same_bits(load_file(out / "model.safetensors"), expected)
    assert (tmp_path / "exported 0/model.safetensors").read_bytes() == (
        tmp_path / "written/model.safetensors"
    ).read_bytes()


def test_a_checkpoint_of_an_earlier_version_takes_the_buffers_from_the_models_folder_and_says_so(
    kind: str, path: str, tmp_path: Path
) -> None:
    """Such a checkpoint has everything but the buffers, whose offsets are in the file's metadata
    too."""
    config = policy_config(path)
    group = local_group(ActorWorker, config)
    group.update_actor(make_batch()).get()
    checkpoint = tmp_path / "global_step_1/actor/checkpoint"
    group.save_checkpoint(str(checkpoint))
    (file,) = checkpoint.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    lacking = [f"model.{name}" for name in NAMES[kind]]
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in lacking}
    offsets = {
        name: each
        for name, each in json.loads(metadata["DCP_SHARDING_INFO"]).items()
        if name not in lacking
    }
    save_file(tensors, file, metadata | {"DCP_SHARDING_INFO": json.dumps(offsets)})

    resumed = local_group(ActorWorker, config)
    ((note,),) = resumed.load_checkpoint(str(checkpoint))
    names = ", ".join(NAMES[kind])
    assert (
        note
        == f"{checkpoint} is of an earlier version and lacks the buffers {names}: they are those "
        f"of {path}."
    )
    of_folder = {name: load_file(Path(path, "model.safetensors"))[name] for name in NAMES[kind]}
    assert same_bits(buffers_of(resumed), of_folder)

    with pytest.raises(ValueError, match=r"lacks the buffers .* cannot be read .*config.yaml"):
        export(checkpoint.parent, tmp_path / "without a record")
    OmegaConf.save({"actor_rollout_ref": {"model": {"path": path}}}, tmp_path / "config.yaml")
    with pytest.warns(UserWarning, match=f"lacks the buffers {names}: they are those of {path}"):
        export(checkpoint.parent, tmp_path / "exported")
    assert same_bits(load_file(tmp_path / "exported/model.safetensors"), of_folder)


def test_the_export_of_an_adapter_has_the_buffers_of_the_model_below_it(tmp_path: Path) -> None:
    path = write(tmp_path / "model", GEMMA)
    weights = load_file(f"{path}/model.safetensors")
    for number, name in enumerate(SCALARS):
        weights[name] = torch.tensor([0.3 + number])
    save_file(weights, f"{path}/model.safetensors", {"format": "pt"})
    config = policy_config(path)
    model = config.model.model_copy(update={"lora_rank": 2, "target_modules": ["q_proj"]})
    group = local_group(ActorWorker, config.model_copy(update={"model": model}))
    assert buffers_of(group) == {}  # they are frozen, and everybody reads them from the folder
    group.save_checkpoint(str(tmp_path / "actor/checkpoint"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(tmp_path / "actor", tmp_path / "exported")
    assert same_bits(
        load_file(tmp_path / "exported/model.safetensors"),
        {name: weights[name] for name in SCALARS},
    )


def test_integers_and_float64_are_sent_and_fingerprinted_to_the_last_bit() -> None:
    numbers = torch.tensor([2**40, 3, -1])
    # Equal in float32
    assert fingerprint_tensor(numbers) != fingerprint_tensor(numbers + torch.tensor([1, 0, 0]))
    wide = torch.tensor([0.1, 2.0], dtype=torch.float64)
    assert fingerprint_tensor(wide) != fingerprint_tensor(wide.float().double())
    buffers = [
        ("table", numbers),
        ("scale", torch.tensor(0.1)),
        ("flag", torch.tensor([True, False])),
    ]
    parameters = [("weight", torch.tensor([1.5, 2.5, 3.5]))]
    exports = [
        collect_weights(
            parameters, buffers, dtype=torch.bfloat16, rank=rank, world_size=2, version=1
        )
        for rank in range(2)
    ]
    assert check_exports(exports, 1).keys() == {"table", "scale", "weight", "flag"}
    buckets = sorted(
        (bucket for each in exports for bucket in each.buckets), key=lambda bucket: bucket.index
    )
    # The widest first, so that each begins at a multiple of its size where they are packed.
    assert [(bucket.names, bucket.dtype) for bucket in buckets] == [
        (("table",), "int64"),
        (("scale",), "float32"),
        (("weight",), "bfloat16"),
        (("flag",), "bool"),
    ]


def build_on_rank(rank: int, port: int, path: str) -> list[tuple[str, torch.dtype, list[float]]]:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
    }
    torch.set_num_threads(1)
    config = bfloat16_config(path)
    ref = config.ref.model_copy(update={"fsdp_config": ForwardFsdpConfig(dtype="bfloat16")})
    worker = ReferenceWorker(config.model_copy(update={"ref": ref}))
    worker.init_model()
    return [(name, buffer.dtype, buffer.tolist()) for name, buffer in worker.engine.named_buffers()]


def test_every_rank_has_the_buffers_of_the_folder_in_the_dtype_of_rank_0(tmp_path: Path) -> None:
    """The model that a rank makes without weights has this buffer in bfloat16."""
    path = write(tmp_path, DEEPSEEK)
    weights = load_file(f"{path}/model.safetensors")
    weights[BIAS] = torch.tensor([0.1, -0.2, 0.3, 1e-4])
    save_file(weights, f"{path}/model.safetensors", {"format": "pt"})
    holder, port = reserve_port()
    holder.close()
    with ProcessPoolExecutor(2, forked_ranks.ranks()) as pool:
        ranks = list(pool.map(build_on_rank, range(2), [port] * 2, [path] * 2))
    assert ranks == [[(BIAS, torch.float32, weights[BIAS].tolist())]] * 2


def test_the_estimate_of_memory_counts_the_buffers_of_a_rank_whole(kind: str, path: str) -> None:
    config = policy_config(path)
    size = ModelSize.of(config.model, "actor_rollout_ref.model", PolicyModel)
    assert size.buffers == {"gemma": 2 * 4, "deepseek": 4 * 4}[kind]  # float32
    passes = MicroBatching(1, 1, by_tokens=False)
    planned = PlannedModel(
        "actor", size, config.model, config.actor.fsdp_config, 3, 8, 4, forward_passes=passes
    )
    assert planned.stored == pytest.approx(4 * size.parameters / 3 + size.buffers)


def test_buffers_that_are_computed_stay_out() -> None:
    model = AutoModelForCausalLM.from_config(GEMMA)
    assert "rotary" in " ".join(name for name, _ in model.named_buffers())
    assert [name for name, _ in model_buffers(model)] == SCALARS
