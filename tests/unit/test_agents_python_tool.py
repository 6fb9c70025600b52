"""Code of the model in its sandbox: what it can do, and what it tries in vain."""

import asyncio
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest
from agent_code import MODULE, on_a_loop

from verl_like.workers.agents.episode import EpisodeFailed
from verl_like.workers.agents.host_process import Unavailable
from verl_like.workers.agents.hosts import HostedCode, Hosts, UserCodeError
from verl_like.workers.agents.python_tool import PythonTool

CAN_UNSHARE = (
    shutil.which("unshare") is not None
    and not subprocess.run(["unshare", "-Urn", "true"], capture_output=True).returncode
)


def output(code: str, **limits: float) -> str:
    """What code prints. Where this machine has no namespaces, the tool is refused, and the test
    ends there."""
    if CAN_UNSHARE:
        return PythonTool(**limits).python(textwrap.dedent(code))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unshare -Urn true"):
        PythonTool()
    pytest.skip("no namespaces here: the tool was refused")


def processes_with(mark: str) -> list[int]:
    """The processes of this machine that have a text in their command."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:  # it has ended
            continue
    return found


def until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_code_prints_what_it_computes_with_the_libraries_of_this_environment() -> None:
    assert output(
        "import numpy, math\nprint(int(numpy.full(3, 2) @ numpy.ones(3)), math.pi)\nexit()"
    ) == ("6 3.141592653589793\n")


def test_errors_are_shown_with_their_line() -> None:
    found = output("print('é')\n1 / 0")
    assert found.startswith('é\nTraceback (most recent call last):\n  File "<stdin>", line 2')
    assert found.endswith("ZeroDivisionError: division by zero\n")
    assert "[killed by signal 11]" in output("import ctypes; ctypes.string_at(0)")


def test_long_code_and_code_with_half_a_surrogate_pair_are_run() -> None:
    assert output("'''" + "x" * 300_000 + "'''\nprint('end')") == "end\n"
    assert output("print('a \ud800 b')") == "a ? b\n"


def test_nothing_is_left_for_the_next_code() -> None:
    where_it_is = "import os; print(os.listdir(), os.getcwd())"
    at_first = output(where_it_is)  # if Python lies below /tmp, the way to it is there
    assert at_first.endswith("] /tmp\n") and "a.py" not in at_first
    assert output("open('a.py', 'w').write('b = 7'); import a; print(a.b)") == "7\n"
    assert output(where_it_is) == at_first


def test_no_file_of_this_machine_but_those_of_python_is_there(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    canaries = [tmp_path / mark, Path.home() / f".{mark}", Path.cwd() / "pyproject.toml"]
    for file in canaries[:2]:
        file.write_text("a secret")
    paths = [
        *map(str, canaries),
        "/etc/passwd",
        "/proc/1/environ",
        "/proc/self/status",
        "/dev/null",
    ]
    try:
        found = output(
            f"""
            import os
            for path in {paths!r}:
                try: print(open(path).read())
                except OSError as error: print(type(error).__name__)
            for folder, folders, files in os.walk("/"):
                for file in files:
                    if {mark!r} in file: print(folder, file)
            """
        )
    finally:
        canaries[1].unlink()
    assert found == "FileNotFoundError\n" * len(paths)


def test_no_variable_of_this_environment_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "a secret")
    found = output("import os; print(sorted(os.environ), 'a secret' in str(os.environ))")
    assert found == "['LC_CTYPE', 'OMP_NUM_THREADS', 'PYTHONPATH'] False\n"


def test_nothing_outside_its_folder_can_be_written(tmp_path: Path) -> None:
    folders = ["/", os.path.dirname(os.__file__), "/lib", str(tmp_path)]
    found = output(
        f"""
        for folder in {folders!r}:
            try: open(folder + "/canary", "w").write("here")
            except OSError as error: print(error.errno)
        """
    )
    assert found == "30\n30\n30\n2\n"
    assert not [folder for folder in folders if os.path.exists(f"{folder}/canary")]


def test_code_has_no_rights_and_cannot_get_any() -> None:
    found = output(
        """
        import ctypes, os, struct
        libc = ctypes.CDLL(None, use_errno=True)
        data = (ctypes.c_uint32 * 6)()
        libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
        print(os.getresuid(), os.getresgid(), os.getgroups(), list(data), libc.prctl(39, 0, 0, 0, 0))
        print(libc.mount(b"a", b"/tmp", b"tmpfs", 0, b""), libc.umount2(b"/tmp", 2), libc.sethostname(b"a", 1))
        print(libc.mount(b"/lib", b"/lib", b"", 0x1000 | 0x20, b""), libc.chroot(b"/tmp"))
        """
    )
    nobody = (65534,) * 3
    assert found == f"{nobody} {nobody} [] {[0] * 6} 1\n-1 -1 -1\n-1 -1\n"


def test_code_gets_no_rights_by_a_namespace_of_its_own() -> None:
    """Where /proc/sys is read-only it can make one, but what is mounted is locked there."""
    found = output(
        """
        import ctypes
        libc = ctypes.CDLL(None)
        print(libc.unshare(0x10000000 | 0x20000))
        for work in (
            lambda: libc.umount2(b"/lib", 2),
            lambda: libc.mount(b"", b"/lib", b"", 0x20 | 0x1000, b""),
        ):
            print(work())
        for path in ("/lib/canary", "/canary"):
            try: open(path, "w")
            except OSError as error: print(error.errno)
        """
    )
    is_read_only = os.statvfs("/proc/sys").f_flag & os.ST_RDONLY
    assert found == f"{0 if is_read_only else -1}\n-1\n-1\n30\n30\n"


def test_code_reaches_no_server_of_this_machine_and_no_other(tmp_path: Path) -> None:
    name = f"\0{uuid.uuid4().hex}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as by_path,
    ):
        abstract.bind(name)
        abstract.listen()
        by_path.bind(f"{tmp_path}/s")
        by_path.listen()
        found = output(
            f"""
            import socket
            for family, address in [
                (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_INET, ("1.1.1.1", 53)),
                (socket.AF_UNIX, {name!r}), (socket.AF_UNIX, "{tmp_path}/s"),
            ]:
                try: socket.socket(family).connect(address)
                except OSError as error: print(error.strerror)
            print(socket.if_nameindex())
            """
        )
    unreachable = "Network is unreachable\n"
    assert found == f"{unreachable * 2}Connection refused\nNo such file or directory\n[(1, 'lo')]\n"


def test_code_that_forks_without_end_gets_so_many_processes() -> None:
    found = output(
        """
        import os, time
        num_processes = 1
        try:
            while True:
                if os.fork() == 0: time.sleep(600)
                num_processes += 1
        except OSError as error:
            print(num_processes, error.strerror)
        """,
        num_processes=7,
    )
    # For root, the process that waits outside counts for another user.
    assert found in ("7 Resource temporarily unavailable\n", "6 Resource temporarily unavailable\n")


@pytest.mark.parametrize("call", ["b'x' * (300 << 20)", "open('a', 'wb').truncate(300 << 20)"])
def test_code_that_uses_too_much_memory_gets_an_error(call: str) -> None:
    found = output(f"print(len('as usual'))\n{call}", memory_mb=200)
    assert found.startswith("8\nTraceback") and (
        "MemoryError" in found or "File too large" in found
    )


def test_files_together_have_no_more_than_the_memory() -> None:
    found = output(
        """
        for index in range(9): open(str(index), "wb").write(bytes(60 << 20))
        """,
        memory_mb=200,
    )
    assert found.endswith("OSError: [Errno 28] No space left on device\n")


SYSTEM_CALLS = {
    "x86_64": {
        "shmget": 29,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "memfd_create": 319,
    },
    "aarch64": {
        "shmget": 194,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "memfd_create": 279,
    },
}


def test_code_gets_no_memory_that_no_limit_counts_and_no_keys_of_the_user() -> None:
    calls = SYSTEM_CALLS[os.uname().machine]
    found = output(
        f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for name, number in {calls}.items():
            print(name, libc.syscall(number, b"a", 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
        print(libc.syscall(0x40000000 + 39), libc.getpid())
        """
    )
    assert found == "".join(f"{name} -1 ENOSYS\n" for name in calls) + "-1 1\n"


