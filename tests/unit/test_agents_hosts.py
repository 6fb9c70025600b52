"""Code of a user in host processes: what it returns, how it fails, and what ends with it."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from agent_code import AGENT_FILE, MODULE, below, hosts_of, on_a_loop, pid_of, supervisor_of
from reward_processes import is_running

from verl_like.rewards import process
from verl_like.workers.agents import hosts as hosts_module
from verl_like.workers.agents.episode import EpisodeFailed, Restarted
from verl_like.workers.agents.hosts import HostedCode, Hosts, Seat, UserCodeError

LONG = 60.0
"""A deadline that no call reaches."""


@pytest.fixture(autouse=True)
def agent_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / f"{MODULE}.py"
    file.write_text(AGENT_FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


async def until_ended(pids: set[int]) -> None:
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def outcome(result: object) -> str:
    """The class of a failure, with its kind."""
    return f"{type(result).__name__} {getattr(result, 'kind', '')}".strip()


@on_a_loop
async def test_an_episode_resets_calls_tools_and_gets_its_reward() -> None:
    async with hosts_of() as hosts:
        seat = await hosts.seat()
        assert await seat.call("reset", {"start": 5, "question": "?", "answer": [7]}, LONG) == (
            "starts at 5 with ['answer', 'question']"
        )
        assert await seat.call("add", {"number": 2}, LONG) == "7", "a tool's result is text"
        assert await seat.call("add_later", {"number": 3}, LONG) == "10"
        assert await seat.call("get_reward", {}, LONG) == 1.25
        assert await seat.call("reset", {}, LONG) is None


@on_a_loop
async def test_results_of_tools_are_the_text_that_trl_makes_of_them() -> None:
    async with hosts_of() as hosts:
        seat = await hosts.seat()
        found = {
            what: await seat.call("give", {"what": what}, LONG)
            for what in ("pair", "none", "float", "half")
        }
        assert found == {"pair": "(1, 2)", "none": "None", "float": "0.5", "half": "a ? b"}


@pytest.mark.parametrize(("name", "reward"), [("NumPy", 0.25), ("NotANumber", math.nan)])
@on_a_loop
async def test_rewards_are_numbers(name: str, reward: float) -> None:
    async with hosts_of(name) as hosts:
        found = await (await hosts.seat()).call("get_reward", {}, LONG)
        assert found == pytest.approx(reward, nan_ok=True)


@on_a_loop
async def test_a_harness_is_called_with_its_row() -> None:
    async with hosts_of("run", "harness") as hosts:
        seat = await hosts.seat()
        given = {"row": {"points": 0.75}, "base_url": "http://h/s/key", "api_key": "key"}
        assert await seat.call("run", given, LONG) == 0.75
        assert await seat.call("run", given | {"api_key": "other"}, LONG) is None
        with pytest.raises(
            UserCodeError, match=r"KeyError: 'points'\n  at .*of_a_test.py:\d+ in run"
        ):
            await seat.call("run", given | {"row": {}}, LONG)


PROGRAM_OF_A_HARNESS = """
import os, subprocess, sys
from verl_like.workers.agents.reward_key import reward_key

PROGRAM = '''
import os
for pid in (os.getpid(), os.getppid()):
    for name in ("environ", "cmdline"):
        print(name, open(f"/proc/{pid}/{name}").read())
'''

async def run(row, base_url, api_key):
    command = [sys.executable, "-c", PROGRAM]
    return [reward_key(), subprocess.run(command, capture_output=True, text=True).stdout]
