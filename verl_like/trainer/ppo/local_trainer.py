"""The PPO trainer in one process, without Ray, for the debugger and for a machine without a GPU."""

from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer


class LocalTrainer(RayPPOTrainer):
    """The same trainer on workers that are objects of this process."""

    def start_groups(self) -> dict[str, WorkerGroup]:
        return {
            role: LocalWorkerGroup(worker_class, role=role, on_call=self.recorder.record)
            for role, worker_class in self.role_worker_mapping.items()
        }
