"""Rewards over HTTP: the client against a server that goes wrong in every way, and the reference
server."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from examples.remote_reward.serve import MAX_CONNECTIONS
from verl_like.rewards.loader import load_reward_function
from verl_like.rewards.manager import RewardError, RewardFunctionSpec, RewardManager, RewardSample
from verl_like.rewards.remote import RemoteReward

TOKEN = "a-token-of-the-test"

# What the server does is the path; `requests` keeps what it was sent.
ODD_SERVER = """
import json, os, pathlib, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPLIES = {
    "500_then_200": b"0.75", "kill_itself": b"0.75", "cut": b"0.75",
    "number": b"0.25", "null": b"null", "true": b"true", "object": b'{"score": 1, "acc": 0.5, "why": "so", "no": null}',
    "nan": b"NaN", "infinite": b'{"score": 1, "acc": Infinity}', "large": b"1e39", "many_digits": b"9" * 10_000,
    "text": b"<html>not JSON</html>", "string": b'"1.0"', "list": b"[1.0]", "no_score": b'{"acc": 1.0}',
    "nested": b'{"score": 1, "acc": {"a": 1}}', "deep": b"[" * 60_000,
    "surrogate": b'{"score": 1, "a": "\\\\ud800"}',
    "latin": b'{"score": 1, "a": "\\xe9"}', "empty": b"", "huge": b" " * 65_536 + b"1.0",
    "large_enough": b" " * 65_533 + b"1.0",
}

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path, _, query = self.path[1:].partition("?")
        count = len(requests.get(path, []))
        requests.setdefault(path, []).append([dict(self.headers.items()), body.decode(), query])
        if path == "requests":
            return self.reply(200, json.dumps(requests).encode())
        if path == "kill_itself" and count == 0:
            return self.connection.close()
        if path == "cut" and count == 0:
            return self.reply(200, b"1", length=2)
        if path == "500" or path == "500_then_200" and count == 0:
            return self.reply(500, b"out of memory")
        if path.isdecimal():
            return self.reply(int(path), b"go away, " + self.headers.get("Authorization", "").encode())
        if path == "slow":
            time.sleep(60)
        if path == "drip":
            self.wfile.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 600\\r\\n\\r\\n")
            for _ in range(600):
                self.wfile.write(b" ")
                time.sleep(0.1)
        self.reply(200, REPLIES[path])

    def reply(self, status, content, length=None):
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/number")
        self.send_header("Content-Length", str(length or len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments): pass
    def handle_error(self, *arguments): pass

requests = {}
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.handle_error = lambda *arguments: None
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def program(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that is killed afterwards."""
    env = {
        name: value for name, value in os.environ.items() if name != "VERL_LIKE_REWARD_TOKEN"
    } | environment
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    """The URL of the odd server, without a path."""
    with program("-c", ODD_SERVER, "0") as server:
        yield f"http://127.0.0.1:{line_of(server)}"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_LIKE_REWARD_TOKEN", TOKEN)


def ask(url: str, timeout_s: float = 2.0, **arguments: Any) -> dict[str, Any]:
    sample = {
        "data_source": "a",
        "solution_str": "ä",
        "ground_truth": ["1"],
        "extra_info": None,
        "raw_prompt": None,
    }
    return RemoteReward(url, timeout_s)(**sample | arguments)


def requests_to(odd: str, path: str) -> list[list[Any]]:
    request = urllib.request.Request(f"{odd}/requests", data=b"", method="POST")
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response).get(path, [])


def test_a_sample_is_posted_with_its_prompt_and_the_token(odd: str, token: None):
    prompt = [{"role": "user", "content": "1+1"}]
    assert ask(f"{odd}/number?model=b", raw_prompt=prompt, extra_info={"index": 3}) == {
        "score": 0.25
    }
    ((headers, body, query),) = requests_to(odd, "number")
    assert json.loads(body) == {
        "data_source": "a",
        "solution_str": "ä",
        "ground_truth": ["1"],
        "extra_info": {"index": 3},
        "raw_prompt": prompt,
    }
    assert (
        headers["Authorization"] == f"Bearer {TOKEN}"
        and headers["Content-Type"] == "application/json"
    )
    assert query == "model=b"


def test_replies_are_a_number_null_or_a_flat_object(odd: str):
    assert ask(f"{odd}/null") == {"score": None} and ask(f"{odd}/true") == {"score": True}
    assert ask(f"{odd}/object") == {"score": 1.0, "acc": 0.5, "why": "so", "no": None}
    assert ask(f"{odd}/large_enough") == {"score": 1.0}
    (_, _, query), *_ = requests_to(odd, "null")
    assert query == ""


@pytest.mark.parametrize("path", ["500_then_200", "kill_itself", "cut"])
def test_a_failed_connection_and_a_status_of_5xx_are_tried_again(odd: str, path: str):
    assert ask(f"{odd}/{path}", timeout_s=20.0) == {"score": 0.75}
    assert len(requests_to(odd, path)) == 2


def test_a_server_that_is_not_there_is_named_with_the_cause():
    with pytest.raises(
        RuntimeError,
        match=r"^http://127.0.0.1:1/score cannot be reached \(ConnectionRefusedError: ",
    ):
        ask("http://127.0.0.1:1/score", timeout_s=0.2)


def test_tries_end_with_the_deadline_and_pauses_double(odd: str):
    with pytest.raises(
        RuntimeError, match=f"^{odd}/500 answered status 500: 'out of memory'; correct the server"
    ):
        ask(f"{odd}/500", timeout_s=1.2)  # 0.96 s hold the pauses 0.1, 0.2 and 0.4, not 0.8 as well
    assert 2 <= len(requests_to(odd, "500")) <= 4


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 429])
def test_no_other_status_is_tried_again_and_the_token_is_not_shown(
    odd: str, token: None, status: int
):
    with pytest.raises(RuntimeError) as error:
        ask(f"{odd}/{status}")
    assert str(error.value) == (
        f"{odd}/{status} answered status {status}: 'go away, Bearer [token]'; correct the server, "
        "custom_reward_function.path, or the token in VERL_LIKE_REWARD_TOKEN"
    )
    assert len(requests_to(odd, str(status))) == 1


@pytest.mark.parametrize(
    ("path", "start"),
    [
        ("nan", "NaN"),
        ("infinite", '{"score": 1, "acc": Infinity}'),
        ("large", "1e39"),
        ("many_digits", "9999999"),
        ("text", "<html>not JSON"),
        ("string", '"1.0"'),
        ("list", "[1.0]"),
        ("no_score", '{"acc"'),
        ("nested", '{"score": 1, "acc": {'),
        ("deep", "[[[["),
        ("surrogate", '{"score": 1, "a": '),
        ("latin", '{"score": 1, "a": "\ufffd"}'),
        ("huge", "   "),
        ("empty", ""),
    ],
)
def test_a_reply_that_is_no_score_is_refused_with_its_first_characters(
    odd: str, path: str, start: str
):
    with pytest.raises(RuntimeError) as error:
        ask(f"{odd}/{path}")
    assert str(error.value).startswith(f"{odd}/{path} ") and start in str(error.value)
    assert "more than 65536 bytes" in str(error.value) or "flat object" in str(error.value)
    assert len(str(error.value)) < 600 and len(requests_to(odd, path)) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///score",
        "http://me:secret@host/score",
        "http://host/a b",
        "http://host:port/",
        "http://host:99999/",
    ],
)
def test_a_url_that_cannot_be_asked_is_refused_without_its_password(url: str):
    with pytest.raises(
        ValueError, match=r"custom_reward_function.path=.*URL|Port out of range"
    ) as error:
        RemoteReward(url, 2.0)
    assert "secret" not in str(error.value)


def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("VERL_LIKE_REWARD_TOKEN", f"{TOKEN}\n")
    with pytest.raises(ValueError, match="white space") as error:
        RemoteReward("http://127.0.0.1:1/score", 2.0)
    assert TOKEN not in str(error.value)


def test_settings_of_a_python_function_are_refused_beside_a_url():
    for spec in (
        RewardFunctionSpec("https://host/", "other"),
        RewardFunctionSpec("https://host/", reward_kwargs={"a": 1}),
    ):
        with pytest.raises(ValueError, match="do not reach the server https://host/"):
            load_reward_function(spec)


@contextlib.contextmanager
def managed(url: str, **options: Any) -> Iterator[RewardManager]:
    manager = RewardManager(
        RewardFunctionSpec(url), **{"num_workers": 1, "timeout_s": 2.0} | options
    )
    yield manager
    manager.close()


def sample(solution_str: str, ground_truth: Any = "46") -> RewardSample:
    return RewardSample(
        "row 3",
        "exact_match",
        solution_str,
        ground_truth,
        {"index": 3},
        [{"role": "user", "content": "1+1"}],
    )


def test_a_slow_and_a_dripping_server_cost_their_sample_the_deadline(odd: str):
    with pytest.raises(TimeoutError, match=f"^{odd}/slow gave no answer within 0.4 s"):
        ask(f"{odd}/slow", timeout_s=0.5)
    for path in ("slow", "drip"):
        with managed(f"{odd}/{path}", timeout_s=2.0, on_error="skip") as manager:
            result = manager.submit([sample("1")]).get()
        assert result.skipped.tolist() == [True] and (result.num_errors, result.num_timeouts) == (
            0,
            1,
        )


def test_a_server_that_refuses_every_row_is_refused_under_each_policy(odd: str, token: None):
    for on_error in ("fail", "skip", "score"):
        with (
            managed(f"{odd}/403", on_error=on_error) as manager,
            pytest.raises(RewardError) as error,
        ):
            manager.check([sample("1")])
        assert (
            f"the reward of row 3 (data_source 'exact_match') failed: RewardServerError: {odd}/403"
            in str(error.value)
        )
        assert "status 403: 'go away" in str(error.value) and TOKEN not in str(error.value)


def test_a_server_that_is_killed_in_a_request_and_starts_again_loses_no_sample():
    with program("-c", ODD_SERVER, "0") as first:
        port = line_of(first)
        with managed(f"http://127.0.0.1:{port}/slow", timeout_s=30.0) as manager:
            pending = manager.submit([sample("1")])
            while not requests_to(f"http://127.0.0.1:{port}", "slow"):
                time.sleep(0.01)
            first.kill()
            first.wait(timeout=30)
            with program(
                "-c", ODD_SERVER.replace("time.sleep(60)", "path = 'number'"), port
            ) as second:
                assert line_of(second) == port
                assert pending.get().scores.tolist() == [0.25]


OWN_REWARD = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info, raw_prompt):
    if solution_str == "wait":
        pathlib.Path(__file__).with_name("begun").touch()
        time.sleep(1.0)
    if solution_str == "none": return None
    return {"score": ground_truth / len(solution_str), "asked": raw_prompt[0]["content"], "right": True}
"""


@contextlib.contextmanager
def served(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The reference server, its URL and its token."""
    with program(
        "-m", "examples.remote_reward.serve", *arguments, "--port=0", **environment
    ) as server:
        token = environment.get("VERL_LIKE_REWARD_TOKEN") or line_of(server).removeprefix(
            "export VERL_LIKE_REWARD_TOKEN="
        )
        yield server, line_of(server).rpartition(" ")[2], token


@pytest.fixture
def own_reward(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN_REWARD)
    return str(tmp_path / "own.py")


def test_the_server_scores_with_a_function_and_stops_after_the_requests_that_have_begun(
    own_reward: str, monkeypatch: pytest.MonkeyPatch
):
    with served(own_reward) as (server, url, token):
        assert url.startswith("http://127.0.0.1:") and url.endswith("/score") and len(token) > 40
        monkeypatch.setenv("VERL_LIKE_REWARD_TOKEN", token)
        arguments = {"raw_prompt": [{"role": "user", "content": "1+1"}], "ground_truth": 3}
        assert ask(url, solution_str="four", **arguments) == {
            "score": 0.75,
            "asked": "1+1",
            "right": True,
        }
        assert ask(url, solution_str="none", **arguments) == {"score": None}
        with pytest.raises(
            RuntimeError, match=r"answered status 422: .*ZeroDivisionError: division by zero"
        ):
            ask(url, solution_str="", **arguments)
        with pytest.raises(
            RuntimeError, match=r"answered status 400: .*unexpected keyword argument .*more"
        ):
            ask(url, more=1, **arguments)
        with pytest.raises(RuntimeError, match=r"answered status 404: .*posted to /score"):
            ask(url.replace("/score", "/scores"))
        with managed(url, timeout_s=20.0) as manager:
            pending = manager.submit([sample("wait", 8)])
            while not Path(own_reward).with_name("begun").exists():
                time.sleep(0.01)
            server.send_signal(signal.SIGTERM)
            assert pending.get().scores.tolist() == [2.0]
        assert server.wait(timeout=30) == 0


def test_the_server_asks_for_its_token_and_bounds_a_request(
    odd: str, monkeypatch: pytest.MonkeyPatch
):
    with served(VERL_LIKE_REWARD_TOKEN=TOKEN) as (server, url, _):
        monkeypatch.delenv("VERL_LIKE_REWARD_TOKEN", raising=False)
        for wrong in ("", "another", f"{TOKEN}x"):
            monkeypatch.setenv("VERL_LIKE_REWARD_TOKEN", wrong)
            with pytest.raises(
                RuntimeError, match=r"answered status 401: .*the bearer token is missing or wrong"
            ):
                ask(url, data_source="exact_match", solution_str="1")
        monkeypatch.setenv("VERL_LIKE_REWARD_TOKEN", TOKEN)
        assert ask(url, data_source="exact_match", solution_str="1") == {"score": 1.0}
        for length in ("99999999", "1" * 5000, "-1", "x"):
            headers = {"Content-Length": length, "Authorization": f"Bearer {TOKEN}"}
            request = urllib.request.Request(url, data=b"", headers=headers)
            with pytest.raises(urllib.error.HTTPError, match="413"):
                urllib.request.urlopen(request, timeout=10)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0


def test_the_server_checks_the_token_before_the_body_comes():
    with served(VERL_LIKE_REWARD_TOKEN=TOKEN) as (_, url, _):
        address = ("127.0.0.1", urlsplit(url).port)
        for length, token, status in (("1000", "another", b" 401 "), ("99999999", TOKEN, b" 413 ")):
            # The server's own limit is 30 s
            with socket.create_connection(address, timeout=20) as client:
                head = (
                    f"POST /score HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: "
                    f"{length}\r\n\r\n"
                )
                client.sendall(head.encode())
                assert status in client.recv(1 << 16)


def test_the_server_closes_the_connections_above_its_limit_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("VERL_LIKE_REWARD_TOKEN", TOKEN)
    with served(VERL_LIKE_REWARD_TOKEN=TOKEN) as (_, url, _), contextlib.ExitStack() as clients:
        address = ("127.0.0.1", urlsplit(url).port)
        for _ in range(MAX_CONNECTIONS):
            clients.enter_context(socket.create_connection(address, timeout=20))
            time.sleep(0.01)  # a server that accepts later would be asked again after seconds
        with socket.create_connection(address, timeout=20) as client:
            assert client.recv(1) == b""
        clients.close()
        assert ask(url, timeout_s=20.0, data_source="exact_match", solution_str="1") == {
            "score": 1.0
        }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--host=0.0.0.0"],
            "--host=0.0.0.0 can be reached from other machines: set VERL_LIKE_REWARD_TOKEN",
        ),
        (["--host="], "can be reached from other machines"),
        (["no_such_file.py"], "there is no file"),
    ],
)
def test_what_the_server_cannot_serve_is_refused(arguments: list[str], message: str):
    env = {name: value for name, value in os.environ.items() if name != "VERL_LIKE_REWARD_TOKEN"}
    command = [sys.executable, "-m", "examples.remote_reward.serve", "--port=0", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert result.returncode == 2 and message in result.stderr and not result.stdout
