"""What is handed around as a value cannot be changed by who gets it, and what CUDA is asked for,
without a GPU."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from verl_like.protocol import DataProto, metric_values
from verl_like.single_controller.network import open_store
from verl_like.trainer.loop.balancing import RowWork
from verl_like.trainer.ppo.experience_maker import Experience, Weights
from verl_like.trainer.ppo.learner import Update
from verl_like.workers.engine import mesh
from verl_like.workers.engine.mini_batches import (
    MicroBatching,
    MiniBatch,
    UpdateSchedule,
    memory_metrics,
)

MICRO = MicroBatching(num_rows=1, max_tokens=2, by_tokens=False)
WORK = RowWork(np.ones(1), np.ones(1), balance=True, sample_starts=np.arange(2))
VALUES = [
    MICRO,
    MiniBatch([], num_tokens=1.0, num_sequences=1.0, share=1.0, response_length=1),
    UpdateSchedule(1, MICRO, epochs=1),
    WORK,
    Experience(DataProto(), WORK, metrics={}),
    Weights(exported=None, version=1),
    Update([], metrics={}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_not_written_into(value: object):
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


def test_a_rank_takes_the_only_gpu_it_sees_and_talks_by_nccl(monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **arguments: calls.append((backend, arguments))
    )
    store_of_rank_0 = open_store("127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store_of_rank_0.port))
    mesh.init_process_group("cuda", rank=1, world_size=2)
    device, (backend, arguments) = calls
    assert device == 0 and backend == "cpu:gloo,cuda:nccl"
    assert arguments.pop("store").port == store_of_rank_0.port
    assert arguments == {"rank": 1, "world_size": 2, "timeout": mesh.COLLECTIVE_DEADLINE}


def test_memory_of_a_gpu_is_the_most_that_was_allocated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3_000_000_000)
    assert metric_values(memory_metrics("cuda", "actor")) == {
        "actor/perf/max_memory_allocated_gb": 3.0
    }
