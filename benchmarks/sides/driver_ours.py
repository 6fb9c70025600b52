"""The side of `driver`. It runs with this version of the project and with one whose batches are
padded."""

import functools
import inspect
import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from benchmarks.serve import peak_resident_bytes, serve
from benchmarks.sides import dispatch_ray
from verl_like.protocol import DataProto, Metric, metric_values
from verl_like.single_controller import Dispatch, Worker, register
from verl_like.single_controller.decorator import registered_methods
from verl_like.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl_like.trainer.loop.balancing import RowWork
from verl_like.workers.actor import ActorWorker
from verl_like.workers.critic import CriticWorker
from verl_like.workers.planning.flops import ModelCost

HAS_JAGGED_ROWS = "jagged" in inspect.signature(register).parameters
PAD = 0
SAMPLES_PER_PROMPT = 8
MEAN_TOKENS_SHARE = 600 / 3072
SCORES = {"compute_log_prob": ("old_log_probs", "entropys"), "compute_values": ("values",)}
state: dict[str, Any] = {}


def read_by(worker_class: type, method: str) -> tuple[str, ...] | None:
    return registered_methods(worker_class)[method].reads


as_own_method = functools.partial(
    register,
    dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
    blocking=False,
    **({"jagged": True} if HAS_JAGGED_ROWS else {}),
)


def token_lengths(num_samples: int, longest: int, seed: int) -> np.ndarray:
    """(B,) log-normal lengths whose mean is the same share of the longest in every benchmark."""
    draws = np.random.default_rng(seed).lognormal(0.0, 1.0, num_samples)
    scale = longest * MEAN_TOKENS_SHARE / draws.mean() * 1.08  # some are cut
    return np.clip(draws * scale, 1, longest).astype(np.int64)


def padded(
    values: np.ndarray, lengths: np.ndarray, width: int, *, at_end: bool = False
) -> np.ndarray:
    """Values of rows one after the other, as (B, width)."""
    places = np.arange(width)
    is_value = places >= width - lengths[:, None] if at_end else places < lengths[:, None]
    column = np.zeros(is_value.shape, dtype=values.dtype)
    column[is_value] = values
    return column


def jagged(values: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), offsets=offsets)


