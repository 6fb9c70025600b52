"""Requests for rollout engines, runs of them, and the log-probabilities of transformers to compare
with."""

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ipc_chunks import packed_chunks
from transformers import DynamicCache, LlamaForCausalLM, TopKLogitsWarper, TopPLogitsWarper

from verl_like.protocol import DataProto
from verl_like.workers.rollout import (
    Completion,
    FinishedRequest,
    GenerationRequest,
    RolloutEngine,
    RolloutError,
    Sampling,
    vllm_async_engine,
)
from verl_like.workers.rollout.batch import assemble, greedy_requests
from verl_like.workers.rollout.engine_thread import EngineThread
from verl_like.workers.weights.exports import WeightBucket, WeightExport
from verl_like.workers.weights.ipc import IpcTransport, receive_chunks
from verl_like.workers.weights.shared_memory import SharedPages

SAMPLING = Sampling(temperature=0.9, top_k=-1, top_p=1.0, max_tokens=20, stop_token_ids=(1,))


def make_requests(
    prompts: Mapping[str, Sequence[int]], sampling: Sampling = SAMPLING
) -> list[GenerationRequest]:
    """A request for each prompt; its seed follows from its name."""
    return [
        GenerationRequest(name, prompt, 1000 + sum(map(ord, name)), sampling)
        for name, prompt in prompts.items()
    ]


def run(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
    """All at once."""
    engine.submit(requests)
    return dict(each for ended in engine.stream() for each in ended)


def generate_sequences(engine: RolloutEngine, prompts: DataProto) -> DataProto:
    """A batch of responses of one engine; where it fails, no request is left in flight."""
    return stream_sequences(engine, prompts)[1]


def stream_sequences(
    engine: RolloutEngine, prompts: DataProto, give_up: bool = False
) -> tuple[list[list[FinishedRequest]], Any]:
    """What each step of one engine ended of a batch, and the batch, None if it is given up after
    the first of these."""
    requests = {
        request.name: request for request in engine.rules().requests_of(prompts, "the batch")
    }
    parts: list[list[FinishedRequest]] = []
    try:
        engine.submit(list(requests.values()))
        for ended in engine.stream():
            parts += [[(requests[name], completion) for name, completion in ended]] if ended else []
            if parts and give_up:
                return parts, None
    finally:
        engine.abort(requests)
    completions = {request.name: completion for part in parts for request, completion in part}
    return parts, assemble(prompts, [completions[name] for name in requests])


class StepByStep:
    """An engine on its thread that takes steps only when a test asks for them.

    Between them it is paused, so that weights do not wait for responses: they are to be loaded with
    `drain=False`.
    """

    def __init__(self, thread: EngineThread) -> None:
        self.thread, self.engine, self.num_left = thread, thread.engine, 0
        step = self.engine._step

        def step_and_stop() -> list[tuple[str, Completion]]:
            self.num_left -= 1
            if self.num_left == 0:
                self.engine.pause()
            return step()

        self.engine._step = step_and_stop
        thread._ask(self.engine.pause)

    def wait_for(self, num_requests: int, age: int = 0) -> None:
        """Until that many unfinished requests are this number of steps old; they come from another
        thread."""
        deadline = time.monotonic() + 60
        while list(self.thread.ages().values()).count(age) != num_requests:
            assert time.monotonic() < deadline, self.thread.ages()
            time.sleep(0.001)

    def advance(self, num_steps: int) -> None:
        """Takes this number of steps, fewer where nothing is unfinished before."""

        def begin() -> None:
            self.num_left = num_steps
            self.engine.resume()

        self.thread._ask(begin)
        while self.thread._ask(lambda: self.engine.is_busy):  # between two steps
            pass
        self.thread._ask(self.engine.pause)


def scaled(model: LlamaForCausalLM, factor: float) -> LlamaForCausalLM:
    """The same model with other weights."""
    other = type(model)(model.config).eval().requires_grad_(False)
    other.load_state_dict({name: value * factor for name, value in model.state_dict().items()})
    return other


def rows_of(output: DataProto, name: str) -> list[list[Any]]:
    """The values of a jagged column, a list for each row."""
    return [row.tolist() for row in output.tensors()[name].unbind()]


def run_late(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], steps_between: int
) -> dict[str, Completion]:
    """One after the other, each while those before are unfinished."""
    completions: dict[str, Completion] = {}
    for request in requests:
        engine.submit([request])
        for _ in range(steps_between):
            completions |= dict(engine.step())
    return completions | dict(each for ended in engine.stream() for each in ended)


