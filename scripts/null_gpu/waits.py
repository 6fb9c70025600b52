"""Counts how often updates wait for the device: `python scripts/null_gpu/waits.py FOLDER [--write]
[SCENARIO ...]`.

`make gpu-rehearsal` runs it where the GPUs are null and have no numbers; FOLDER has what
gpu_rehearsal_data.py made. An update may wait once a micro-batch and three times an optimizer step,
by the null GPU's own counters of synchronisations and of copies that wait, and by
`torch.cuda.set_sync_debug_mode`, which names files and lines: the larger number counts. Each
operator that waits has to be among those of `waits.json`, which `--write` makes anew.

Without numbers memory is never filled. What is replaced for that: the head's Triton kernels, which
need a compiler for a GPU, by nothing; what metrics read from the device, by 1; and the limit of
optimizer steps in a row that may be skipped because a norm is no number.
"""

import contextlib
import ctypes
import json
import linecache
import multiprocessing
import os
import socket
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.padded import without_padding
from verl_like.rehearse.training_process import NoKernels
from verl_like.trainer.config import load_ppo_config, supervised
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.ppo.workers import build_role_worker_mapping
from verl_like.trainer.supervised.run_supervised import KINDS, check_inputs, worker_arguments
from verl_like.workers.engine import fsdp, mini_batches
from verl_like.workers.models import linear_log_prob
from verl_like.workers.pinned_memory import to_host

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = Path(__file__).with_name("waits.json")
COUNTERS = ("stream_synchronizes", "event_synchronizes", "device_synchronizes", "blocking_copies")
NUM_ROWS = 8
PROMPT = 5
RESPONSE = 6
NUM_UPDATES = 3  # the first allocates


@dataclass(frozen=True)
class Scenario:
    """An update of a worker. kind: the trainer's or the role's name. overrides: of its
    configuration."""

    name: str
    kind: str
    overrides: tuple[str, ...] = ()
    num_ranks: int = 1


