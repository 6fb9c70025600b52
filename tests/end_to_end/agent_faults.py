"""The faults of docs/reliability.md in runs of agents: how each is made to happen, and what the run
has to say."""

from collections.abc import Callable

from faults import Fault, Run

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }} {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)
"""A chat template of characters that a tiny model knows, which is continued by further messages."""
CODE = """
import asyncio
import os
import random
import signal

from openai import AsyncOpenAI


def go_wrong():
    if os.path.exists({flag!r}):
        {statement}


class World:
    def reset(self, **row):
        go_wrong()
        self.number = row["extra_info"]["index"]

    async def wait(self, seconds: float) -> str:
        \"\"\"Waits.

        Args:
            seconds: how long
        \"\"\"
        return "done"

    async def get_reward(self):
        await asyncio.sleep(0.2)
        return self.number / 8 + random.random()


async def run(row, base_url, api_key):
    go_wrong()
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = list(row["prompt"])
    texts = set()
    for _ in range(2):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=4
        )
        text = reply.choices[0].message.content
        texts.update(text)
        messages += [{{"role": "assistant", "content": text}}, {{"role": "user", "content": "1"}}]
        await asyncio.sleep(0.1)
    return len(texts) / 8
"""
HOST = "verl_like.workers.agents.host_process"
ENVIRONMENT = "agent.environment=agent_code:World"
HARNESS = "agent.harness=agent_code:run"
RAISE = "raise OSError('the database is down')"


def agent_settings(tiny_llama: Callable) -> list[str]:
    """Overrides of a run of agents, in place of those of a tiny run."""
    model, _ = tiny_llama(template=TEMPLATE)
    return [
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=16",
        "data.max_response_length=24",
        "custom_reward_function.path=null",
        "agent.tool_timeout_s=4",
        "agent.reset_timeout_s=4",
        "agent.reward_timeout_s=4",
        "agent.episode_timeout_s=8",
    ]


def of_agents(
    number: int,
    done: str,
    says: str,
    strike: Callable[[Run], None],
    way: str,
    statement: str = "pass",
    **options: object,
) -> Fault:
    """A fault of a run whose episodes are those of a class or a harness."""
    settings = (way, *options.pop("settings", ()))
    file = ("agent_code.py", CODE, {"statement": statement})
    return Fault(number, done, says, strike, settings, file, **options)


def send_to_host(number: int) -> Callable[[Run], None]:
    """Sends a signal to the process that runs environments or harnesses, below its supervisor."""

    def strike(run: Run) -> None:
        supervisor = run.find(HOST)
        (host,) = supervisor.children()
        host.send_signal(number)

    return strike
