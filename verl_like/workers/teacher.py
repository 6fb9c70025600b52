"""A frozen teacher for the policy loss `distillation`, as a custom role."""

from typing import Any

from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl_like.workers.models.packing import SEQUENCE_COLUMNS
from verl_like.workers.reference import ReferenceWorker


class TeacherWorker(ReferenceWorker):
    """One rank of the teacher, run as the reference policy is, with the model `actor.policy_loss.teacher_path`.

    A run has one with `worker_classes.teacher=verl_like.workers.teacher.TeacherWorker`, placed like any custom role.

    Args:
        config: the run's configuration, which every custom role gets.

    Raises:
        ValueError: no teacher is configured.
    """

    def __init__(self, config: Any) -> None:
        policy = config.actor_rollout_ref
        path = (policy.actor.policy_loss.model_extra or {}).get("teacher_path")
        if path is None:
            raise ValueError(
                "actor_rollout_ref.actor.policy_loss.teacher_path=null: the role teacher has no model to load; set it "
                "to a folder or hub name, with policy_loss.loss_mode=distillation"
            )
        model = policy.model.model_copy(update={"path": path})
        super().__init__(policy.model_copy(update={"model": model}))

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"),
        blocking=False,
        reads=SEQUENCE_COLUMNS,
        writes=["teacher_log_prob"],
    )
    def annotate(self, data: DataProto) -> DataProto:
        """Log-probability of each response token under the teacher, (B, R) float32."""
        return DataProto.from_dict(tensors={"teacher_log_prob": self.compute_ref_log_prob(data).batch["ref_log_prob"]})
