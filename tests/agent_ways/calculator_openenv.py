"""Serves the calculator of examples/agents as an environment of OpenEnv: `python
calculator_openenv.py PORT`, in its environment."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

from examples.agents.calculator import Calculator

MAX_SESSIONS = 64


class CalculatorEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.calculator = Calculator()
        server = FastMCP("calculator")
        server.tool(self.calculator.multiply)
        server.tool(self.calculator.submit)
        super().__init__(server)

    def reset(self, **row: Any) -> Observation:
        self.calculator.reset(**row)
        return Observation()

    async def step_async(self, action: Action, **options: Any) -> Observation:
        """The reward of an action is by how much it changes the reward of the episode."""
        if not isinstance(action, CallToolAction):
            return await super().step_async(action, **options)
        before = self.calculator.get_reward()
        observation = await super().step_async(action, **options)
        observation.reward = self.calculator.get_reward() - before
        return observation

    def _step_impl(self, action: Action, **options: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(
        CalculatorEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=MAX_SESSIONS
    )
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
