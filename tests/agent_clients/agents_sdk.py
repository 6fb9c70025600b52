"""A conversation by OpenAI's Agents SDK.

python agents_sdk.py BASE_URL API_KEY chat|responses whole|streamed QUESTION ...
"""

import asyncio
import sys
from typing import Any

import agents
from openai import AsyncOpenAI
from tools import MOST_CALLS, multiply, seen, submit, tell

base_url, api_key, dialect, form, *questions = sys.argv[1:]
MODELS = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}


def seen_items(items: Any) -> dict[str, Any]:
    texts = []
    calls = []
    for item in items:
        if item.type == "function_call":
            calls.append((item.name, item.arguments))
        elif item.type == "message":
            texts += [part.text for part in item.content]
    return seen("".join(texts), calls)


async def main() -> None:
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120)
    agent = agents.Agent(
        name="calculator",
        model=MODELS[dialect](model="policy", openai_client=client),
        tools=[agents.function_tool(multiply), agents.function_tool(submit)],
    )
    items: list[Any] = []
    replies = []
    for question in questions:
        items.append({"role": "user", "content": question})
        if form == "streamed":
            result: Any = agents.Runner.run_streamed(agent, items, max_turns=MOST_CALLS)
            async for _event in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, items, max_turns=MOST_CALLS)
        replies += [seen_items(response.output) for response in result.raw_responses]
        items = result.to_input_list()
    tell(replies)


asyncio.run(main())
