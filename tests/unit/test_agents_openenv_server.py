"""Episodes in an OpenEnv server: the wire, on a real WebSocket with a server written here, and what
becomes of failures."""

import asyncio
import contextlib
import http
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from agent_server_parts import WritingModel, call_text, make_chat, session_of
from tiny_worker_models import policy_config
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from verl_like.trainer.ppo.agent_inputs import describe_server
from verl_like.workers.agent_worker import AgentWorker
from verl_like.workers.agents.chat import ChatFormat
from verl_like.workers.agents.episode import EpisodeFailed, RewardProblem
from verl_like.workers.agents.hosts import Description
from verl_like.workers.agents.openenv_server import OpenEnvServer, describe_openenv
from verl_like.workers.agents.runner import Outcome
from verl_like.workers.agents.session import Session
from verl_like.workers.agents.tool_loop import ToolLoop
from verl_like.workers.agents.verifiers_server import VerifiersServer
from verl_like.workers.config.agent import AgentConfig, MultiTurnConfig

ACTION = {
    "title": "Multiply",
    "description": "Multiplies the number.",
    "type": "object",
    "properties": {
        "metadata": {"title": "Metadata", "type": "object"},
        "factor": {"title": "Factor", "type": "integer"},
    },
    "required": ["factor"],
}
LISTED = {"title": "CallToolAction", "type": "object", "properties": {}}
TOOL = {"name": "multiply", "description": "Multiplies.", "input_schema": {"type": "object"}}
ROW = {"prompt": [{"role": "user", "content": "Go on."}], "start": 5}
ENDS = "ends the connection"
Answers = Callable[[str, Any], Any]
"""From the type and the data of a message to the message that answers it."""


