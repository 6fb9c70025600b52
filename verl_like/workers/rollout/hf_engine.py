"""Reference rollout engine: transformers' `generate` on a copy of the model. Small, slow, easy to step through."""

from collections.abc import Generator, Iterator
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl_like.workers.rollout.base import CPU_NUM_SEQS, Completion, RolloutEngine, Sampling
from verl_like.workers.weight_sync import WeightSyncError, fingerprint_tensor


class HfEngine(RolloutEngine):
    """Generates with transformers; every rank is a replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.tensor_model_parallel_size != 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={self.config.tensor_model_parallel_size} needs rollout.name=vllm; "
                "the hf engine runs on one process."
            )
        self.model = AutoModelForCausalLM.from_config(
            self.hf_config,
            dtype=getattr(torch, self.config.dtype),
            trust_remote_code=self.model_config.trust_remote_code,
        )
        self.model.eval().requires_grad_(False).to(self.device)
        # `generate` fills what a request leaves open from here, and a model's own defaults must not leak in.
        self.model.generation_config = GenerationConfig()

    def _generate(
        self, prompts: list[list[int]], sampling: Sampling, seeds: list[list[int]]
    ) -> Generator[list[tuple[int, int, Completion]], None, None]:
        self.wake_up()
        generation = GenerationConfig(
            do_sample=False,  # `_SeededDraw` draws
            max_new_tokens=sampling.max_tokens,
            eos_token_id=list(sampling.stop_token_ids) or None,
            pad_token_id=self.pad_token_id,
            return_dict_in_generate=True,
        )
        at_once = max(1, (self.config.max_num_seqs or CPU_NUM_SEQS) // sampling.n)
        for start in range(0, len(prompts), at_once):
            rows = slice(start, start + at_once)
            draw = _SeededDraw(sampling, [seed for group in seeds[rows] for seed in group])
            completions = self._generate_padded(prompts[rows], sampling, generation, draw)
            yield [(start + i // sampling.n, i % sampling.n, completion) for i, completion in enumerate(completions)]

    @torch.no_grad()
    def _generate_padded(
        self, prompts: list[list[int]], sampling: Sampling, generation: GenerationConfig, draw: "_SeededDraw"
    ) -> list[Completion]:
        width = max(map(len, prompts))
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
        attention_mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model.generate(
            input_ids=input_ids.to(self.device).repeat_interleave(sampling.n, dim=0),
            attention_mask=attention_mask.to(self.device).repeat_interleave(sampling.n, dim=0),
            generation_config=generation,
            logits_processor=LogitsProcessorList([draw]),
        )
        tokens, log_probs = output.sequences[:, width:], torch.stack(draw.log_probs, dim=1)
        completions = []
        for token_row, log_prob_row in zip(tokens.tolist(), log_probs.tolist(), strict=True):
            ends = [t for t, token in enumerate(token_row) if token in sampling.stop_token_ids]
            length = ends[0] + 1 if ends else len(token_row)
            completions.append(Completion(token_row[:length], log_prob_row[:length]))
        return completions

    @torch.no_grad()
    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.wake_up()
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            if name not in parameters or parameters[name].shape != tensor.shape:
                known = parameters[name].shape if name in parameters else sorted(parameters)
                raise WeightSyncError(
                    f"The model has no parameter {name} of shape {tuple(tensor.shape)}; it has {known}."
                )
            parameters[name].copy_(tensor)

    def _fingerprint(self) -> int:
        return sum(map(fingerprint_tensor, self.model.parameters())) % 2**64

    def sleep(self) -> None:
        if self.config.free_cache_engine:
            self.model.to("cpu")
            if self.device == "cuda":
                torch.cuda.empty_cache()  # what torch keeps for itself, the training process cannot use

    def wake_up(self) -> None:
        self.model.to(self.device)


class _SeededDraw(LogitsProcessor):
    """Draws each row's token with a generator of its own and leaves `generate` no other choice.

    The maximum of log p - log E over the tokens, with E drawn from the exponential distribution, is a draw from p (the
    Gumbel-max trick). `log_probs` collects log p of the drawn tokens, one (rows,) tensor a step.
    """

    def __init__(self, sampling: Sampling, seeds: list[int]) -> None:
        self.warpers: list[LogitsProcessor] = []
        self.generators: list[torch.Generator] = []
        self.log_probs: list[torch.Tensor] = []
        if sampling.temperature == 0:
            return
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k != -1:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for warp in self.warpers:
            scores = warp(input_ids, scores)
        log_probs = keys = scores.float().log_softmax(-1)
        if self.generators:
            noise = torch.stack([torch.empty(scores.shape[-1]).exponential_(generator=g) for g in self.generators])
            keys = log_probs - noise.log().to(scores.device)
        drawn = keys.argmax(-1, keepdim=True)
        self.log_probs.append(log_probs.gather(-1, drawn).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)
