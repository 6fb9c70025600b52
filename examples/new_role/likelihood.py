"""A custom role: a frozen model in a pool of its own; its log-probability of a response is added to
the reward."""

from typing import ClassVar

from verl_like.algorithms.masked import masked_mean
from verl_like.protocol import DataProto
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import jagged_on_last_token
from verl_like.single_controller.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl_like.trainer.config.schema import PPOConfig
from verl_like.workers.models.packing import SEQUENCE_COLUMNS
from verl_like.workers.reference import ReferenceWorker


class LikelihoodWorker(ReferenceWorker):
    """The reference policy's code with a role of its own; a custom role gets the whole
    configuration.

    The model here is the one that training starts from. Another model is one line: give
    `super().__init__` a copy of the settings with another `model.path`.
    """

    reward_columns: ClassVar = {"likelihood_scores": 0.1}  # added to the reward with this weight

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config.actor_rollout_ref)

    @register(
        # Its ranks may share sequences
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"),
        blocking=False,
        reads=SEQUENCE_COLUMNS,
        writes=["likelihood_scores"],
        jagged=True,  # as `compute_ref_log_prob` takes its batch
    )
    def annotate(self, data: DataProto) -> DataProto:
        """`likelihood_scores` (B R): the mean log-probability of a response's tokens, on its last
        token."""
        scored = data.union(self.compute_ref_log_prob(data))
        columns = padded(scored, ["ref_log_prob", "response_mask"]).batch
        mean_B = masked_mean(columns["ref_log_prob"], columns["response_mask"], axis=-1)
        scores = jagged_on_last_token(mean_B, data.batch["response_mask"])
        return DataProto.from_dict(tensors={"likelihood_scores": scores})
