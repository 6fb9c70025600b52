"""vLLM's own server beside our endpoint: the same requests, and nothing is recorded."""

import asyncio
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import psutil

from benchmarks.serve import serve
from benchmarks.sides import agents_world as world
from benchmarks.sides.agents_cpu import seconds_below, seconds_of
from benchmarks.sides.agents_harness import conversation

START_S = 600
END_S = 20
PR_SET_PDEATHSIG = 1
KEY = "benchmark"
state: dict[str, Any] = {}


def start(
    folder: str, port: int, rows: dict[str, int], context: int, max_num_seqs: int
) -> dict[str, Any]:
    """Starts the server, with what the project's engine sets, and waits until it answers."""
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    command += ["--model", f"{folder}/model", "--served-model-name", "policy"]
    command += ["--api-key", KEY, "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(context)]
    command += ["--max-num-seqs", str(max_num_seqs), "--max-num-batched-tokens", "8192"]
    command += ["--no-enable-chunked-prefill", "--enable-prefix-caching", "--enforce-eager"]
    command += ["--generation-config", "vllm", "--seed", "1", "--kv-cache-memory-bytes", "2G"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    state["server"] = subprocess.Popen(
        command, env=os.environ | variables, preexec_fn=end_with_parent
    )
    state["address"] = f"http://127.0.0.1:{port}"
    state["rows"] = [row["extra_info"] | row for row in world.rows(**rows)]
    ended = time.monotonic() + START_S
    while not answers():
        if state["server"].poll() is not None or time.monotonic() > ended:
            raise RuntimeError(f"vLLM's server does not answer: {' '.join(command)}")
        time.sleep(0.5)
    return {}


def end_with_parent() -> None:
    """Has the kernel end this process when the one that started it is killed. Linux alone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def answers() -> bool:
    try:
        with urllib.request.urlopen(f"{state['address']}/health", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def end() -> None:
    """Ends the server and its engine, if they run."""
    if "server" not in state or state["server"].poll() is not None:
        return
    server = psutil.Process(state["server"].pid)
    processes = [server, *server.children(recursive=True)]
    server.terminate()
    _ended, alive = psutil.wait_procs(processes, timeout=END_S)
    for process in alive:
        process.kill()


async def conversations(rows: list[dict[str, Any]]) -> list[tuple[list[str], list[float]]]:
    return await asyncio.gather(*[conversation(row, f"{state['address']}/v1", KEY) for row in rows])


def run(first: int, number: int) -> dict[str, Any]:
    """The episodes of `number` prompts: what the model said, the CPU seconds of the server and of
    its client, and the seconds by the wall and of each turn."""
    server = psutil.Process(state["server"].pid)
    before = seconds_of(server) + seconds_below(server)
    client_before = time.process_time()
    started = time.perf_counter()
    talked = state["loop"].run(conversations(state["rows"][first : first + number]))
    seconds = time.perf_counter() - started
    cpu = {
        "server": seconds_of(server) + seconds_below(server) - before,
        "hosts": time.process_time() - client_before,
    }
    texts = [list(said) for said, _turns in talked]
    turns = itertools.chain.from_iterable(turns for _said, turns in talked)
    return {"cpu": cpu, "seconds": seconds, "texts": texts, "turns": np.array(list(turns))}


if __name__ == "__main__":
    with asyncio.Runner() as state["loop"]:
        try:
            serve(start, run)
        finally:  # also where it does not answer in time
            end()