"""


@on_a_loop
async def test_the_reward_key_is_known_to_the_harness_and_not_to_programs_that_it_starts(
    agent_file: Path,
) -> None:
    agent_file.write_text(PROGRAM_OF_A_HARNESS)
    hosts = Hosts(HostedCode("harness", f"{MODULE}:run", "the second secret"), 1, 2.0)
    try:
        seat = await hosts.seat()
        arguments = {"row": {}, "base_url": "http://h/s/secret/v1", "api_key": "key"}
        key, seen = await seat.call("run", arguments, LONG)
    finally:
        await hosts.close()
    assert key == "the second secret" and key not in seen
    assert seen.count("environ ") == seen.count("cmdline ") == 2


@on_a_loop
async def test_a_host_process_imports_none_of_the_agents_libraries() -> None:
    async with hosts_of() as hosts:
        assert await (await hosts.seat()).call("give", {"what": "loaded"}, LONG) == "[]"


@on_a_loop
async def test_instances_are_used_again_unless_their_episode_failed() -> None:
    async with hosts_of() as hosts:

        async def number() -> tuple[Seat, str]:
            seat = await hosts.seat()
            return seat, await seat.call("give", {"what": "number"}, LONG)

        first, one = await number()
        second, two = await number()
        first.leave()
        third, three = await number()
        third.leave(failed=True)
        second.leave()
        _fourth, four = await number()
        _fifth, five = await number()
        assert (one, two, three, four, five) == ("1", "2", "1", "2", "3")


@on_a_loop
async def test_an_episode_goes_to_the_process_with_the_fewest() -> None:
    async with hosts_of(num_processes=2) as hosts:
        seats = [await hosts.seat() for _ in range(5)]
        pids = [await pid_of(seat) for seat in seats]
        assert len(set(pids)) == 2 and sorted(map(pids.count, set(pids))) == [2, 3]
        alone = min(set(pids), key=pids.count)
        for seat, pid in zip(seats, pids, strict=True):
            if pid == alone:
                seat.leave()
        assert [await pid_of(await hosts.seat()) for _ in range(3)] == [alone] * 3


@pytest.mark.parametrize("method", ["meet", "meet_later"])
@on_a_loop
async def test_methods_of_many_episodes_wait_at_once(method: str) -> None:
    async with hosts_of() as hosts:
        seats = [await hosts.seat() for _ in range(40)]
        found = await asyncio.gather(*[seat.call(method, {}, LONG) for seat in seats])
        assert found == ["None"] * 40


@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("divide", {"by": 0}, r"ZeroDivisionError: division by zero\n  at .*:\d+ in inner$"),
        ("add", {"amount": 1}, r"TypeError: .*unexpected keyword argument 'amount'$"),
        ("fail", {"how": "leave"}, r"SystemExit: bye\n  at .*:\d+ in fail$"),
        ("fail_later", {}, r"SystemExit: 3\n  at .*:\d+ in fail_later$"),
        ("fail", {"how": "long"}, r"^ValueError: y{3988}\n  at"),
        ("fail", {"how": "half"}, r"ValueError: a \? b\n"),
        ("give", {"what": "long"}, r"ValueError: the result has more than 1048576 bytes"),
    ],
)
@on_a_loop
async def test_an_error_of_the_code_is_its_text_and_the_process_goes_on(
    method: str, arguments: dict[str, object], text: str
) -> None:
    async with hosts_of() as hosts:
        seat = await hosts.seat()
        with pytest.raises(UserCodeError, match=text):
            await seat.call(method, arguments, LONG)
        await seat.call("reset", {"start": 1}, LONG)
        assert await seat.call("add", {"number": 2}, LONG) == "3"


@on_a_loop
async def test_a_reward_that_is_no_json_is_an_error() -> None:
    async with hosts_of("Odd") as hosts:
        seat = await hosts.seat()
        assert await seat.call("reset", {}, LONG) == {"no": "text"}
        with pytest.raises(UserCodeError, match="TypeError: set is no JSON value"):
            await seat.call("get_reward", {}, LONG)


@on_a_loop
async def test_an_environment_that_is_unavailable_fails_its_episode_alone() -> None:
    async with hosts_of() as hosts:
        seat = await hosts.seat()
        pid = await pid_of(seat)
        with pytest.raises(
            EpisodeFailed, match=r"Game: its process said Unavailable: the data"
        ) as failed:
            await seat.call("fail", {"how": "unavailable"}, LONG)
        assert failed.value.kind == "environment"
        assert await pid_of(seat) == pid


@on_a_loop
async def test_a_late_method_ends_its_process_and_the_other_episodes_start_again(
    tmp_path: Path,
) -> None:
    async with hosts_of() as hosts:
        late, waiting, idle = [await hosts.seat() for _ in range(3)]
        pid = await pid_of(idle)
        await idle.call("start", {"file": f"{tmp_path}/pid"}, LONG)
        found = await asyncio.gather(
            late.call("sleep", {"seconds": 600}, 0.3),
            late.call("sleep_later", {"seconds": 600}, LONG),
            waiting.call("sleep", {"seconds": 600}, LONG),
            return_exceptions=True,
        )
        assert list(map(outcome, found)) == [
            "EpisodeFailed deadline",
            "EpisodeFailed deadline",
            "Restarted",
        ]
        assert str(found[0]).endswith(
            "Game: its process did not end sleep within 0.3 s and was ended"
        )
        with pytest.raises(Restarted):
            await idle.call("add", {"number": 1}, LONG)
        again = await hosts.seat()
        assert await pid_of(again) != pid
        for seat in (late, waiting, idle):
            seat.leave(failed=True)
        await until_ended({pid, int((tmp_path / "pid").read_text())})


@on_a_loop
async def test_a_late_coroutine_is_cancelled_and_its_process_goes_on() -> None:
    async with hosts_of() as hosts:
        late, other = [await hosts.seat() for _ in range(2)]
        pid = await pid_of(other)
        waiting = asyncio.create_task(other.call("sleep", {"seconds": 2}, LONG))
        with pytest.raises(EpisodeFailed, match=r"did not end sleep_later within 0.2 s$") as failed:
            await late.call("sleep_later", {"seconds": 600}, 0.2)
        assert failed.value.kind == "deadline"
        assert await waiting == "None" and await pid_of(other) == pid


@on_a_loop
async def test_a_method_that_ends_soon_after_its_deadline_leaves_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts_module, "_GRACE_S", LONG)
    async with hosts_of() as hosts:
        seat = await hosts.seat()
        pid = await pid_of(seat)
        with pytest.raises(EpisodeFailed, match=r"did not end sleep within 0.1 s$"):
            await seat.call("sleep", {"seconds": 1}, 0.1)
        assert await pid_of(seat) == pid


@on_a_loop
async def test_a_coroutine_that_ignores_its_cancellation_ends_its_process(tmp_path: Path) -> None:
    async with hosts_of() as hosts:
        seat, other = [await hosts.seat() for _ in range(2)]
        pid = await pid_of(seat)
        waiting = asyncio.create_task(other.call("sleep_later", {"seconds": 600}, LONG))
        with pytest.raises(EpisodeFailed, match="was ended"):
            await seat.call("sleep_on", {"file": f"{tmp_path}/said"}, 0.2)
        assert (tmp_path / "said").read_text() == "cancelled"
        with pytest.raises(Restarted):
            await waiting
        await until_ended({pid})


@on_a_loop
async def test_where_it_is_not_known_who_holds_a_process_up_each_may_be_the_cause() -> None:
    async with hosts_of() as hosts:
        holding, late, idle = [await hosts.seat() for _ in range(3)]
        await pid_of(idle)
        calls = [holding.call("hold", {}, LONG), late.call("sleep_later", {"seconds": 600}, 0.5)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert list(map(outcome, found)) == ["EpisodeFailed deadline"] * 2
        with pytest.raises(Restarted):
            await pid_of(idle)


async def cancelled(seat: Seat, method: str) -> None:
    """Cancels a call that has begun."""
    call = asyncio.create_task(seat.call(method, {"seconds": 600}, LONG))
    await asyncio.sleep(0)
    await pid_of(seat)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@on_a_loop
async def test_a_cancelled_coroutine_ends_and_its_process_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts_module, "_GRACE_S", 0.5)
    async with hosts_of() as hosts:
        seat = await hosts.seat()
        pid = await pid_of(seat)
        await cancelled(seat, "sleep_later")
        await asyncio.sleep(1.0)
        assert await pid_of(seat) == pid


@on_a_loop
async def test_a_cancelled_method_ends_its_process_and_the_others_start_again() -> None:
    async with hosts_of() as hosts:
        seat, other = [await hosts.seat() for _ in range(2)]
        pid = await pid_of(other)
        waiting = asyncio.create_task(other.call("sleep", {"seconds": 600}, LONG))
        await cancelled(seat, "sleep")
        with pytest.raises(Restarted):
            await waiting
        await until_ended({pid})


@on_a_loop
async def test_a_process_that_dies_fails_the_episodes_that_have_a_call_in_it() -> None:
    async with hosts_of() as hosts:
        dying, other, idle = [await hosts.seat() for _ in range(3)]
        await pid_of(idle)
        calls = [other.call("sleep", {"seconds": 600}, LONG), dying.call("exit", {"code": 7}, LONG)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert list(map(outcome, found)) == ["EpisodeFailed environment"] * 2
        assert str(found[1]).endswith(":Game: its process died with exit code 7")
        with pytest.raises(Restarted):
            await pid_of(idle)
        assert await (await hosts.seat()).call("reset", {}, LONG) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@on_a_loop
async def test_a_host_process_that_is_killed_or_stopped_is_replaced(
    number: int, tmp_path: Path
) -> None:
    async with hosts_of(num_processes=2) as hosts:
        one, other = [await hosts.seat() for _ in range(2)]
        pid = await pid_of(one)
        await one.call("start", {"file": f"{tmp_path}/pid"}, LONG)
        os.kill(pid, number)
        if number == signal.SIGKILL:
            await until_ended({pid})
        while (
            number == signal.SIGSTOP and "State:\tT" not in Path(f"/proc/{pid}/status").read_text()
        ):
            time.sleep(0.001)
        with pytest.raises((EpisodeFailed, Restarted)):
            await one.call("add", {"number": 1}, 0.5)
        await until_ended({pid, int((tmp_path / "pid").read_text())})
        one.leave(failed=True)
        await other.call("reset", {"start": 1}, LONG)
        assert await other.call("add", {"number": 2}, LONG) == "3"
        assert await pid_of(await hosts.seat()) not in (pid, await pid_of(other))


@on_a_loop
async def test_a_stopped_supervisor_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_S", 1.0)
    before = below()
    async with hosts_of() as hosts:
        pid = await pid_of(await hosts.seat())
        os.kill(supervisor_of(pid), signal.SIGSTOP)
    assert below() == before and not is_running(pid)


@on_a_loop
async def test_a_process_above_its_memory_is_ended() -> None:
    async with hosts_of(max_memory_gb=0.5) as hosts:
        seat = await hosts.seat()
        with pytest.raises(EpisodeFailed, match=r"used more memory than agent.max_memory_gb=0.5"):
            await seat.call("eat", {}, LONG)


@pytest.mark.parametrize(
    "content",
    [
        "\xff\n",
        "[1]\n",
        "[" * 9000 + "\n",
        '{"id": 2, "value": 1, "more": 2}\n',
        '{"id": true, "value": 1}\n',
        '{"id": "2", "value": 1}\n',
        '{"id": 900, "value": 1}\n',
        '{"id": 2, "value": "\\ud800"}\n',
        '{"id": 2, "error": "' + "x" * 4001 + '"}\n',
        "x" * (1 << 20) + "x",
    ],
)
@on_a_loop
async def test_code_that_writes_to_the_socket_fails_its_episode(content: str) -> None:
    async with hosts_of() as hosts:
        seat = await hosts.seat()
        with pytest.raises(
            EpisodeFailed, match=r"its process sent .*, which is no answer"
        ) as failed:
            await seat.call("write", {"content": content}, LONG)
        assert failed.value.kind == "environment" and len(str(failed.value)) < 300


@pytest.mark.parametrize(
    ("content", "path", "text"),
    [
        (
            "",
            "no_such_module:Game",
            r"agent.environment=no_such_module:Game cannot .*ModuleNotFoundError",
        ),
        (
            "",
            "broken:Game",
            r"broken:Game cannot be imported \(AttributeError: .*'Game'.* give module:name",
        ),
        (
            "1 / 0",
            "broken:Game",
            r"broken:Game cannot be imported \(ZeroDivisionError: division by zero\)",
        ),
        ("raise SystemExit(4)", "broken:Game", r"broken:Game cannot be imported \(SystemExit: 4\)"),
        (
            "import os; os._exit(4)",
            "broken:Game",
            r"its process died with exit code 4: load the module with",
        ),
        ("x = 1", "broken", r"agent.environment=broken cannot be imported .*: give module:name"),
    ],
)
@on_a_loop
async def test_code_that_cannot_be_loaded_is_refused(
    tmp_path: Path, content: str, path: str, text: str
) -> None:
    (tmp_path / "broken.py").write_text(content)
    before = below()
    hosts = Hosts(HostedCode("environment", path), 2, 2.0)
    with pytest.raises(ValueError, match=text):
        await hosts.start()
    await hosts.close()
    assert below() == before


@on_a_loop
async def test_a_module_that_hangs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(hosts_module, "START_S", 1.0)
    hosts = Hosts(HostedCode("harness", "broken:run"), 1, 2.0)
    with pytest.raises(
        ValueError, match=r"agent.harness=broken:run: its process did not end load within 1 s"
    ):
        await hosts.start()
    await hosts.close()


@on_a_loop
async def test_the_current_folder_is_searched_for_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/of_the_folder.py").write_text(
        "class Game:\n    def reset(self): return 'here'"
    )
    monkeypatch.chdir(tmp_path / "folder")
    hosts = Hosts(HostedCode("environment", "of_the_folder:Game"), 1, 2.0)
    assert await (await hosts.seat()).call("reset", {}, LONG) == "here"
    await hosts.close()


DYING = """
import os, pathlib
marker = pathlib.Path(__file__).with_name("how_often_an_import_dies")
num_deaths = int(marker.read_text()) if marker.exists() else 0
if num_deaths:
    marker.write_text(str(num_deaths - 1))
    os._exit(9)
