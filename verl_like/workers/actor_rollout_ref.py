"""What the policy's three roles have in common; verl has one class of this name for all of them."""

import torch
from transformers import AutoModelForCausalLM

from verl_like.workers.config.engine import ForwardFsdpConfig, TrainedFsdpConfig
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.engine.mini_batches import Rows
from verl_like.workers.model_worker import ModelWorker
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.pretrained import load_pretrained


class ActorRolloutRefWorker(ModelWorker):
    """One rank of the policy: an `ActorWorker`, a `ReferenceWorker` or a `RolloutWorker`.

    Args:
        config: settings of the policy in all its roles.
        shares_device: whether a rollout engine takes memory of the device in turn.
    """

    fsdp_config: ForwardFsdpConfig | TrainedFsdpConfig
    """How the model of this role is sharded and stored."""

    def __init__(self, config: ActorRolloutRefConfig, shares_device: bool = False) -> None:
        super().__init__(shares_device)
        self.config = config

    def build_model(self, with_weights: bool) -> PolicyModel:
        """The policy before it is sharded; without weights it is made on the meta device."""
        return PolicyModel(
            load_pretrained(
                AutoModelForCausalLM,
                self.config.model,
                self.fsdp_config,
                key="actor_rollout_ref.model",
                device=self.device,
                weights=with_weights,
            )
        )

    def _score(self, micro: Rows, *, with_entropy: bool, with_sum_pi_squared: bool = False) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of the response tokens and what is asked for, see `linear_log_prob`: (b, R) each."""
        packed = self.engine.pack(micro)
        scores = self.engine.run(packed, self.config.rollout.temperature, with_entropy, with_sum_pi_squared)
        return tuple(map(packed.unpack, scores))
