"""A rollout worker that finishes its first generation only when a reward was computed for it."""

import itertools
import os
import time
from pathlib import Path

from verl_like.single_controller import Dispatch, register
from verl_like.workers.rollout import Completion
from verl_like.workers.rollout_worker import RolloutWorker

SCORED = "PATH_OF_THE_FILE_THAT_A_REWARD_MAKES"


class WaitingRollout(RolloutWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        step, parts = self.rollout._step, itertools.count()

        def wait_after_the_first_part() -> list[tuple[str, Completion]]:
            ended = step()
            deadline = time.monotonic() + 120
            # And not the comparison at the start
            is_generation = ended and ended[0][0].startswith("row")
            while is_generation and next(parts) > 0 and not Path(os.environ[SCORED]).exists():
                assert time.monotonic() < deadline, (
                    "no reward was computed while others were generated"
                )
                time.sleep(0.01)
            return ended

        self.rollout._step = wait_after_the_first_part
