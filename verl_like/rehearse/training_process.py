"""Measures a training process of a run on the null GPU: one rank at its real size, with a group that is not there."""

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl_like.protocol import DataProto, Metric
from verl_like.rehearse.measured import Measured
from verl_like.single_controller.worker import rank_environment
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.ppo_workers import build_role_worker_mapping
from verl_like.trainer.roles import Role
from verl_like.workers import model_worker
from verl_like.workers.engine import fsdp, mini_batches
from verl_like.workers.engine.host_memory import local_part
from verl_like.workers.model_worker import TrainedWorker
from verl_like.workers.models import linear_log_prob
from verl_like.workers.planning.partition import MicroBatching, log_prob_micro_batching

NUM_MICRO_BATCHES = 2
"""Of an optimizer step: from the second on there are gradients of those before."""


class Phases:
    """Takes the peak of each phase."""

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.engines: dict[str, fsdp.FsdpEngine] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.begin()
        yield
        self.end(phase)

    def begin(self) -> None:
        """Torch gives what it keeps of freed memory back before it says that memory is short: so does each phase."""
        if torch.cuda.is_initialized():  # the worker sets what the allocator reads when it starts
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def end(self, phase: str) -> None:
        parts: dict[str, int] = {}
        for role, engine in self.engines.items():
            parts |= {f"{role} {part}": size for part, size in parts_of(engine).items() if size}
        self.measured.append(
            Measured(
                phase,
                allocated=torch.cuda.max_memory_allocated(),
                reserved=torch.cuda.max_memory_reserved(),
                parts=parts,
                heap=heap_bytes(),
            )
        )


class _MallInfo(ctypes.Structure):
    """glibc's mallinfo2, of ten sizes."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def heap_bytes() -> int:
    """What malloc has given out, also where nobody has written: a model in host memory counts as one that was read."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return info.hblkhd + info.uordblks


def parts_of(engine: fsdp.FsdpEngine) -> dict[str, int]:
    """Bytes of the device that a model's parameters, optimizer and gradients take now."""

    def on_device(tensors: Sequence[torch.Tensor | None]) -> int:
        own = [local_part(tensor) for tensor in tensors if tensor is not None]
        return sum(tensor.nbytes for tensor in own if tensor.is_cuda)

    state = engine.optimizer.state.values() if engine.optimizer else ()
    return {
        "weights": on_device([*engine.model.parameters(), *engine.model.buffers()]),
        "optimizer": on_device([value for of_parameter in state for value in of_parameter.values()]),
        "gradients": on_device([parameter.grad for parameter in engine.parameters]),
    }


def empty_weights(model_class: Any, config: Any, settings: Any, **options: Any) -> Any:
    """In the place of `load_pretrained`: on rank 0 a model in host memory that nobody has written, and so not there."""
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


def read_ones(parts: Sequence[mini_batches.MicroMetrics]) -> list[dict[str, Metric]]:
    """As `read_metrics`, which would refuse numbers that nobody computed."""
    return [{name: metric.finish(*[1.0] * len(metric.numbers)) for name, metric in part.items()} for part in parts]


class NobodyElse:
    """`torch.distributed` for an engine whose other ranks are not there: what rank 0 would send stays as it is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        pass


def receive_weights(model: Any, weights: Any, options: Any) -> None:
    """In the place of `set_model_state_dict` on a rank that rank 0 sends each weight, whole and one at a time."""
    for value in model.state_dict().values():
        torch.empty(value.shape, dtype=value.dtype, device="cuda")


def join_nobody(rank: int, world_size: int) -> None:
    """A process group whose other ranks are not there, and whose collectives do nothing."""
    os.environ |= rank_environment(rank, world_size, 0, 1, "cuda")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    engine: Any = fsdp
    engine.dist = NobodyElse()
    if rank:
        engine.set_model_state_dict = receive_weights


def replace_what_needs_numbers() -> None:
    """Weights that nobody reads, the head's Triton kernels, metrics, and the limit of steps without a norm."""
    modules: tuple[Any, ...] = (model_worker, linear_log_prob, fsdp, mini_batches)
    workers, head, engine, updates = modules
    workers.load_pretrained = empty_weights
    head._kernels = lambda x_MC: NoKernels
    engine.MAX_SKIPPED_STEPS = 10**9
    updates.read_metrics = read_ones


