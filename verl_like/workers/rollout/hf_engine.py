"""Reference rollout engine: transformers' `generate` on a copy of the model. Small, slow, easy to step through."""

from collections.abc import Generator, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from verl_like.workers.rollout.base import Completion, RolloutEngine, Sampling
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
        self, prompts: list[list[int]], sampling: Sampling, seed: int
    ) -> Generator[list[tuple[int, int, Completion]], None, None]:
        self.wake_up()
        torch.manual_seed(seed)
        settings: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            top_k = 0 if sampling.top_k == -1 else sampling.top_k
            settings = {"do_sample": True, "temperature": sampling.temperature, "top_k": top_k, "top_p": sampling.top_p}
        generation = GenerationConfig(
            **settings,
            max_new_tokens=sampling.max_tokens,
            num_return_sequences=sampling.n,
            eos_token_id=list(sampling.stop_token_ids) or None,
            pad_token_id=self.pad_token_id,
            return_dict_in_generate=True,
            output_scores=True,
        )
        at_once = max(1, self.config.max_num_seqs // sampling.n)
        for start in range(0, len(prompts), at_once):
            completions = self._generate_padded(prompts[start : start + at_once], sampling, generation)
            yield [(start + i // sampling.n, i % sampling.n, completion) for i, completion in enumerate(completions)]

    @torch.no_grad()
    def _generate_padded(
        self, prompts: list[list[int]], sampling: Sampling, generation: GenerationConfig
    ) -> list[Completion]:
        width = max(map(len, prompts))
        input_ids = torch.tensor([[self.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
        attention_mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model.generate(
            input_ids=input_ids.to(self.device),
            attention_mask=attention_mask.to(self.device),
            generation_config=generation,
        )
        tokens = output.sequences[:, width:]
        # Scores are the logits after temperature, top-k and top-p: their softmax is what was sampled from.
        log_probs = torch.stack(
            [
                scores.float().log_softmax(-1).gather(-1, tokens[:, t : t + 1]).squeeze(-1)
                for t, scores in enumerate(output.scores)
            ],
            dim=1,
        )
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
