"""A reward model: a pretrained sequence classifier, which gives one score for each response."""

from typing import ClassVar

from torch import Tensor

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import jagged_on_last_token
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.workers.config.roles import RewardModelConfig
from verl_like.workers.engine.mini_batches import MicroBatch, forward
from verl_like.workers.model_worker import ModelWorker
from verl_like.workers.models.packed_models import RewardModel
from verl_like.workers.models.packing import SEQUENCE_COLUMNS, Rows
from verl_like.workers.planning.partition import MicroBatching


class RewardModelWorker(ModelWorker):
    """One rank of a reward model.

    It reads the policy's token ids, so both must have the same vocabulary.
    """

    model_class = RewardModel
    reward_columns: ClassVar = {"rm_scores": 1.0}
    replaced_methods: ClassVar = {
        "_score": "override score_rows, which returns the score of each row, (b,), or "
        "compute_rm_score"
    }

    def __init__(
        self,
        config: RewardModelConfig,
        shares_device: bool = False,
        model_key: str = "reward_model.model",
    ) -> None:
        super().__init__(shares_device)
        self.model_key = model_key
        self.config = config
        self.model_config = config.model
        self.fsdp_config = config.model.fsdp_config

    def init_model(self) -> None:
        """Loads the model."""
        self.start_engine()

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=SEQUENCE_COLUMNS,
        writes=["rm_scores"],
        jagged=True,
    )
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Returns the score of each sequence on its last response token, 0 on the others.

        The column is jagged float32.
        """
        micro_batching = MicroBatching(
            self.config.micro_batch_size_per_gpu,
            self.config.forward_max_token_len_per_gpu,
            self.config.use_dynamic_bsz,
        )
        rows = Rows.of(data)
        (scores_B,) = forward(self.engine, rows, micro_batching, self.score_rows, by_token=False)
        rm_scores = jagged_on_last_token(scores_B, rows["response_mask"])
        return DataProto.from_dict(tensors={"rm_scores": rm_scores})

    def score_rows(self, micro: MicroBatch) -> tuple[Tensor]:
        """Runs the model, and returns the score of each row, (b,)."""
        packed = self.engine.pack(micro.on_host)
        return (self.engine.run(packed),)
