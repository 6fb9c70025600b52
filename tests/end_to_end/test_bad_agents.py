"""Agents that cannot act are refused before Ray starts, with what, value, why and fix."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from optional_packages import needs_vllm
from test_bad_input import Refusal, refusal  # noqa: F401  a fixture

pytestmark = needs_vllm

CODE = '''
class NoTool:
    def reset(self, **row): pass
    def get_reward(self): return 1.0

class Adder:
    def reset(self, **row): pass
    def get_reward(self): return 1.0

class NoHint(Adder):
    def add(self, a, b: int):
        """Adds.

        Args:
            a: one
            b: the other
        """

class NoDocstring(Adder):
    def add(self, a: int, b: int): return a + b

def run(row, base_url, api_key): return 1.0

async def act(row, base_url, api_key): return 1.0
'''
EXTENDABLE = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
LAST_MESSAGE_ALONE = "{{ messages[-1].content }}<eos>"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_agents.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("environment=bad_agents:NoTool", "has no public method beside reset and get_reward"),
        ("environment=bad_agents:NoHint", "the tool add cannot be described"),
        ("environment=bad_agents:NoDocstring", "it has no docstring"),
        ("environment=bad_agents:Nothing", "cannot be imported"),
        ("harness=bad_agents:run", "is no async function: write `async def run"),
        ("server=openenv://127.0.0.1:1", "does not answer as OpenEnv 0.10 does"),
        ("server=verifiers://127.0.0.1:1", "serve the environment with verifiers 0.4.0"),
    ],
)
def test_code_that_cannot_act_and_a_server_that_does_not_answer_are_refused(
    refusal: Refusal,  # noqa: F811
    setting: str,
    expected: str,
):
    message = refusal(f"agent.{setting}")
    assert f"agent.{setting}" in message and expected in message


@pytest.mark.usefixtures("code")
def test_a_parser_that_there_is_not_is_refused(refusal: Refusal, tiny_llama: Callable):  # noqa: F811
    model, _ = tiny_llama(template=EXTENDABLE)
    settings = ["agent.harness=bad_agents:act", f"actor_rollout_ref.model.path={model}"]
    message = refusal(*settings, "actor_rollout_ref.rollout.multi_turn.format=nonsense")
    assert "multi_turn.format=nonsense with agent.reasoning_parser=None does not work" in message
    message = refusal(*settings, "agent.reasoning_parser=nothing")
    assert "multi_turn.format=hermes with agent.reasoning_parser=nothing does not" in message
    assert "Take the parsers that vLLM's documentation names for the model" in message


@pytest.mark.usefixtures("code")
def test_a_template_that_no_second_turn_extends_is_refused(refusal: Refusal, tiny_llama: Callable):  # noqa: F811
    model, _ = tiny_llama(template=LAST_MESSAGE_ALONE)
    settings = ["agent.harness=bad_agents:act", f"actor_rollout_ref.model.path={model}"]
    message = refusal(*settings)
    assert "the chat template does not extend the text of a conversation" in message
    assert "'1<eos>' became '2<eos>'; set actor_rollout_ref.model.tokenizer_path" in message


@pytest.mark.usefixtures("code")
def test_a_port_that_is_taken_and_one_that_there_is_not_are_refused(refusal: Refusal):  # noqa: F811
    """The endpoint of the second rank of the node gets the next port."""
    setting = "agent.harness=bad_agents:act"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refusal(setting, f"agent.port={port - 1}")
    assert f"agent.port leads to port {port}, which cannot be taken: [Errno 98]" in message
    message = refusal(setting, "agent.port=65535")
    assert "agent.port leads to port 65536, which cannot be taken" in message
