"""Measures a training process of a run on the null GPU. One rank runs at its real size. The other
ranks of its process group do not exist, and its collectives do nothing."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed import tensor_parallel

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.row_ops import jagged_from_lengths
from verl_like.protocol.samples import count_samples
from verl_like.rehearse.commands import config_of
from verl_like.rehearse.host import heap_bytes, leave_unreserved, pinned_bytes, shared_bytes
from verl_like.rehearse.measured import Measured
from verl_like.single_controller.ray.worker_group import RayClassWithInitArgs
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
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.pretrained import empty_model
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS, RouterShape
from verl_like.workers.models.router_replay import shape_of
from verl_like.workers.planning.partition import MicroBatching

NUM_MICRO_BATCHES = 2
"""How many micro-batches an optimizer step has. From the second on, the gradients of those before
lie on the device."""


class Phases:
    """Measures the memory of this process, phase by phase."""

    def __init__(self) -> None:
        self.measured: dict[str, Measured] = {}
        """By phase, its last measurement."""
        self.engines: dict[str, Any] = {}
        """By role, the training engine of its worker."""
        self.most_heap = 0
        """The most bytes of the heap that `look_at_heap` has seen in the present phase."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the code inside as a phase."""
        self.begin()
        yield
        self.end(name)

    def begin(self) -> None:
        """Begins a phase. Frees what torch's allocator keeps of freed memory, as torch itself does
        before it says that memory is short."""
        if torch.cuda.is_initialized():  # a worker sets the allocator's options when it starts
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.most_heap = 0

    def look_at_heap(self) -> None:
        """Counts the host memory in use now. It is called while a whole model may lie there."""
        heap = heap_bytes()
        self.most_heap = max(self.most_heap, heap)

    def end(self, phase: str) -> None:
        """Ends the phase that began last, and keeps its measurement."""
        parts = {}
        for role, engine in self.engines.items():
            parts_of_role = parts_of(engine)
            for part, size in parts_of_role.items():
                if size:
                    parts[f"{role} {part}"] = size
        self.look_at_heap()
        self.measured[phase] = Measured(
            phase,
            allocated=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.max_memory_reserved(),
            parts=parts,
            heap=self.most_heap,
            pinned=pinned_bytes(),
            shared=shared_bytes(),
        )


def parts_of(engine: fsdp.FsdpEngine) -> dict[str, int]:
    """The bytes of the device that a model's weights, optimizer and gradients take now."""
    moments = []
    if engine.optimizer:
        for state_of_parameter in engine.optimizer.state.values():
            moments.extend(state_of_parameter.values())
    gradients = [parameter.grad for parameter in engine.parameters]
    weights = [*engine.model.parameters(), *engine.model.buffers()]
    return {
        "weights": bytes_on_device(weights),
        "optimizer": bytes_on_device(moments),
        "gradients": bytes_on_device(gradients),
    }


def bytes_on_device(tensors: Sequence[Tensor | None]) -> int:
    """The bytes of the device that this rank's parts of the tensors take. None counts nothing."""
    parts = [local_part(tensor) for tensor in tensors if tensor is not None]
    return sum(part.nbytes for part in parts if part.is_cuda)


def empty_weights(*arguments: Any, **options: Any) -> Any:
    """Takes the place of `load_pretrained`. On rank 0 it returns a model in host memory whose
    weights are never written, so that they take no memory of this machine."""
    with_weights = options.pop("weights")
    model = _load_pretrained(*arguments, weights=False, **options)
    if with_weights:
        return model.to_empty(device="cpu")
    return model


_load_pretrained = model_worker.load_pretrained


class NoKernels:
    """Takes the place of the head's Triton kernels, and computes nothing."""

    @staticmethod
    def statistics(x_MC: Tensor, *_: Any) -> tuple[Tensor, ...]:
        """Returns three tensors of the shape and dtype of the statistics, all zero."""
        zeros_M = x_MC.new_zeros(len(x_MC), dtype=torch.float32)
        return zeros_M, torch.zeros_like(zeros_M), torch.zeros_like(zeros_M)

    @staticmethod
    def to_gradient(*_: Any) -> None:
        """Leaves the logits as they are."""


def begin_nothing(writer: Any, state: Mapping[str, Tensor], *_: Any) -> None:
    """Takes the place of `ShardWriter.begin`. It allocates the memory for a copy of the state, but
    neither copies nor writes a file.

    The buffers were never written, so they take none of this machine's memory. A copy of an
    offloaded state would write them, and this machine may have no room for them.
    """
    if not writer.buffers:
        writer._allocate(state)
    written: Future[dict[str, Any]] = Future()
    written.set_result({})  # no file
    writer.writing = written


def read_ones(parts: Sequence[mini_batches.MicroMetrics]) -> list[dict[str, Metric]]:
    """Takes the place of `read_metrics`, which would refuse numbers that were never computed. Every
    number of a metric is 1."""
    read = []
    for part in parts:
        metrics = {}
        for name, metric in part.items():
            ones = [1.0] * len(metric.numbers)
            metrics[name] = metric.finish(*ones)
        read.append(metrics)
    return read


