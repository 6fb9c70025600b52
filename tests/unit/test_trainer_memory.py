"""The sum of a GPU's memory: derived by hand, compared with what autograd keeps, and the table of
docs/memory.md."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from verl_like.protocol import DataProto
from verl_like.protocol.padded import without_padding
from verl_like.trainer.config import PPOConfig, load_config, load_ppo_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.config.run_config import RecordConfig, RunConfig
from verl_like.trainer.config.supervised import (
    DPOConfig,
    ILQLConfig,
    RMConfig,
    SFTConfig,
    broken_supervised_rules,
)
from verl_like.trainer.memory.activations import TokenValues
from verl_like.trainer.memory.pools import check_memory, planned_pools
from verl_like.trainer.memory.sums import ModelSize, Phase, PlannedModel, require_memory
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.workers import build_role_worker_mapping
from verl_like.trainer.run import shell as run
from verl_like.workers.config.engine import TrainedFsdpConfig
from verl_like.workers.config.models import PolicyModelConfig
from verl_like.workers.models.attention import choose_attention
from verl_like.workers.models.packed_models import PolicyModel, decoder_layers
from verl_like.workers.models.packing import Rows, pack
from verl_like.workers.planning.partition import MicroBatching

ROOT = Path(__file__).parents[2]
DEVICES = {"80 GB": 79.1 * 2**30, "141 GB": 139.7 * 2**30}
"""What CUDA has of an H100 and an H200."""
SEVEN_BILLION = 2 * 102400 * 4096 + 30 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096


@pytest.fixture(scope="module")
def deepseek_7b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the architecture of deepseek-llm-7b-chat, without weights."""
    path = tmp_path_factory.mktemp("deepseek_7b")
    LlamaConfig(
        vocab_size=102400,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=30,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ).save_pretrained(path)
    return str(path)


def script_overrides(
    model: str, script: str = "split_placement/run_deepseek7b_llm.sh"
) -> list[str]:
    """Of what a script of the examples runs on GPUs."""
    command = (ROOT / "examples" / script).read_text().split("verl_like.trainer.main_ppo ")
    words = shlex.split(
        command[-1].replace("\\\n", " ").replace("$MODEL_PATH", model).replace("$@", "")
    )
    return list(filter(None, words))


def script_config(
    model: str, *changes: str, script: str = "split_placement/run_deepseek7b_llm.sh"
) -> PPOConfig:
    """What a script of the examples runs on GPUs."""
    return load_ppo_config([*script_overrides(model, script), *changes])


def memory_phases(config: RunConfig, device_bytes: float) -> list[Phase]:
    """All phases of all pools."""
    return [phase for pool in planned_pools(config, device_bytes) for phase in pool.phases()]


def phase(config: PPOConfig, name: str, device_bytes: float = 85e9) -> dict[str, float]:
    (found,) = (phase for phase in memory_phases(config, device_bytes) if phase.name == name)
    return {part: size / 1e9 for part, size in found.parts.items()}


def test_weights_adam_and_gradients_of_7b_on_four_gpus_are_those_of_the_hand(deepseek_7b: str):
    config = script_config(deepseek_7b)
    parameters = SEVEN_BILLION / 1e9
    generation, update = phase(config, "generation"), phase(config, "actor update")
    for parts in (generation, update):
        assert parts["actor weights"] == pytest.approx(4 * parameters / 4)  # float32 on each of 4
        assert parts["actor Adam"] == pytest.approx(8 * parameters / 4)
    assert generation["engine's share"] == pytest.approx(0.4 * 85)
    assert update["gradients"] == pytest.approx(4 * parameters / 4)
    assert "engine's share" not in update  # it sleeps
    outer, layer = 2 * 102400 * 4096 + 4096, 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert update["gathered layers"] == pytest.approx(2 * (outer + layer) / 1e9)
    # Into buffers of their own, and their shards are cast before.
    assert update["gathering*"] == pytest.approx(2 * (outer + layer) * 5 / 4 / 1e9)


