"""The frozen teacher of on-policy distillation."""

from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import register
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.models.packing import SEQUENCE_COLUMNS
from verl_like.workers.models.pretrained import TEACHER_PATH
from verl_like.workers.reference import BY_SHARD, ReferenceWorker


class TeacherWorker(ReferenceWorker):
    """One rank of the teacher, a reference policy with the model
    `actor.policy_loss.teacher_path`."""

    model_key = TEACHER_PATH

    def __init__(self, config: ActorRolloutRefConfig, shares_device: bool = False) -> None:
        assert config.teacher_model, "a run without teacher_path has no teacher"
        teacher_config = config.model_copy(update={"model": config.teacher_model})
        super().__init__(teacher_config, shares_device)

    @register(
        dispatch_mode=BY_SHARD,
        blocking=False,
        reads=SEQUENCE_COLUMNS,
        writes=["teacher_log_prob"],
        jagged=True,
    )
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Returns the log-probability of each response token under the teacher, jagged float32."""
        return self.infer_log_probs(data, "teacher_log_prob", phase="teacher")
