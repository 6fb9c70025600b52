"""Episodes in environment servers of verifiers and OpenEnv, with their packages unmodified in
environments of their own, as processes beside ours. Where they end in mid-episode too."""

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_environments import environment, serving
from agent_server_parts import (
    OneTokenModel,
    StandInEndpoint,
    WritingModel,
    call_text,
    make_chat,
    session_of,
)

from verl_like.workers.agents.episode import EpisodeFailed
from verl_like.workers.agents.openenv_server import OpenEnvServer, describe_openenv
from verl_like.workers.agents.runner import Outcome
from verl_like.workers.agents.tool_loop import ToolLoop
from verl_like.workers.agents.verifiers_server import VerifiersServer, describe_verifiers
from verl_like.workers.config.agent import AgentConfig

PRODUCT = Path(__file__).resolve().parents[1] / "agent_servers/product"
VERIFIERS = ("verifiers", "agent_servers/serve_verifiers.py", "product")
OPENENV = ("openenv", "agent_servers/serve_openenv.py")
pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a taskset that verifiers has scaffolded, with our tool and reward."""
    folder = tmp_path_factory.mktemp("taskset")
    init = environment("verifiers") / "vf-init"
    command = [init, "product", "--add-tool", "--path", folder]
    subprocess.run(command, check=True, timeout=120)
    package = folder / "product/product"
    shutil.copy(PRODUCT / "taskset.py", package)
    shutil.copy(PRODUCT / "tool.py", package / "servers")
    return str(package.parent)


def row_of(a: int, b: int) -> dict[str, Any]:
    question = f"What is {a} times {b}?"
    return {
        "prompt": [{"role": "user", "content": question}],
        "answer": str(a * b),
        "data_source": "products",
    }


def multiplies_and_says(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The model multiplies by the tool, and says what it returned, but 10 in place of 12."""
    last = messages[-1]["content"]
    if messages[-1]["role"] == "user":
        words = last.removesuffix("?").split()
        arguments = json.dumps({"a": int(words[2]), "b": int(words[4])})
        function = {"name": "product_multiply", "arguments": arguments}
        call = {"id": "c1", "type": "function", "function": function}
        return {"content": "", "tool_calls": [call]}
    return {"content": "It is 10." if last == "12" else f"It is {last}."}


@contextlib.asynccontextmanager
async def verifiers_way(address: str) -> AsyncIterator[tuple[StandInEndpoint, VerifiersServer]]:
    endpoint = StandInEndpoint(multiplies_and_says)
    way = VerifiersServer(address, endpoint, timeout_s=5.0)
    await way.start()
    try:
        yield endpoint, way
    finally:
        await way.close()


def test_a_taskset_of_verifiers_with_tools_ends_its_episodes_with_rewards(product: str):
    async def run(address: str) -> None:
        async with verifiers_way(address) as (endpoint, way):
            products = [(6, 7), (3, 4), (11, 12)]
            sessions = [session_of(OneTokenModel(), row_of(a, b)) for a, b in products]
            outcomes = await asyncio.gather(*[way.run(session) for session in sessions])
            rewards = [outcome.reward for outcome in outcomes]
            assert rewards == [0.5, 0.0, 0.5], "its weight is 0.5, and 10 is wrong"
            assert [len(session.turns) for session in sessions] == [2, 2, 2]
            results = [chat["messages"][-1] for chat in endpoint.chats]
            results = [message["content"] for message in results if message["role"] == "tool"]
            assert sorted(results) == ["12", "132", "42"], "its server has run the tool"
            assert not endpoint.accesses
            row = row_of(6, 7)
            del row["answer"]
            with pytest.raises(EpisodeFailed, match="refused the episode: ValidationError"):
                await way.run(session_of(OneTokenModel(), row))

    with serving(describe_verifiers, *VERIFIERS, PYTHONPATH=product) as (address, _server):
        asyncio.run(run(address))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_or_the_silence_of_a_verifiers_server_fails_its_episodes(
    product: str, sent: signal.Signals
):
    async def run(address: str, server: subprocess.Popen[bytes]) -> None:
        async with verifiers_way(address) as (endpoint, way):
            endpoint.is_held = True
            session = session_of(OneTokenModel(), row_of(6, 7))
            episode = asyncio.create_task(way.run(session))
            async with asyncio.timeout(300):
                while not endpoint.chats:
                    await asyncio.sleep(0.05)
            server.send_signal(sent)
            async with asyncio.timeout(60):
                with pytest.raises(EpisodeFailed, match="the connection to the server ended"):
                    await episode
            with pytest.raises(EpisodeFailed, match="no server answers"):
                await way.run(session_of(OneTokenModel(), row_of(6, 7)))
            endpoint.is_held = False

    with serving(describe_verifiers, *VERIFIERS, PYTHONPATH=product) as (address, server):
        asyncio.run(run(address, server))