def test_no_more_layers_are_gathered_than_there_are(tmp_path: Path):
    layer, outer = 4 * 64**2 + 3 * 64 * 96 + 2 * 64, 2 * 320 * 64 + 64
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path)
    update = phase(script_config(str(tmp_path)), "actor update")
    assert update["gathered layers"] == pytest.approx(2 * (outer + layer) / 1e9)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            ["fsdp_config.strategy=zero1"],
            {"gradients": 4, "gathered layers": 2, "actor Adam": 8 / 4},
        ),
        (
            ["fsdp_config.strategy=ddp"],
            {"gradients": 4, "gathered layers": 2, "actor weights": 4, "actor Adam": 8},
        ),
        (
            ["fsdp_config.strategy=zero2"],
            {"gradients": 4 / 4, "gathered layers": 2, "actor weights": 4 / 4},
        ),
        (
            ["fsdp_config.model_dtype=bfloat16"],
            {"gradients": 6 / 4, "actor weights": 2 / 4, "actor Adam": 4 / 4},
        ),
        (
            ["fsdp_config.model_dtype=bfloat16", "fsdp_config.strategy=ddp"],
            {"gradients": 4, "gathered layers": 2, "actor weights": 2, "actor Adam": 4},
        ),
        (["fsdp_config.optimizer_offload=true"], {"actor weights": 4 / 4, "actor Adam": None}),
    ],
)
def test_bytes_of_a_parameter_follow_sharding_data_type_and_offload(
    deepseek_7b: str, changes, expected
):
    parts = phase(
        script_config(deepseek_7b, *(f"actor_rollout_ref.actor.{c}" for c in changes)),
        "actor update",
    )
    for part, size in expected.items():
        assert parts.get(part) == (
            None if size is None else pytest.approx(size * SEVEN_BILLION / 1e9)
        ), part


def test_an_offloaded_optimizer_is_on_the_device_for_its_step_alone(deepseek_7b: str):
    offload = "actor_rollout_ref.actor.fsdp_config"
    config = script_config(
        deepseek_7b, f"{offload}.optimizer_offload=true", f"{offload}.param_offload=true"
    )
    shard = SEVEN_BILLION / 4 / 1e9
    step = phase(config, "actor optimizer step")
    assert (step["actor weights"], step["actor Adam"], step["gradients"]) == pytest.approx(
        (4 * shard, 8 * shard, 4 * shard)
    )
    assert not {"actor weights", "actor Adam"} & phase(config, "generation").keys()


def test_the_hf_engine_takes_its_weights_and_no_share(deepseek_7b: str):
    config = script_config(deepseek_7b, "actor_rollout_ref.rollout.name=hf")
    generation = phase(config, "generation")
    # Bfloat16, whole
    assert generation["engine's weights"] == pytest.approx(2 * SEVEN_BILLION / 1e9)
    assert "engine's share" not in generation
    # They go to the host
    assert not {"engine's weights", "sleeping engine*"} & phase(config, "actor update").keys()
    kept = script_config(
        deepseek_7b,
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.free_cache_engine=false",
    )
    assert phase(kept, "actor update")["engine's weights"] == generation["engine's weights"]


def test_roles_of_one_pool_lie_there_together(deepseek_7b: str):
    config = script_config(
        deepseek_7b,
        "placement=colocated",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.n_gpus_per_node=4",
    )
    generation = phase(config, "generation")
    assert generation["ref weights"] == pytest.approx(2 * SEVEN_BILLION / 4 / 1e9)
    critic = SEVEN_BILLION - 102400 * 4096 + 4096 + 1  # a head of one number, with a bias
    assert generation["critic Adam"] == pytest.approx(8 * critic / 4 / 1e9)
    assert phase(config, "ref forward pass")["actor Adam"] == generation["actor Adam"]


def test_the_teacher_is_counted_with_its_own_size_beside_the_actor(
    deepseek_7b: str, tmp_path: Path
):
    layer, outer = 4 * 64**2 + 3 * 64 * 96 + 2 * 64, 2 * 320 * 64 + 64
    LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    loss = "actor_rollout_ref.actor.policy_loss"
    config = script_config(
        deepseek_7b, f"{loss}.loss_mode=distillation", f"{loss}.teacher_path={tmp_path}"
    )
    teacher = phase(config, "teacher forward pass")
    assert teacher["teacher weights"] == pytest.approx(2 * (outer + 5 * layer) / 4 / 1e9)
    assert teacher["actor Adam"] == phase(config, "generation")["actor Adam"]
    assert build_role_worker_mapping(config, {})["teacher"].kwargs["shares_device"]