def run_with_update(
    engine: RolloutEngine,
    early: Sequence[GenerationRequest],
    queued: Sequence[GenerationRequest],
    late: Sequence[GenerationRequest],
    exports: list[WeightExport],
    steps: int,
) -> dict[str, Completion]:
    """`early`, with new weights after some steps; `queued` comes just before the weights, `late`
    just after them."""
    engine.submit(early)
    completions: dict[str, Completion] = {}
    for _ in range(steps):
        completions |= dict(engine.step())
    engine.submit(queued)
    engine.load_weights(exports, exports[0].version)
    engine.submit(late)
    return completions | dict(each for ended in engine.stream() for each in ended)


def run_with_update_when_one_ended(
    engine: RolloutEngine,
    early: Sequence[GenerationRequest],
    queued: Sequence[GenerationRequest],
    late: Sequence[GenerationRequest],
    exports: list[WeightExport],
) -> dict[str, Completion]:
    """As `run_with_update`, for an engine that computes on its own: the weights come when one of
    `early` ended."""
    engine.submit(early)
    completions: dict[str, Completion] = {}
    while not completions:
        completions |= dict(engine.step())
    engine.pause()
    engine.submit(queued)
    engine.load_weights(exports, exports[0].version)
    engine.submit(late)
    engine.resume()
    return completions | dict(each for ended in engine.stream() for each in ended)


def run_beside_one_without_adapter(
    engine: RolloutEngine, request: GenerationRequest
) -> tuple[set[str], Any, Any]:
    """A request, as the engine gives it to vLLM, beside the same one without an adapter.

    Returns the adapters of the requests in vLLM before, and what the second one gave beside the
    first one, and alone.
    """
    engine.submit([request, replace(request, name="other")])
    llm = engine.llm.llm_engine
    adapters = {state.lora_name for state in llm.output_processor.request_states.values()}
    engine.abort(["other"])
    _, *parts = engine._vllm_request(request)
    without = []
    for name in ("beside", "alone"):
        llm.reset_prefix_cache()
        llm.add_request(name, *parts[:2])
        while llm.has_unfinished_requests():
            without += [
                each.outputs[0] for each in llm.step() if each.finished and each.request_id == name
            ]
    engine.abort([request.name])
    return adapters, *((list(each.token_ids), each.logprobs.logprobs) for each in without)


def engine_process(engine: RolloutEngine) -> int:
    """The id of the process that computes for this one."""
    (process,) = engine.llm.llm_engine.engine_core.resources.engine_manager.processes
    return process.pid


def run_beyond_the_limit(
    engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> dict[str, Completion]:
    """Of an engine in its own process, while no other answer of it may take as long as the first
    response does.

    A step gives nothing meanwhile, and returns.
    """
    engine.llm.pause_generation(mode="keep", clear_cache=False)
    engine.submit(requests)
    limit, vllm_async_engine._TIMEOUT_S = vllm_async_engine._TIMEOUT_S, 0.5
    assert [engine.step() for _ in range(3)] == [[], [], []]

    def go_on() -> None:
        vllm_async_engine._TIMEOUT_S = limit
        engine.llm.resume_generation()

    threading.Timer(2.5, go_on).start()
    return dict(each for ended in engine.stream() for each in ended)


def run_paused(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], steps: int
) -> dict[str, Completion]:
    """With a pause after some steps, in which the second half of the requests comes."""
    half = len(requests) // 2
    engine.submit(requests[:half])
    completions = dict(each for _ in range(steps) for each in engine.step())
    engine.pause()
    engine.submit(requests[half:])
    with pytest.raises(RuntimeError, match="is paused"):
        next(engine.stream())
    assert [engine.step() for _ in range(3)] == [[], [], []]
    engine.resume()
    return completions | dict(each for ended in engine.stream() for each in ended)


def run_with_a_response_that_is_refused(
    engine: RolloutEngine, batch: DataProto, requests: Sequence[GenerationRequest]
) -> dict[str, Completion]:
    """A batch that fails, since two responses that end in one step have no log-probabilities; then
    requests."""
    step = engine._step

    def step_without_log_probs() -> list[tuple[str, Completion]]:
        ended = step()
        return (
            [(name, replace(each, log_probs=[])) for name, each in ended]
            if len(ended) > 1
            else ended
        )

    engine._step = step_without_log_probs
    message = r"The response to row \d \(uid 0-\d\), sample \d of the batch has \d+ tokens but log"
    with pytest.raises(RolloutError, match=message):
        generate_sequences(engine, batch)
    engine._step = step
    assert not engine._has_work()
    return run(engine, requests)


