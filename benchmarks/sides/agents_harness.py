"""The harnesses of the benchmarks of agents, which call the model by OpenAI's client."""

import json
import time
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from examples.agents.calculator import Calculator

CONNECTIONS = DefaultAsyncHttpxClient()
"""Of all episodes of a process: to make a client's own takes as long as tens of requests."""
MAX_TOKENS = 24
Row = dict[str, Any]


def client_of(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=0, http_client=CONNECTIONS, timeout=600
    )


async def calculate(row: Row, base_url: str, api_key: str) -> float:
    """Lets the model use the calculator until it calls no tool."""
    client = client_of(base_url, api_key)
    calculator = Calculator()
    calculator.reset(**row)
    messages = list(row["prompt"])
    tools = json.loads(row["tools"])
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        message = reply.choices[0].message
        if not message.tool_calls:
            return calculator.get_reward()
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = getattr(calculator, call.function.name)(**arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def talk(row: Row, base_url: str, api_key: str) -> list[float]:
    """Lets the model speak `num_turns` times. The reward of a turn is how many seconds it took."""
    _texts, seconds = await conversation(row, base_url, api_key)
    return seconds


async def conversation(row: Row, base_url: str, api_key: str) -> tuple[list[str], list[float]]:
    """What the model says in each turn, and the seconds of each."""
    client = client_of(base_url, api_key)
    messages = list(row["prompt"])
    texts = []
    seconds = []
    for _ in range(row["num_turns"]):
        started = time.perf_counter()
        reply = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=MAX_TOKENS, temperature=0
        )
        seconds.append(time.perf_counter() - started)
        texts.append(reply.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": texts[-1]})
        messages.append({"role": "user", "content": "and then?"})
    return texts, seconds
