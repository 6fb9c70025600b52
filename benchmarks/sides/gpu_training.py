"""Cases of the GPU check that train: real workers on one rank, with random weights in the shapes of
known models."""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.sides.gpu_kernels import report_peak, start_peak
from benchmarks.sides.gpu_process import EXPERTS, seconds_of
from verl_like.protocol import DataProto, metric_values
from verl_like.protocol.padded import without_padding
from verl_like.protocol.row_ops import jagged_parts
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.model_worker import ModelWorker
from verl_like.workers.models.attention import choose_attention
from verl_like.workers.models.packed_models import PackedModel
from verl_like.workers.weights.arrival import check_exports
from verl_like.workers.weights.exports import iterate_weights
from verl_like.workers.weights.fingerprints import fingerprint_tensor

ROUNDS = 3
WARM_UP = 2

QWEN = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "tie_word_embeddings": True}
SHAPES: dict[str, PretrainedConfig] = {
    "0.5B": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        **QWEN,
    ),
    "1.5B": Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        **QWEN,
    ),
    "0.6B": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        **QWEN,
    ),
    EXPERTS: Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        **(QWEN | {"tie_word_embeddings": False}),
    ),
}
"""Qwen2.5-0.5B, Qwen2.5-1.5B, Qwen3-0.6B, and a few layers of Qwen3-30B-A3B."""
TOY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2,
}
"""What replaces it on a CPU."""
TOY_EXPERTS = {"moe_intermediate_size": 32, "num_local_experts": 16, "num_experts_per_tok": 4}
"""And in a mixture of experts."""


class RandomWeights(ModelWorker):
    """A worker whose model is not loaded: it has random weights, the same ones every time."""

    hf_config: PretrainedConfig

    def build_model(self, with_weights: bool) -> PackedModel:
        fsdp = self.fsdp_config
        attention = choose_attention(None, self.device, getattr(torch, fsdp.dtype))
        torch.manual_seed(0)
        with torch.device(self.device):
            hf = AutoModelForCausalLM.from_config(
                self.hf_config,
                dtype=getattr(torch, fsdp.model_dtype),
                attn_implementation=attention,
                experts_implementation=self.model_config.experts_implementation,
            )
        return self.model_class(hf.cpu())


class RandomPolicy(ActorWorker, RandomWeights):
    """The policy with random weights."""

    def __init__(self, config: ActorRolloutRefConfig, hf_config: PretrainedConfig) -> None:
        super().__init__(config)
        self.hf_config = hf_config


def toy_of(shape: str) -> dict[str, Any]:
    """The numbers by which a shape becomes one for a CPU."""
    return TOY | (TOY_EXPERTS if shape == EXPERTS else {})


def policy(
    shape: str,
    device: str,
    max_tokens: int,
    *,
    lr: float = 1e-4,
    model: dict[str, Any] | None = None,
    fsdp: dict[str, Any] | None = None,
    replay_mode: str = "disabled",
) -> RandomPolicy:
    """An actor whose update of any number of rows is one optimizer step, in micro-batches of at
    most `max_tokens`."""
    os.environ["VERL_LIKE_DEVICE"] = device
    config = ActorRolloutRefConfig.model_validate(
        {
            "model": {"path": f"random weights in the shape {shape}", **(model or {})},
            "actor": {
                "ppo_mini_batch_size": 1024,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": max_tokens,
                "optim": {"lr": lr},
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.2,
                "loss_agg_mode": "token-mean",
                "router_replay": {"mode": replay_mode},
                "fsdp_config": {
                    "dtype": "bfloat16" if device == "cuda" else "float32",
                    **(fsdp or {}),
                },
            },
            "ref": {
                "log_prob_micro_batch_size_per_gpu": 1,
                "log_prob_use_dynamic_bsz": True,
                "log_prob_max_token_len_per_gpu": max_tokens,
            },
            "rollout": {
                "prompt_length": 1,
                "response_length": max_tokens,
                "log_prob_use_dynamic_bsz": True,
                "log_prob_max_token_len_per_gpu": max_tokens,
            },
        }
    )
    hf_config = type(SHAPES[shape]).from_dict(
        SHAPES[shape].to_dict() | (toy_of(shape) if device == "cpu" else {})
    )
    worker = RandomPolicy(config, hf_config)
    worker.init_model()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the weights were made on the device
    return worker


