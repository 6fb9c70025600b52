"""Compares the plan of a GPU's memory with what ranks reserve on the null GPU: `make plan-check`.

Each case is a training command. Of each phase of both ranks that are measured, the plan without
context and engine has to be at least what torch reserves, and at most 10% or 0.3 GB more. Engines
are vLLM with different settings on a GPU of 84.9 GB: what they take has to be within their share
and the context. Writes docs/memory_plan.md, and ends with an error where a phase is outside.
`python scripts/plan_check.py sft "lora*"` does these cases alone and writes nothing.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatch
from pathlib import Path

from transformers import LlamaConfig, Qwen3MoeConfig

from scripts.commit import commit
from verl_like.rehearse.commands import config_of
from verl_like.rehearse.gpu_size import bytes_of_gpu
from verl_like.rehearse.null_gpu import NullGpu
from verl_like.rehearse.processes import Pool, Process, measure_engine, measure_run
from verl_like.trainer.memory.pools import planned_pools
from verl_like.trainer.memory.sums import CONTEXT, GB, PlannedPool

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "build" / "plan_check"
MODEL = MODELS / "7b"
SIZES = {"7b": (4096, 11008, 32, 32, 32), "70b": (8192, 28672, 80, 64, 8)}
"""Of Llama-2: hidden, intermediate, layers, heads, heads of keys and values."""
EXPERTS = "30b-a3b"
PAGE = ROOT / "docs" / "memory_plan.md"
MOST_ABOVE = 1.1
NEGLIGIBLE = 0.3 * GB
NOT_OF_THE_PROCESS = {"context*", "sleeping engine*", "engine's share", "engine's weights"}
ACTOR = "actor_rollout_ref.actor"
EXPERT_PARALLEL = f"{ACTOR}.fsdp_config.expert_parallel_size"
MODEL_KEY = "actor_rollout_ref.model"
CORRECTED = "algorithm.rollout_correction.rollout_is=token"


@dataclass(frozen=True)
class Case:
    """A training command of which the plan is compared."""

    name: str
    overrides: Sequence[str]
    command: str = "main_ppo"


def ppo(
    name: str, *overrides: str, ranks: int = 8, command: str = "main_ppo", size: str = "7b"
) -> Case:
    """GRPO of the actor alone, on that many ranks, with 16,384 tokens in a pass, unless the
    overrides say otherwise."""
    common = [
        "placement=colocated",
        "algorithm.adv_estimator=grpo",
        f"trainer.n_gpus_per_node={min(8, ranks)}",
        f"trainer.nnodes={max(1, ranks // 8)}",
        "data.train_files=rows.jsonl",
        "data.val_files=rows.jsonl",
        "data.max_prompt_length=1024",
        "data.max_response_length=1024",
        "data.train_batch_size=1024",
        f"{MODEL_KEY}.path={MODELS / size}",
        f"{ACTOR}.ppo_mini_batch_size=1024",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    ]
    return Case(name, [*common, *overrides], command)


def with_critic(name: str, *overrides: str, **options: str) -> Case:
    """PPO with a critic, and every forward pass with as many tokens as an update."""
    own = (
        "algorithm.adv_estimator=gae",
        f"critic.model.path={MODEL}",
        "critic.ppo_mini_batch_size=1024",
        "critic.ppo_micro_batch_size_per_gpu=8",
        "critic.forward_micro_batch_size_per_gpu=8",
    )
    return ppo(name, *own, *overrides, **options)


def examples(name: str, command: str, *overrides: str) -> Case:
    common = [
        "data.train_files=rows.jsonl",
        "data.max_length=2048",
        f"model.path={MODEL}",
        "trainer.n_gpus_per_node=8",
    ]
    return Case(name, [*common, *overrides], command)


CASES = (
    ppo("zero3, 8 ranks"),
    ppo("zero3, 8 ranks, bfloat16", f"{ACTOR}.fsdp_config.model_dtype=bfloat16"),
    ppo("zero3, 64 ranks", ranks=64),
    ppo("zero3, 64 ranks, bfloat16", f"{ACTOR}.fsdp_config.model_dtype=bfloat16", ranks=64),
    ppo("70B, 8 ranks", size="70b"),
    ppo("70B, 8 ranks, bfloat16", f"{ACTOR}.fsdp_config.model_dtype=bfloat16", size="70b"),
    ppo("70B, 64 ranks", ranks=64, size="70b"),
    ppo(
        "70B, 64 ranks, bfloat16", f"{ACTOR}.fsdp_config.model_dtype=bfloat16", ranks=64, size="70b"
    ),
    ppo("30B-A3B, 8 ranks", size=EXPERTS),
    ppo("30B-A3B, 64 ranks", size=EXPERTS, ranks=64),
    ppo(
        "30B-A3B, 64 ranks, bfloat16",
        f"{ACTOR}.fsdp_config.model_dtype=bfloat16",
        ranks=64,
        size=EXPERTS,
    ),
    ppo(
        "30B-A3B, 64 ranks, no checkpointing, 2,048 tokens",
        f"{MODEL_KEY}.enable_gradient_checkpointing=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        ranks=64,
        size=EXPERTS,
    ),
    ppo("30B-A3B, 8 ranks, expert parallel 8", f"{EXPERT_PARALLEL}=8", size=EXPERTS),
    ppo("30B-A3B, 64 ranks, expert parallel 8", f"{EXPERT_PARALLEL}=8", ranks=64, size=EXPERTS),
    ppo(
        "30B-A3B, 64 ranks, expert parallel 4, no checkpointing, 2,048 tokens",
        f"{EXPERT_PARALLEL}=4",
        f"{MODEL_KEY}.enable_gradient_checkpointing=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        ranks=64,
        size=EXPERTS,
    ),
    ppo(
        "30B-A3B, 64 ranks, expert parallel 8, zero1",
        f"{EXPERT_PARALLEL}=8",
        f"{ACTOR}.fsdp_config.strategy=zero1",
        ranks=64,
        size=EXPERTS,
    ),
    ppo("zero1", f"{ACTOR}.fsdp_config.strategy=zero1"),
    ppo("zero2", f"{ACTOR}.fsdp_config.strategy=zero2"),
    ppo("ddp", f"{ACTOR}.fsdp_config.strategy=ddp"),
    ppo("lora", f"{MODEL_KEY}.lora_rank=16"),
    ppo("param offload", f"{ACTOR}.fsdp_config.param_offload=true"),
    ppo("optimizer offload", f"{ACTOR}.fsdp_config.optimizer_offload=true"),
    ppo(
        "both offloads",
        f"{ACTOR}.fsdp_config.param_offload=true",
        f"{ACTOR}.fsdp_config.optimizer_offload=true",
    ),
    ppo("activation offload", f"{MODEL_KEY}.enable_activation_offload=true"),
    ppo(
        "no checkpointing, 4,096 tokens",
        f"{MODEL_KEY}.enable_gradient_checkpointing=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    ),
    ppo("ulysses of 2", f"{ACTOR}.ulysses_sequence_parallel_size=2"),
    ppo("ulysses of 4", f"{ACTOR}.ulysses_sequence_parallel_size=4"),
    ppo("single, 1 rank", f"{ACTOR}.fsdp_config.strategy=single", ranks=1),
    ppo("copies of 4 shards each", f"{ACTOR}.fsdp_config.fsdp_size=4"),
    ppo("average", f"{ACTOR}.ema_decay=0.9"),
    with_critic(
        "critic, reference and reward model on one pool",
        "algorithm.use_kl_in_reward=true",
        "reward_model.enable=true",
        f"reward_model.model.path={MODEL}",
        "reward_model.micro_batch_size_per_gpu=8",
    ),
    with_critic(
        "detached",
        "placement=detached",
        "algorithm.use_kl_in_reward=true",
        "algorithm.rollout_correction.bypass_mode=false",
        command="main_detached",
    ),
    examples("sft", "main_sft"),
    examples("sft, lora", "main_sft", "model.lora_rank=16"),
    examples("rm", "main_rm"),
    examples("dpo", "main_dpo"),
    examples("dpo, lora", "main_dpo", "model.lora_rank=16"),
    examples("ilql", "main_ilql"),
)

ROLLOUT = "actor_rollout_ref.rollout"
ENGINES = (
    ppo("engine"),
    ppo("engine, quantised", f"{ROLLOUT}.quantization=fp8_per_channel", CORRECTED),
    ppo("engine, cache kept in updates", f"{ROLLOUT}.kv_after_update=keep", CORRECTED),
    ppo("engine, adapter", f"{MODEL_KEY}.lora_rank=16"),
)
DEVICE_BYTES = bytes_of_gpu("H100-80")


def make_models() -> None:
    """The architectures of Llama-2 and of Qwen3-30B-A3B."""
    for name, (hidden, intermediate, layers, heads, key_value_heads) in SIZES.items():
        LlamaConfig(
            vocab_size=32000,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            max_position_embeddings=32768,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(MODELS / name)
    Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(MODELS / EXPERTS)


def rows_of(case: Case, pool: Pool, planned_pool: PlannedPool) -> tuple[list[str], list[str]]:
    """A row of the page for each phase, of the rank that reserves more; and what is outside of the
    bounds."""
    plan = {
        phase.name: sum(
            size for part, size in phase.parts.items() if part not in NOT_OF_THE_PROCESS
        )
        for phase in planned_pool.phases()
    }
    rows = []
    faults = []
    ranks = [process for process in pool.processes if not process.is_counted]
    for of_ranks in zip(*(process.phases for process in ranks), strict=True):
        phase = max(of_ranks, key=lambda each: each.reserved)
        if phase.phase not in plan:  # between calls
            continue
        expected = plan[phase.phase]
        above = expected - phase.reserved
        numbers = [f"{size / GB:.1f}" for size in (phase.allocated, phase.reserved, expected)]
        ratio = f"{expected / phase.reserved:.3f}"
        name = (
            f"{case.name} | {phase.phase}"
            if case.command != "main_detached"
            else f"{pool.name} | {phase.phase}"
        )
        rows.append(f"| {name} | {' | '.join(numbers)} | {ratio} |")
        if above < 0 or above > max((MOST_ABOVE - 1) * phase.reserved, NEGLIGIBLE):
            faults.append(f"{name}: the plan is {ratio} of what is reserved")
    return rows, faults


def rows_of_engine(
    case: Case, engine: Process, planned_pool: PlannedPool
) -> tuple[list[str], list[str]]:
    """A row of the page for each phase of an engine; and what is outside of the bounds."""
    if engine.refusal:
        return [], [f"{case.name}: {engine.refusal}"]
    assert planned_pool.rollout
    most = sum(planned_pool.rollout.working.values()) + CONTEXT
    rows = []
    for phase in engine.phases:
        sizes = (
            phase.reserved,
            phase.parts.get("weights", 0),
            phase.parts.get("cache", 0),
            phase.pinned,
        )
        rows.append(
            f"| {case.name} | {phase.phase} | {' | '.join(f'{size / GB:.1f}' for size in sizes)} |"
        )
    over_full = [phase.phase for phase in engine.phases if phase.reserved > most]
    return rows, [f"{case.name}: takes more than its share in {phase}" for phase in over_full]


def chosen_of(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    return [case for case in cases if any(fnmatch(case.name, pattern) for pattern in patterns)]


def main() -> None:
    patterns = sys.argv[1:] or ["*"]
    chosen = chosen_of(CASES, patterns)
    engines = chosen_of(ENGINES, patterns)
    if not chosen and not engines:
        names = ", ".join(case.name for case in (*CASES, *ENGINES))
        sys.exit(f"No case is called {' or '.join(patterns)}; there are {names}.")
    make_models()
    null_gpu = NullGpu()
    began = time.monotonic()
    rows = [
        "| case | phase | tensors | reserved | plan | plan / reserved |",
        "|---|---|---|---|---|---|",
    ]
    print(*rows, sep="\n", flush=True)
    faults = []
    for case in chosen:
        task = {
            "command": case.command,
            "overrides": case.overrides,
            "config_name": None,
            "config_dir": None,
        }
        planned = planned_pools(config_of(case.command, case.overrides), 0)
        for pool, planned_pool in zip(measure_run(null_gpu, task, planned), planned, strict=True):
            own_rows, own_faults = rows_of(case, pool, planned_pool)
            print(*own_rows, sep="\n", flush=True)
            rows = rows + own_rows
            faults = faults + own_faults
    of_engines = [
        "| engine | phase | on the GPU | weights | cache | pinned |",
        "|---|---|---|---|---|---|",
    ]
    for case in engines:
        task = {
            "command": case.command,
            "overrides": case.overrides,
            "config_name": None,
            "config_dir": None,
        }
        (planned_pool,) = planned_pools(config_of(case.command, case.overrides), DEVICE_BYTES)
        engine = measure_engine(null_gpu, task, planned_pool, DEVICE_BYTES)
        own_rows, own_faults = rows_of_engine(case, engine, planned_pool)
        print(*own_rows, sep="\n", flush=True)
        of_engines = of_engines + own_rows
        faults = faults + own_faults
    if patterns == ["*"]:
        write_page(rows, of_engines, time.monotonic() - began)
    if faults:
        sys.exit("\n".join(["Outside of the bounds:", *faults]))


def write_page(table: Sequence[str], of_engines: Sequence[str], seconds: float) -> None:
    """docs/memory_plan.md."""
    about = [
        f"Written by `make plan-check` on {date.today()}, of commit {commit()}, in {seconds:.0f} "
        "s. It has what ranks",
        "reserve of a GPU in each phase, by torch's allocator on the null GPU, and what the plan "
        "says",
        "([memory](memory.md)), in GB (10^9 bytes), without CUDA context and engine; of rank 0 and "
        "the last rank the",
        "larger. The models are Llama-2, of 7B and shared by 8 ranks with zero3 unless a case says "
        "otherwise; 30B-A3B is",
        "Qwen3's mixture of experts. 16,384 tokens are in a pass.",
    ]
    about_engines = [
        "vLLM with the 7B model on a GPU of 84.9 GB, of which its share is 34.0: the most that it "
        "holds in each phase,",
        "and host memory that is pinned. Tensor parallel engines are run with numbers, by `make "
        "gpu-rehearsal`.",
    ]
    title = "# The plan of memory beside the rehearsal"
    lines = [
        title,
        "",
        *about,
        "",
        *table,
        "",
        "## Engines",
        "",
        *about_engines,
        "",
        *of_engines,
        "",
    ]
    PAGE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