class NobodyElse:
    """Takes the place of `torch.distributed` in an engine whose other ranks do not exist. What rank
    0 would send stays as it is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        """Leaves the objects as they are."""


def join_nobody(rank: int, world_size: int, phases: Phases) -> None:
    """Makes a process group whose other ranks do not exist, and whose collectives do nothing."""
    os.environ |= rank_environment(rank, world_size, 0, 1, "cuda")
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)

    def distribute(model: Any, weights: Any, options: Any) -> None:
        """Takes the place of `set_model_state_dict`. Whole weights come to the device, one at a
        time."""
        phases.look_at_heap()
        for value in model.state_dict().values():
            torch.empty(value.shape, dtype=value.dtype, device="cuda")

    engine: Any = fsdp
    engine.dist = NobodyElse()
    engine.set_model_state_dict = distribute


def dispatch_evenly(
    style: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    num_local_experts: int,
    group: Any,
    num_ranks: int,
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """Takes the place of `EpDispatchExpertsParallel._dispatch_tokens`, which reads how many tokens
    come from other ranks. Here as many come from each rank as go to it, and the numbers of ranks
    differ by one at most. `style` is the `self` of that method."""
    num_pairs = top_k_index.numel()
    order = torch.argsort(top_k_index.reshape(-1))
    sent = hidden_states[order // top_k_index.size(-1)]
    parts = torch.arange(num_pairs).tensor_split(num_ranks)
    sizes = [len(part) for part in parts]
    received = tensor_parallel.all_to_all_single(sent, sizes, sizes, group)
    expert_ids = torch.arange(num_pairs, device=sent.device) % num_local_experts
    return received, expert_ids, order, sizes, sizes


def replace_what_needs_numbers() -> None:
    """Replaces what would read or check numbers, because nothing computes any, and what would write
    files or host memory."""
    model_worker.load_pretrained = empty_weights
    head: Any = linear_log_prob
    head._kernels = lambda x_MC: NoKernels
    style: Any = tensor_parallel.EpDispatchExpertsParallel
    style._dispatch_tokens = dispatch_evenly
    fsdp.MAX_SKIPPED_STEPS = 10**9  # a step whose norm is not finite is skipped
    mini_batches.read_metrics = read_ones
    writer: Any = ShardWriter
    writer.begin = begin_nothing
    leave_unreserved()


def rows_of_ppo(config: PPOConfig, num_rows: int) -> DataProto:
    """Prompts and responses of full length, with all columns that a role reads."""
    prompt = config.data.max_prompt_length
    response = config.data.max_response_length
    tensors = full_rows(num_rows, prompt, response)
    responses = tensors["responses"]
    for name in (
        "advantages",
        "returns",
        "values",
        "old_log_probs",
        "ref_log_prob",
        "rollout_log_probs",
    ):
        tensors[name] = torch.zeros_like(responses, dtype=torch.float32)
    policy = config.actor_rollout_ref
    if policy.actor.router_replay.chosen != "disabled":
        hf = empty_model(policy.model, PolicyModel.auto_class, key="actor_rollout_ref.model")
        tensors[ROUTED_EXPERTS] = first_experts(shape_of(hf), num_rows, prompt + response)
    padding = (prompt, response, 0)  # widths of prompt and response, padding token
    return DataProto.from_dict(tensors, meta_info={"padding": padding})


def first_experts(shape: RouterShape, num_rows: int, length: int) -> Tensor:
    """The column `routed_experts` of rows of `length` tokens, all of which have the first
    experts."""
    of_token = torch.arange(shape.top_k, dtype=shape.dtype)
    ids = of_token.repeat(num_rows * length, shape.num_layers, 1)
    return jagged_from_lengths(ids, torch.full((num_rows,), length))


def rows_of_examples(config: SupervisedConfig, num_examples: int, example_length: int) -> DataProto:
    """Examples of full length. An example is one conversation, or a pair if `example_length` is
    twice `data.max_length`. All tokens of a conversation but the first are learned."""
    length = config.data.max_length
    num_others = length - 1
    rows_of_example = example_length // length
    num_rows = num_examples * rows_of_example
    tensors = full_rows(num_rows, 1, num_others)
    examples = torch.arange(num_examples)
    tensors["sample_id"] = examples.repeat_interleave(rows_of_example)
    tensors["margin"] = torch.zeros(num_rows)
    tensors["score"] = torch.zeros(num_rows)
    padding = (1, num_others, 0)  # widths of prompt and response, padding token
    return DataProto.from_dict(tensors, meta_info={"padding": padding})


def full_rows(num_rows: int, prompt_length: int, response_length: int) -> dict[str, Tensor]:
    """Prompts and responses, all of whose tokens are scored."""
    return {
        "prompts": rows_of_ones(num_rows, prompt_length),
        "responses": rows_of_ones(num_rows, response_length),
        "response_mask": rows_of_ones(num_rows, response_length),
    }


def rows_of_ones(num_rows: int, length: int) -> Tensor:
    """A jagged int64 column whose rows all have `length` values, each of them 1."""
    num_values = num_rows * length
    values = torch.ones(num_values, dtype=torch.int64)
    lengths = torch.full((num_rows,), length)
    return jagged_from_lengths(values, lengths)


def rows_of(config: RunConfig, model: PlannedModel, passes: MicroBatching) -> DataProto:
    """Samples of full length that fill `NUM_MICRO_BATCHES` micro-batches. A pair of conversations
    is one sample of two rows."""
    samples_of_pass = passes.num_rows
    if passes.by_tokens:
        # Ranks that share sequences have as many tokens each.
        tokens_of_pass = passes.max_tokens * model.ranks_of_sequence
        samples_of_pass = max(1, tokens_of_pass // model.sequence_length)
    num_samples = NUM_MICRO_BATCHES * samples_of_pass
    if isinstance(config, SupervisedConfig):
        return rows_of_examples(config, num_samples, model.sequence_length)
    assert isinstance(config, PPOConfig)
    return rows_of_ppo(config, num_samples)


METHODS = {
    Role.Actor: ("compute_log_prob", "update_actor"),
    Role.Critic: ("compute_values", "update_critic"),
    Role.RefPolicy: ("compute_ref_log_prob", ""),
    Role.Teacher: ("compute_teacher_log_prob", ""),
    "model": ("evaluate", "update_model"),
}
"""By role, the method that runs the model forward and the one that trains it. Every other role is a
reward model: it has `compute_rm_score` and is not trained."""


def workers_of(pool: PlannedPool) -> dict[str, RayClassWithInitArgs]:
    """The worker of each role of the pool's training process, custom roles among them."""
    config = pool.config
    if isinstance(config, SupervisedConfig):
        worker = KINDS[type(config)].worker
        arguments = worker_arguments(config)
        return {"model": RayClassWithInitArgs(worker, *arguments)}
    assert isinstance(config, PPOConfig)
    own_classes = {
        role: import_worker_class(role, path) for role, path in config.worker_classes.items()
    }
    mapping = build_role_worker_mapping(config, own_classes)
    copies = mapping
    if isinstance(config, DetachedConfig):
        copies = maker_models(config, mapping)
    workers = {}
    for model in pool.models:
        classes = copies
        if model.is_trained:
            classes = mapping
        workers[model.name] = classes[model.name]
    for role in config.plan.custom_roles:
        if config.role_mapping[role] == pool.name:
            workers[role] = mapping[role]
    return workers


