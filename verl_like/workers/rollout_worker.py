"""The role that generates responses with the policy, in a rollout engine."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import chain
from typing import ClassVar

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
from verl_like.workers.rollout.base import RolloutEngine
from verl_like.workers.rollout.batch import RequestRules, assemble, greedy_requests, names_of_real
from verl_like.workers.rollout.engine_thread import EngineThread
from verl_like.workers.rollout.request import Completion, FinishedRequest, GenerationRequest
from verl_like.workers.rollout.router import after_requests, call_by_requests
from verl_like.workers.weights import WEIGHT_TRANSPORTS
from verl_like.workers.weights.exports import WeightExport

PROMPT_COLUMNS = ["prompts", "uid"]
AFTER_REQUESTS = replace(Dispatch.ONE_TO_ALL, name="AFTER_REQUESTS", call_fn=after_requests)
"""ONE_TO_ALL, but only after the requests of earlier calls have reached the engines."""


class RolloutWorker(ActorRolloutRefWorker):
    """One rank of the policy that generates. `seed` is the run's, and seeds the sampling."""

    replaced_methods: ClassVar = {
        "submit_prompts": "generate_sequences of some prompts may be called while others are "
        "generated",
        "advance_sequences": "the engine computes by itself; the future of generate_sequences says "
        "when responses ended",
        "restart_sequences": "the driver begins the requests of a call again "
        "(RequestCall.begin_again)",
    }

    def __init__(self, config: ActorRolloutRefConfig, seed: int) -> None:
        super().__init__(config)
        self.seed = seed
        self.weight_transport = WEIGHT_TRANSPORTS[config.rollout.weight_transport]()
        self.num_calls = 0
        """The number of batches of which this rank itself made requests."""

    def init_model(self) -> None:
        """Starts the rollout engine, which has no weights before `load_weights`.

        Raises ValueError if it is called again.
        """
        if "engine_thread" in vars(self):
            raise ValueError(
                f"init_model is called again on rank {self.rank}, which has a rollout engine "
                "already: call it once"
            )
        engine_class = get_rollout_engine(self.config.rollout.name)
        replay_mode = self.config.actor.router_replay.chosen

        def make_engine() -> RolloutEngine:
            # Constructors of engines that cannot record may lack the argument.
            recording = {"records_routing": True} if replay_mode == "R3" else {}
            return engine_class(
                self.config.rollout,
                self.config.model,
                rank=self.rank,
                world_size=self.world_size,
                seed=self.seed,
                device=self.device,
                **recording,
            )

        self.engine_thread = EngineThread(make_engine)
        self.rollout = self.engine_thread.engine
        # Tells the driver which replica this rank is in, and whether its results are collected.
        self._register_dispatch_collect_info(
            "rollout", self.rollout.dp_rank, self.rollout.is_collect
        )

    def close(self) -> None:
        if "engine_thread" in vars(self):  # it is missing before init_model
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
        """Loads the weights that the ranks of the actor exported into the rollout engine.

        Tokens that are drawn from then on have the version `version`. Returns the engine's
        fingerprint of all parameters together.

        Args:
            exported: the exports of all ranks of the actor.
            version: the version of the weights.
            checks_first: see `RolloutEngine.load_weights`.
            address: where the actor's rank 0 waits for this group. None means the address in its
                export.
            drain: if True, responses of earlier calls are finished with the old weights first. If
                False, unfinished ones continue with the new weights.
        """
        if address:
            # Of the ranks of the actor the first alone waits.
            exported = [
                replace(export, address=address if export.rank == 0 else None)
                for export in exported
            ]
        received = self.weight_transport.receive(exported, self)
        return self.engine_thread.load_weights(
            received, version, checks_first=checks_first, drain=drain
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def unknown_parameters(self) -> tuple[str, ...]:
        """Returns the engine's parameters whose layout is not known, so that log-probabilities show
        whether their weights arrived."""
        return self.rollout.unknown_parameters

    @register(
        dispatch_mode={
            **make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"),
            "call_fn": call_by_requests,
        },
        blocking=False,
        reads=PROMPT_COLUMNS,
        writes=[*SEQUENCE_COLUMNS, "rollout_log_probs", "policy_version", "routed_experts?"],
        jagged=True,
    )
    def generate_sequences(
        self, prompts: DataProto
    ) -> Generator[list[FinishedRequest], None, DataProto]:
        """Generates n responses to each of the B prompts.

        Yields lists of finished responses while others are still generated, without those of
        padding rows. Returns a batch of (B * n) rows, in which the responses to a prompt are
        consecutive.

        A call of the driver does not run this method: the driver makes requests of the prompts and
        a batch of the completions itself. On a rank it does the same, for methods of subclasses.
        """
        self.num_calls += 1
        call = f"call {self.num_calls} of rank {self.rank}"
        requests = self.rollout.rules().requests_of(prompts, call)
        told: set[str] = set()
        if self.rollout.is_collect:
            told = names_of_real(prompts, requests)
        completions = {}
        for finished in self.engine_thread.stream(requests):
            to_tell = []
            for request, completion in finished:
                completions[request.name] = completion
                if request.name in told:
                    to_tell.append((request, completion))
            if to_tell:
                yield to_tell
        in_order = [completions[request.name] for request in requests]
        return assemble(prompts, in_order)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def request_rules(self) -> RequestRules:
        """Returns how batches become requests, and how these are routed to replicas."""
        return self.rollout.rules()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, is_recorded=False)
    def submit_requests(self, requests: Sequence[GenerationRequest]) -> None:
        """Adds requests to the unfinished ones. All ranks of a replica get the same requests."""
        self.engine_thread.submit(requests)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_recorded=False)
    def collect_completions(self, wait_s: float) -> tuple[dict[str, Completion], int]:
        """Returns the responses that have ended since the last call, by the names of their
        requests, and how many requests the rank still has.

        It waits for responses as `EngineThread.collect` does. Ranks whose results are not used
        return none.
        """
        if not self.rollout.is_collect:
            self.engine_thread.collect(0.0)
            return {}, 0
        return self.engine_thread.collect(wait_s), self.engine_thread.num_left()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_recorded=False)
    def abort_requests(self, names: Sequence[str]) -> None:
        """Drops requests, whether they have ended or not."""
        self.engine_thread.abort(names)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, is_recorded=False)
    def request_ages(self) -> dict[str, int]:
        """Returns the engine's steps since each unfinished request was submitted, by its name."""
        return self.engine_thread.ages()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, reads=PROMPT_COLUMNS, jagged=True)
    def draw_greedily(self, prompts: DataProto, num_tokens: int) -> DataProto | None:
        """Continues each of the B prompts with the likeliest tokens, `num_tokens` of them at most.

        There are fewer only if `rollout.response_length` is smaller; no token ends a response.
        Every replica answers all prompts, beside the requests in flight. Returns B rows as
        `generate_sequences` does, with log-probabilities at temperature 1, or None on ranks whose
        results are not used.
        """
        max_tokens = min(num_tokens, self.config.rollout.response_length)
        requests = greedy_requests(prompts, max_tokens)
        finished = chain.from_iterable(self.engine_thread.stream(requests))
        completions = {request.name: completion for request, completion in finished}
        self.engine_thread.forget_prompts()
        if not self.rollout.is_collect:
            return None
        in_order = [completions[request.name] for request in requests]
        return assemble(prompts, in_order)

    @register(dispatch_mode=AFTER_REQUESTS)
    def sleep(self) -> None:
        """Frees the device for training if `rollout.free_cache_engine` is set.

        `load_weights` wakes the engine.
        """
        self.engine_thread.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self) -> None:
        """Takes back the device's memory for the weights, as `load_weights` does, too."""
        self.engine_thread.wake()
