"""Measures a training process of a run on the null GPU: one rank at its real size, with a group
that is not there."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.row_ops import jagged_from_lengths
from verl_like.protocol.samples import count_samples
from verl_like.rehearse.commands import config_of
from verl_like.rehearse.host import heap_bytes, leave_unreserved, pinned_bytes, shared_bytes
from verl_like.rehearse.measured import Measured
from verl_like.single_controller.worker import rank_environment
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.config.roles import Role
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.config.supervised import SupervisedConfig
from verl_like.trainer.detached.maker_holder import maker_models
from verl_like.trainer.memory.pools import planned_pools
from verl_like.trainer.memory.sums import PlannedModel, PlannedPool
from verl_like.trainer.ppo.workers import build_role_worker_mapping, import_worker_class
from verl_like.trainer.supervised.run_supervised import KINDS, worker_arguments
from verl_like.workers import model_worker
from verl_like.workers.engine import fsdp, mini_batches
from verl_like.workers.engine.host_memory import local_part
from verl_like.workers.engine.shard_writer import ShardWriter
from verl_like.workers.model_worker import ModelWorker, TrainedWorker
from verl_like.workers.models import linear_log_prob
from verl_like.workers.planning.partition import MicroBatching

NUM_MICRO_BATCHES = 2
"""Of an optimizer step: from the second on there are gradients of those before."""


class Phases:
    """Takes the peak of each phase."""

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.engines: dict[str, Any] = {}
        self.most_heap = 0

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.begin()
        yield
        self.end(phase)

    def begin(self) -> None:
        """Torch gives what it keeps of freed memory back before it says that memory is short: so
        does each phase."""
        if torch.cuda.is_initialized():  # the worker sets what the allocator reads when it starts
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.most_heap = 0

    def look_at_heap(self) -> None:
        """A whole model may lie there now."""
        self.most_heap = max(self.most_heap, heap_bytes())

    def end(self, phase: str) -> None:
        parts: dict[str, int] = {}
        for role, engine in self.engines.items():
            parts |= {f"{role} {part}": size for part, size in parts_of(engine).items() if size}
        self.look_at_heap()
        self.measured.append(
            Measured(
                phase,
                allocated=torch.cuda.max_memory_allocated(),
                reserved=torch.cuda.max_memory_reserved(),
                parts=parts,
                heap=self.most_heap,
                pinned=pinned_bytes(),
                shared=shared_bytes(),
            )
        )


def parts_of(engine: fsdp.FsdpEngine) -> dict[str, int]:
    """Bytes of the device that a model's parameters, optimizer and gradients take now."""

    def on_device(tensors: Sequence[torch.Tensor | None]) -> int:
        own = [local_part(tensor) for tensor in tensors if tensor is not None]
        return sum(tensor.nbytes for tensor in own if tensor.is_cuda)

    state = engine.optimizer.state.values() if engine.optimizer else ()
    return {
        "weights": on_device([*engine.model.parameters(), *engine.model.buffers()]),
        "optimizer": on_device(
            [value for of_parameter in state for value in of_parameter.values()]
        ),
        "gradients": on_device([parameter.grad for parameter in engine.parameters]),
    }


def empty_weights(model_class: Any, config: Any, settings: Any, **options: Any) -> Any:
    """In the place of `load_pretrained`: on rank 0 a model in host memory that nobody has written,
    and so not there."""
    with_weights = options.pop("weights")
    model = _load_pretrained(model_class, config, settings, weights=False, **options)
    return model.to_empty(device="cpu") if with_weights else model


_load_pretrained = model_worker.load_pretrained


