"""A rollout engine that is scripted, a plugin: its answers cost next to nothing."""

from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.sides.agents_world import Script
from verl_like.workers.rollout import Completion, RolloutEngine, register_rollout_engine
from verl_like.workers.rollout.request import GenerationRequest, NamedCompletion


@register_rollout_engine("scripted")
class ScriptedEngine(RolloutEngine):
    """Answers all requests in one step. `rollout.multi_turn.max_assistant_turns` is the number of
    turns of its script."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.script = Script(self.model_config.path, self.config.multi_turn.max_assistant_turns)
        self.queued: list[GenerationRequest] = []
        self.policy_version = 0  # there are no weights to wait for

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.queued += requests

    def _step(self) -> list[NamedCompletion]:
        answered = self.queued
        self.queued = []
        return [(request.name, self._answer(request)) for request in answered]

    def _answer(self, request: GenerationRequest) -> Completion:
        drawn = self.script.drawn(request.prompt_ids)
        return Completion(drawn, [-0.5] * len(drawn), ((0, 0, len(drawn)),))

    def _has_work(self) -> bool:
        return bool(self.queued)

    def _abort(self, names: Collection[str]) -> None:
        self.queued = [request for request in self.queued if request.name not in names]

    def _load(self, exports: Any, version: int) -> None:
        raise AssertionError("a scripted engine has no weights")

    def _fingerprints(self) -> dict[str, int]:
        return {}

    def _sleep(self) -> None:
        pass
