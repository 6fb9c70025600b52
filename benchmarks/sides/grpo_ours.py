"""verl_like's side of `grpo_step`, `grpo_reward_curve` and `agents_step`: its trainer, made from
configuration as the command line makes it, one step at a time."""

import contextlib
import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from benchmarks.serve import serve
from benchmarks.sides.grpo_gate import Gate
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.inputs import check_inputs
from verl_like.trainer.ppo.run_ppo import fit
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.run.shell import train

gate = Gate()
bodies: queue.Queue[tuple[Callable[[], None], Future[None]]] = queue.Queue()


class SteppingRecorder(RunRecorder):
    @contextlib.contextmanager
    def step(self, step: int, total_steps: int) -> Iterator[Callable[[dict[str, float]], None]]:
        gate.wait()
        with super().step(step, total_steps) as log:
            yield log
        gate.finished(json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1]))


def start(overrides: list[str]) -> dict[str, Any]:
    """Starts Ray, workers and engine; returns when the first step may begin."""

    def body() -> None:
        with contextlib.ExitStack() as cleanup:
            inputs = check_inputs(load_ppo_config(overrides), cleanup)
            train(inputs, fit, SteppingRecorder(inputs.config, PPO_DISPLAY))

    def in_the_main_thread() -> None:
        ended: Future[None] = Future()
        bodies.put((body, ended))
        ended.result()

    gate.start(in_the_main_thread)
    return {}


def step() -> dict[str, Any]:
    """One step: its seconds, phases, tokens and reward."""
    seconds, metrics = gate.step()
    return {
        "seconds": seconds,
        "tokens": metrics["perf/total_num_tokens"],
        "longest": metrics["response_length/max"],
        "reward": metrics["critic/score/mean"],
        "tool_calls": metrics.get("agent/tool_calls/mean", 0.0),
        "phases": {
            name.removeprefix("timing_s/"): s
            for name, s in metrics.items()
            if name.startswith("timing_s/")
        },
    }


def answer_calls() -> None:
    serve(start, step)
    # `_thread.interrupt_main` does not end a wait in the main thread
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    # A background job of a shell ignores interrupts, and the end of the calls is one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A run handles signals, which only the main thread can, so calls are answered in another.
    threading.Thread(target=answer_calls, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # the other side hung up
        body, ended = bodies.get()
        try:
            body()
        except BaseException as error:
            ended.set_exception(error)
            raise
        ended.set_result(None)
        threading.Event().wait()
