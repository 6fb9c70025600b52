"""The rollout worker of `grpo_step` where every response has a length of its own: the engine is
told when to end it."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.sides.grpo_world import lengths_of_step
from verl_like.workers.rollout import GenerationRequest
from verl_like.workers.rollout_worker import RolloutWorker


class ForcedLengthWorker(RolloutWorker):
    """Everything is the project's; only the lengths of the responses come from outside.

    The requests of a step come to a rank together, as `rollout.routing=fixed`, the default on a
    CPU, sends them.
    """

    def init_model(self) -> None:
        super().init_model()
        submit = self.rollout.submit
        step = 0

        def submit_with_lengths(requests: Sequence[GenerationRequest]) -> None:
            nonlocal step
            if requests[0].sampling.temperature == 0:  # the comparison with the actor at the start
                submit(requests)
                return
            lengths = lengths_of_step(step)[self.rank :: self.world_size]
            step += 1
            samplings = [
                replace(r.sampling, max_tokens=n, stop_token_ids=())
                for r, n in zip(requests, lengths, strict=True)
            ]
            submit(
                [
                    replace(r, sampling=sampling)
                    for r, sampling in zip(requests, samplings, strict=True)
                ]
            )

        self.rollout.submit = submit_with_lengths  # type: ignore[method-assign]
