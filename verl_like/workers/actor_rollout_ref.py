"""What the policy's three roles have in common; verl has one class of this name for all of them."""

import torch

from verl_like.protocol import DataProto
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.engine.mini_batches import MicroBatch
from verl_like.workers.model_worker import ModelWorker
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.planning.partition import log_prob_micro_batching


class ActorRolloutRefWorker(ModelWorker):
    """One rank of the policy: `ActorWorker`, `ReferenceWorker` or `RolloutWorker`; `config` has the settings of all."""

    model_class = PolicyModel
    model_key = "actor_rollout_ref.model"

    def __init__(self, config: ActorRolloutRefConfig, shares_device: bool = False) -> None:
        super().__init__(shares_device)
        self.config = config
        self.model_config = config.model

    def _score(
        self, micro: MicroBatch, *, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of the response tokens and what is asked for, see `linear_log_prob`: (K,) each."""
        packed = self.engine.pack(micro.on_host)
        scores = self.engine.run(packed, self.config.rollout.temperature, with_entropy, with_sum_pi_squared)
        return tuple(map(packed.unpack, scores))

    def infer_log_probs(self, data: DataProto, column: str, phase: str) -> DataProto:
        """`column`: the log-probability of each response token, jagged float32, in passes as of the reference."""
        micro_batching = log_prob_micro_batching(self.config.ref)
        return self.infer(data, [column], micro_batching, lambda micro: self._score(micro, with_entropy=False), phase)
