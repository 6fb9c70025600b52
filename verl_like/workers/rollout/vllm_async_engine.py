"""Rollout engine on vLLM's AsyncLLM, which computes in a process of its own beside the
rollout's."""

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from verl_like.workers.rollout.request import Completion, GenerationRequest
from verl_like.workers.rollout.vllm_engine import VllmEngine, completion
from verl_like.workers.weights.exports import WeightExport

_TIMEOUT_S = 1800.0
"""For an answer of the engine's process. That it died is noticed within a second."""
_STEP_S = 0.02
"""How long a step waits for a response to end, before requests and weights are taken in again."""


class _Calls:
    """AsyncLLM with the calls of vLLM's LLM: each waits for the answer."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self.llm_engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except RuntimeError as error:  # vLLM says only that it has printed the cause
            log = os.readlink("/proc/self/fd/2")
            raise RuntimeError(
                f"vLLM's engine process did not start; the end of {log} says why."
            ) from error
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="calls to vLLM", daemon=True).start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.wait(
            getattr(self.llm_engine, name)(*args, **kwargs), name
        )

    def wait(self, answer: Coroutine[Any, Any, Any], what: str) -> Any:
        """Raises TimeoutError, or vLLM's EngineDeadError."""
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        deadline = time.monotonic() + _TIMEOUT_S
        while not future.done() and time.monotonic() < deadline:
            if self.llm_engine.errored:  # vLLM leaves calls without an answer then
                raise self.llm_engine.dead_error
            concurrent.futures.wait([future], timeout=1.0)
        if not future.done():
            future.cancel()
            raise TimeoutError(f"vLLM's engine process took more than {_TIMEOUT_S:g} s for {what}.")
        return future.result()


class VllmAsyncEngine(VllmEngine):
    """The engine computes from `submit` on, except while it is paused; `step` waits a moment for
    responses to end."""

    llm: _Calls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._answers: dict[str, asyncio.Task] = {}  # to requests, by name
        super().__init__(*args, **kwargs)

    def _make(self, **arguments: Any) -> Any:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        # As a class, since by its name it would start one more process on a CPU.
        return _Calls(arguments | {"distributed_executor_backend": UniProcExecutor})

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        async def add() -> None:
            for request in requests:
                answer = await self.llm.llm_engine.add_request(*self._vllm_request(request))
                self._answers[request.name] = asyncio.create_task(answer.get())

        self.llm.wait(add(), "requests")

    def _step(self) -> list[tuple[str, Completion]]:
        async def next_ended() -> list[str]:
            await asyncio.wait(
                self._answers.values(), timeout=_STEP_S, return_when=asyncio.FIRST_COMPLETED
            )
            return [name for name, answer in self._answers.items() if answer.done()]

        names = self.llm.wait(next_ended(), "the responses that have ended")
        return [(name, completion(self._answers.pop(name).result())) for name in names]

    def _has_work(self) -> bool:
        return bool(self._answers)

    def _abort(self, names: Collection[str]) -> None:
        for name in names:
            self._answers.pop(name, None)
        self.llm.abort(names)

    def pause(self) -> None:
        super().pause()
        self.llm.pause_generation(mode="keep", clear_cache=False)

    def resume(self) -> None:
        super().resume()
        self._go_on()

    def _go_on(self) -> None:
        if self.policy_version is not None and not self._is_paused:
            self.llm.resume_generation()

    def load_weights(
        self, exports: Sequence[WeightExport], version: int, *, checks_first: bool = True
    ) -> str:
        try:
            return super().load_weights(exports, version, checks_first=checks_first)
        finally:
            self._go_on()  # not before the weights were verified

    def _load(self, exports: Sequence[WeightExport], version: int) -> None:
        self.llm.pause_generation(mode="keep", clear_cache=False)
        super()._load(exports, version)
