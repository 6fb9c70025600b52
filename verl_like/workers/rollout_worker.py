"""The policy as it generates responses, in a rollout engine."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from verl_like.plugins import refuse_replaced
from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.workers.actor_rollout_ref import ActorRolloutRefWorker
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.models.packing import SEQUENCE_COLUMNS
from verl_like.workers.rollout import get_rollout_engine
from verl_like.workers.rollout.batch import RequestRules, assemble, greedy_requests, names_of_real
from verl_like.workers.rollout.engine_thread import EngineThread
from verl_like.workers.rollout.request import Completion, FinishedRequest, GenerationRequest
from verl_like.workers.rollout.router import after_requests, call_by_requests
from verl_like.workers.weights import WEIGHT_TRANSPORTS
from verl_like.workers.weights.exports import WeightExport

PROMPT_COLUMNS = ["prompts", "uid"]
AFTER_REQUESTS = replace(Dispatch.ONE_TO_ALL, name="AFTER_REQUESTS", call_fn=after_requests)
"""ONE_TO_ALL, after the requests of earlier calls have reached the engines."""


_REPLACED = {
    "submit_prompts": "generate_sequences of some prompts may be called while others are generated",
    "advance_sequences": "the engine computes by itself; the future of generate_sequences says "
    "when responses ended",
    "restart_sequences": "the driver begins the requests of a call again (RequestCall.begin_again)",
}


class RolloutWorker(ActorRolloutRefWorker):
    """One rank of the policy that generates; `seed`, the run's, is for sampling."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        refuse_replaced(cls, _REPLACED)

    def __init__(self, config: ActorRolloutRefConfig, seed: int) -> None:
        super().__init__(config)
        self.seed = seed
        self.weight_transport = WEIGHT_TRANSPORTS[config.rollout.weight_transport]()
        self.num_calls = 0
        """Batches that this rank made requests of."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Starts the rollout engine; it has no weights before `load_weights`."""
        engine_class = get_rollout_engine(self.config.rollout.name)
        self.engine_thread = EngineThread(
            lambda: engine_class(
                self.config.rollout,
                self.config.model,
                rank=self.rank,
                world_size=self.world_size,
                seed=self.seed,
                device=self.device,
            )
        )
        self.rollout = self.engine_thread.engine
        self._register_dispatch_collect_info(
            "rollout", self.rollout.dp_rank, self.rollout.is_collect
        )

    def close(self) -> None:
        if "engine_thread" in vars(self):  # else there is no model yet
            self.engine_thread.close()

    @register(dispatch_mode=AFTER_REQUESTS)
    def load_weights(
        self,
        exported: list[WeightExport],
        version: int,
        checks_first: bool = True,
        address: tuple[str, int] | None = None,
        drain: bool = True,
    ) -> str:
        """Takes what all ranks of the actor exported into the rollout engine; samples then carry
        `version`.

        `checks_first`: see `RolloutEngine.load_weights`. `address` is where the actor's rank 0
        waits for this group, if not where its export says. With `drain` the responses of all calls
        that were made before are drawn with the weights that are there, and without it those that
        are unfinished go on with the new ones.
        """
        if address:
            exported = [
                replace(export, address=None if export.rank else address) for export in exported
            ]
        received = self.weight_transport.receive(exported, self)
        return self.engine_thread.load_weights(
            received, version, checks_first=checks_first, drain=drain
        )

    @register(
        dispatch_mode={
            **make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"),
            "call_fn": call_by_requests,
        },
        blocking=False,
        reads=PROMPT_COLUMNS,
        writes=[*SEQUENCE_COLUMNS, "rollout_log_probs", "policy_version"],
        jagged=True,
    )
    def generate_sequences(
        self, prompts: DataProto
    ) -> Generator[list[FinishedRequest], None, DataProto]:
        """n responses to each of the B prompts, the responses to one prompt next to each other: (B
        * n) rows.

        Yields lists of those that are finished while others are still generated, but for padding
        rows. The driver makes requests of the prompts, and a batch of the completions; this method,
        which does the same on a rank, is for a subclass's own.
        """
        self.num_calls += 1
        requests = self.rollout.rules().requests_of(
            prompts, f"call {self.num_calls} of rank {self.rank}"
        )
        told = names_of_real(prompts, requests) if self.rollout.is_collect else set()
        completions: dict[str, Completion] = {}
        for finished in self.engine_thread.stream(requests):
            completions |= {request.name: completion for request, completion in finished}
            if of_told := [each for each in finished if each[0].name in told]:
                yield of_told
        return assemble(prompts, [completions[request.name] for request in requests])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def request_rules(self) -> RequestRules:
        """How batches become requests, and which replica takes which."""
        return self.rollout.rules()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, is_recorded=False)
    def submit_requests(self, requests: Sequence[GenerationRequest]) -> None:
        """Takes requests in, beside those that are unfinished. All ranks of a replica get the same
        ones."""
        self.engine_thread.submit(requests)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_recorded=False)
    def collect_completions(self, wait_s: float) -> tuple[dict[str, Completion], int]:
        """The responses that have ended since the call before, see `EngineThread.collect`, and how
        many requests the rank still has.

        There are none on ranks that are not collected.
        """
        if not self.rollout.is_collect:
            self.engine_thread.collect(0.0)
            return {}, 0
        return self.engine_thread.collect(wait_s), self.engine_thread.num_left()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_recorded=False)
    def abort_requests(self, names: Sequence[str]) -> None:
        """Forgets requests, whether they have ended or not."""
        self.engine_thread.abort(names)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_recorded=False)
    def request_ages(self) -> dict[str, int]:
        """The steps of the engine since each unfinished request was submitted, by name."""
        return self.engine_thread.ages()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, reads=PROMPT_COLUMNS, jagged=True)
    def draw_greedily(self, prompts: DataProto, num_tokens: int) -> DataProto | None:
        """The likeliest `num_tokens` tokens after each of the B prompts, also after one that ends a
        response, and their log-probabilities at temperature 1: (B, ...) rows as of
        `generate_sequences`.

        Every replica answers all prompts, beside what is in flight. None on ranks that are not
        collected.
        """
        requests = greedy_requests(prompts, min(num_tokens, self.config.rollout.response_length))
        completions: dict[str, Completion] = {}
        for finished in self.engine_thread.stream(requests):
            completions |= {request.name: completion for request, completion in finished}
        self.engine_thread.forget_prompts()
        batch = assemble(prompts, [completions[request.name] for request in requests])
        return batch if self.rollout.is_collect else None

    @register(dispatch_mode=AFTER_REQUESTS)
    def sleep(self) -> None:
        """Frees the device for training where `rollout.free_cache_engine` says so; `load_weights`
        wakes the engine."""
        self.engine_thread.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self) -> None:
        """Takes the device's memory for the weights back, as `load_weights` does too."""
        self.engine_thread.wake()