def observation(fields: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    data = {"observation": {"metadata": {}, **fields}, "reward": None, "done": False}
    return {"type": "observation", "data": data | more}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


class ServerByHand:
    """Speaks the WebSocket of OpenEnv: it answers with what is written in the test."""

    def __init__(self, answers: Answers, schemas: Any) -> None:
        self.answers = answers
        self.schemas = schemas
        self.got: list[Any] = []
        self.num_sessions = 0
        self.server: Server | None = None

    async def session(self, connection: ServerConnection) -> None:
        self.num_sessions += 1
        with contextlib.suppress(ConnectionClosed):
            async for text in connection:
                message = json.loads(text)
                self.got.append(message)
                if message["type"] == "close":
                    await asyncio.sleep(0.05)  # its environment takes a while to end
                    break
                answer = self.answers(message["type"], message.get("data"))
                if answer == ENDS:
                    break
                if answer is not None:
                    await connection.send(json.dumps(answer))
        self.num_sessions -= 1

    def page(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/schema":
            return connection.respond(http.HTTPStatus.OK, json.dumps(self.schemas))
        return None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        serving = serve(self.session, "127.0.0.1", 0, process_request=self.page)
        async with serving as self.server:
            yield f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return make_chat()


def describe(schemas: Any, answers: Answers) -> Any:
    server = ServerByHand(answers, schemas)

    async def run() -> Any:
        async with server.serving() as address:
            return await asyncio.to_thread(describe_openenv, address)

    return asyncio.run(run())


def episode(
    chat: ChatFormat,
    answers: Answers,
    *texts: str,
    schema: Mapping[str, Any] = ACTION,
    tool_timeout_s: float = 10.0,
) -> tuple[Outcome, Session, ServerByHand, WritingModel]:
    """Runs an episode in which the model writes these texts."""
    server = ServerByHand(answers, {"action": schema})
    model = WritingModel(chat, *texts)
    tools = describe({"action": schema}, answers).tools
    prompt_ids = chat.tokens(chat.render(ROW["prompt"], tools, is_prompt=True))
    session = session_of(model, ROW, prompt_ids)

    async def run() -> Outcome:
        async with server.serving() as address:
            config = AgentConfig(server=f"openenv://{address}", tool_timeout_s=tool_timeout_s)
            loop = ToolLoop(chat, tools, has_reward=True, max_turns=None, config=config)
            way = OpenEnvServer(address, loop)
            await way.start()
            outcome = await way.run(session)
            assert server.num_sessions == 0, "there is room for another session"
            await way.close()
            return outcome

    return asyncio.run(run()), session, server, model


def growing(kind: str, data: Any) -> Any:
    """An environment that is done at its second action, and has rewards for both."""
    if kind == "reset":
        return observation({"text": "It is 5."}, reward=4.0)
    if data["factor"] == 3:
        return observation({"number": 15, "text": "small"}, reward=0.25)
    return observation({"number": 150}, reward=True, done=True)


def test_an_action_schema_is_one_tool_and_the_environment_ends_the_episode(chat: ChatFormat):
    outcome, session, server, model = episode(
        chat, growing, call_text("step", factor=3), call_text("step", factor=10), "never written"
    )
    assert server.got == [
        {"type": "reset", "data": ROW},
        {"type": "step", "data": {"factor": 3}},
        {"type": "step", "data": {"factor": 10}},
        {"type": "close"},
    ]
    first, second = model.prompts
    assert "<|start|>user Go on.It is 5.<|end|><|start|>assistant " in first
    assert '"name": "step", "description": "Multiplies the number."' in first
    assert "Factor" in first and "metadata" not in first
    result = '<|end|><|start|>tool {"number": 15, "text": "small"}<|end|><|start|>assistant '
    assert second.endswith(result)
    assert outcome == Outcome([0.25, 1.0], "done")
    [row] = session.finish(outcome.reward)
    assert [score for score in row.scores.tolist() if score] == [0.25, 1.0]
    assert row.scores[-1] == 1.0


def test_several_actions_of_a_turn_share_its_reward_and_none_follows_the_end(chat: ChatFormat):
    calls = call_text("step", factor=3) + call_text("step", factor=10) + call_text("step", factor=3)
    outcome, _session, server, _model = episode(chat, growing, calls)
    assert outcome == Outcome([1.25], "done")
    assert [message["type"] for message in server.got] == ["reset", "step", "step", "close"]


def test_a_turn_without_an_action_has_no_reward_and_ends_the_episode(chat: ChatFormat):
    outcome, _session, _server, _model = episode(
        chat, growing, call_text("step", factor=3), "That is enough."
    )
    assert outcome == Outcome([0.25, 0.0], "done")


def test_listed_tools_are_called_by_name_and_their_failures_are_told_and_counted(chat: ChatFormat):
    results = {
        2: {"result": {"content": [{"type": "text", "text": "4"}], "data": 4}, "error": None},
        3: {"result": "six", "error": None},
        0: {"result": None, "error": {"error_type": "execution_error", "message": "lost"}},
    }

    def answers(kind: str, data: Any) -> Any:
        if kind == "reset":
            return observation({})
        if data["type"] == "list_tools":
            return observation({"tools": [TOOL]})
        result = results[data["arguments"]["b"]]
        return observation({"tool_name": data["tool_name"], **result}, reward=0.5)

    texts = [call_text("multiply", a=2, b=b) for b in (2, 3, 0)]
    outcome, session, server, model = episode(chat, answers, *texts, "Done.", schema=LISTED)
    action = {"type": "call_tool", "tool_name": "multiply", "arguments": {"a": 2, "b": 2}}
    assert server.got[1] == {"type": "step", "data": action}
    assert '"name": "multiply", "description": "Multiplies.", "parameters"' in model.prompts[1]
    assert model.prompts[1].endswith("<|start|>tool 4<|end|><|start|>assistant ")
    assert "<|start|>tool six<|end|>" in model.prompts[2]
    assert '<|start|>tool {\'error\': \'{"error_type": "execution_error"' in model.prompts[3]
    assert session.counts["tool_errors/multiply"] == 1
    assert outcome == Outcome([0.5, 0.5, 0.5, 0.0], "done")


@pytest.mark.parametrize(
    "failure",
    [
        error("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["factor"], "msg": "no int"}]),
        error("EXECUTION_ERROR", "no int: the number would be lost"),
    ],
    ids=["validation", "execution"],
)
def test_an_error_that_an_action_causes_is_told_to_the_model(chat: ChatFormat, failure: Any):
    def answers(kind: str, data: Any) -> Any:
        return observation({}) if kind == "reset" else failure

    outcome, session, _server, model = episode(chat, answers, call_text("step", factor="x"), "Oh.")
    assert "<|start|>tool {'error'" in model.prompts[1] and "no int" in model.prompts[1]
    assert session.counts["tool_errors/step"] == 1
    assert outcome == Outcome([0.0, 0.0], "done")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"text": "It is 5."}, "It is 5."),
        ({"number": 5}, "5"),
        ({"board": {"content": [{"type": "text", "text": "a picture"}]}}, "a picture"),
        ({"board": {"content": [{"type": "text", "text": 5}]}}, "5"),
        ({"number": 5, "hint": None}, '{"number": 5, "hint": null}'),
    ],
    ids=["nothing", "a text", "a number", "parts", "a part that is no text", "several fields"],
)
def test_the_model_reads_the_only_field_of_an_observation_or_all_of_them(
    chat: ChatFormat, fields: Mapping[str, Any], text: str
):
    def answers(kind: str, data: Any) -> Any:
        return observation(fields, metadata={"seen": True})

    _outcome, _session, _server, model = episode(chat, answers, "I see.")
    assert f"Go on.{text}<|end|>" in model.prompts[0]