def rows_of(config: PPOConfig, num_rows: int) -> DataProto:
    """Prompts and responses of full length, with all columns that a role reads."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    by_token = ("advantages", "returns", "values", "old_log_probs", "ref_log_prob", "rollout_log_probs")
    attended = torch.ones(num_rows, prompt + response, dtype=torch.int64)
    tensors = {
        "input_ids": attended,
        "attention_mask": attended,
        "position_ids": attended.cumsum(-1) - 1,
        "response_mask": attended[:, prompt:],
        **{name: torch.zeros(num_rows, response) for name in by_token},
    }
    return DataProto.from_dict(tensors=tensors)


def num_rows_of_pass(passes: MicroBatching, config: PPOConfig) -> int:
    """Rows of full length that share a pass."""
    length = config.data.max_prompt_length + config.data.max_response_length
    return max(1, passes.max_tokens // length) if passes.by_tokens else passes.num_rows


def passes_of(role: str, config: PPOConfig) -> MicroBatching:
    """The micro-batches of a role's passes without gradients."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    if role == Role.Actor:
        return log_prob_micro_batching(policy.rollout)
    if role in (Role.RefPolicy, Role.Teacher):
        return log_prob_micro_batching(policy.ref)
    if role == Role.Critic:
        rows, tokens = critic.forward_micro_batch_size_per_gpu, critic.forward_max_token_len_per_gpu
        return MicroBatching(rows, tokens, critic.use_dynamic_bsz)
    rows, tokens = reward.micro_batch_size_per_gpu, reward.forward_max_token_len_per_gpu
    return MicroBatching(rows, tokens, reward.use_dynamic_bsz)


METHODS = {
    Role.Actor: ("compute_log_prob", "update_actor"),
    Role.Critic: ("compute_values", "update_critic"),
    Role.RefPolicy: ("compute_ref_log_prob",),
    Role.Teacher: ("compute_teacher_log_prob",),
}


def measure(config: PPOConfig, roles: Sequence[str], rank: int, world_size: int) -> list[Measured]:
    """All phases of the process of these roles."""
    join_nobody(rank, world_size)
    replace_what_needs_numbers()
    mapping = build_role_worker_mapping(config, {})
    phases, workers = Phases(), {}
    for role in roles:
        made = mapping[role]
        with phases(f"{role} load"):
            worker = workers[role] = made.cls(*made.args, **made.kwargs)
            worker.init_model()
            phases.engines[role] = worker.engine
    for role, worker in workers.items():
        for method in METHODS.get(Role(role), ("compute_rm_score",)):
            if method.startswith("update"):
                measure_update(phases, role, worker, getattr(worker, method), config)
            else:
                rows = rows_of(config, NUM_MICRO_BATCHES * num_rows_of_pass(passes_of(role, config), config))
                with phases(f"{role} {method}"):
                    getattr(worker, method)(rows)
    if Role.Actor in workers:
        with phases("actor export"):
            workers[Role.Actor].export_weights(1)
    with phases("between calls"):
        pass
    return list({each.phase: each for each in phases.measured}.values())  # of the two updates the second


def measure_update(
    phases: Phases, role: str, worker: TrainedWorker, update: Callable[[DataProto], Any], config: PPOConfig
) -> None:
    """Two updates, since the first makes the optimizer's state; the optimizer step is a phase of its own."""
    schedule = worker.schedule
    num_rows = NUM_MICRO_BATCHES * num_rows_of_pass(schedule.micro_batching, config)
    worker.schedule = mini_batches.UpdateSchedule(num_rows, schedule.micro_batching, epochs=1)
    engine: Any = worker.engine
    step = engine.step

    def step_apart() -> float:
        phases.end(f"{role} update")
        with phases(f"{role} optimizer step"):
            return step()

    engine.step = step_apart
    rows = rows_of(config, num_rows)
    for _ in range(2):
        phases.begin()
        update(rows)
    engine.step = step


def main() -> None:
    task = json.loads(sys.argv[1])
    config = load_ppo_config(task["overrides"], task.get("config_name"), task.get("config_dir"))
    measured = measure(config, task["roles"], task["rank"], task["world_size"])
    sys.stdout.write(json.dumps([asdict(each) for each in measured]) + "\n")


if __name__ == "__main__":
    main()
