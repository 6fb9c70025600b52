"""Serves an environment of OpenEnv under uvicorn: `python serve_openenv.py PORT actions|tools|slow
SESSIONS`, in its environment. The task is to multiply numbers until the product is above 100. It takes long to multiply
by 1. The slow one takes a while to begin."""

import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Multiply(Action):
    """Multiplies the number by another one."""

    factor: int = Field(description="the other number")


class Number(Observation):
    number: int


class Products(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, *, start: int
    ) -> Number:
        self.number = start
        return Number(number=start)

    def step(self, action: Multiply, timeout_s: float | None = None, **_: Any) -> Number:
        if action.factor == 0:
            raise ZeroDivisionError("the number would be lost")
        if action.factor == 1:
            time.sleep(60)
        self.number *= action.factor
        is_done = self.number > 100
        return Number(number=self.number, reward=0.25 if is_done else None, done=is_done)

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("products")

        @server.tool
        def multiply(a: int, b: int) -> int:
            """Multiplies two whole numbers."""
            if b == 0:
                raise ZeroDivisionError("the number would be lost")
            return a * b

        super().__init__(server)

    def reset(self, **row: Any) -> Observation:
        return Observation()

    async def step_async(self, action: Action, **options: Any) -> Observation:
        observation = await super().step_async(action, **options)
        if isinstance(observation, CallToolObservation):
            observation.reward = 0.5
        return observation

    def _step_impl(self, action: Action, **options: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


class Slow(Tools):
    def reset(self, **row: Any) -> Observation:
        time.sleep(0.5)
        return super().reset(**row)


KINDS = {
    "actions": (Products, Multiply, Number),
    "tools": (Tools, CallToolAction, CallToolObservation),
    "slow": (Slow, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    app = create_fastapi_app(*KINDS[sys.argv[2]], max_concurrent_envs=int(sys.argv[3]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
