"""The rollout worker of `grpo_step` where every response has a length of its own: the engine is told when to end it."""

import copy
from dataclasses import replace
from typing import Any

from benchmarks.sides.grpo_world import lengths_of_step
from verl_like.workers.rollout_worker import RolloutWorker


class EveryToken(tuple):
    """Stop tokens of which the engine gets none, while the check of its responses lets any token end one."""

    def __contains__(self, token: object) -> bool:
        return True


class ForcedLengthWorker(RolloutWorker):
    """Everything is the project's; only the lengths of the responses come from outside."""

    def init_model(self) -> None:
        super().init_model()
        engine: Any = self.rollout
        core = engine.llm.llm_engine.engine_core
        sampling_of, add_request = engine._sampling, core.add_request
        step = 0
        left: list[int] = []

        def add_request_with_length(request: Any) -> None:
            nonlocal step
            if not left:
                left.extend(lengths_of_step(step)[self.rank :: self.world_size])
                step += 1
            request.sampling_params = copy.copy(request.sampling_params)
            request.sampling_params.max_tokens = left.pop()
            add_request(request)

        engine._sampling = lambda validate: replace(sampling_of(validate), stop_token_ids=EveryToken())
        core.add_request = add_request_with_length