POLICY = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
OFFLOAD = (f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true")
BY_TOKENS = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=40")
SCENARIOS = (
    Scenario("actor", "actor"),
    Scenario("actor, micro-batches by tokens", "actor", BY_TOKENS),
    Scenario(
        "actor, everything offloaded",
        "actor",
        (*OFFLOAD, f"{POLICY}.enable_activation_offload=true"),
    ),
    Scenario("actor, adapter", "actor", (f"{POLICY}.lora_rank=4",)),
    Scenario(
        "actor, entropy and KL loss",
        "actor",
        (f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_kl_loss=true"),
    ),
    Scenario("actor, two ranks, zero3", "actor", num_ranks=2),
    Scenario(
        "actor, two ranks share sequences",
        "actor",
        (f"{ACTOR}.ulysses_sequence_parallel_size=2",),
        num_ranks=2,
    ),
    Scenario("critic", "critic"),
    Scenario(
        "critic, everything offloaded",
        "critic",
        tuple(each.replace(ACTOR, "critic.model") for each in OFFLOAD),
    ),
    Scenario("sft", "sft"),
    Scenario("sft, zero1", "sft", ("model.fsdp_config.strategy=zero1",), num_ranks=2),
    Scenario("rm", "rm"),
    Scenario("dpo", "dpo"),
    Scenario("ilql", "ilql"),
)
CONFIGS: dict[str, type[supervised.SupervisedConfig]] = {
    "sft": supervised.SFTConfig,
    "rm": supervised.RMConfig,
    "dpo": supervised.DPOConfig,
    "ilql": supervised.ILQLConfig,
}
FILES = {
    "sft": "answers.parquet",
    "rm": "pairs.jsonl",
    "dpo": "pairs.jsonl",
    "ilql": "walks/walks.jsonl",
}


def supervised_update(scenario: Scenario, folder: Path) -> tuple[Any, Callable[[], Any]]:
    """The worker, and its update of a batch."""
    model = folder / ".toy_world" / ("walks/model" if scenario.kind == "ilql" else "model")
    own = (
        f"data.train_files={folder}/.toy_world/{FILES[scenario.kind]}",
        f"data.train_batch_size={NUM_ROWS}",
        f"model.path={model}",
        "training.use_dynamic_bsz=false",
        "training.micro_batch_size_per_gpu=2",
        "trainer.total_training_steps=9",
        "trainer.device=cuda",
        f"trainer.n_gpus_per_node={scenario.num_ranks}",
    )
    config = load_config(
        CONFIGS[scenario.kind], supervised.broken_supervised_rules, [*own, *scenario.overrides]
    )
    inputs = check_inputs(config, contextlib.ExitStack())
    worker = KINDS[type(config)].worker(*worker_arguments(inputs.config))
    rows = inputs.train_dataset.collate(list(range(NUM_ROWS // scenario.num_ranks)))
    return worker, lambda: worker.update_model(rows)


def ppo_update(scenario: Scenario, folder: Path) -> tuple[Any, Callable[[], Any]]:
    """The worker, and its update of a batch."""
    world = folder / ".toy_world"
    own = (
        *(f"data.train_files={world}/train.parquet", f"data.val_files={world}/test.parquet"),
        *(f"{POLICY}.path={world}/model", "placement=colocated", "device=cuda"),
        *(f"trainer.n_gpus_per_node={scenario.num_ranks}", f"data.train_batch_size={NUM_ROWS}"),
        *(f"{ACTOR}.ppo_mini_batch_size={NUM_ROWS}", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"),
        "critic.ppo_micro_batch_size_per_gpu=2",
    )
    config = load_ppo_config(
        [*own, *scenario.overrides], "toy", str(ROOT / "examples/split_placement/config")
    )
    made = build_role_worker_mapping(config, {})[scenario.kind]
    worker = made.cls(*made.args, **made.kwargs)
    shares = 2 if "ulysses" in str(scenario.overrides) else 1
    data = random_rows(NUM_ROWS * shares // scenario.num_ranks)
    return worker, lambda: getattr(worker, f"update_{scenario.kind}")(data)


def random_rows(num_rows: int) -> DataProto:
    """Rows of different lengths, with all that actor and critic read."""
    generator = torch.Generator().manual_seed(1)
    num_response = torch.arange(num_rows) % RESPONSE + 1
    is_prompt = torch.arange(PROMPT) >= torch.arange(num_rows)[:, None] % PROMPT
    is_response = torch.arange(RESPONSE) < num_response[:, None]
    attended = torch.cat([is_prompt, is_response], dim=1).long()
    by_token = (
        "advantages",
        "returns",
        "values",
        "old_log_probs",
        "ref_log_prob",
        "rollout_log_probs",
    )
    tensors = {
        "input_ids": torch.randint(3, 15, (num_rows, PROMPT + RESPONSE), generator=generator),
        "attention_mask": attended,
        "responses": torch.randint(3, 15, (num_rows, RESPONSE), generator=generator),
        "response_mask": is_response.long(),
        **{name: torch.randn(num_rows, RESPONSE, generator=generator) for name in by_token},
    }
    return without_padding(DataProto.from_dict(tensors), pad_token_id=0)


def read_ones(parts: Sequence[mini_batches.MicroMetrics]) -> list[dict[str, Metric]]:
    """As `read_metrics`, which would refuse numbers that nobody computed."""
    numbers = [
        number.double() for part in parts for metric in part.values() for number in metric.numbers
    ]
    to_host(torch.stack(numbers)).tolist()
    return [
        {name: metric.finish(*[1.0] * len(metric.numbers)) for name, metric in part.items()}
        for part in parts
    ]


class Waiting(TorchDispatchMode):
    """Notes each operator that waits, with the function of ours or of a library's that called
    it."""

    def __init__(self, num_waits: Callable[[], int]) -> None:
        super().__init__()
        self.num_waits, self.places = num_waits, Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = self.num_waits()
        result = function(*args, **(kwargs or {}))
        if self.num_waits() > before:
            frames = [
                frame for frame in traceback.extract_stack() if "/verl_like/" in frame.filename
            ]
            # Such as <listcomp>
            frames = [frame for frame in frames if not frame.name.startswith("<")]
            where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "backward"
            self.places[f"{where}: {function}"] += 1
        return result


def measure(scenario: Scenario, folder: Path, rank: int, port: int, answer: Any) -> None:
    """What a rank counts in an update; rank 0 answers."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.null_gpu_count.restype = ctypes.c_long

    def num_waits() -> int:
        return sum(library.null_gpu_count(name.encode()) for name in COUNTERS)

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(scenario.num_ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "VERL_LIKE_DEVICE": "cuda"}
    linear_log_prob._kernels = lambda x_MC: NoKernels
    fsdp.MAX_SKIPPED_STEPS = 10**9
    mini_batches.read_metrics = read_ones
    make = supervised_update if scenario.kind in CONFIGS else ppo_update
    worker, update = make(scenario, folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # the checks before want to see all
    worker.init_model()
    backward = count_calls(worker.engine, "backward")
    step = count_calls(worker.engine, "step")
    for _ in range(NUM_UPDATES):
        backward.clear()
        step.clear()
        before = num_waits()
        update()
        waits = num_waits() - before
    num_backward = len(backward)
    num_steps = len(step)
    lines = waits_by_torch(update)
    with Waiting(num_waits) as waiting:
        update()
    if rank == 0:
        answer.put(
            {
                "waits": max(waits, sum(lines.values())),
                "by_torch": dict(sorted(lines.items())),
                "micro_batches": num_backward,
                "optimizer_steps": num_steps,
                "places": dict(sorted(waiting.places.items())),
            }
        )


def waits_by_torch(update: Callable[[], Any]) -> Counter[str]:
    """How often torch says that an update waits, by the function of ours or of a library's that
    does."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        update()
    torch.cuda.set_sync_debug_mode("default")
    places = [
        (each.filename, each.lineno)
        for each in said
        if "synchronizing CUDA operation" in str(each.message)
    ]
    return Counter(
        f"{Path(file).name}: {linecache.getline(file, line).strip()}" for file, line in places
    )


def count_calls(owner: Any, name: str) -> list[str]:
    """A list that gets an entry with each call of a method."""
    calls: list[str] = []
    call = getattr(owner, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return call(*arguments, **named)

    setattr(owner, name, counted)
    return calls


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def run(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Forks the scenario's ranks, which are the first to use CUDA. Raises RuntimeError if one fails
    or hangs."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    answer = context.Queue()
    arguments = [(scenario, folder, rank, port, answer) for rank in range(scenario.num_ranks)]
    ranks = [context.Process(target=measure, args=own) for own in arguments]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=300)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    if any(codes):
        raise RuntimeError(f"{scenario.name}: its ranks ended with {codes}")
    return answer.get(timeout=10)


def faults_of(name: str, counted: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    bound = counted["micro_batches"] + 3 * counted["optimizer_steps"]
    known = committed.get(name, {})
    new = {
        place
        for part in ("places", "by_torch")
        for place in counted[part].keys() - known.get(part, {}).keys()
    }
    faults = (
        [f"{name}: {counted['waits']} waits, at most {bound}"] if counted["waits"] > bound else []
    )
    return faults + [f"{name}: waits in a new place, {place}" for place in sorted(new)]


def main(arguments: Sequence[str]) -> int:
    names = [argument for argument in arguments[1:] if argument != "--write"]
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    faults = []
    results = dict(committed)
    for scenario in SCENARIOS:
        if names and scenario.name not in names:
            continue
        counted = results[scenario.name] = run(scenario, Path(arguments[0]).resolve())
        print(f"{scenario.name:36} {counted}", flush=True)
        faults += faults_of(scenario.name, counted, committed)
    if "--write" in arguments:
        COMMITTED.write_text(json.dumps(results, indent=1) + "\n")
        faults = [fault for fault in faults if "new place" not in fault]
    print("\n".join(faults) or "Each update waits as often as it may, where it is known to.")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
