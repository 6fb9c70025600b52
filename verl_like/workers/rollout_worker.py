"""The policy as it generates responses, in a rollout engine."""

from collections.abc import Generator
from typing import Any

from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl_like.single_controller.dispatch import collect_list
from verl_like.workers.actor_rollout_ref import ActorRolloutRefWorker
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.models.packing import SEQUENCE_COLUMNS
from verl_like.workers.rollout import FinishedSample, get_rollout_engine
from verl_like.workers.weight_sync import WeightExport
from verl_like.workers.weight_transfer import get_weight_transport

BY_REPLICA = make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout")


class RolloutWorker(ActorRolloutRefWorker):
    """One rank of the policy that generates; `seed`, the run's, is for sampling."""

    def __init__(self, config: ActorRolloutRefConfig, seed: int) -> None:
        super().__init__(config)
        self.seed = seed
        self.weight_transport = get_weight_transport(config.rollout.weight_transport)
        self.advancing: Generator[list[FinishedSample], None, DataProto] | None = None
        self.advanced: DataProto | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Starts the rollout engine; it has no weights before `load_weights`."""
        self.rollout = get_rollout_engine(self.config.rollout.name)(
            self.config.rollout,
            self.config.model,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            device=self.device,
        )
        self._register_dispatch_collect_info("rollout", self.rollout.dp_rank, self.rollout.is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, exported: list[WeightExport], version: int) -> dict[str, Any]:
        """Takes what all ranks of the actor exported into the rollout engine; samples then carry `version`."""
        return self.rollout.load_weights(self.weight_transport.receive(exported, self), version)

    @register(
        dispatch_mode={"dispatch_fn": BY_REPLICA["dispatch_fn"], "collect_fn": collect_list},
        reads=["input_ids", "attention_mask", "position_ids", "uid"],
    )
    def advance_sequences(self, prompts: DataProto, num_steps: int) -> bool:
        """Begins `generate_sequences(prompts)`, or goes on with it for `num_steps` steps of the engine at most.

        Returns whether all responses have ended: once they have on all ranks, `generate_sequences(prompts)` returns
        them at once. Weights may be loaded between two calls, and nothing else be generated.
        """
        self.advancing = self.advancing or self.rollout.stream_sequences(prompts, every_step=True)
        for _ in range(num_steps if self.advanced is None else 0):
            try:
                next(self.advancing)
            except StopIteration as end:
                self.advanced = end.value
                break
        return self.advanced is not None

    @register(
        dispatch_mode=BY_REPLICA,
        blocking=False,
        reads=["input_ids", "attention_mask", "position_ids", "uid"],
        writes=["prompts", "responses", *SEQUENCE_COLUMNS, "rollout_log_probs", "policy_version"],
    )
    def generate_sequences(self, prompts: DataProto) -> Generator[list[FinishedSample], None, DataProto]:
        """n responses to each of the (B, P) prompts, the responses to one prompt next to each other: (B * n) rows.

        Yields lists of those that are finished while others are still generated.
        """
        advanced, self.advanced, self.advancing = self.advanced, None, None
        if advanced is not None:
            return advanced
        return (yield from self.rollout.stream_sequences(prompts))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Frees the device for training where `rollout.free_cache_engine` says so; `load_weights` wakes the engine."""
        self.rollout.sleep()
