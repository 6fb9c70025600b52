"""A question to an agent of smolagents.

    python smolagents_agent.py BASE_URL API_KEY calls|code whole|streamed QUESTION

The agent that calls tools has no words of its own, so that the model reads what it knows.
"""

import contextlib
import io
import sys
from typing import Any

import smolagents
from tools import MOST_CALLS, multiply, seen, submit, tell

base_url, api_key, kind, form, question = sys.argv[1:]
model = smolagents.OpenAIModel(
    "policy", api_base=base_url, api_key=api_key, client_kwargs={"max_retries": 0, "timeout": 120}
)
options: Any = {
    "tools": [smolagents.tool(multiply), smolagents.tool(submit)],
    "model": model,
    "max_steps": MOST_CALLS - 1,
    "stream_outputs": form == "streamed",
    "verbosity_level": smolagents.LogLevel.OFF,
}
if kind == "calls":
    templates = smolagents.PromptTemplates(
        system_prompt="",
        planning=smolagents.PlanningPromptTemplate(
            initial_plan="", update_plan_pre_messages="", update_plan_post_messages=""
        ),
        managed_agent=smolagents.ManagedAgentPromptTemplate(task="", report=""),
        final_answer=smolagents.FinalAnswerPromptTemplate(
            pre_messages="", post_messages="{{task}}"
        ),
    )
    agent: Any = smolagents.ToolCallingAgent(prompt_templates=templates, **options)
else:
    agent = smolagents.CodeAgent(**options)
with contextlib.redirect_stdout(io.StringIO()):  # what it streams
    agent.run(question)
replies = []
for step in agent.memory.steps:
    message = getattr(step, "model_output_message", None)
    if message is not None:
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        text = message.content or ""
        replies.append(seen(text.removesuffix("</code>"), calls))  # CodeAgent has written that
tell(replies)
