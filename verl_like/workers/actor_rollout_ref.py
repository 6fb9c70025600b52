"""What the policy's three roles have in common; verl has one class of this name for all of them."""

from functools import partial
from typing import Any

import torch

from verl_like.plugins import refuse_overridden
from verl_like.protocol import DataProto
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.engine.mini_batches import MicroBatch
from verl_like.workers.model_worker import ModelWorker
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.planning.partition import log_prob_micro_batching


class ActorRolloutRefWorker(ModelWorker):
    """One rank of the policy: `ActorWorker`, `ReferenceWorker` or `RolloutWorker`; `config` has the
    settings of all."""

    model_class = PolicyModel
    model_key = "actor_rollout_ref.model"

    def __init__(self, config: ActorRolloutRefConfig, shares_device: bool = False) -> None:
        super().__init__(shares_device)
        self.config = config
        self.model_config = config.model

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raises ValueError for a subclass with a pass of earlier versions, which nothing would
        call."""
        super().__init_subclass__(**arguments)
        refuse_overridden(
            cls, ActorRolloutRefWorker, {"_score": "override score_tokens, which returns (K,) each"}
        )

    def score_tokens(
        self, micro: MicroBatch, *, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of the response tokens and what is asked for, see `linear_log_prob`:
        (K,) each."""
        packed = self.engine.pack(micro.on_host)
        scores = self.engine.run(
            packed, self.config.rollout.temperature, with_entropy, with_sum_pi_squared
        )
        return tuple(map(packed.of_tokens, scores))

    def _score(self, micro: MicroBatch, **options: bool) -> tuple[torch.Tensor, ...]:
        """`score_tokens` padded to (b, R), for objectives of subclasses that are written for it."""
        return tuple(map(micro.of_rows, self.score_tokens(micro, **options)))

    def infer_log_probs(self, data: DataProto, column: str, phase: str) -> DataProto:
        """`column`: the log-probability of each response token, jagged float32, in passes as of the
        reference."""
        micro_batching = log_prob_micro_batching(self.config.ref)
        log_probs = partial(self.score_tokens, with_entropy=False)
        return self.infer(data, [column], micro_batching, log_probs, phase)
