"""Both sides of `router_replay`: vLLM and a trainer in this process, with router replay or
without."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from benchmarks.serve import serve
from benchmarks.sides.router_replay_data import NUM_DRAWN, NUM_PROMPTS, PROMPT_LENGTH, VOCABULARY
from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lists, jagged_parts
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config import load_ppo_config
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.rollout.batch import assemble
from verl_like.workers.rollout.request import GenerationRequest, Sampling
from verl_like.workers.rollout.vllm_engine import VllmEngine

SAMPLING = Sampling(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=NUM_DRAWN, stop_token_ids=())
state: dict[str, Any] = {}


def start(mode: str) -> dict[str, Any]:
    """Makes a random Qwen3-MoE of 8 layers with 32 experts, the engine in bfloat16, and the trainer
    in float32."""
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="benchmark_router_replay_")
    write_model(Path(folder))
    config = policy_config(folder, mode)
    engine = VllmEngine(
        config.rollout,
        config.model,
        rank=0,
        world_size=1,
        seed=5,
        device="cpu",
        records_routing=mode == "R3",
    )
    group = LocalWorkerGroup(ClassWithInitArgs(ActorWorker, config=config))
    group.init_model()
    engine.load_weights([group.export_weights(version=0).get()[0]], 0)
    generator = torch.Generator().manual_seed(4)
    size = (NUM_PROMPTS, PROMPT_LENGTH)
    state["prompts"] = torch.randint(2, VOCABULARY, size, generator=generator).tolist()
    state["engine"] = engine
    state["group"] = group
    return {}


def write_model(folder: Path) -> None:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def policy_config(folder: str, mode: str) -> ActorRolloutRefConfig:
    policy = "actor_rollout_ref"
    overrides = [
        "device=cpu",
        "placement=colocated",
        "trainer.n_gpus_per_node=1",
        "data.train_files=none",
        "data.val_files=none",
        "algorithm.adv_estimator=grpo",
        f"{policy}.model.path={folder}",
        f"data.max_prompt_length={PROMPT_LENGTH}",
        f"data.max_response_length={NUM_DRAWN}",
        f"data.train_batch_size={NUM_PROMPTS}",
        f"{policy}.actor.ppo_mini_batch_size={NUM_PROMPTS}",
        f"{policy}.actor.ppo_micro_batch_size_per_gpu=16",
        f"{policy}.actor.optim.lr=1e-9",
        f"{policy}.actor.fsdp_config.strategy=single",
        f"{policy}.actor.router_replay.mode={mode}",
        f"{policy}.rollout.dtype=bfloat16",
        f"{policy}.rollout.log_prob_micro_batch_size_per_gpu=16",
        f"{policy}.rollout.n=2",
        f"{policy}.rollout.ignore_eos=true",
    ]
    return load_ppo_config(overrides).actor_rollout_ref


def generate() -> dict[str, Any]:
    """Draws a response to each prompt: the CPU seconds, and the tokens."""
    engine = state["engine"]
    engine.forget_prompts()
    requests = []
    for index, prompt in enumerate(state["prompts"]):
        requests.append(GenerationRequest(f"{index}", prompt, seed=index, sampling=SAMPLING))
    started = time.process_time()
    engine.submit(requests)
    completions = {}
    for ended in engine.stream():
        completions.update(ended)
    seconds = time.process_time() - started
    in_order = [completions[request.name] for request in requests]
    prompts = jagged_from_lists(state["prompts"], torch.int64)
    batch = assemble(DataProto.from_dict(tensors={"prompts": prompts}), in_order)
    tokens, offsets = jagged_parts(batch.batch["responses"])
    advantages = torch.linspace(-1, 1, len(tokens))
    batch.batch["advantages"] = torch.nested.nested_tensor_from_jagged(advantages, offsets)
    state["batch"] = batch
    return {"seconds": seconds, "tokens": tokens.numpy()}


def update() -> dict[str, Any]:
    """Trains an optimizer step on what was drawn last: the CPU seconds."""
    started = time.process_time()
    state["group"].update_actor(state["batch"]).get()
    return {"seconds": time.process_time() - started}


if __name__ == "__main__":
    serve(start, generate, update)
