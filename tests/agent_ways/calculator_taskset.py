"""A taskset of verifiers whose tools are those of the calculator in examples/agents. One process
serves them to all episodes, and what an episode has submitted is part of its state."""

from typing import Any

import verifiers.v1 as vf

from examples.agents.calculator import Calculator

__all__ = ["CalculatorTaskset"]


class CalculatorData(vf.TaskData):
    reward_model: dict[str, Any]


class CalculatorState(vf.State):
    answer: int | None = None


class CalculatorToolset(vf.Toolset[vf.SharedToolsetConfig, CalculatorState]):
    TOOL_PREFIX = None  # the names of the tools are those of the methods

    @vf.tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return Calculator().multiply(a, b)

    @vf.tool
    def submit(self, value: int) -> str:
        """Give the answer."""
        calculator = Calculator()
        said = calculator.submit(value)
        self.state.answer = calculator.answer
        return said


class CalculatorTask(vf.Task[CalculatorData, CalculatorState, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        calculator = Calculator()
        calculator.reset(reward_model=self.data.reward_model)
        calculator.answer = trace.state.answer
        return calculator.get_reward()


class CalculatorConfig(vf.TasksetConfig):
    task: vf.TaskConfig = vf.TaskConfig()


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        return [CalculatorToolset(vf.SharedToolsetConfig())]

    def load(self) -> list[CalculatorTask]:
        return []  # the rows come with the requests


if __name__ == "__main__":
    CalculatorToolset.run()