def rows(worker: RandomPolicy, lengths: list[int], *, padded: bool = False) -> DataProto:
    """Sequences of these lengths, of which the first token is the prompt; `padded`: all are as long
    as the longest, by tokens that nothing scores."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), max(lengths))
    real = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    input_ids = torch.randint(2, worker.hf_config.vocab_size, shape, generator=generator)
    in_verls_layout = DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(real) if padded else real,
            "responses": input_ids[:, 1:],
            "response_mask": real[:, 1:],
            "advantages": torch.randn(shape[0], shape[1] - 1, generator=generator),
        }
    )
    return without_padding(in_verls_layout, pad_token_id=0)


def update(worker: RandomPolicy, batch: DataProto) -> dict[str, float]:
    """The metrics of one optimizer step."""
    return metric_values(worker.update_actor(batch).meta_info["metrics"])


def log_probs(worker: RandomPolicy, batch: DataProto) -> torch.Tensor:
    """Of all tokens, (N,)."""
    return jagged_parts(worker.compute_log_prob(batch).tensors()["old_log_probs"])[0]


def report_speed(report: Any, what: str, worker: RandomPolicy, batch: DataProto) -> None:
    """Tokens a second and MFU of the update."""
    steps = [update(worker, batch) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    mfu = statistics.median(step["perf/mfu/actor"] for step in steps)
    report.row(
        f"{what}: update", "tokens/s", [step["perf/tokens_per_s/actor"] for step in steps], mfu=mfu
    )


def goal(report: Any, device: str, *, kept: bool, compiled: bool) -> None:
    """prime-rl's published measurement: Qwen3-0.6B, one long sequence an optimizer step."""
    before = start_peak(device)
    tokens = 16_384 if device == "cuda" else 128
    model = {
        "enable_gradient_checkpointing": not kept,
        "use_torch_compile": compiled and device == "cuda",
    }
    what = f"goal, {'activations kept' if kept else 'layers recomputed'}{', compiled' * compiled}"
    if compiled and device != "cuda":
        report.skip(what, "cuda only")
        return
    worker = policy("0.6B", device, tokens, model=model)
    report_speed(report, what, worker, rows(worker, [tokens]))
    report_peak(report, f"{what}: peak memory", device, before)