def measure(pool: PlannedPool, rank: int) -> list[Measured]:
    """Measures the phases of one rank of a pool's training process: each role's load, each model's
    forward pass and, if it is trained, what `measure_training` says, and what stays between calls.
    """
    phases = Phases()
    join_nobody(rank, sum(pool.nodes), phases)
    replace_what_needs_numbers()
    workers = {}
    for role, planned in workers_of(pool).items():
        with phases.phase(f"{role} load"):
            worker = planned.cls(*planned.args, **planned.kwargs)
            worker.init_model()
            workers[role] = worker
            if isinstance(worker, ModelWorker):
                phases.engines[role] = worker.engine
    for worker, model in with_plans(workers, pool):
        forward, update = METHODS.get(model.name, ("compute_rm_score", ""))
        run_forward = getattr(worker, forward)
        rows = rows_of(pool.config, model, model.forward_passes)
        with phases.phase(f"{model.name} forward pass"):
            run_forward(rows)
        if model.is_trained:
            run_update = getattr(worker, update)
            measure_training(phases, model, worker, run_update, pool.config)
    with phases.phase("between calls"):
        pass  # nothing runs: what lies in memory is measured
    return list(phases.measured.values())


def with_plans(workers: Mapping[str, Any], pool: PlannedPool) -> list[tuple[Any, PlannedModel]]:
    """Pairs each worker that is called with the plan of its model.

    The worker of a custom role has no plan, because nobody knows what its methods take. A plan may
    have no worker: the worker of DPO's model holds the reference model too.
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
    """Measures an update, then the export, if the model has one, and the saving of the weights. The
    optimizer step is a phase of its own.

    Two updates are done, and the numbers of the second are kept: it finds the memory as all later
    ones do, with what the first has left, such as workspaces of cuBLAS.
    """
    passes = worker.schedule.micro_batching
    rows = rows_of(config, model, passes)
    num_samples = count_samples(rows)
    worker.schedule = mini_batches.UpdateSchedule(num_samples, passes, epochs=1)
    engine: Any = worker.engine
    step = engine.step

    def measured_step() -> float:
        phases.end(f"{model.name} update")  # which began in the loop below
        with phases.phase(f"{model.name} optimizer step"):
            return step()

    engine.step = measured_step
    for _ in range(2):
        phases.begin()
        update(rows)
    engine.step = step
    if model.export_dtype:
        with phases.phase(f"{model.name} export"):
            worker.export_weights(1)
    with phases.phase(f"{model.name} save"):
        worker.save_checkpoint("nowhere")


def main() -> None:
    task = json.loads(sys.argv[1])
    config = config_of(**task["command"])
    pools = {pool.name: pool for pool in planned_pools(config, 0)}
    pool = pools[task["pool"]]
    measured = measure(pool, task["rank"])
    answer = [asdict(each) for each in measured]
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