def tool_error(error_type: str, message: str) -> Any:
    problem = {"error_type": error_type, "message": message}
    return observation({"tool_name": "step", "result": None, "error": problem})


def fails_in(kind: str, answer: Any) -> Answers:
    def answers(each: str, data: Any) -> Any:
        return answer if each == kind else observation({"text": "x"})

    return answers


@pytest.mark.parametrize(
    ("answers", "kind", "text"),
    [
        (
            fails_in("reset", error("EXECUTION_ERROR", "no such task")),
            "environment",
            "no such task",
        ),
        (fails_in("reset", error("CAPACITY_REACHED", "1/1 sessions")), "environment", "1/1 sess"),
        (fails_in("step", error("SESSION_ERROR", "lost")), "environment", "step failed.*lost"),
        (fails_in("step", {"type": "observation"}), "environment", "(?s)127.*failed: .*data"),
        (
            fails_in("step", observation({}, reward="much")),
            "environment",
            "(?s)127.*failed: .*reward",
        ),
        (fails_in("step", ENDS), "environment", "127.*failed: received 1000"),
        (fails_in("step", None), "deadline", "a step took over 0.3 s"),
        (fails_in("step", tool_error("timeout", "30 s")), "deadline", "tool failed: .*30 s"),
        (fails_in("step", tool_error("transport_error", "lost")), "environment", "tool.*lost"),
    ],
    ids=[
        *("reset", "capacity", "session", "no answer", "reward", "end", "silence"),
        *("tool's deadline", "transport"),
    ],
)
def test_failures_of_the_server_are_no_reward(
    chat: ChatFormat, answers: Answers, kind: str, text: str
):
    with pytest.raises(EpisodeFailed, match=text) as failure:
        episode(chat, answers, call_text("step", factor=3), "On.", tool_timeout_s=0.3)
    assert failure.value.kind == kind


def test_a_reward_that_is_no_number_is_a_problem_of_the_reward(chat: ChatFormat):
    answers = fails_in("step", observation({}, reward=float("nan")))
    outcome, session, _server, _model = episode(chat, answers, call_text("step", factor=3), "On.")
    with pytest.raises(RewardProblem, match="nan"):
        session.finish(outcome.reward)


