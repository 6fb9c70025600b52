"""The tools of all clients, and the form in which they say what they saw."""

import json
from collections.abc import Sequence
from typing import Any

MOST_CALLS = 4
"""Of the model, for one question."""


def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(int(a) * int(b))


def submit(value: int) -> str:
    """Give the answer.

    Args:
        value: The answer.
    """
    return "taken"


TOOLS = {"multiply": multiply, "submit": submit}
PARAMETERS = {"multiply": ("a", "b"), "submit": ("value",)}


def schema_of(name: str) -> dict[str, Any]:
    """The JSON schema of a tool's parameters."""
    names = PARAMETERS[name]
    properties = {parameter: {"type": "integer"} for parameter in names}
    return {"type": "object", "properties": properties, "required": list(names)}


def call_tool(name: str, arguments: Any) -> str:
    """Calls a tool with arguments as the model has written them."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return str(TOOLS[name](**arguments))


def seen(text: str | None, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A reply as the client saw it: its text, and the names and arguments of its calls."""
    parsed = []
    for name, arguments in calls:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        parsed.append([name, arguments])
    return {"text": text or "", "calls": parsed}


def seen_blocks(blocks: Sequence[Any]) -> dict[str, Any]:
    """A reply of Anthropic's SDK."""
    texts = [block.text for block in blocks if block.type == "text"]
    calls = [(block.name, block.input) for block in blocks if block.type == "tool_use"]
    return seen("".join(texts), calls)


def tell(replies: Sequence[dict[str, Any]]) -> None:
    """Writes what the client saw for the test, as the last line of the output."""
    print(json.dumps(replies))
