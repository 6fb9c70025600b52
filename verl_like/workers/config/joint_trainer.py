"""Several trainers of one model: how the processes of each learn of the others."""

import json
import os
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True)
class JointTrainer:
    """One of `count` trainers of a model, each the driver of worker groups of its own, that add
    their gradients.

    Worker groups dispatch over their own ranks. Those of all trainers, as many of each, make up one
    process group. They meet in a store, `torch.distributed.TCPStore(master_addr, master_port,
    is_master=True, wait_for_workers=False)`, which somebody opens before and keeps as long as the
    trainers run; with port 0 the system chooses `store.port`.
    """

    index: int
    count: int
    master_addr: str
    master_port: int
    processes: str = ""

    def worker_env(self, processes: str) -> dict[str, str]:
        """`worker_env` of a worker group. Groups that meet, one of each trainer, have the same name
        `processes`."""
        return {"VERL_LIKE_JOINT_TRAINER": json.dumps(asdict(self) | {"processes": processes})}

    @classmethod
    def of_process(cls) -> Self | None:
        """What `worker_env` told this process."""
        told = os.environ.get("VERL_LIKE_JOINT_TRAINER")
        return cls(**json.loads(told)) if told else None