def test_what_a_server_says_before_it_ends_the_connection_is_read(chat: ChatFormat):
    """As when it has no room for another session."""

    async def full(connection: ServerConnection) -> None:
        await connection.send(json.dumps(error("CAPACITY_REACHED", "2/2 sessions")))

    async def run() -> None:
        async with serve(full, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            config = AgentConfig(server=f"openenv://{address}")
            loop = ToolLoop(chat, [], has_reward=True, max_turns=None, config=config)
            await OpenEnvServer(address, loop).run(session_of(None, ROW))

    with pytest.raises(EpisodeFailed, match="2/2 sessions"):
        asyncio.run(run())


def test_an_episode_waits_for_a_server_that_is_started_again(chat: ChatFormat):
    tools = describe({"action": ACTION}, growing).tools
    server = ServerByHand(growing, {"action": ACTION})
    session = session_of(WritingModel(chat, call_text("step", factor=30)), ROW)

    async def run() -> Outcome:
        async with server.serving() as address:
            pass
        config = AgentConfig(server=f"openenv://{address}", reset_timeout_s=10.0)
        loop = ToolLoop(chat, tools, has_reward=True, max_turns=None, config=config)
        task = asyncio.create_task(OpenEnvServer(address, loop).run(session))
        await asyncio.sleep(0.3)
        assert not task.done()
        async with serve(server.session, *address.split(":")):
            return await task

    assert asyncio.run(run()).reward == [1.0]


def test_a_server_that_takes_connections_and_answers_none_fails_its_episodes(chat: ChatFormat):
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as stopped:
            address = f"127.0.0.1:{stopped.getsockname()[1]}"
            config = AgentConfig(server=f"openenv://{address}", reset_timeout_s=0.2)
            loop = ToolLoop(chat, [], has_reward=True, max_turns=None, config=config)
            async with asyncio.timeout(5):
                await OpenEnvServer(address, loop).run(session_of(None, ROW))

    with pytest.raises(EpisodeFailed, match="failed: timed out") as failure:
        asyncio.run(run())
    assert failure.value.kind == "environment"


def test_an_episode_without_a_server_fails(chat: ChatFormat):
    config = AgentConfig(server="openenv://127.0.0.1:1", reset_timeout_s=0.2)
    loop = ToolLoop(chat, [], has_reward=True, max_turns=None, config=config)
    way = OpenEnvServer("127.0.0.1:1", loop)
    with pytest.raises(EpisodeFailed, match=r"the server at 127\.0\.0\.1:1 failed: .*call failed"):
        asyncio.run(way.run(session_of(None, ROW)))


def test_an_episode_that_is_cancelled_leaves_no_session(chat: ChatFormat):
    tools = describe({"action": ACTION}, growing).tools
    server = ServerByHand(fails_in("step", None), {"action": ACTION})
    session = session_of(WritingModel(chat, call_text("step", factor=3)), ROW)

    async def run() -> None:
        async with server.serving() as address:
            config = AgentConfig(server=f"openenv://{address}")
            loop = ToolLoop(chat, tools, has_reward=True, max_turns=None, config=config)
            task = asyncio.create_task(OpenEnvServer(address, loop).run(session))
            async with asyncio.timeout(10):
                while {"type": "step", "data": {"factor": 3}} not in server.got:
                    await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert server.num_sessions == 0

    asyncio.run(run())


def test_the_check_before_a_run_makes_tools_of_the_schema_or_of_the_list():
    description = describe({"action": ACTION, "observation": {}}, growing)
    assert description.has_reward
    properties = {"factor": {"title": "Factor", "type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["factor"]}
    function = {"name": "step", "description": "Multiplies the number.", "parameters": parameters}
    assert description.tools == [{"type": "function", "function": function}]
    listed = describe({"action": LISTED}, lambda kind, data: observation({"tools": [TOOL]}))
    function = {"name": "multiply", "description": "Multiplies.", "parameters": {"type": "object"}}
    assert listed.tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("schemas", "answers", "text"),
    [
        ({"actions": {}}, growing, "action\n  Field required"),
        ({"action": LISTED}, lambda kind, data: observation({"tools": []}), "it has no tools"),
        ({"action": LISTED}, lambda kind, data: observation({"tools": [{"name": "a"}]}), "input_s"),
        ({"action": LISTED}, lambda kind, data: error("UNKNOWN_TYPE", "step"), "UNKNOWN_TYPE"),
        ({"action": LISTED}, lambda kind, data: error("VALIDATION_ERROR", "type"), "VALIDATION"),
        ({"action": LISTED}, lambda kind, data: {"result": []}, "type\n  Field required"),
    ],
    ids=["other schemas", "no tools", "other tools", "error", "other actions", "other messages"],
)
def test_a_server_of_another_protocol_is_refused_before_the_run(
    schemas: Any, answers: Answers, text: str
):
    with pytest.raises(ValueError, match=r"does not answer as OpenEnv 0\.10 does") as refusal:
        describe(schemas, answers)
    assert text in str(refusal.value) and "scripts/agents_environment.sh" in str(refusal.value)


def test_a_server_that_is_not_there_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"openenv://127\.0\.0\.1:1 does not answer.*refused"):
        describe_openenv("127.0.0.1:1")


def test_the_address_of_a_server_says_its_protocol():
    with pytest.raises(ValueError, match=r"openenv://127\.0\.0\.1:1 does not answer"):
        describe_server("openenv://127.0.0.1:1")
    for wrong in ("verifiers://host", "http://host:8000", "openenv://host:8000/ws"):
        with pytest.raises(ValueError, match=f"server={wrong}: expected verifiers://host:port"):
            AgentConfig(server=wrong)


def test_a_rank_of_agents_acts_in_the_server_of_its_address(chat: ChatFormat):
    config = AgentConfig(server="openenv://host:8000", reset_timeout_s=7.0)
    policy = policy_config("unused")
    turns = MultiTurnConfig(max_assistant_turns=3)
    rollout = policy.rollout.model_copy(update={"multi_turn": turns})
    policy = policy.model_copy(update={"rollout": rollout})
    tool = {"type": "function", "function": {"name": "step"}}
    worker = AgentWorker(config, policy, {}, {}, Description(tools=[tool], has_reward=True))
    way = worker.make_way(chat.tokenizer, [chat.tokenizer.eos_token_id])
    assert isinstance(way, OpenEnvServer) and way.address == "host:8000"
    assert way.loop.tool_names == {"step"} and way.loop.has_reward
    assert (way.loop.max_turns, way.loop.config) == (3, config)
    worker.config = config.model_copy(update={"server": "verifiers://host:5000"})
    way = worker.make_way(chat.tokenizer, [chat.tokenizer.eos_token_id])
    assert isinstance(way, VerifiersServer) and way.address == "host:5000"
    assert way.timeout_s == 7.0
