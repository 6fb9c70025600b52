"""verl_like's side of `rollout`: its vLLM engine in this process, with a length of its own for
every response."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.serve import serve, stopwatch
from benchmarks.sides.rollout_data import (
    LONGEST,
    MEAN_LENGTH,
    NUM_PROMPTS,
    PROMPT_LENGTH,
    VOCABULARY,
    lengths,
    prompts,
)
from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_from_lists, jagged_parts
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout import GenerationRequest
from verl_like.workers.rollout.batch import assemble
from verl_like.workers.rollout.vllm_engine import VllmEngine
from verl_like.workers.weights.exports import collect_weights

state: dict[str, Any] = {}


class ForcedLengths(VllmEngine):
    """Ends each response after a number of tokens that was chosen before."""

    wanted: list[int]
    with_seeds: bool

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        samplings = [
            dataclasses.replace(request.sampling, max_tokens=length)
            for request, length in zip(requests, self.wanted, strict=True)
        ]
        super().submit(
            [dataclasses.replace(r, sampling=s) for r, s in zip(requests, samplings, strict=True)]
        )

    def _vllm_request(self, request: GenerationRequest) -> tuple[Any, ...]:
        """Without a seed where responses are to have none of their own."""
        name, prompt, parameters, *others = super()._vllm_request(request)
        if not self.with_seeds:
            parameters.seed = None
        return name, prompt, parameters, *others


def start() -> dict[str, Any]:
    """Makes a random Qwen2, starts the engine with its weights, and returns the model's folder."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="benchmark_rollout_"))
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        # A distribution that is neither flat nor certain, so that greedy has one answer
        parameter.normal_(std=0.08)
    model.save_pretrained(folder)
    rollout = RolloutConfig(
        dtype="float32",
        n=1,
        ignore_eos=True,
        prompt_length=PROMPT_LENGTH,
        response_length=LONGEST,
        max_num_seqs=NUM_PROMPTS,
        log_prob_use_dynamic_bsz=False,
        log_prob_max_token_len_per_gpu=1,  # the actor reads these two
    )
    engine = ForcedLengths(
        rollout, TrainedModelConfig(path=str(folder)), rank=0, world_size=1, seed=0, device="cpu"
    )
    named = model.named_parameters()
    engine.load_weights(
        [collect_weights(named, dtype=torch.float32, rank=0, world_size=1, version=1)], 1
    )
    state["engine"] = engine
    return {"folder": str(folder), "num_parameters": model.num_parameters()}


def _generate(
    wanted: list[int], seed: int, greedy: bool, with_seeds: bool = True
) -> tuple[DataProto, float]:
    state["engine"].wanted = wanted
    state["engine"].with_seeds = with_seeds
    ids = prompts(seed)[: len(wanted)]
    columns = {
        "prompts": jagged_from_lists(ids, torch.int64),
        "uid": np.array([str(i) for i in range(len(ids))], dtype=object),
    }
    batch = DataProto.from_single_dict(
        columns, meta_info={"global_steps": seed, "validate": greedy}
    )
    with stopwatch() as seconds:
        requests = state["engine"].rules().requests_of(batch, "a batch")
        state["engine"].submit(requests)
        completions = dict(each for ended in state["engine"].stream() for each in ended)
        output = assemble(batch, [completions[request.name] for request in requests])
    return output, seconds[0]


def generate(seed: int, with_seeds: bool = True) -> dict[str, Any]:
    """Responses of the lengths of `seed` to its prompts, each drawn with a seed of its own or all
    from one stream."""
    wanted = lengths(seed)
    output, seconds = _generate(wanted, seed, greedy=False, with_seeds=with_seeds)
    assert jagged_parts(output.batch["responses"])[1].diff().tolist() == wanted
    return {"seconds": seconds, "tokens": sum(wanted)}


def greedy(seed: int, length: int) -> dict[str, Any]:
    output, _ = _generate([length] * NUM_PROMPTS, seed, greedy=True)
    return {
        "responses": jagged_parts(output.batch["responses"])[0].view(NUM_PROMPTS, length).numpy()
    }


def _timed(step: Callable[[], Any], seconds: list[float]) -> Any:
    with stopwatch() as one:
        result = step()
    seconds += one
    return result


def step_costs(seed: int, sizes: list[int]) -> dict[str, Any]:
    """Median seconds of a step of the engine that decodes this many responses."""
    engine = state["engine"]
    costs = {}
    step = engine.llm.llm_engine.step
    for size in sizes:
        seconds: list[float] = []
        engine.llm.llm_engine.step = functools.partial(_timed, step, seconds)
        _generate([MEAN_LENGTH] * size, seed, greedy=False)
        costs[str(size)] = float(np.median(seconds[2:-1]))
    engine.llm.llm_engine.step = step
    return {"costs": costs}


if __name__ == "__main__":
    serve(start, generate, greedy, step_costs)
