"""A conversation by messages of the Anthropic SDK.

python anthropic_messages.py BASE_URL API_KEY whole|streamed QUESTION ...
"""

import sys
from typing import Any

import anthropic
from tools import MOST_CALLS, TOOLS, call_tool, schema_of, seen_blocks, tell

base_url, api_key, form, *questions = sys.argv[1:]
client = anthropic.Anthropic(
    base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0, timeout=120
)
tools: Any = [
    {"name": name, "description": tool.__doc__, "input_schema": schema_of(name)}
    for name, tool in TOOLS.items()
]
messages: list[Any] = []
replies = []
for question in questions:
    messages.append({"role": "user", "content": question})
    for _ in range(MOST_CALLS):
        options: Any = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": 60}
        if form == "streamed":
            with client.messages.stream(**options) as stream:
                blocks = stream.get_final_message().content
        else:
            blocks = client.messages.create(**options).content
        replies.append(seen_blocks(blocks))
        content = [block.model_dump(exclude_none=True) for block in blocks]
        messages.append({"role": "assistant", "content": content})
        results: list[Any] = []
        for block in blocks:
            if block.type == "tool_use":
                result = call_tool(block.name, block.input)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        if not results:
            break
        messages.append({"role": "user", "content": results})
tell(replies)
