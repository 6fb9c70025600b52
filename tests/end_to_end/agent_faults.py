"""The faults of docs/reliability.md in runs of agents: how each is made to happen, and what the run
has to say."""

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
from agent_environments import serving
from faults import (
    BOTH,
    DETACHED,
    DIED,
    ENDED,
    ENGINE_RANK,
    STOPPED,
    Fault,
    Run,
    Strike,
    raise_flag,
    send,
)

from verl_like.workers.agents.openenv_server import describe_openenv
from verl_like.workers.agents.verifiers_server import describe_verifiers

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
AGENT_RANK = "agent rank"
HOST = "verl_like.workers.agents.host_process"
ENVIRONMENT = "agent.environment=agent_code:World"
HARNESS = "agent.harness=agent_code:run"
RAISE = "raise OSError('the database is down')"
ALL_FAILED = r"The last \d+ episodes failed, so there is nothing to train"


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
    strike: Strike,
    way: str,
    statement: str = "pass",
    **options: object,
) -> Fault:
    """A fault of a run whose episodes are those of a class or a harness."""
    settings = (way, *options.pop("settings", ()))
    file = ("agent_code.py", CODE, {"statement": statement})
    return Fault(number, done, says, strike, settings, file, **options)


def send_to_host(number: int) -> Strike:
    """Sends a signal to the process that runs environments or harnesses, below its supervisor."""

    def strike(run: Run) -> None:
        supervisor = run.find(HOST)
        (host,) = supervisor.children()
        host.send_signal(number)

    return strike


AGENT_DIED = f"agent {DIED}"
AGENT_STOPPED = f"agent {STOPPED}"
AGENT_FAULTS = [
    of_agents(
        26,
        "SIGKILL to a process of environments",
        ENDED,
        send_to_host(signal.SIGKILL),
        ENVIRONMENT,
        goes_on=BOTH,
    ),
    of_agents(
        26,
        "SIGSTOP to a process of environments",
        ENDED,
        send_to_host(signal.SIGSTOP),
        ENVIRONMENT,
        goes_on=BOTH,
    ),
    of_agents(
        26,
        "SIGKILL to a process of harnesses",
        ENDED,
        send_to_host(signal.SIGKILL),
        HARNESS,
        goes_on=BOTH,
    ),
    of_agents(
        26,
        "SIGSTOP to a process of harnesses",
        ENDED,
        send_to_host(signal.SIGSTOP),
        HARNESS,
        goes_on=BOTH,
    ),
    of_agents(
        27,
        "SIGKILL to an agents' rank, which has the endpoint",
        AGENT_DIED,
        send(signal.SIGKILL, AGENT_RANK),
        HARNESS,
        goes_on=(DETACHED,),
    ),
    of_agents(
        27,
        "SIGSTOP to an agents' rank, which has the endpoint",
        AGENT_STOPPED,
        send(signal.SIGSTOP, AGENT_RANK),
        HARNESS,
        goes_on=(DETACHED,),
    ),
    of_agents(
        28,
        "SIGKILL to an engine's rank in episodes",
        f"rollout {DIED}",
        send(signal.SIGKILL, ENGINE_RANK),
        HARNESS,
        goes_on=(DETACHED,),
    ),
    of_agents(
        28,
        "SIGSTOP to an engine's rank in episodes",
        f"rollout {STOPPED}",
        send(signal.SIGSTOP, ENGINE_RANK),
        ENVIRONMENT,
        goes_on=(DETACHED,),
    ),
    of_agents(
        29,
        "one in twenty episodes fails, with agent.num_attempts=1",
        ENDED,
        raise_flag,
        ENVIRONMENT,
        f"if random.random() < 0.05: {RAISE}",
        settings=("agent.num_attempts=1",),
        goes_on=BOTH,
        lost="the episodes in agent/num_failed",
    ),
    of_agents(
        29,
        "all episodes fail",
        rf"{ALL_FAILED}.*the database is down",
        raise_flag,
        ENVIRONMENT,
        RAISE,
    ),
]
SERVERS: dict[str, tuple[Any, ...]] = {
    "openenv": (describe_openenv, "openenv", "agent_servers/serve_openenv.py", "slow", "64"),
    "verifiers": (
        describe_verifiers,
        "verifiers",
        "agent_servers/serve_verifiers.py",
        "plain_taskset",
    ),
}
"""How the server of each protocol is started."""
SERVER_SETTINGS = [
    "agent.max_episodes=16",
    "agent.reset_timeout_s=20",
    "agent.episode_timeout_s=120",
    "actor_rollout_ref.rollout.n=4",
]


def serving_episodes(kind: str, port: int | None = None) -> AbstractContextManager[Any]:
    """A server of this protocol, whose episodes take a while."""
    programs = Path(__file__).parents[1] / "agent_servers"
    return serving(*SERVERS[kind], port=port, PYTHONPATH=str(programs))


def has_episodes(kind: str, server: psutil.Process) -> bool:
    """Whether the server runs episodes now."""
    if kind == "verifiers":  # each has processes
        return bool(server.children())
    connections = server.net_connections()
    return any(each.status == psutil.CONN_ESTABLISHED for each in connections)
