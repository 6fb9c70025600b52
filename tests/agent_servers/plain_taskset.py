"""A taskset of verifiers without tools: a model is to say a number."""

from typing import Any

import verifiers.v1 as vf

__all__ = ["PlainTaskset"]


class PlainData(vf.TaskData):
    reward_model: dict[str, Any]


class PlainTask(vf.Task[PlainData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.reward_model["ground_truth"][0] in trace.last_reply)


class PlainTaskset(vf.Taskset[PlainTask, vf.TasksetConfig]):
    def load(self) -> list[PlainTask]:
        return []  # the rows come with the requests
