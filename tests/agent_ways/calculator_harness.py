"""A harness that lets the model use the calculator of examples/agents, by OpenAI's client."""

import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from transformers.utils import get_json_schema

from examples.agents.calculator import Calculator

NAMES = ["multiply", "submit"]
TOOLS: list[Any] = [get_json_schema(getattr(Calculator, name)) for name in NAMES]


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    calculator = Calculator()
    calculator.reset(**row)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = list(row["prompt"])
    is_done = False
    while not is_done:
        try:
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS
            )
        except BadRequestError:  # no room is left
            break
        [choice] = reply.choices
        calls: list[Any] = choice.message.tool_calls or []
        is_done = not calls or choice.finish_reason == "length"
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in calls:
            content = "" if is_done else use(calculator, call.function)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    await client.close()
    return calculator.get_reward()


def use(calculator: Calculator, function: Any) -> str:
    """Calls a tool, and returns what the model reads. Of errors it reads what a class says."""
    if function.name not in NAMES:
        return str({"error": f"Tool {function.name} not found."})
    arguments = json.loads(function.arguments)
    if not isinstance(arguments, dict):
        return str({"error": f"The arguments of {function.name} are no JSON object."})
    try:
        return str(getattr(calculator, function.name)(**arguments))
    except (TypeError, ValueError) as error:
        return str({"error": f"{type(error).__name__}: {error}"})
