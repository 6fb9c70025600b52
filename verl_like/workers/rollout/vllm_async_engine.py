"""The rollout engine on vLLM's AsyncLLM, which computes in a separate process."""

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from verl_like.workers.rollout.request import GenerationRequest, NamedCompletion
from verl_like.workers.rollout.vllm_engine import VllmEngine, completion
from verl_like.workers.weights.exports import WeightExport

_TIMEOUT_S = 1800.0
"""How long to wait for an answer of the engine's process. Its death is noticed within a second."""
_STEP_S = 0.02
"""How long a step waits for a response to end, before requests and weights are taken again."""


class _Calls:
    """Makes the methods of AsyncLLM callable like those of vLLM's LLM: each waits for its result.

    The coroutines run on an event loop in a thread of its own.
    """

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
        run = self._loop.run_forever
        thread = threading.Thread(target=run, name="calls to vLLM", daemon=True)
        thread.start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns the method `name` of AsyncLLM as a function that waits for the result."""

        def call(*args: Any, **kwargs: Any) -> Any:
            method = getattr(self.llm_engine, name)
            answer = method(*args, **kwargs)
            return self.wait(answer, name)

        return call

    def wait(self, answer: Coroutine[Any, Any, Any], what: str) -> Any:
        """Returns the result of a coroutine, which runs on the event loop.

        Raises TimeoutError, which names `what`, or vLLM's EngineDeadError.
        """
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        deadline = time.monotonic() + _TIMEOUT_S
        while not future.done() and time.monotonic() < deadline:
            if self.llm_engine.errored:  # vLLM never answers the calls of a dead engine
                raise self.llm_engine.dead_error
            concurrent.futures.wait([future], timeout=1.0)
        if not future.done():
            future.cancel()
            raise TimeoutError(f"vLLM's engine process took more than {_TIMEOUT_S:g} s for {what}.")
        return future.result()


class VllmAsyncEngine(VllmEngine):
    """A VllmEngine that computes between steps, too, unless it is paused.

    `step` only waits a moment for responses to end.
    """

    llm: _Calls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._answers: dict[str, asyncio.Task] = {}
        """The tasks that wait for the responses, by the names of their requests."""
        super().__init__(*args, **kwargs)

    def _make(self, **arguments: Any) -> Any:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        # The executor is given as a class, because its name would start one more process on a CPU.
        arguments["distributed_executor_backend"] = UniProcExecutor
        return _Calls(arguments)

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        async def add() -> None:
            for request in requests:
                arguments = self._vllm_request(request)
                answers = await self.llm.llm_engine.add_request(*arguments)
                task = asyncio.create_task(answers.get())
                self._answers[request.name] = task

        self.llm.wait(add(), "requests")

    def _step(self) -> list[NamedCompletion]:
        async def next_ended() -> list[str]:
            tasks = self._answers.values()
            await asyncio.wait(tasks, timeout=_STEP_S, return_when=asyncio.FIRST_COMPLETED)
            return [name for name, task in self._answers.items() if task.done()]

        names = self.llm.wait(next_ended(), "the responses that have ended")
        ended = []
        for name in names:
            task = self._answers.pop(name)
            response = completion(task.result())
            ended.append((name, response))
        return self._with_routing(ended)

    def _has_work(self) -> bool:
        return bool(self._answers)

    def _abort(self, names: Collection[str]) -> None:
        for name in names:
            self._answers.pop(name, None)
        self.llm.abort(names)
        self._forget_routing(names)

    def pause(self) -> None:
        super().pause()
        self.llm.pause_generation(mode="keep", clear_cache=False)

    def resume(self) -> None:
        super().resume()
        self._go_on()

    def _go_on(self) -> None:
        """Lets the engine compute again, if it has verified weights and is not paused."""
        if self.policy_version is not None and not self._is_paused:
            self.llm.resume_generation()

    def load_weights(
        self, exports: Sequence[WeightExport], version: int, *, checks_first: bool = True
    ) -> str:
        try:
            return super().load_weights(exports, version, checks_first=checks_first)
        finally:
            self._go_on()  # only now are the weights verified

    def _load(self, exports: Sequence[WeightExport], version: int) -> None:
        self.llm.pause_generation(mode="keep", clear_cache=False)
        super()._load(exports, version)
