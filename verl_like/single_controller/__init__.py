"""Calls from one controller to groups of workers. Backends: verl_like.single_controller.ray and
.local."""

from verl_like.single_controller.decorator import Execute, register
from verl_like.single_controller.dispatch import (
    Dispatch,
    PerRank,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
)
from verl_like.single_controller.failure import CallTimeout, WorkerDied, WorkerError
from verl_like.single_controller.shard import Ordered
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import CallEvent, ClassWithInitArgs, WorkerGroup
