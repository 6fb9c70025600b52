"""A fork of the template runs a script as a process of its own would."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_workers import shared_template

from verl_like.trainer.run import worker_template

SCRIPT = """
import json, os, signal, sys
answer = {"arguments": sys.argv[1:], "given": os.environ.get("GIVEN"), "folder": os.getcwd(), "parent": os.getppid()}
answer |= {"preloaded": "statistics" in sys.modules, "name": __name__, "input": sys.stdin.read()}
answer["interrupt"] = signal.getsignal(signal.SIGINT) is signal.default_int_handler
sys.stderr.write("an error")
print(json.dumps(answer))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def run(command: str, script: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GIVEN": "a worker's"}
    arguments = {
        "capture_output": True,
        "text": True,
        "timeout": 60,
        "cwd": script.parent,
        "env": environment,
    }
    return subprocess.run(
        f"exec {command} {script} --rank 3", shell=True, input="typed", **arguments
    )


def test_a_fork_has_the_arguments_environment_folder_and_streams_of_its_command_line(script: Path):
    template = worker_template.start(["statistics"])
    try:
        answers = [run(template.command, script) for _ in range(2)]
    finally:
        template.close()
    for answer in answers:
        assert answer.stderr == "an error"
        assert json.loads(answer.stdout) == {
            "arguments": ["--rank", "3"],
            "given": "a worker's",
            "folder": str(script.parent),
            "input": "typed",
            "parent": template.process.pid,
            "preloaded": True,
            "name": "__main__",
            "interrupt": True,
        }


def test_without_its_template_a_worker_starts_as_any_process(script: Path):
    template = worker_template.start(["statistics"])
    template.close()
    answer = json.loads(run(template.command, script).stdout)
    assert (
        answer["preloaded"] is False
        and answer["given"] == "a worker's"
        and answer["arguments"] == ["--rank", "3"]
    )


def test_a_template_ends_without_the_last_words_of_what_it_imported(tmp_path: Path):
    (tmp_path / "talkative.py").write_text("import atexit\natexit.register(print, 'leaked')\n")
    program = (
        "from verl_like.trainer.run import worker_template\n"
        "template = worker_template.start(['talkative'])\n"
        "template.process.stdin.close()\n"
        "assert template.process.wait(timeout=60) == 0\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose paths have at most 107 characters; pytest's folder may be one of
    many."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_template_ends_with_the_process_that_started_it_and_its_folder_goes_when_the_next_starts(
    short_path: Path,
):
    program = (
        "from verl_like.trainer.run import worker_template\n"
        "template = worker_template.start([])\n"
        "print(template.process.pid, flush=True)\n"
        "input()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = os.environ | {"TMPDIR": str(short_path)}
    with subprocess.Popen([sys.executable, "-c", program], env=env, **pipes) as driver:
        pid = int(driver.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
        driver.kill()
    (left,) = short_path.glob("verl_like_*")
    worker_gone = subprocess.run(["tail", "--pid", str(pid), "-f", "/dev/null"], timeout=60)
    assert worker_gone.returncode == 0
    subprocess.run(
        [sys.executable, "-c", program],
        input="",
        env=env,
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert not left.exists()


def test_a_request_whose_sender_ended_in_the_middle_of_it_runs_nothing():
    theirs, ours = socket.socketpair()
    theirs.sendall(b'{"arguments": ["nothing.py"')
    theirs.close()
    before = list(sys.argv)
    worker_template._become_worker(ours)
    assert sys.argv == before


def test_what_is_imported_before_workers_are_forked_does_not_import_ray(tmp_path: Path):
    """A fork of a process that has Ray's library dies as it starts, and Ray starts another one, for
    ever."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print('ray' in sys.modules, 'torch' in sys.modules)")
    done = run(shared_template().command, script)
    assert done.stdout.strip() == "False True"