def test_a_verifiers_server_ends_the_programs_of_an_episode_that_is_cancelled(product: str):
    async def run(address: str, server: subprocess.Popen[bytes]) -> None:
        async with verifiers_way(address) as (endpoint, way):
            endpoint.is_held = True
            episode = asyncio.create_task(way.run(session_of(OneTokenModel(), row_of(6, 7))))
            async with asyncio.timeout(300):
                while not endpoint.chats:
                    await asyncio.sleep(0.05)
                assert psutil.Process(server.pid).children()
                episode.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await episode
                while psutil.Process(server.pid).children():
                    await asyncio.sleep(0.05)
            endpoint.is_held = False

    with serving(describe_verifiers, *VERIFIERS, PYTHONPATH=product) as (address, server):
        asyncio.run(run(address, server))


async def openenv_episode(
    model: WritingModel, address: str, row: Mapping[str, Any], **options: Any
) -> Outcome:
    """Runs an episode of a row with these options of agents."""
    chat = model.chat
    tools = (await asyncio.to_thread(describe_openenv, address)).tools
    config = AgentConfig(server=f"openenv://{address}", **options)
    loop = ToolLoop(chat, tools, has_reward=True, max_turns=None, config=config)
    messages = [{"role": "user", "content": "Multiply."}]
    prompt_ids = chat.tokens(chat.render(messages, tools, is_prompt=True))
    session = session_of(model, {"prompt": messages, **row}, prompt_ids)
    return await OpenEnvServer(address, loop).run(session)


def test_an_openenv_server_of_actions_ends_its_episodes_with_rewards():
    """It has room for two sessions, so those of earlier episodes have ended."""
    chat = make_chat()

    async def run(address: str) -> None:
        wrong = [call_text("step", factor="x"), call_text("step", factor=0)]
        right = [call_text("step", factor=7), call_text("step", factor=3)]
        for _ in range(4):
            model = WritingModel(chat, *wrong, *right)
            outcome = await openenv_episode(model, address, {"start": 5})
            assert outcome == Outcome([0.0, 0.0, 0.0, 0.25], "done")
            assert "Multiply.5<|end|>" in model.prompts[0]
            assert "Input should be a valid integer" in model.prompts[1]
            assert "the number would be lost" in model.prompts[2]
            assert "<|start|>tool 35<|end|>" in model.prompts[3]
        with pytest.raises(EpisodeFailed, match=r"reset raised .*'start'"):
            await openenv_episode(WritingModel(chat), address, {})
        with pytest.raises(EpisodeFailed, match="a step took over 2 s") as failure:
            model = WritingModel(chat, call_text("step", factor=1))
            await openenv_episode(model, address, {"start": 5}, tool_timeout_s=2.0)
        assert failure.value.kind == "deadline"

    with serving(describe_openenv, *OPENENV, "actions", "2") as (address, _server):
        asyncio.run(run(address))


def test_an_openenv_server_of_tools_ends_its_episodes_with_rewards():
    chat = make_chat()

    async def run(address: str) -> None:
        calls = [call_text("multiply", a=6, b=7), call_text("multiply", a=6, b=0)]
        model = WritingModel(chat, *calls, "42")
        outcome = await openenv_episode(model, address, {})
        assert outcome == Outcome([0.5, 0.5, 0.0], "done")
        assert "<|start|>tool 42<|end|>" in model.prompts[1]
        assert "the number would be lost" in model.prompts[2]

    with serving(describe_openenv, *OPENENV, "tools", "2") as (address, _server):
        asyncio.run(run(address))


@pytest.mark.parametrize(
    ("sent", "kind"), [(signal.SIGKILL, "environment"), (signal.SIGSTOP, "deadline")]
)
def test_the_end_or_the_silence_of_an_openenv_server_fails_its_episodes(
    sent: signal.Signals, kind: str
):
    chat = make_chat()

    async def run(address: str, server: subprocess.Popen[bytes]) -> None:
        model = WritingModel(chat, call_text("step", factor=1))
        episode = asyncio.create_task(
            openenv_episode(model, address, {"start": 5}, tool_timeout_s=5.0)
        )
        async with asyncio.timeout(60):
            while not model.prompts:
                await asyncio.sleep(0.01)
        server.send_signal(sent)
        with pytest.raises(EpisodeFailed) as failure:
            async with asyncio.timeout(30):
                await episode
        assert failure.value.kind == kind

    with serving(describe_openenv, *OPENENV, "actions", "2") as (address, server):
        asyncio.run(run(address, server))