AS_ANOTHER_USER = """
import os
from verl_like.workers.agents.python_tool import PythonTool
found = PythonTool().python("import os; os.kill(0, 9)")
print(os.getuid(), repr(found))
"""


def test_signals_of_code_reach_nobody_outside_where_it_runs_as_the_same_user() -> None:
    output("")
    found = subprocess.run(
        [
            "unshare",
            "-U",
            "--map-user=1000",
            "--map-group=1000",
            sys.executable,
            "-c",
            AS_ANOTHER_USER,
        ],
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert found.stdout == "1000 ''\n", (found.returncode, found.stderr)


def test_output_without_end_is_cut_and_the_code_killed() -> None:
    mark = uuid.uuid4().hex
    found = output(f"while True: print('{mark}', 'é' * 10)", output_chars=120, seconds=60.0)
    assert (
        found
        == f"{(mark + ' ' + 'é' * 10 + chr(10)) * 3}"[:120] + "\n[killed after 120 characters]"
    )


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; open('up', 'w'); time.sleep(600)", "MARK"])
    os._exit(0)
while not os.path.exists("up"): time.sleep(0.01)
print("up", flush=True)
"""


def test_a_daemon_ends_with_its_code() -> None:
    mark = uuid.uuid4().hex
    assert output(DAEMON.replace("MARK", mark)) == "up\n"
    until(lambda: not processes_with(mark))


def test_nothing_outlives_the_deadline() -> None:
    mark = uuid.uuid4().hex
    code = """
    import ctypes, os, time
    ctypes.CDLL(None).prctl(1, 0)  # it does not end with its parent
    os.close(1), os.close(2), os.setsid()
    time.sleep(600)
    """
    found: list[str] = []
    begun = DAEMON.replace("MARK", mark) + textwrap.dedent(code)
    thread = threading.Thread(target=lambda: found.append(output(begun, seconds=4.5)))
    thread.start()
    if CAN_UNSHARE:
        until(lambda: processes_with(mark))
    thread.join(60)
    if CAN_UNSHARE:
        assert found == ["up\n\n[killed after 4.5 s]"]
    # On a machine with other work the kernel takes a moment to end what is killed.
    until(lambda: not processes_with(mark))


def test_no_process_and_no_file_descriptor_is_left() -> None:
    output("print(1)")
    gc.collect()  # of tests before
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = (len(os.listdir("/proc/self/fd")), children.read_text())
    output("print(1)")
    output("while True: print(1)", output_chars=10)
    assert (len(os.listdir("/proc/self/fd")), children.read_text()) == before


def test_limits_that_leave_no_room_for_python_are_refused() -> None:
    output("")
    with pytest.raises(
        ValueError, match=r"PythonTool\(10.0, 1, 32, 10000\) cannot run code here \("
    ):
        PythonTool(memory_mb=1)


NO_NAMESPACES = """
from verl_like.workers.agents.python_tool import PythonTool
open("/proc/sys/user/max_user_namespaces", "w").write("0")
try:
    PythonTool(seconds=7)
except ValueError as error:
    print(error)
"""


def test_the_tool_is_refused_where_there_are_no_namespaces() -> None:
    output("")
    found = subprocess.run(
        ["unshare", "-Ur", sys.executable, "-c", NO_NAMESPACES], capture_output=True, text=True
    )
    assert found.stdout == (
        "PythonTool(7, 1024, 32, 10000) cannot run code here (code cannot be run: [Errno 28] unshare: No space "
        "left on device): it needs Linux 5.12 or newer where `unshare -Urn true` works, and limits that leave "
        "room for Python\n"
    ), found.stderr


def test_code_that_cannot_be_run_any_more_is_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    output("")
    tool = PythonTool()
    monkeypatch.setattr(sys, "base_prefix", "/no/python")
    with pytest.raises(Unavailable, match="mount /proc/no/python: No such file or directory"):
        tool.python("print(1)")


CLASS = """
import os
from verl_like.workers.agents.python_tool import PythonTool

class Solver(PythonTool):
    def __init__(self):
        super().__init__(seconds=60.0)
    def reset(self):
        return str(os.getpid())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@on_a_loop
async def test_no_code_outlives_the_environment_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    output("")
    (tmp_path / f"{MODULE}.py").write_text(CLASS)
    monkeypatch.syspath_prepend(str(tmp_path))
    mark = uuid.uuid4().hex
    hosts = Hosts(HostedCode("environment", f"{MODULE}:Solver"), 1, 2.0)
    seat = await hosts.seat()
    host = int(await seat.call("reset", {}, 60.0))
    assert await seat.call("python", {"code": "print(1)"}, 60.0) == "1\n"
    with pytest.raises(UserCodeError, match="unexpected keyword argument"):
        await seat.call("python", {"text": "print(1)"}, 60.0)
    code = DAEMON.replace("MARK", mark) + "time.sleep(600)"
    call = asyncio.create_task(seat.call("python", {"code": code}, 6.0))
    await asyncio.to_thread(until, lambda: processes_with(mark))
    os.kill(host, number)
    with pytest.raises(EpisodeFailed):
        await call
    await hosts.close()
    assert not processes_with(mark)
