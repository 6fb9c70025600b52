"""A conversation by responses of the OpenAI SDK.

python openai_responses.py BASE_URL API_KEY whole|streamed QUESTION ...
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
        "name": name,
        "description": tool.__doc__,
        "parameters": schema_of(name),
        "strict": None,
    }
    for name, tool in TOOLS.items()
]
items: list[Any] = []
replies = []
for question in questions:
    items.append({"role": "user", "content": question})
    for _ in range(MOST_CALLS):
        options: Any = {"model": "policy", "input": items, "tools": tools}
        if form == "streamed":
            with client.responses.stream(**options) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**options)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        replies.append(seen(response.output_text, [(call.name, call.arguments) for call in calls]))
        for call in calls:
            result = call_tool(call.name, call.arguments)
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
        if not calls:
            break
tell(replies)