class Gpu:
    def __init__(self, total_memory: float) -> None:
        self.total_memory = total_memory


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has one of 85 GB and one of 60 GB."""
    gpus = [Gpu(85e9), Gpu(60e9)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)


@pytest.mark.usefixtures("two_gpus")
def test_the_smallest_gpu_of_the_machine_counts_where_the_run_starts_its_own_ray(deepseek_7b: str):
    (sums,) = check_memory(script_config(deepseek_7b, "trainer.n_gpus_per_node=8"))
    assert sums.startswith("Memory of a GPU at most, of 60.0 GB (* estimated):")
    tight = ["trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.gpu_memory_utilization=0.6"]
    with pytest.raises(
        ValueError, match=r"a GPU has 60\.0 GB, and this does not fit \(actor_rollout_ref_pool, gen"
    ):
        check_memory(script_config(deepseek_7b, *tight, "actor_rollout_ref.actor.ema_decay=0.9"))
    assert (
        check_memory(script_config(deepseek_7b, *tight, "ray_kwargs.ray_init.address=auto")) == []
    )
    assert check_memory(script_config(deepseek_7b, *tight, "device=cpu")) == []


@pytest.mark.usefixtures("two_gpus")
def test_the_models_of_somebodys_own_trainer_are_not_counted():
    class Descent(RunConfig):
        base_name = "descent"

    assert (
        check_memory(Descent(trainer=RecordConfig(experiment_name="e", default_local_dir="f")))
        == []
    )


@pytest.mark.usefixtures("two_gpus")
def test_a_pool_of_custom_roles_alone_is_not_counted(deepseek_7b: str):
    judge = [
        "worker_classes.judge=package.Judge",
        "role_mapping.judge=judge_pool",
        "resource_pool_spec.judge_pool=[1]",
    ]
    config = script_config(deepseek_7b, "trainer.n_gpus_per_node=8", *judge)
    assert "judge_pool" not in {pool.name for pool in planned_pools(config, 85e9)}
    (sums,) = check_memory(config)
    assert "critic_pool" in sums and "judge" not in sums


def test_a_run_that_does_not_fit_is_refused_before_ray_starts(
    deepseek_7b: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def does_not_fit(config: PPOConfig) -> list[str]:
        raise ValueError("a GPU has 1 GB")

    monkeypatch.setattr(run, "check_memory", does_not_fit)
    config = script_config(deepseek_7b)
    assert run.run(config, lambda config, cleanup: None, pytest.fail, PPO_DISPLAY) == 2
    assert "a GPU has 1 GB" in capsys.readouterr().err


def test_what_cannot_fit_is_refused_with_the_sum(deepseek_7b: str):
    config = script_config(deepseek_7b, "trainer.n_gpus_per_node=2")
    with pytest.raises(
        ValueError,
        match=r"a GPU has 85\.0 GB.*generation: actor weights 27\.6 \+ actor Adam 55\.3 \+ eng",
    ):
        require_memory(planned_pools(config, 85e9), 85e9)
    sums = require_memory(planned_pools(script_config(deepseek_7b), 85e9), 85e9)
    assert (
        "actor_rollout_ref_pool, generation: actor weights 6.9 + actor Adam 13.8 + engine's share "
        "34.0" in sums
    )
    long = "data.max_response_length=3000"
    tight = script_config(
        deepseek_7b, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64", long
    )
    sums = require_memory(planned_pools(tight, 85e9), 85e9)
    assert "actor update" in sums and "may not fit" in sums


def test_the_table_of_machines_for_the_7b_script_is_the_sum(deepseek_7b: str):
    rows = []
    of_table = ("generation", "actor update", "critic update")
    for gpus in (2, 4, 8):
        for name, size in DEVICES.items():
            phases = memory_phases(
                script_config(deepseek_7b, f"trainer.n_gpus_per_node={gpus}"), size
            )
            shown = {phase.name: phase.total / 1e9 for phase in phases if phase.name in of_table}
            numbers = [shown[name] for name in of_table]
            fits = "no" if max(phase.certain for phase in phases) > size else "yes"
            fits = "perhaps" if fits == "yes" and max(numbers) > size else fits
            cells = [
                str(gpus),
                f"{name} ({size / 1e9:.1f})",
                *(f"{number:.1f}" for number in numbers),
                fits,
            ]
            rows.append(f"| {' | '.join(cells)} |")
    assert max(phases, key=lambda phase: phase.total).name in of_table
    table = "\n".join(rows)
    assert table in (ROOT / "docs/memory.md").read_text(), (
        f"docs/memory.md needs this table:\n{table}"
    )


def test_the_grpo_script_fits_on_four_and_on_eight_gpus_of_80_gb(tmp_path: Path):
    Qwen2Config(  # Qwen2.5-7B
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
    ).save_pretrained(tmp_path)
    totals = {}
    for gpus in (4, 8):
        config = script_config(
            str(tmp_path), f"trainer.n_gpus_per_node={gpus}", script="grpo/run_qwen2_5_7b.sh"
        )
        phases = memory_phases(config, DEVICES["80 GB"])
        totals[gpus] = {phase.name: phase.total / 1e9 for phase in phases}
        assert {"generation", "actor update", "ref forward pass"} < totals[gpus].keys()
        assert max(totals[gpus].values()) < DEVICES["80 GB"] / 1e9
    # Weights 4 bytes, Adam 8 and the reference 2 for each of 7.6 billion parameters, 1.2% between
    # them, 0.6 of the GPU, and 1.15 GB.
    assert totals[4]["generation"] == pytest.approx(
        1.012 * 7.616 * 14 / 4 + 0.6 * 84.9 + 1.15, abs=0.1
    )
    assert totals[8]["generation"] == pytest.approx(
        1.012 * 7.616 * 14 / 8 + 0.6 * 84.9 + 1.15, abs=0.1
    )


def test_only_roles_beside_the_rollout_engine_hand_memory_back(deepseek_7b: str):
    config = script_config(
        deepseek_7b, "reward_model.enable=true", f"reward_model.model.path={deepseek_7b}"
    )
    config = config.model_copy(
        update={"role_mapping": config.role_mapping | {"reward_model": "actor_rollout_ref_pool"}}
    )
    arguments = {
        role: built.kwargs for role, built in build_role_worker_mapping(config, {}).items()
    }
    shares = {
        role: arguments[role]["shares_device"] for role in ("actor", "critic", "reward_model")
    }
    assert shares == {"actor": True, "critic": False, "reward_model": True}


def test_each_reward_model_takes_its_own_memory(deepseek_7b: str):
    models = ["reward_model.enable=true", f"reward_model.model.path={deepseek_7b}"]
    models += [f"reward_models.safety.path={deepseek_7b}", "role_mapping.safety=critic_pool"]
    config = script_config(deepseek_7b, *models)
    # One score in place of the language-model head, bfloat16 on each of 4.
    weights = 2 * (SEVEN_BILLION - 102400 * 4096 + 4096) / 1e9 / 4
    for name in ("critic update", "safety forward pass", "reward_model forward pass"):
        parts = phase(config, name)
        assert parts["reward_model weights"] == parts["safety weights"] == pytest.approx(weights)
    offloaded = script_config(
        deepseek_7b, *models, "reward_model.model.fsdp_config.param_offload=true"
    )
    assert "safety weights" not in phase(offloaded, "critic update").keys() | phase(
        offloaded, "reward_model forward pass"
    )
    assert phase(offloaded, "safety forward pass")["safety weights"] == pytest.approx(weights)


def test_detached_makers_hold_copies_beside_an_engine_that_never_sleeps(deepseek_7b: str):
    options = [
        "placement=detached",
        "trainer.n_gpus_per_node=4",
        "algorithm.rollout_correction.bypass_mode=false",
    ]
    config = load_config(
        DetachedConfig, broken_detached_rules, [*script_overrides(deepseek_7b), *options]
    )
    own = {
        phase.name: phase
        for phase in memory_phases(config, 85e9)
        if phase.pool.startswith("maker_0")
    }
    shard, critic = SEVEN_BILLION / 4 / 1e9, (SEVEN_BILLION - 102400 * 4096 + 4096 + 1) / 4 / 1e9
    generation = {part: size / 1e9 for part, size in own["generation"].parts.items()}
    # Copies are stored in bfloat16, in which layers compute, and have no optimizer.
    assert generation["actor weights"] == pytest.approx(2 * shard)
    assert generation["critic weights"] == pytest.approx(2 * critic)
    assert generation["actor Adam"] == 0
    assert own["actor forward pass"].parts["engine's share"] == pytest.approx(0.4 * 85e9)
    assert "actor update" not in own and "actor export" not in own
    trainer = {
        phase.name: phase
        for phase in memory_phases(config, 85e9)
        if phase.pool.startswith("trainer_0")
    }
    assert trainer["actor update"].parts["actor Adam"] == pytest.approx(8 * SEVEN_BILLION / 4)
    assert "generation" not in trainer and "engine's share" not in trainer["critic update"].parts


def plan_of_examples(schema: type, model: str, *overrides: str) -> dict[str, dict[str, float]]:
    """GB by phase and part, on three ranks."""
    common = [
        f"model.path={model}",
        "data.train_files=rows.jsonl",
        "trainer.n_gpus_per_node=3",
        "data.max_length=7000",
    ]
    common += ["data.train_batch_size=9", "model.fsdp_config.dtype=bfloat16"]
    config = load_config(schema, broken_supervised_rules, [*common, *overrides])
    (pool,) = planned_pools(config, 85e9)
    return {
        phase.name: {part: size / 1e9 for part, size in phase.parts.items()}
        for phase in pool.phases()
    }


def test_training_on_examples_is_planned_by_its_model(deepseek_7b: str):
    shard = SEVEN_BILLION / 3 / 1e9
    sft = plan_of_examples(SFTConfig, deepseek_7b)
    assert list(sft) == [
        f"model {name}" for name in ("load", "forward pass", "update", "optimizer step", "save")
    ]
    assert sft["model update"]["model Adam"] == pytest.approx(8 * shard)
    dpo = plan_of_examples(DPOConfig, deepseek_7b)
    assert dpo["model update"]["reference weights"] == pytest.approx(2 * shard)
    assert dpo["model update"]["model Adam"] == pytest.approx(8 * shard)
    assert (
        "reference weights"
        not in plan_of_examples(DPOConfig, deepseek_7b, "model.lora_rank=4")["model update"]
    )
    rm = plan_of_examples(RMConfig, deepseek_7b)
    assert rm["model load"]["model weights"] == pytest.approx(
        4 * (shard - (102400 - 1) * 4096 / 3e9)
    )
    # Two heads with their averages, and a value head: (4096 x 8192 + 8192) + 8192 x outputs each.
    heads = 4 * (4096 * 8192 + 8192 + 8192 * 102400) + (4096 * 8192 + 8192 + 8192)
    ilql = plan_of_examples(ILQLConfig, deepseek_7b)
    assert ilql["model load"]["model weights"] == pytest.approx(4 * (shard + heads / 3e9))
    trained = heads - 2 * (4096 * 8192 + 8192 + 8192 * 102400)
    assert ilql["model load"]["model Adam"] == pytest.approx(8 * (shard + trained / 3e9))


def test_the_reference_of_dpo_gathers_into_buffers_of_its_own(deepseek_7b: str):
    gathering = [
        plan_of_examples(schema, deepseek_7b)["model update"]["gathering*"]
        for schema in (SFTConfig, DPOConfig)
    ]
    assert gathering[1] == pytest.approx(2 * gathering[0])


def test_ranks_that_share_sequences_have_a_part_of_the_activations(deepseek_7b: str):
    rows = ("training.use_dynamic_bsz=false", "training.micro_batch_size_per_gpu=9")
    shared = "training.ulysses_sequence_parallel_size=3"
    parts = [
        plan_of_examples(SFTConfig, deepseek_7b, *rows, *own)["model forward pass"]
        for own in ((), (shared,))
    ]
    assert parts[1]["activations*"] == pytest.approx(parts[0]["activations*"] / 3)


def test_an_optimizer_step_holds_float32_weights_for_their_average_and_the_head_beside_an_adapter(
    deepseek_7b: str,
):
    actor = "actor_rollout_ref.actor"
    average = [f"{actor}.ema_decay=0.9", f"{actor}.fsdp_config.model_dtype=bfloat16"]
    step = phase(script_config(deepseek_7b, *average), "actor optimizer step")
    shard = SEVEN_BILLION / 4 / 1e9
    assert step["weights for their average"] == pytest.approx(4 * shard)
    assert step["actor Adam"] == pytest.approx((2 * 2 + 4) * shard)
    assert step["gathered layers"] == 0
    adapter = phase(
        script_config(deepseek_7b, "actor_rollout_ref.model.lora_rank=4"), "actor optimizer step"
    )
    assert adapter["gathered layers"] == pytest.approx(2 * 102400 * 4096 / 1e9)


def test_rows_of_pairs_are_two_conversations_of_a_pass(deepseek_7b: str):
    by_rows = ("training.use_dynamic_bsz=false", "training.micro_batch_size_per_gpu=3")
    activations = [
        plan_of_examples(schema, deepseek_7b, *by_rows)["model forward pass"]["activations*"]
        for schema in (SFTConfig, DPOConfig)
    ]
    assert activations[1] == pytest.approx(2 * activations[0])
    assert activations[0] == pytest.approx((4 * 4096 + 3 * 11008) * 2 * 3 * 7000 / 1e9)


def test_a_load_brings_one_whole_parameter_after_the_other_before_adam_is_made(deepseek_7b: str):
    config = script_config(deepseek_7b, "actor_rollout_ref.actor.use_kl_loss=true")
    assert phase(config, "actor load")["actor Adam"] == pytest.approx(8 * SEVEN_BILLION / 4 / 1e9)
    reference = phase(config, "ref load")
    # The embedding, bfloat16
    assert reference["a whole parameter"] == pytest.approx(2 * 102400 * 4096 / 1e9)
    assert reference["actor Adam"] == pytest.approx(8 * SEVEN_BILLION / 4 / 1e9)  # loaded before


def test_export_gathers_a_bucket_in_the_dtype_that_is_sent(deepseek_7b: str):
    largest = phase(
        script_config(deepseek_7b, "actor_rollout_ref.rollout.dtype=float32"), "actor export"
    )
    # The embedding is more than a bucket: gathered whole, and this rank has its fourth.
    assert largest["a bucket of weights*"] == pytest.approx(4 * 102400 * 4096 * 1.25 / 1e9)
    adapter = phase(
        script_config(deepseek_7b, "actor_rollout_ref.model.lora_rank=4"), "actor export"
    )
    # Two matrices of rank 4 for each of seven
    of_layer = 4 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert adapter["a bucket of weights*"] == pytest.approx(2 * 30 * of_layer * 2.25 / 1e9)


def saved_bytes_per_token(architecture: type, num_layers: int, checkpointing: bool) -> float:
    """Bytes of the tensors that autograd saves in the backbone, parameters aside, for each
    token."""
    torch.manual_seed(0)
    config = architecture(num_hidden_layers=num_layers, **SIZES, **EXPERT_SIZES[architecture])
    attention = choose_attention(None, "cpu", torch.bfloat16, softcap=None)
    hf = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=attention
    )
    if checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    rows, length = 2, 64
    input_ids = torch.randint(0, 64, (rows, length))
    in_verls_layout = DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": torch.ones(rows, length, dtype=torch.long),
            "responses": input_ids[:, length // 2 :],
        }
    )
    packed = pack(Rows.of(without_padding(in_verls_layout, pad_token_id=0)))
    own = {parameter.untyped_storage().data_ptr() for parameter in hf.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        # Kept, so that no address is given out twice
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        PolicyModel(hf).train().hidden_states(packed)
    return sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in own) / (
        rows * length
    )


SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 192}
EXPERT_SIZES: dict[type, dict[str, int]] = {
    LlamaConfig: {},
    Qwen3Config: {},
    Qwen3MoeConfig: EXPERTS,
    Qwen2MoeConfig: EXPERTS | {"shared_expert_intermediate_size": 320},
}


@pytest.mark.parametrize("architecture", EXPERT_SIZES)
def test_activations_are_at_most_the_estimate_and_most_of_it(architecture: type, tmp_path: Path):
    config = architecture(num_hidden_layers=1, **SIZES, **EXPERT_SIZES[architecture])
    config.save_pretrained(tmp_path)
    size = ModelSize.of(PolicyModelConfig(path=str(tmp_path)), "model", PolicyModel)
    layer = (
        saved_bytes_per_token(architecture, 3, False)
        - saved_bytes_per_token(architecture, 1, False)
    ) / 2
    assert 0.6 < layer / (2 * size.token.saved) <= 1  # bfloat16 has 2 bytes
    kept = (
        saved_bytes_per_token(architecture, 3, True) - saved_bytes_per_token(architecture, 1, True)
    ) / 2
    assert kept == pytest.approx(2 * size.hidden, rel=0.01)


def test_the_values_of_a_token_in_a_layer_with_experts_are_those_of_its_selected_and_shared_ones():
    with torch.device("meta"):
        config = Qwen2MoeConfig(
            num_hidden_layers=2, mlp_only_layers=[0], **SIZES, **EXPERT_SIZES[Qwen2MoeConfig]
        )
        hf = AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(hf)
    token = TokenValues.of(
        layers, hidden=256, intermediate=704, num_selected=3, has_norms=False, has_adapter=False
    )
    used = 3 * 192 + 320
    assert token.saved == 13 * 256 + 3 * 2 * 256 + 4 * used + 256
    assert token.live == 4 * 256 + max(3.45 * 3 * 256, 3 * 256 + 3 * used)
    assert token.expanded == 3
    dense = TokenValues.of(
        layers[:1], hidden=256, intermediate=704, num_selected=3, has_norms=True, has_adapter=True
    )
    assert dense == TokenValues(saved=20 * 256 + 4 * 704, live=4 * 256 + 4 * 704, expanded=0)


def test_a_rank_plans_with_its_share_of_distributed_experts(tmp_path: Path):
    config = Qwen3MoeConfig(num_hidden_layers=3, **SIZES, **EXPERTS)
    config.save_pretrained(tmp_path)
    size = ModelSize.of(PolicyModelConfig(path=str(tmp_path)), "model", PolicyModel)
    experts_of_layer = 8 * 3 * 256 * 192
    assert size.experts_of_layer == experts_of_layer
    assert size.experts == 3 * experts_of_layer

    def planned(expert_parallel_size: int, strategy: str = "zero3") -> PlannedModel:
        passes = MicroBatching(num_rows=1, max_tokens=100, by_tokens=True)
        fsdp = TrainedFsdpConfig(
            expert_parallel_size=expert_parallel_size, strategy=strategy, model_dtype="bfloat16"
        )
        return PlannedModel(
            "actor",
            size,
            PolicyModelConfig(path=str(tmp_path), enable_gradient_checkpointing=True),
            fsdp,
            shards=8,
            sequence_length=50,
            scored_length=20,
            forward_passes=passes,
            update_passes=passes,
            export_dtype="bfloat16",
        )

    gathered, distributed = planned(1), planned(4)
    assert distributed.stored == gathered.stored  # a rank's shards are as large
    elsewhere = 3 / 4 * experts_of_layer
    less = gathered.update()["gathered layers"] - distributed.update()["gathered layers"]
    assert less == pytest.approx(2 * elsewhere)
    less = gathered.forward()["gathered layers"] - distributed.forward()["gathered layers"]
    assert less == pytest.approx(2 * 2 * elsewhere)  # of two layers
    less = planned(1, "zero1").gradients() - planned(4, "zero1").gradients()
    assert less == pytest.approx(4 * 3 * elsewhere)
    assert gathered.travelling(100) == 0
    assert distributed.travelling(100) == 2 * 3 * 256 * 2 * 100
    # A parameter that is larger than a bucket is gathered in two steps, with a quarter between.
    large = [
        replace(each, size=replace(size, largest_trained=10**9)).export()["a bucket of weights*"]
        for each in (gathered, distributed)
    ]
    assert large[1] - large[0] == pytest.approx(2 * 10**9 / 4)