def run_with_abort(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], aborted: list[str], steps: int
) -> tuple[dict[str, Completion], list[str], dict[str, Completion]]:
    """With requests that are aborted after some steps; then these again, under the same names."""
    engine.submit(requests)
    completions = dict(each for _ in range(steps) for each in engine.step())
    gone = engine.abort([*aborted, "unknown"])
    completions |= dict(each for ended in engine.stream() for each in ended)
    return (
        completions,
        gone,
        run(engine, [request for request in requests if request.name in aborted]),
    )


def draw_and_forget(
    engine: RolloutEngine, prompts: DataProto, later: Sequence[GenerationRequest]
) -> tuple[dict[str, Completion], dict[str, Completion]]:
    """What the engine draws greedily for its comparison with the actor, and requests after that."""
    drawn = run(engine, greedy_requests(prompts, 8))
    engine.forget_prompts()
    return drawn, run(engine, later)


def load_changed(
    engine: RolloutEngine, exports: list[WeightExport], change: Callable[[WeightBucket], Any]
) -> Any:
    """New weights, of which the engine's own loading gets what `change` makes of the buckets, but
    for those of which it makes nothing."""
    changed = [
        replace(export, buckets=tuple(filter(None, map(change, export.buckets))))
        for export in exports
    ]
    load = engine._load
    engine._load = lambda exports, version: load(changed, version)
    try:
        return engine.load_weights(exports, exports[0].version)
    finally:
        engine._load = load


def load_swapped(
    engine: RolloutEngine, exports: list[WeightExport], first: str, second: str
) -> Any:
    """New weights, of which the engine takes two parameters for each other."""
    other = {first: second, second: first}
    return load_changed(
        engine,
        exports,
        lambda bucket: replace(bucket, names=tuple(other.get(name, name) for name in bucket.names)),
    )


def load_without(engine: RolloutEngine, exports: list[WeightExport], name: str) -> Any:
    """New weights, of which the engine does not get the parameter `name`."""

    def shortened(bucket: WeightBucket) -> WeightBucket | None:
        if name not in bucket.names:
            return bucket
        if len(bucket.names) == 1:
            return None
        index = bucket.names.index(name)
        sizes = [math.prod(shape) for shape in bucket.shapes]
        values = np.asarray(bucket.data)
        width = len(values) // sum(sizes)
        start, end = (width * sum(sizes[:stop]) for stop in (index, index + 1))
        return replace(
            bucket,
            names=(*bucket.names[:index], *bucket.names[index + 1 :]),
            shapes=(*bucket.shapes[:index], *bucket.shapes[index + 1 :]),
            data=np.concatenate([values[:start], values[end:]]),
        )

    return load_changed(engine, exports, shortened)


def load_corrupted(engine: RolloutEngine, exports: list[WeightExport], name: str) -> Any:
    """New weights, with another last bit of the first number of the parameter `name`, which begins
    a bucket."""

    def corrupted(bucket: WeightBucket) -> WeightBucket:
        if bucket.names[0] != name:
            return bucket
        data = bucket.data.copy()
        data[0] ^= 1
        return replace(bucket, data=data)

    return load_changed(engine, exports, corrupted)


def load_torn(engine: RolloutEngine, exports: list[WeightExport], num_loaded: int) -> Any:
    """New weights, of which the engine finds only this number of buckets."""

    def torn(bucket: WeightBucket) -> WeightBucket:
        gone = SharedPages("/proc/self/fd/none", "of a process that ended", bucket.data.nbytes)
        return bucket if bucket.index < num_loaded else replace(bucket, data=gone)

    return load_changed(engine, exports, torn)


