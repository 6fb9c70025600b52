"""The frozen reference policy."""

from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl_like.workers.actor_rollout_ref import ActorRolloutRefWorker
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.models.packing import SEQUENCE_COLUMNS, Rows
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS

BY_SHARD = make_nd_compute_dataproto_dispatch_fn(mesh_name="ref")


class ReferenceWorker(ActorRolloutRefWorker):
    """One rank of the reference policy, which only runs forward.

    Subclasses change the model in `build_model`.
    """

    def __init__(self, config: ActorRolloutRefConfig, shares_device: bool = False) -> None:
        super().__init__(config, shares_device)
        self.model_config = self.model_config.model_copy(update={"lora_rank": 0})
        self.fsdp_config = config.ref.fsdp_config

    def init_model(self) -> None:
        """Loads the model. As many ranks share a sequence as in the actor."""
        sequence_parallel_size = self.config.actor.ulysses_sequence_parallel_size
        self.register_mesh("ref", sequence_parallel_size)
        self.start_engine(sequence_parallel_size)

    @register(
        dispatch_mode=BY_SHARD,
        blocking=False,
        reads=SEQUENCE_COLUMNS,
        writes=["ref_log_prob"],
        jagged=True,
    )
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Returns the log-probability of each response token under the reference policy.

        The column is jagged float32.
        """
        return self.infer_log_probs(data, "ref_log_prob", phase="ref")


class ReplayingReferenceWorker(ReferenceWorker):
    """A reference policy that computes each token with the experts of the rollout engine."""

    replay_mode = "R3"

    @register(
        dispatch_mode=BY_SHARD,
        blocking=False,
        reads=[*SEQUENCE_COLUMNS, ROUTED_EXPERTS],
        writes=["ref_log_prob"],
        jagged=True,
    )
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Returns the log-probability of each response token, jagged float32.

        Raises ValueError for routing that is not the model's.
        """
        self.require_routing(Rows.of(data))
        return super().compute_ref_log_prob(data)
