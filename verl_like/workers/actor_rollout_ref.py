"""The base class of the policy's three roles. verl has one class of this name for all of them."""

from functools import partial
from typing import ClassVar

from torch import Tensor

from verl_like.protocol import DataProto
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.engine.mini_batches import MicroBatch
from verl_like.workers.model_worker import ModelWorker, scores_of_tokens
from verl_like.workers.models.packed_models import PackedModel, PolicyModel
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS, RouterShape, check_routing
from verl_like.workers.models.router_replay import attach_replay
from verl_like.workers.planning.partition import log_prob_micro_batching


class ActorRolloutRefWorker(ModelWorker):
    """One rank of the policy: an `ActorWorker`, `ReferenceWorker` or `RolloutWorker`.

    `config` has the settings of all three.
    """

    model_class = PolicyModel
    model_key = "actor_rollout_ref.model"
    replaced_methods: ClassVar = {"_score": "override score_tokens, which returns (K,) each"}
    replay_mode = "disabled"
    """Whose routing the routers of this role replay."""
    routers: RouterShape | None = None
    """The shape of the routers, if they replay."""

    def __init__(self, config: ActorRolloutRefConfig, shares_device: bool = False) -> None:
        super().__init__(shares_device)
        self.config = config
        self.model_config = config.model
        self.shares_prompts = config.actor.use_prefix_grouper

    def build_model(self, with_weights: bool) -> PackedModel:
        """Makes the model before it is sharded. With `replay_mode` its routers can replay."""
        model = super().build_model(with_weights)
        if self.replay_mode != "disabled":
            self.routers = attach_replay(model.hf)
            model.routers = self.routers
            model.replays = True
        return model

    def require_routing(self, rows: Rows) -> None:
        """Raises ValueError unless rows, whose routing is replayed, have that of each token."""
        if self.routers is None:
            return
        if ROUTED_EXPERTS not in rows:
            raise ValueError(
                f"{type(self).__name__} replays the routing of experts "
                f"(router_replay.mode={self.replay_mode}), and its batch has no column "
                f"{ROUTED_EXPERTS}; have what makes the batch write it, or set mode=disabled"
            )
        check_routing(rows[ROUTED_EXPERTS], rows.lengths_B, self.routers)

    def score_tokens(
        self, micro: MicroBatch, *, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> tuple[Tensor, ...]:
        """Runs the model, and returns the log-probabilities of the response tokens, (K,).

        Entropies and sums of squared probabilities follow if asked for, (K,) each; see
        `linear_log_prob`.
        """
        temperature = self.config.rollout.temperature
        return scores_of_tokens(self.engine, micro, temperature, with_entropy, with_sum_pi_squared)

    def _score(self, micro: MicroBatch, **options: bool) -> tuple[Tensor, ...]:
        """Returns the results of `score_tokens` padded to (b, R), for objectives of subclasses that
        use this form."""
        scores = self.score_tokens(micro, **options)
        return tuple(micro.of_rows(scored) for scored in scores)

    def infer_log_probs(self, data: DataProto, column: str, phase: str) -> DataProto:
        """Returns `column`: the log-probability of each response token, jagged float32.

        Passes of the model have the size that `ref` configures. `phase` names them in metrics.
        """
        micro_batching = log_prob_micro_batching(self.config.ref)
        log_probs = partial(self.score_tokens, with_entropy=False)
        return self.infer(data, [column], micro_batching, log_probs, phase)