def load_by_ipc(engine: RolloutEngine, exports: list[WeightExport], version: int) -> str:
    """How far vLLM comes without a GPU: it joins a trainer and cannot open the first chunk's
    buffer.

    The trainer and the replicas of lower rank are threads here; they wait in vain for the chunk to
    be read.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    transport, config = IpcTransport(), engine.config
    exports = [transport.publish(export) for export in exports]
    chunks = packed_chunks(
        [("model.norm.weight", torch.ones(64))], "GPU-0", torch.zeros(256, dtype=torch.uint8)
    )

    def send() -> None:
        with transport.joined(rank=0, num_receivers=engine.world_size):
            transport.offer(chunks, rank=0)

    def join(rank: int) -> None:
        group = StatelessProcessGroup.create(*exports[0].address, rank, 1 + engine.world_size)
        receive_chunks(group, lambda chunk: None, lambda: None)

    for target, args in ((send, ()), *((join, (rank,)) for rank in range(1, 1 + engine.rank))):
        threading.Thread(target=target, args=args, daemon=True).start()
    engine.config, engine._has_joined = config.model_copy(update={"weight_transport": "ipc"}), False
    with pytest.raises(AssertionError) as error:
        engine.load_weights(exports, version)
    engine.config = config
    engine.llm.collective_rpc(lambda worker: setattr(worker.weight_transfer_engine, "direct", None))
    return str(error.value)


def load_by_nccl(engine: RolloutEngine, exports: list[WeightExport], version: int) -> list[str]:
    """How far vLLM comes without a GPU: why it cannot join the trainer, and why, as if it had, it
    cannot receive."""
    config, errors = engine.config, []
    engine.config = config.model_copy(update={"weight_transport": "nccl"})
    for has_joined in (False, True):
        engine._has_joined = has_joined
        with pytest.raises(RuntimeError) as error:
            engine.load_weights(exports, version)
        errors.append(str(error.value))
    engine.config = config
    engine.llm.collective_rpc(lambda worker: setattr(worker.weight_transfer_engine, "direct", None))
    return errors


@dataclass
class Deadly:
    """Values that kill who reads them."""

    nbytes: int

    def __array__(self, *_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def load_and_die(engine: RolloutEngine, exports: list[WeightExport], num_loaded: int) -> Any:
    """New weights, and after this number of buckets the process is killed."""
    return load_changed(
        engine,
        exports,
        lambda bucket: (
            bucket
            if bucket.index < num_loaded
            else replace(bucket, data=Deadly(bucket.data.nbytes))
        ),
    )


def forget_fused_forms(engine: RolloutEngine) -> None:
    """From now on vLLM's model does not say which parameters it fuses."""
    engine.llm.apply_model(lambda model: setattr(model, "packed_modules_mapping", {}))


def leave_to_numbers(engine: RolloutEngine) -> None:
    """From now on the engine is taken to be of a family whose layouts are not all known."""
    engine.shows_by_numbers = True


def unknown_parameters(engine: RolloutEngine) -> tuple[str, ...]:
    return engine.unknown_parameters


def openmp_limit() -> int:
    """How many threads a loop of the calling thread uses, asked of OpenMP: torch sets its own limit
    as it is asked."""
    libraries = {
        Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()
    }
    (library,) = [
        path
        for path in libraries
        if path.name.startswith(("libgomp", "libiomp")) and "torch" in str(path)
    ]
    return ctypes.CDLL(str(library)).omp_get_max_threads()


def memory(name: str) -> int:
    """Bytes of a line of this process's status, such as VmHWM, its most memory so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def extra_memory(engine: RolloutEngine, exports: list[WeightExport]) -> int:
    """Most bytes that the process needs beside the exports' and what it had before, while it loads
    them."""
    for bucket in (bucket for export in exports for bucket in export.buckets):
        bucket.data[::4096].sum()  # its pages count from now on
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory("VmRSS")
    engine.load_weights(exports, exports[0].version)
    return memory("VmHWM") - before


@torch.no_grad()
def assert_drawn_by(
    models: Mapping[int, LlamaForCausalLM],
    request: GenerationRequest,
    completion: Completion,
    *,
    kv: str,
) -> None:
    """Each token's log-probability is that of the model of its version.

    With `kv="recompute"` the model computes the whole text before the token, with `kv="keep"` what
    was not computed before, so that a text has keys and values of several models. Tokens without a
    version were not drawn.
    """
    tokens = completion.token_ids.tolist()
    version_of = {
        t: version for version, start, end in completion.versions for t in range(start, end)
    }
    text = torch.tensor([[*request.prompt_ids, *tokens]])
    cache: Any = DynamicCache()
    for t, token in enumerate(tokens):
        if t not in version_of:
            continue
        end = len(request.prompt_ids) + t
        start = cache.get_seq_length() if kv == "keep" else 0
        cache = cache if kv == "keep" else DynamicCache()
        logits = models[version_of[t]](text[:, start:end], past_key_values=cache).logits[0, -1]
        logits = logits[None] / request.sampling.temperature
        if request.sampling.top_k != -1:
            logits = TopKLogitsWarper(request.sampling.top_k)(text, logits)
        if request.sampling.top_p < 1:
            logits = TopPLogitsWarper(request.sampling.top_p)(text, logits)
        expected = logits.log_softmax(-1)[0, token]
        assert abs(float(expected) - completion.log_probs[t]) < 2e-5, (
            request.name,
            t,
            completion.versions,
        )
