"""Episodes in a verifiers server: the wire, on real sockets with a server written here, and what
becomes of failures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from agent_server_parts import OneTokenModel, StandInEndpoint, session_of

from verl_like.workers.agents.episode import EpisodeFailed, RewardProblem
from verl_like.workers.agents.session import Session
from verl_like.workers.agents.verifiers_server import VerifiersServer, describe_verifiers

ROW = {"prompt": [{"role": "user", "content": "6 * 7?"}], "answer": "42"}
Parts = list[bytes]


class ServerByHand:
    """Speaks the wire of verifiers' EnvServer: it answers requests with parts that are written in
    the test."""

    def __init__(self, answer: Callable[[str, Any], list[Parts]]) -> None:
        """`answer` gets the method and the content of a request, and returns its answers."""
        self.answer = answer
        self.requests: list[tuple[str, bytes, Any]] = []
        """The method, the name and the content of each."""
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind("tcp://127.0.0.1:0")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self.task = asyncio.create_task(self.serve())

    async def serve(self) -> None:
        while True:
            client, name, method, content = await self.socket.recv_multipart()
            request = msgpack.unpackb(content)
            self.requests.append((method.decode(), name, request))
            answers = self.answer(method.decode(), request)
            if method == b"cancel":
                answers = [reply(cancelled=False)]
            for parts in answers:
                await self.socket.send_multipart([client, name, *parts])

    async def has_got(self, method: str) -> tuple[bytes, Any]:
        """Waits for a request of this method; its name and its content."""
        async with asyncio.timeout(10):
            while True:
                for each, name, content in self.requests:
                    if each == method:
                        return name, content
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self.task.cancel()
        self.context.destroy(linger=0)


def delta(**news: Any) -> Parts:
    return [b"delta", msgpack.packb({"trace": "t1", **news})]


def reply(**content: Any) -> Parts:
    return [b"reply", msgpack.packb({"success": True, "error": None, **content})]


OPEN = delta(open={"version": 1, "id": "t1"}, set={"rewards": {}, "ok": False})
DONE = reply(head={"ok": True, "is_timeout": False, "errors": [], "id": "e1"}, traces=[])
FAILED = reply(
    head={
        "ok": False,
        "is_timeout": True,
        "errors": [{"type": "TimeoutError", "message": "run() exceeded its 5s deadline"}],
    }
)


def rewards(**each: Any) -> Parts:
    return delta(set={"rewards": each})


@contextlib.asynccontextmanager
async def way(
    answer: Callable[[str, Any], list[Parts]], timeout_s: float = 10.0
) -> AsyncIterator[tuple[ServerByHand, StandInEndpoint, VerifiersServer]]:
    server = ServerByHand(answer)
    endpoint = StandInEndpoint(lambda messages: {"content": "42"})
    agents = VerifiersServer(server.address, endpoint, timeout_s=timeout_s)
    await agents.start()
    try:
        yield server, endpoint, agents
    finally:
        await agents.close()
        assert endpoint.is_closed
        server.close()


def outcome(*answers: Parts, session: Session | None = None) -> Any:
    """What an episode ends with if the server answers like this."""

    async def run() -> Any:
        def answer(method: str, request: Any) -> list[Parts]:
            return list(answers) if method == "run" else []

        async with way(answer) as (_server, endpoint, agents):
            try:
                return await agents.run(session or session_of(OneTokenModel(), ROW))
            finally:
                assert not endpoint.accesses, "the access ends with the episode"
                assert not agents.parts, "nobody waits for answers any more"

    return asyncio.run(run())


def test_a_request_has_the_row_the_address_of_its_episode_and_the_key_of_the_run():
    async def run() -> tuple[Any, ...]:
        def answer(method: str, request: Any) -> list[Parts]:
            return [OPEN, DONE] if method == "run" else []

        async with way(answer) as (server, endpoint, agents):
            session = session_of(OneTokenModel(), ROW)
            await asyncio.gather(agents.run(session), agents.run(session))
            await server.has_got("cancel")  # whose answer nobody waits for
            await agents.run(session)
            names = [name for method, name, _content in server.requests if method == "run"]
            return (await server.has_got("run"))[1], endpoint, names

    request, endpoint, names = asyncio.run(run())
    client = request.pop("client")
    assert request == {"task_data": ROW, "model": "policy", "sampling": {}}
    assert client.pop("base_url").startswith(f"http://127.0.0.1:{endpoint.port}/s/")
    key = endpoint.api_key
    assert client == {
        "type": "eval",
        "api_key_var": "VERL_LIKE_AGENT_KEY",
        "headers": {"Authorization": f"Bearer {key}", "x-api-key": key},
    }
    assert len(set(names)) == 3


def test_the_reward_is_the_weighted_sum_of_the_last_rewards_of_the_record():
    first = rewards(right={"score": 9.0, "weight": 1.0})
    last = rewards(
        right={"score": 1.0, "weight": 0.5}, short={"score": -0.25, "weight": 2.0}, judge=None
    )
    other = delta(nodes=[{"message": {"role": "user"}}], links={0: []})
    ended = outcome(OPEN, first, other, last, DONE)
    assert ended.reward == pytest.approx(0.0)
    assert ended.ended == "done" and ended.is_scored
    assert outcome(OPEN, rewards(right={"score": 1.5, "weight": 0.5}), DONE).reward == 0.75


def test_an_episode_without_rewards_has_none_and_is_left_out():
    assert outcome(OPEN, rewards(judge=None), DONE).reward is None
    assert outcome(OPEN, DONE).reward is None


@pytest.mark.parametrize("score", [None, "high", [1.0]])
def test_a_score_that_is_none_is_a_problem_of_the_reward_and_ends_no_run(score: Any):
    with pytest.raises(RewardProblem, match=r"rewards\.right\.score"):
        outcome(OPEN, rewards(right={"score": score, "weight": 1.0}), DONE)


def test_a_reward_that_is_no_number_is_a_problem_of_the_reward():
    session = session_of(OneTokenModel(), ROW)
    reward = outcome(OPEN, rewards(right={"score": float("nan"), "weight": 1.0}), DONE).reward
    with pytest.raises(RewardProblem, match="nan"):
        session.finish(reward)


@pytest.mark.parametrize(
    ("answers", "kind", "text"),
    [
        ([reply(success=False, error="ValidationError: answer")], "environment", "refused.*answer"),
        (
            [OPEN, delta(errors=[{"type": "ToolsetError", "message": "no tool"}]), FAILED],
            "environment",
            r"ToolsetError: no tool; TimeoutError: run\(\) exceeded its 5s deadline",
        ),
        (
            [OPEN, delta(set={"is_timeout": True, "stop_condition": "agent_timeout"}), DONE],
            "deadline",
            "a deadline of the environment",
        ),
        (
            [OPEN, [b"delta", msgpack.packb({"trace": "t2", "open": {"version": 1}})], DONE],
            "environment",
            "2 agents ran.*with one agent and without retries",
        ),
        ([DONE], "environment", "0 agents ran"),
    ],
    ids=["refused", "failed", "its own deadline", "several agents", "no agent"],
)
def test_failures_of_the_server_are_no_reward(answers: list[Parts], kind: str, text: str):
    with pytest.raises(EpisodeFailed, match=text) as failure:
        outcome(*answers)
    assert failure.value.kind == kind


def test_the_text_of_a_failure_has_no_secret():
    async def run() -> None:
        def answer(method: str, request: Any) -> list[Parts]:
            client = request.get("client", {})
            text = f"{client.get('base_url')} with {client.get('headers')}"
            return [reply(success=False, error=f"no answer of {text}")] if client else []

        async with way(answer) as (_server, _endpoint, agents):
            await agents.run(session_of(OneTokenModel(), ROW))

    with pytest.raises(EpisodeFailed, match=r"no answer of http://127\.0\.0\.1:\d+/s/") as failure:
        asyncio.run(run())
    text = str(failure.value)
    assert "/s/***/v1 with {'Authorization': 'Bearer ***', 'x-api-key': '***'}" in text


def test_a_record_of_another_version_is_refused_with_the_version_to_take():
    with pytest.raises(ValueError, match=r"have version 2: serve .* verifiers 0\.4\.0"):
        outcome(delta(open={"version": 2}), DONE)


def test_a_policy_that_used_up_its_room_is_trained_also_if_the_server_then_fails():
    session = session_of(OneTokenModel(), ROW)
    session.counts["room_used_up"] = 1
    ended = outcome(OPEN, rewards(right={"score": 0.5, "weight": 1.0}), DONE, session=session)
    assert (ended.reward, ended.ended) == (0.5, "room")
    ended = outcome(OPEN, FAILED, session=session)
    assert (ended.reward, ended.ended) == (0.0, "room")


@pytest.mark.parametrize("answers", [[OPEN, DONE], [OPEN, FAILED]], ids=["ended", "failed"])
def test_what_failed_between_us_and_the_model_counts_before_what_the_server_says(
    answers: list[Parts],
):
    async def run() -> None:
        def answer(method: str, request: Any) -> list[Parts]:
            for access in endpoint.accesses.values():
                access.failure = EpisodeFailed("engine", "no engine answers")
            return answers if method == "run" else []

        async with way(answer) as (_server, endpoint, agents):
            await agents.run(session_of(OneTokenModel(), ROW))

    with pytest.raises(EpisodeFailed, match="no engine answers"):
        asyncio.run(run())


def test_an_episode_that_is_cancelled_ends_at_the_server():
    async def run() -> None:
        async with way(lambda method, request: []) as (server, endpoint, agents):
            task = asyncio.create_task(agents.run(session_of(OneTokenModel(), ROW)))
            name, _content = await server.has_got("run")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not endpoint.accesses
            _name, content = await server.has_got("cancel")
            assert content == {"request_id": name.decode()}

    asyncio.run(run())


def test_the_end_of_the_server_fails_its_episodes_and_one_that_comes_back_gets_new_ones():
    async def run() -> Any:
        async with way(lambda method, request: []) as (server, _endpoint, agents):
            task = asyncio.create_task(agents.run(session_of(OneTokenModel(), ROW)))
            await server.has_got("run")
            server.close()
            with pytest.raises(
                EpisodeFailed, match="the connection to the server ended"
            ) as failure:
                await task
            assert failure.value.kind == "environment"
            waiting = asyncio.create_task(agents.run(session_of(OneTokenModel(), ROW)))
            await asyncio.sleep(0.1)
            context = zmq.asyncio.Context()
            with context.socket(zmq.ROUTER) as again:
                again.bind(f"tcp://{server.address}")
                method = b""
                while method != b"run":
                    client, name, method, _content = await again.recv_multipart()
                for parts in (OPEN, rewards(right={"score": 1.0, "weight": 1.0}), DONE):
                    await again.send_multipart([client, name, *parts])
                return await waiting

    assert asyncio.run(asyncio.wait_for(run(), 20)).reward == 1.0


def test_an_episode_waits_for_a_server_that_is_not_there_until_its_deadline():
    async def run() -> None:
        endpoint = StandInEndpoint(lambda messages: {})
        agents = VerifiersServer("127.0.0.1:1", endpoint, timeout_s=0.2)
        await agents.start()
        try:
            await agents.run(session_of(OneTokenModel(), ROW))
        finally:
            await agents.close()

    with pytest.raises(EpisodeFailed, match=r"no server answers at 127\.0\.0\.1:1"):
        asyncio.run(run())


def describe(answer: Callable[[str, Any], list[Parts]]) -> Any:
    async def run() -> Any:
        server = ServerByHand(answer)
        try:
            return await asyncio.to_thread(describe_verifiers, server.address)
        finally:
            server.close()

    return asyncio.run(run())


def test_the_check_before_a_run_asks_for_health_and_finds_no_tools_of_ours():
    def answer(method: str, request: Any) -> list[Parts]:
        assert (method, request) == ("health", {})
        return [reply()]

    description = describe(answer)
    assert description.tools == [] and description.has_reward


def test_a_server_of_an_older_wire_is_refused_before_the_run_with_the_version_to_take():
    older = [msgpack.packb({"success": True, "error": None})]  # verifiers 0.3.1 sends no kind
    with pytest.raises(ValueError, match=r"1 parts instead of 2: serve .* verifiers 0\.4\.0"):
        describe(lambda method, request: [older])


def test_a_server_that_does_not_answer_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"no server answers at agent.server=verifiers://127"):
        describe_verifiers("127.0.0.1:1")
