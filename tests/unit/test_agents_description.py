"""What an environment class and a harness have to be, and what is read from them."""

import asyncio
import sys
from pathlib import Path

import pytest

from verl_like.workers.agents.description import describe
from verl_like.workers.agents.hosts import Description, describe_environment, describe_harness

CODE = '''
import os
from typing import Literal

class Base:
    def look(self) -> str:
        """Looks around."""

class Game(Base):
    def __init__(self, size: int = 3):
        self.size = size

    def reset(self, **row): pass

    async def move(self, direction: Literal["up", "down"], steps: int = 1) -> str:
        """Moves.

        Args:
            direction: Where to.
            steps: How far.

        Returns:
            What is there.
        """

    def get_reward(self): return 0.5

    def _helper(self): pass

    @property
    def state(self): raise RuntimeError("is not looked at")

class NoReward:
    def reset(self): pass
    look = Base.look

class NeedsSize(Game):
    def __init__(self, size): pass

class NoReset(Base): pass

class NoTool:
    def reset(self): pass
    def get_reward(self): return 1.0

class NoHint(Game):
    def move(self, direction):
        """Moves.

        Args:
            direction: Where to.
        """

class NoDocstring(Game):
    def go(self, direction: str): pass

class NoLine(Game):
    def move(self, direction: str, steps: int):
        """Moves.

        Args:
            direction: Where to.
        """

class UnknownHint(Game):
    def move(self, direction: "Direction"):
        """Moves.

        Args:
            direction: Where to.
        """

class Unready(Game):
    def __init__(self): raise OSError("no such table")

class Ends(Game):
    def __init__(self): os._exit(6)

game = Game()

async def run(row, base_url, api_key): return 1.0
async def with_options(row, base_url, api_key, *, turns=3): return 1.0
async def without_key(row, base_url): return 1.0
async def with_more(row, base_url, api_key, model): return 1.0
def not_async(row, base_url, api_key): return 1.0
'''


@pytest.fixture(autouse=True)
def described_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "described_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Each test has a module of its own.
    monkeypatch.delitem(sys.modules, "described_code", raising=False)


MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Moves.",
        "parameters": {
            "type": "object",
            "properties": {
                "direction": {"type": "string", "enum": ["up", "down"], "description": "Where to."},
                "steps": {"type": "integer", "description": "How far."},
            },
            "required": ["direction"],
        },
        "return": {"type": "string", "description": "What is there."},
    },
}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks around.",
        "parameters": {"type": "object", "properties": {}},
        "return": {"type": "string"},
    },
}


def test_the_tools_of_a_class_are_described_as_transformers_does_it() -> None:
    found = describe_environment("described_code:Game", 4.0)
    assert found == Description(tools=[LOOK, MOVE], has_reward=True)


def test_a_class_without_a_reward_says_so() -> None:
    found = asyncio.run(describe("environment", "described_code:NoReward"))
    assert found == {"tools": [LOOK], "has_reward": False}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "Nothing",
            r"cannot be imported \(AttributeError: .*no attribute 'Nothing'\): give module:name",
        ),
        ("game", r"is a Game: give module:Class"),
        ("run", r"is a function: give module:Class"),
        ("NeedsSize", r"cannot be constructed without arguments \(.*'size'\): give each a default"),
        ("NoReset", r"has no method reset: add `def reset\(self, \*\*row\)`"),
        ("NoTool", r"has no public method beside reset and get_reward: add one for each tool"),
        (
            "NoHint",
            r"the tool move .*\(Argument direction is missing a type hint .*: give each parameter",
        ),
        (
            "NoDocstring",
            r"the tool go .*\(Cannot generate JSON schema for go because it has no docstring",
        ),
        (
            "NoLine",
            r"the tool move .*\(.*docstring has no description for the argument 'steps'\): .* `Args:`",
        ),
        ("UnknownHint", r"the tool move .*\(name 'Direction' is not defined\)"),
        ("Unready", r"cannot be constructed \(OSError: no such table\)"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^agent.environment=described_code:{name}.* {text}"):
        asyncio.run(describe("environment", f"described_code:{name}"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("not_async", "is no async function: write `async def run"),
        ("Game", "is no async function: write `async def run"),
        ("without_key", "cannot be called as a harness .*api_key.*: write `async def run"),
        ("with_more", "cannot be called as a harness .*'model'.*: write `async def run"),
    ],
)
def test_a_function_that_is_no_harness_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^agent.harness=described_code:{name} {text}"):
        asyncio.run(describe("harness", f"described_code:{name}"))


@pytest.mark.parametrize("name", ["run", "with_options"])
def test_a_harness_may_have_options(name: str) -> None:
    assert asyncio.run(describe("harness", f"described_code:{name}")) is None


def test_a_refusal_comes_out_of_the_process() -> None:
    describe_harness("described_code:run", 4.0)
    with pytest.raises(ValueError, match=r"^agent.harness=described_code:not_async is no async"):
        describe_harness("described_code:not_async", 4.0)


def test_it_is_described_where_an_event_loop_runs_as_in_a_notebook() -> None:
    async def cell() -> None:
        with pytest.raises(
            ValueError, match=r"^agent.environment=described_code:NoTool has no public"
        ):
            describe_environment("described_code:NoTool", 4.0)

    asyncio.run(cell())


def test_a_class_that_ends_its_process_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"described_code:Ends cannot be loaded \(.*exit code 6\): load it with python",
    ):
        describe_environment("described_code:Ends", 4.0)
