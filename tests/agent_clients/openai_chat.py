"""A conversation by chat completions of the OpenAI SDK.

python openai_chat.py BASE_URL API_KEY whole|streamed QUESTION ...
"""

import sys
from typing import Any

import openai
from tools import MOST_CALLS, TOOLS, call_tool, schema_of, seen, tell

base_url, api_key, form, *questions = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120)
tools: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": tool.__doc__, "parameters": schema_of(name)},
    }
    for name, tool in TOOLS.items()
]
messages: list[Any] = []
replies = []
for question in questions:
    messages.append({"role": "user", "content": question})
    for _ in range(MOST_CALLS):
        options: Any = {"model": "policy", "messages": messages, "tools": tools}
        if form == "streamed":
            with client.chat.completions.stream(**options) as stream:
                reply = stream.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(**options).choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in reply.tool_calls or []]
        replies.append(seen(reply.content, calls))
        messages.append(
            reply.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        )
        for call in reply.tool_calls or []:
            result = call_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not calls:
            break
tell(replies)