class ScriptedWorker(Worker):
    """Returns at once what a model would compute; its own columns are made before."""

    def __init__(self, num_samples: int, prompt: int, response: int) -> None:
        super().__init__()
        mine = np.array_split(np.arange(num_samples), self.world_size)[self.rank]
        prompts_of_all = token_lengths(num_samples // SAMPLES_PER_PROMPT, prompt, 0).repeat(
            SAMPLES_PER_PROMPT
        )
        self.lengths = prompts_of_all[mine], token_lengths(num_samples, response, 1)[mine]
        self.widths = prompt, response
        self.generated = self.make_rows()

    def make_rows(self) -> DataProto:
        (prompt_lengths, lengths), (P, R) = self.lengths, self.widths
        prompts, responses = (np.arange(of.sum()) % 32_003 + 1 for of in self.lengths)
        of_tokens = {"responses": responses, "response_mask": np.ones_like(responses)}
        of_tokens["rollout_log_probs"] = -(responses % 7).astype(np.float32)
        if HAS_JAGGED_ROWS:
            columns = {"prompts": jagged(prompts, prompt_lengths)}
            columns |= {name: jagged(values, lengths) for name, values in of_tokens.items()}
            return DataProto.from_dict(columns)
        arrays = {name: padded(values, lengths, R) for name, values in of_tokens.items()}
        arrays["prompts"] = padded(prompts, prompt_lengths, P, at_end=True)
        is_prompt = padded(np.ones_like(prompts), prompt_lengths, P, at_end=True)
        mask = np.concatenate([is_prompt, arrays["response_mask"]], 1)
        arrays |= {"attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
        arrays["input_ids"] = np.concatenate([arrays["prompts"], arrays["responses"]], 1)
        return DataProto.from_dict(
            {name: torch.from_numpy(array) for name, array in arrays.items()}
        )

    @as_own_method()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        return self.generated

    @as_own_method(reads=read_by(ActorWorker, "compute_log_prob"))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self.scores(data, "old_log_probs", "entropys")

    @as_own_method(reads=read_by(CriticWorker, "compute_values"))
    def compute_values(self, data: DataProto) -> DataProto:
        return self.scores(data, "values")

    def scores(self, data: DataProto, *names: str) -> DataProto:
        mask = data.tensors()["response_mask"]
        return DataProto.from_dict({name: mask.float() for name in names})

    @as_own_method(reads=read_by(ActorWorker, "update_actor"))
    def update_actor(self, data: DataProto) -> DataProto:
        return self.reply(data)

    @as_own_method(reads=read_by(CriticWorker, "update_critic"))
    def update_critic(self, data: DataProto) -> DataProto:
        return self.reply(data)

    def reply(self, data: DataProto) -> DataProto:
        mask = data.tensors()["response_mask"]
        values = data.tensors()["values" if "values" in data.tensors() else "old_log_probs"]
        flat = [column.values() if column.is_nested else column for column in (mask, values)]
        counts = {
            name: Metric.sum(int(each.sum()))
            for name, each in zip(("tokens", "sum"), flat, strict=True)
        }
        return DataProto.from_dict({}, meta_info={"metrics": counts})


def start(num_samples: int, prompt: int, response: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dispatch_ray.init(4, 9 * 1024)
    pool = RayResourcePool([2], use_gpu=False)
    state["group"] = RayWorkerGroup(
        pool, RayClassWithInitArgs(ScriptedWorker, num_samples, prompt, response)
    )
    state["group"].init_model()
    state["sizes"] = num_samples, prompt, response
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    state["cost"] = ModelCost.of(config)
    return {}


def step(with_estimator: bool) -> dict[str, Any]:
    """A round; `with_estimator`: padded columns of rewards and advantages are made on the way."""
    group = state["group"]
    (num_samples, prompt, response) = state["sizes"]
    asked = DataProto.from_dict(
        {"row": torch.arange(num_samples)}, meta_info={"padding": (prompt, response, PAD)}
    )
    generation = group.generate_sequences.remote(asked)
    while not generation.done():
        time.sleep(0.01)
    created = dispatch_ray.created_bytes()
    started = time.perf_counter()
    started_cpu = time.process_time()
    batch = asked.union(generation.get())
    work = RowWork.of(batch, state["cost"], balance=True)
    pending = [work.submit(getattr(group, method), batch) for method in SCORES]
    for future in pending:
        batch = batch.union(future.get())
    batch = learned_from(batch, with_estimator)
    mini = num_samples // 4
    updates = [
        work.submit(getattr(group, method), batch, mini)
        for method in ("update_actor", "update_critic")
    ]
    of_actor, of_critic = (metric_values(future.get().meta_info["metrics"]) for future in updates)
    cpu = time.process_time() - started_cpu
    seconds = time.perf_counter() - started
    state["columns"] = sum(
        (column.values() if column.is_nested else column).nbytes
        for column in batch.tensors().values()
    )
    state["store"] = dispatch_ray.created_bytes() - created
    return {
        "cpu": cpu,
        "seconds": seconds,
        "peak": peak_resident_bytes(),
        "num_tokens": of_actor["tokens"],
        "sum": of_critic["sum"],
    }


def learned_from(batch: DataProto, with_estimator: bool) -> DataProto:
    """The batch with `advantages` and `returns`."""
    if not HAS_JAGGED_ROWS or not with_estimator:
        made = batch.select()
        made.batch["advantages"] = made.batch["returns"] = made.batch["values"]
        return made
    from verl_like.protocol.padded import strip, view_of_samples

    view = view_of_samples(batch)
    view.batch["advantages"] = view.batch["returns"] = view.batch["values"]
    return strip(view, batch)


def num_bytes() -> dict[str, Any]:
    """Of the columns of the last round's batch, and what went through the object store."""
    return {"columns": state["columns"], "store": state["store"]}


if __name__ == "__main__":
    serve(start, step, num_bytes)
