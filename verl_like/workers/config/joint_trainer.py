"""Several trainers of one model: how the processes of each learn of the others."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True)
class JointTrainer:
    """One of `count` trainers of a model, which add their gradients. Each is the driver of worker
    groups of its own.

    Worker groups dispatch over their own ranks. The ranks of all trainers, as many of each, make up
    one process group. They meet in a store, `torch.distributed.TCPStore(master_addr, master_port,
    is_master=True, wait_for_workers=False)`, which somebody opens before the trainers start and
    keeps as long as they run. With port 0 the system chooses `store.port`.
    """

    index: int
    count: int
    master_addr: str
    master_port: int
    processes: str = ""

    def worker_env(self, processes: str) -> dict[str, str]:
        """Return the `worker_env` of a worker group. Groups that meet, one of each trainer, have
        the same name `processes`."""
        return {"VERL_LIKE_JOINT_TRAINER": json.dumps(asdict(self) | {"processes": processes})}

    @classmethod
    def of_process(cls) -> Self | None:
        """Return what `worker_env` told this process; None in a process of a single trainer."""
        told = os.environ.get("VERL_LIKE_JOINT_TRAINER")
        return cls(**json.loads(told)) if told else None
