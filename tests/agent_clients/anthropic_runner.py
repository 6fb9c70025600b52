"""A question to the tool runner of the Anthropic SDK.

python anthropic_runner.py BASE_URL API_KEY whole|streamed QUESTION
"""

import sys
from typing import Any

import anthropic
from tools import MOST_CALLS, multiply, seen_blocks, submit, tell

base_url, api_key, form, question = sys.argv[1:]
client = anthropic.Anthropic(
    base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0, timeout=120
)
options: Any = {
    "model": "policy",
    "max_tokens": 60,
    "max_iterations": MOST_CALLS,
    "tools": [anthropic.beta_tool(tool) for tool in (multiply, submit)],
    "messages": [{"role": "user", "content": question}],
}
replies = []
if form == "streamed":
    for stream in client.beta.messages.tool_runner(stream=True, **options):
        replies.append(seen_blocks(stream.get_final_message().content))
else:
    for message in client.beta.messages.tool_runner(**options):
        replies.append(seen_blocks(message.content))
tell(replies)
