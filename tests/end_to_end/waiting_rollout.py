"""A rollout worker that finishes its first generation only when a reward was computed for it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from verl_like.single_controller import Dispatch, register
from verl_like.workers.rollout import base
from verl_like.workers.rollout.base import Completion
from verl_like.workers.rollout_worker import RolloutWorker

SCORED = "PATH_OF_THE_FILE_THAT_A_REWARD_MAKES"


class WaitingRollout(RolloutWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        base._SECONDS_BETWEEN_PARTS = 0.0
        generate = self.rollout._generate

        def wait_after_the_first_part(*args: object) -> Iterator[list[tuple[int, int, Completion]]]:
            deadline = time.monotonic() + 120
            for number, finished in enumerate(generate(*args)):
                while number > 0 and not Path(os.environ[SCORED]).exists():
                    assert time.monotonic() < deadline, "no reward was computed while others were generated"
                    time.sleep(0.01)
                yield finished

        self.rollout._generate = wait_after_the_first_part