class NoKernels:
    """In the place of the head's Triton kernels: numbers that are not computed."""

    @staticmethod
    def statistics(x_MC: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        return tuple(x_MC.new_zeros(len(x_MC), dtype=torch.float32) for _ in range(3))

    @staticmethod
    def to_gradient(*_: Any) -> None:
        pass


def begin_nothing(writer: Any, state: Mapping[str, torch.Tensor], *_: Any) -> None:
    """In the place of `ShardWriter.begin`: memory for a copy of the state, which is neither copied
    nor written.

    What is offloaded would be copied within the host, which would write the memory that nobody has
    written.
    """
    if not writer.buffers:
        writer._allocate(state)
    writer.writing = writer.threads.submit(dict)


def read_ones(parts: Sequence[mini_batches.MicroMetrics]) -> list[dict[str, Metric]]:
    """As `read_metrics`, which would refuse numbers that nobody computed."""
    return [
        {name: metric.finish(*[1.0] * len(metric.numbers)) for name, metric in part.items()}
        for part in parts
    ]


class NobodyElse:
    """`torch.distributed` for an engine whose other ranks are not there: what rank 0 would send
    stays as it is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        pass


def distribute_nothing(model: Any, weights: Any, options: Any) -> None:
    """In the place of `set_model_state_dict`: each weight comes to the device, whole and one at a
    time."""
    for value in model.state_dict().values():
        torch.empty(value.shape, dtype=value.dtype, device="cuda")


def join_nobody(rank: int, world_size: int, phases: Phases) -> None:
    """A process group whose other ranks are not there, and whose collectives do nothing."""
    os.environ |= rank_environment(rank, world_size, 0, 1, "cuda")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    engine: Any = fsdp
    engine.dist = NobodyElse()

    def distribute(model: Any, weights: Any, options: Any) -> None:
        phases.look_at_heap()
        distribute_nothing(model, weights, options)

    engine.set_model_state_dict = distribute


def replace_what_needs_numbers() -> None:
    """Weights that nobody reads, the head's Triton kernels, metrics, the limit of steps without a
    norm, files, and host memory."""
    modules: tuple[Any, ...] = (model_worker, linear_log_prob, fsdp, mini_batches, ShardWriter)
    workers, head, engine, updates, writer = modules
    workers.load_pretrained = empty_weights
    head._kernels = lambda x_MC: NoKernels
    engine.MAX_SKIPPED_STEPS = 10**9
    updates.read_metrics = read_ones
    writer.begin = begin_nothing
    leave_unreserved()


def rows_of_ppo(config: PPOConfig, num_rows: int) -> DataProto:
    """Prompts and responses of full length, with all columns that a role reads."""
    prompt = config.data.max_prompt_length
    response = config.data.max_response_length
    by_token = (
        "advantages",
        "returns",
        "values",
        "old_log_probs",
        "ref_log_prob",
        "rollout_log_probs",
    )
    tensors = full_rows(num_rows, prompt, response)
    tensors |= {
        name: torch.zeros_like(tensors["responses"], dtype=torch.float32) for name in by_token
    }
    return DataProto.from_dict(tensors, meta_info={"padding": (prompt, response, 0)})


def rows_of_examples(config: SupervisedConfig, num_examples: int, example_length: int) -> DataProto:
    """Conversations of full length, one an example or a pair of them, all of whose tokens but the
    first are learned."""
    length = config.data.max_length
    of_each = example_length // length
    num_rows = num_examples * of_each
    tensors = full_rows(num_rows, 1, length - 1)
    tensors["sample_id"] = torch.arange(num_examples).repeat_interleave(of_each)
    tensors |= {name: torch.zeros(num_rows) for name in ("margin", "score")}
    return DataProto.from_dict(tensors, meta_info={"padding": (1, length - 1, 0)})


def full_rows(num_rows: int, prompt_length: int, response_length: int) -> dict[str, torch.Tensor]:
    """Prompts and responses, each token of which is scored."""
    prompts = torch.ones(num_rows * prompt_length, dtype=torch.int64)
    responses = torch.ones(num_rows * response_length, dtype=torch.int64)
    return {
        "prompts": jagged_from_lengths(prompts, torch.full((num_rows,), prompt_length)),
        "responses": jagged_from_lengths(responses, torch.full((num_rows,), response_length)),
        "response_mask": jagged_from_lengths(responses, torch.full((num_rows,), response_length)),
    }


def rows_of(config: RunConfig, model: PlannedModel, passes: MicroBatching) -> DataProto:
    """Those of `NUM_MICRO_BATCHES` passes."""
    per_pass = (
        max(1, passes.max_tokens // model.sequence_length) if passes.by_tokens else passes.num_rows
    )
    num_rows = NUM_MICRO_BATCHES * per_pass
    if isinstance(config, SupervisedConfig):
        return rows_of_examples(config, num_rows, model.sequence_length)
    assert isinstance(config, PPOConfig)
    return rows_of_ppo(config, num_rows)


METHODS = {
    Role.Actor: ("compute_log_prob", "update_actor"),
    Role.Critic: ("compute_values", "update_critic"),
    Role.RefPolicy: ("compute_ref_log_prob", ""),
    Role.Teacher: ("compute_teacher_log_prob", ""),
    "model": ("evaluate", "update_model"),
}
"""By role: what runs it forward, and what trains it; of a reward model `compute_rm_score`."""


def workers_of(pool: PlannedPool) -> dict[str, Callable[[], Any]]:
    """What makes the worker of each role of the pool's training process, custom roles among
    them."""
    config = pool.config
    if isinstance(config, SupervisedConfig):
        kind = KINDS[type(config)]
        return {"model": lambda: kind.worker(*worker_arguments(config))}
    assert isinstance(config, PPOConfig)
    own_classes = {
        role: import_worker_class(role, path) for role, path in config.worker_classes.items()
    }
    mapping = build_role_worker_mapping(config, own_classes)
    copies = maker_models(config, mapping) if isinstance(config, DetachedConfig) else mapping
    made = {
        model.name: (mapping if model.is_trained else copies)[model.name] for model in pool.models
    }
    made |= {
        role: mapping[role]
        for role in config.plan.custom_roles
        if config.role_mapping[role] == pool.name
    }
    return {
        role: functools.partial(built.cls, *built.args, **built.kwargs)
        for role, built in made.items()
    }


def measure(pool: PlannedPool, rank: int, world_size: int) -> list[Measured]:
    """All phases of the training process of a pool."""
    phases = Phases()
    join_nobody(rank, world_size, phases)
    replace_what_needs_numbers()
    workers: dict[str, Any] = {}
    for role, make in workers_of(pool).items():
        with phases(f"{role} load"):
            worker = workers[role] = make()
            worker.init_model()
            if isinstance(worker, ModelWorker):
                phases.engines[role] = worker.engine
    for worker, model in with_plans(workers, pool):
        forward, update = METHODS.get(model.name, ("compute_rm_score", ""))
        rows = rows_of(pool.config, model, model.forward_passes)
        with phases(f"{model.name} forward pass"):
            getattr(worker, forward)(rows)
        if model.is_trained:
            measure_training(phases, model, worker, getattr(worker, update), pool.config)
    with phases("between calls"):
        pass
    # Of the two updates the second
    return list({each.phase: each for each in phases.measured}.values())


def with_plans(workers: Mapping[str, Any], pool: PlannedPool) -> list[tuple[Any, PlannedModel]]:
    """Each worker that is called, with the plan of its model.

    A custom role has none: what its calls take is not known. A plan may have no worker of its own:
    that of DPO's trains and holds the reference.
    """
    models = {model.name: model for model in pool.models}
    return [(worker, models[role]) for role, worker in workers.items() if role in models]


def measure_training(
    phases: Phases,
    model: PlannedModel,
    worker: TrainedWorker,
    update: Callable[[DataProto], Any],
    config: Any,
) -> None:
    """Two updates, since the first makes the optimizer's state; the optimizer step is a phase of
    its own. Then what sends and saves the weights."""
    passes = worker.schedule.micro_batching
    rows = rows_of(config, model, passes)
    worker.schedule = mini_batches.UpdateSchedule(count_samples(rows), passes, epochs=1)
    engine: Any = worker.engine
    step = engine.step

    def step_apart() -> float:
        phases.end(f"{model.name} update")
        with phases(f"{model.name} optimizer step"):
            return step()

    engine.step = step_apart
    for _ in range(2):
        phases.begin()
        update(rows)
    engine.step = step
    if model.export_dtype:
        with phases(f"{model.name} export"):
            worker.export_weights(1)
    with phases(f"{model.name} save"):
        worker.save_checkpoint("nowhere")


def main() -> None:
    task = json.loads(sys.argv[1])
    config = config_of(task["command"], task["overrides"], task["config_name"], task["config_dir"])
    (pool,) = [pool for pool in planned_pools(config, 0) if pool.name == task["pool"]]
    measured = measure(pool, task["rank"], task["world_size"])
    sys.stdout.write(json.dumps([asdict(each) for each in measured]) + "\n")


if __name__ == "__main__":
    main()
