"""Clients of others, unmodified, talk through the endpoint to a model that a real vLLM computes. The
record of each conversation is what requests to the engine draw without endpoint and client."""

import asyncio
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_endpoints import Served, make_chat
from rollout_requests import run
from test_vllm_rollout import export, rollout_settings
from transformers import AutoTokenizer, LlamaForCausalLM

from examples.agents.make_world import Settings, make_world
from verl_like.workers.agents.chat import ChatFormat
from verl_like.workers.agents.episode import EpisodeSpec
from verl_like.workers.agents.session import Limits, Session
from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout import get_rollout_engine
from verl_like.workers.rollout.request import Completion, GenerationRequest, Sampling

pytestmark = [pytest.mark.proof, pytest.mark.vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build/agents/harnesses/bin/python"
DEADLINE_S = 240
STARTING_S = 900
# Prompts of smolagents have thousands of characters, each of which is a token.
FIRST_PROMPT = 14_000
RESPONSE = 2_000
CONTEXT = FIRST_PROMPT + RESPONSE
LIMITS = Limits(FIRST_PROMPT, RESPONSE, CONTEXT, call_timeout_s=DEADLINE_S)
VERSION = 4
QUESTIONS = "47*83=", "31*12="
NUM_QUESTIONS = {
    "openai_chat.py": 2,
    "openai_responses.py": 1,
    "agents_sdk.py chat": 1,
    "agents_sdk.py responses": 1,
    "anthropic_messages.py": 2,
    "anthropic_runner.py": 1,
}
"""The model ends its answer to a question with an empty reply, which is no item of a response: a
client of responses would leave it out before the second question."""
TOLERANCE = 2e-5
TOOLS: dict[str, Callable[..., Any]] = {
    "multiply": lambda a, b: a * b,
    "submit": lambda value: "taken",
}


def compute(path: str, connection: Connection) -> None:
    """Answers requests, in a process that has an engine."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    settings = rollout_settings(
        prompt_length=FIRST_PROMPT, response_length=RESPONSE, max_num_batched_tokens=CONTEXT
    )
    place: Any = {"rank": 0, "world_size": 1, "seed": 5, "device": "cpu"}
    config = RolloutConfig(**settings)
    engine = get_rollout_engine("vllm")(config, TrainedModelConfig(path=path), **place)
    model = LlamaForCausalLM.from_pretrained(path)
    engine.load_weights(export(model, VERSION, world_size=1), VERSION)
    connection.send("ready")
    while True:
        request = connection.recv()
        connection.send(run(engine, [request])[request.name])


class Engine:
    """A real vLLM in a process of its own."""

    def __init__(self, path: str) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=compute, args=(path, theirs), daemon=True)
        self.process.start()
        self.lock = threading.Lock()
        assert self.connection.poll(STARTING_S) and self.connection.recv() == "ready"

    def draw(self, request: GenerationRequest) -> Completion:
        with self.lock:
            self.connection.send(request)
            assert self.connection.poll(DEADLINE_S), "the engine does not answer"
            return self.connection.recv()


@dataclass
class Call:
    """A call of the model and what was drawn."""

    prompt_ids: list[int]
    seed: int
    drawn_ids: list[int]
    log_probs: np.ndarray
    versions: tuple[Any, ...]


@dataclass
class EngineModel:
    """The model of a session: the engine, which its requests reach as they are."""

    engine: Engine
    requests: list[GenerationRequest] = field(default_factory=list)

    async def complete(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        return await asyncio.to_thread(self.engine.draw, request)


@dataclass
class World:
    """What the clients of this file talk to, and what they are compared with."""

    chat: ChatFormat
    engine: Engine
    served: Served
    seed: int = 0
    """With which the model multiplies by its tool in the first turn."""
    conversation: list[Call] = field(default_factory=list)
    """What the engine draws for the questions."""

    @property
    def sampling(self) -> Sampling:
        end = self.chat.tokenizer.eos_token_id
        return Sampling(temperature=0.9, top_k=-1, top_p=1.0, max_tokens=60, stop_token_ids=(end,))

    def draw(self, prompt_ids: Sequence[int], seed: int) -> Call:
        """Asks the engine itself."""
        drawn = self.engine.draw(GenerationRequest("direct", prompt_ids, seed, self.sampling))
        token_ids = drawn.token_ids.tolist()
        return Call(list(prompt_ids), seed, token_ids, drawn.log_probs, drawn.versions)

    def text(self, call: Call) -> str:
        """What the model has written, without the token that ends it."""
        return self.chat.tokenizer.decode(call.drawn_ids).removesuffix("<|im_end|>")


def user_turn(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def written(text: str) -> dict[str, Any] | None:
    """What a client is to see of a text of the model. None for a call that is no JSON, which
    vLLM reads as text, or in a stream in another way."""
    before, *blocks = re.split(r"<tool_call>(.*?)</tool_call>", text, flags=re.DOTALL)
    if "<tool_call>" in before + "".join(blocks[1::2]):
        return None
    try:
        calls = [json.loads(block) for block in blocks[::2]]
    except ValueError:
        return None
    return {"text": before, "calls": [[call["name"], call["arguments"]] for call in calls]}


def first_prompt(chat: ChatFormat) -> list[int]:
    return chat.tokens(f"<|im_start|>system\nmultiply submit<|im_end|>\n{user_turn(QUESTIONS[0])}")


def seed_that_multiplies(world: World) -> int:
    for seed in range(1, 100):
        reply = written(world.text(world.draw(first_prompt(world.chat), seed)))
        if reply and reply["calls"] and reply["calls"][0][0] == "multiply":
            return seed
    raise AssertionError("the model never multiplies")


def converse(world: World) -> list[Call]:
    """Asks the questions, without an endpoint, a template or a parser."""
    tokens = world.chat.tokens
    calls = []
    prompt = first_prompt(world.chat)
    further = list(QUESTIONS[1:])
    while True:
        seed = world.seed
        if calls:
            key = repr((world.seed, 0)).encode() + np.array(prompt, np.int64).tobytes()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1
        call = world.draw(prompt, seed)
        calls.append(call)
        reply = written(world.text(call))
        assert reply is not None and len(calls) < 9
        if not reply["calls"] and not further:
            return calls
        end = "" if world.chat.tokenizer.eos_token_id in call.drawn_ids else "<|im_end|>"
        results = [str(TOOLS[name](**arguments)) for name, arguments in reply["calls"]]
        turns = [f"<|im_start|>tool\n{result}<|im_end|>\n" for result in results]
        behind = "".join(turns) + "<|im_start|>assistant\n"
        if not turns:
            behind = user_turn(further.pop(0))
        prompt = [*prompt, *call.drawn_ids, *tokens(f"{end}\n{behind}")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    script = ROOT / "scripts/agents_environment.sh"
    subprocess.run(["bash", script, "harnesses"], check=True, timeout=1500)
    folder = tmp_path_factory.mktemp("world")
    make_world(folder, Settings(seed=3, product_rate=0.5, num_steps=250))
    path = folder / "model"
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (path / "config.json").write_text(json.dumps(config))
    chat = make_chat(AutoTokenizer.from_pretrained(path))
    served = Served(chat, ModelConfig(path=str(path)))
    engine = Engine(str(path))
    world = World(chat, engine, served)
    world.seed = seed_that_multiplies(world)
    world.conversation = converse(world)
    yield world
    engine.process.kill()
    served.close()


def converse_by(world: World, program: str, *arguments: str) -> tuple[Session, EngineModel, Any]:
    """Runs a client to its end, as an episode. Returns also what it saw of each reply."""
    model = EngineModel(world.engine)
    request = GenerationRequest("an episode", [7], world.seed, world.sampling)
    session = Session(EpisodeSpec(request, {}), model, LIMITS, name="an attempt")
    access = world.served.open(session)
    key = world.served.endpoint.api_key
    command = [PYTHON, ROOT / "tests/agent_clients" / program, access.base_url, key, *arguments]
    variables = {"PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1"}
    try:
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    finally:
        world.served.forget(access)
    assert ended.returncode == 0, ended.stderr
    return session, model, json.loads(ended.stdout.splitlines()[-1])


def recorded_calls(session: Session, model: EngineModel) -> list[Call]:
    """The calls as the rows of the episode have them."""
    calls = []
    for number, request in enumerate(model.requests):
        turn = session.turns[number]
        row = session.finish(0.0)[turn.row]
        end = session.rows[turn.row].ends[number] + 1
        start = end - turn.num_drawn
        assert row.response_mask[start:end].all()
        spans = [
            (version, first - start, last - start)
            for version, first, last in row.versions
            if start <= first < end
        ]
        before = [*row.prompt_ids.tolist(), *row.response_ids[:start].tolist()]
        drawn = row.response_ids[start:end].tolist()
        log_probs = row.log_probs[start:end]
        calls.append(Call(before, request.seed, drawn, log_probs, tuple(spans)))
    return calls


def rows_by_hand(calls: Sequence[Call]) -> list[list[int]]:
    """A call whose prompt has the tokens of a row before it continues that row."""
    rows: list[list[int]] = []
    for call in calls:
        continued = [row for row in rows if call.prompt_ids[: len(row)] == row]
        if continued:
            rows.remove(continued[-1])
        rows.append([*call.prompt_ids, *call.drawn_ids])
    return rows


def largest_difference(calls: Sequence[Call], others: Sequence[Call]) -> float:
    """Of log-probabilities. The rest has to be equal."""
    assert len(calls) == len(others)
    differences = []
    for call, other in zip(calls, others, strict=True):
        assert call.prompt_ids == other.prompt_ids
        assert call.seed == other.seed
        assert call.drawn_ids == other.drawn_ids
        assert call.versions == other.versions == ((VERSION, 0, len(call.drawn_ids)),)
        differences.append(np.abs(call.log_probs - other.log_probs).max())
    return float(max(differences))


def told(session: Session, calls: Sequence[Call], difference: float) -> str:
    num_drawn = sum(len(call.drawn_ids) for call in calls)
    return (
        f"{len(calls)} requests in {len(session.rows)} row(s): {num_drawn} drawn tokens are equal, "
        f"log-probabilities within {difference:.0e}"
    )


@pytest.mark.parametrize("form", ["whole", "streamed"])
@pytest.mark.parametrize("client", list(NUM_QUESTIONS))
def test_a_conversation_with_tools_is_one_row_of_what_direct_requests_draw(
    world: World, client: str, form: str, record_property: Callable[[str, object], None]
):
    questions = QUESTIONS[: NUM_QUESTIONS[client]]
    session, model, seen = converse_by(world, *client.split(), form, *questions)
    calls = recorded_calls(session, model)
    difference = largest_difference(calls, world.conversation[: len(calls)])
    assert difference < TOLERANCE
    assert seen == [written(world.text(call)) for call in calls]
    (row,) = session.finish(0.0)
    assert [[*row.prompt_ids, *row.response_ids]] == rows_by_hand(calls)
    num_drawn = sum(len(call.drawn_ids) for call in calls)
    assert row.response_mask.sum() == num_drawn
    # An empty reply to the first question ends it: multiply, submit, and that.
    assert len(calls) >= 2 and seen[0]["calls"][0][0] == "multiply"
    assert len(calls) == len(world.conversation) or len(questions) == 1
    assert seen[-1]["calls"] == []
    assert session.counts["drifted_calls"] == 0
    record_property("result", told(session, calls, difference))


@pytest.mark.parametrize("form", ["whole", "streamed"])
@pytest.mark.parametrize("kind", ["calls", "code"])
def test_an_agent_of_smolagents_has_rows_of_what_direct_requests_draw(
    world: World, kind: str, form: str, record_property: Callable[[str, object], None]
):
    """It has prompts of its own, and writes calls into the history as text, so that another row
    begins. The model does not know such prompts."""
    session, model, seen = converse_by(world, "smolagents_agent.py", kind, form, QUESTIONS[0])
    calls = recorded_calls(session, model)
    direct = [world.draw(request.prompt_ids, request.seed) for request in model.requests]
    difference = largest_difference(calls, direct)
    assert difference < TOLERANCE
    assert calls[0].seed == world.seed
    assert len({call.seed for call in calls}) == len(calls) >= 3
    expected = [written(world.text(call)) for call in calls]
    # Of its last request smolagents keeps no reply.
    for reply, other in zip(seen, expected, strict=False):
        assert reply == other or other is None
    assert any(expected[: len(seen)])
    rows = [[*row.prompt_ids, *row.response_ids] for row in session.finish(0.0)]
    assert sorted(rows) == sorted(rows_by_hand(calls))
    record_property("result", told(session, calls, difference))