def speed(report: Any, device: str, *, shape: str, kept: bool) -> None:
    """Updates and log-probabilities of two micro-batches, of short and of long sequences."""
    long, short = (16_384, 4096) if device == "cuda" else (128, 32)
    worker = policy(shape, device, long, model={"enable_gradient_checkpointing": not kept})
    for length in (short, long):
        before = start_peak(device)
        batch = rows(worker, [length] * (2 * long // length))
        what = f"speed, {shape}, {length} tokens{', activations kept' if kept else ''}"
        report_speed(report, what, worker, batch)
        report_peak(report, f"{what}: peak memory over parameters and optimizer", device, before)
        if not kept:
            seconds = seconds_of(
                device, lambda batch=batch: log_probs(worker, batch), rounds=ROUNDS, warm_up=1
            )
            report.row(f"{what}: log-probabilities", "tokens/s", [2 * long / s for s in seconds])


def variant(
    report: Any,
    device: str,
    *,
    name: str,
    model: dict[str, Any] | None = None,
    fsdp: dict[str, Any] | None = None,
) -> None:
    """Three updates under one setting: seconds, peak and idle memory; the third step is the same
    under all."""
    if device != "cuda" and name == "compiled":
        report.skip(f"engine, {name}", "cuda only")
        return
    before = start_peak(device)
    tokens = 4096 if device == "cuda" else 32
    worker = policy("0.5B", device, tokens, model=model, fsdp=fsdp)
    batch = rows(worker, [tokens // 2] * 4)
    steps = []
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        started = time.perf_counter()
        steps.append(update(worker, batch))
        seconds.append(time.perf_counter() - started)
    report.row(f"engine, {name}: first update", "s", seconds[:1])
    report.row(f"engine, {name}: update", "s", seconds[WARM_UP:])
    report_peak(report, f"engine, {name}: peak memory", device, before)
    if device == "cuda":
        report.row(
            f"engine, {name}: memory between updates",
            "GiB",
            [(torch.cuda.memory_allocated() - before) / 2**30],
        )
    # Two steps have changed the weights by then.
    assert steps[2]["actor/grad_norm"] != steps[0]["actor/grad_norm"], (
        "the optimizer changed nothing"
    )
    for metric in ("actor/grad_norm", "actor/entropy"):
        report.same(
            f"{metric} of the third update",
            f"engine, {name}",
            steps[2][metric],
            2e-2 if device == "cuda" else 1e-5,
        )


def checkpoint(report: Any, device: str) -> None:
    """A checkpoint brings weights and optimizer back: the step after it is the step that was made
    before."""
    tokens = 4096 if device == "cuda" else 32
    worker = policy("0.5B", device, tokens)
    vocabulary = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    # Its random weights have none
    worker.engine.tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary)
    batch = rows(worker, [tokens])
    update(worker, batch)
    saved = log_probs(worker, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        save = seconds_of(device, lambda: worker.save_checkpoint(path), rounds=1, warm_up=0)
        num_bytes = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        update(worker, batch)
        expected = log_probs(worker, batch)
        load = seconds_of(device, lambda: worker.load_checkpoint(path), rounds=1, warm_up=0)
    report.row("checkpoint: save", "GB/s", [1e-9 * num_bytes / s for s in save])
    report.row("checkpoint: load", "GB/s", [1e-9 * num_bytes / s for s in load])
    moved = (expected - saved).abs().mean()
    off = (log_probs(worker, batch) - saved).abs().mean()
    assert off < 1e-2 * moved, (
        f"log-probabilities are off by {off} after loading; an update moves them by {moved}"
    )
    update(worker, batch)
    off = (log_probs(worker, batch) - expected).abs().mean()
    # Some kernels' backward passes add in another order each time.
    assert off < (0.2 if device == "cuda" else 1e-3) * moved, (
        f"and by {off} after the update done again"
    )


def packing(report: Any, device: str) -> None:
    """The same update with and without the padding computed; causal attention makes the numbers the
    same."""
    longest, num_rows = (4096, 32) if device == "cuda" else (64, 8)
    generator = torch.Generator().manual_seed(0)
    draws = torch.empty(num_rows).log_normal_(0, 0.8, generator=generator) * longest / 4
    lengths = [longest, *draws.int().clamp(2, longest).tolist()[1:]]
    worker = policy("0.5B", device, 4 * longest, lr=0.0)  # both batches meet the same weights
    useful = sum(lengths)
    rates = {}
    norms = {}
    for name in ("padded", "packed"):
        before = start_peak(device)
        batch = rows(worker, lengths, padded=name == "padded")
        seconds = seconds_of(device, lambda batch=batch: update(worker, batch), rounds=ROUNDS)
        rates[name] = [useful / s for s in seconds]
        norms[name] = update(worker, batch)["actor/grad_norm"]
        report_peak(
            report, f"packing, {name}: peak memory over parameters and optimizer", device, before
        )
    gain = statistics.median(rates["packed"]) / statistics.median(rates["padded"])
    ideal = num_rows * longest / useful
    report.row("packing, padded", "useful tokens/s", rates["padded"])
    report.row(
        "packing, packed", "useful tokens/s", rates["packed"], of_padded=gain, of_ideal=gain / ideal
    )
    tolerance = 2e-2 if device == "cuda" else 1e-4
    assert abs(norms["packed"] / norms["padded"] - 1) < tolerance, f"gradient norms differ: {norms}"


def export(report: Any, device: str, *, shape: str) -> None:
    """Weights for the rollout engine, beside a copy to pinned host memory; what arrives has the
    right fingerprints."""
    worker = policy(shape, device, 4096)
    exported = []

    def run() -> None:
        exported[:] = [worker.export_weights(version=1)]

    seconds = seconds_of(device, run, rounds=ROUNDS, warm_up=1)
    num_bytes = exported[0].num_bytes
    announced = check_exports(exported, 1)
    arrived = {name: fingerprint_tensor(values) for name, values in iterate_weights(exported)}
    assert arrived == announced, f"fingerprints {arrived} and {announced}"
    ratios = {}
    if device == "cuda":
        source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        copies = seconds_of(device, lambda: target.copy_(source, non_blocking=True))
        ratios["of_pinned_copy"] = (
            num_bytes / statistics.median(seconds) / (2**30 / statistics.median(copies))
        )
        report.row(
            f"export, {shape}: a copy to pinned memory", "GB/s", [1e-9 * 2**30 / s for s in copies]
        )
    report.row(
        f"export, {shape}: weights", "GB/s", [1e-9 * num_bytes / s for s in seconds], **ratios
    )