class Game:
    def reset(self): return "here"
    def exit(self): os._exit(3)
"""


@pytest.mark.parametrize("how_often", [2, 3])
@on_a_loop
async def test_a_process_that_dies_while_it_loads_is_replaced_twice(
    tmp_path: Path, how_often: int
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    hosts = Hosts(HostedCode("environment", "dying:Game"), 1, 2.0)
    await hosts.start()
    with pytest.raises(EpisodeFailed):
        await (await hosts.seat()).call("exit", {}, LONG)
    (tmp_path / "how_often_an_import_dies").write_text(str(how_often))
    if how_often == 2:
        assert await (await hosts.seat()).call("reset", {}, LONG) == "here"
    else:
        with pytest.raises(
            ValueError, match=r"3 host processes in a row ended .*exit code 9.*out of memory"
        ):
            await hosts.seat()
    await hosts.close()


@on_a_loop
async def test_an_episode_that_is_cancelled_while_its_process_loads_gives_up_its_place() -> None:
    hosts = Hosts(HostedCode("environment", f"{MODULE}:Game"), 2, 2.0)
    waiting = [asyncio.create_task(hosts.seat()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting, timeout=30)
    pids = [await pid_of(await hosts.seat()) for _ in range(2)]
    assert pids[0] != pids[1]
    await hosts.close()


@on_a_loop
async def test_closing_ends_processes_whose_methods_hang(tmp_path: Path) -> None:
    before = below()
    async with hosts_of(num_processes=2) as hosts:
        seats = [await hosts.seat() for _ in range(2)]
        await seats[0].call("start", {"file": f"{tmp_path}/pid"}, LONG)
        calls = [asyncio.create_task(seat.call("sleep", {"seconds": 600}, LONG)) for seat in seats]
        await asyncio.sleep(0.1)
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert list(map(outcome, found)) == ["Restarted"] * 2
    assert below() == before and not is_running(int((tmp_path / "pid").read_text()))


def test_a_killed_agent_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio
        from verl_like.workers.agents.hosts import HostedCode, Hosts
        async def main():
            hosts = Hosts(HostedCode("environment", "{MODULE}:Game"), 1, 2.0)
            seat = await hosts.seat()
            await seat.call("start", {{"file": "{tmp_path}/pid"}}, 60.0)
            print(await seat.call("give", {{"what": "pid"}}, 60.0), flush=True)
            await seat.call("sleep", {{"seconds": 600}}, 600.0)
        asyncio.run(main())
        """)
    )
    agent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    pids = {int(agent.stdout.readline()), int((tmp_path / "pid").read_text())}
    assert all(map(is_running, pids))
    agent.kill()
    agent.wait(timeout=30)
    asyncio.run(until_ended(pids))
