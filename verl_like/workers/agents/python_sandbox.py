"""The program that runs Python code in namespaces of its own. `PythonTool` starts it, with the code
as standard input. It imports little, because it starts for each code.

It makes a file system with read-only folders and an empty working folder. Then a child without any
rights becomes the interpreter that runs the code. That is process 1 of its namespace, so the kernel
ends all others with it.
"""

import ctypes
import errno
import os
import resource
import struct
import sys

_SYS_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000
_NO_WRITING = 0x1
_READ_ONLY = _NO_WRITING | 0x2 | 0x4
"""Attributes of a mount: no writing, no set-user-id programs, no devices."""
_MS_NOSUID_NODEV = 0x2 | 0x4
_MS_BIND_RECURSIVE = 0x1000 | 0x4000
_MNT_DETACH = 2
_NEW_NAMESPACES = 0x20000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Of mounts, IPC, users, processes and the network."""
_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_FILTER = 2
_FORBIDDEN = {
    "x86_64": (0xC000003E, (29, 248, 249, 250, 319, 447)),
    "aarch64": (0xC00000B7, (194, 217, 218, 219, 279, 447)),
}
"""By machine its name in the kernel, and the numbers of the system calls shmget, add_key,
request_key, keyctl, memfd_create and memfd_secret. No limit holds for the memory that they give,
and keys are those of the user."""
_OTHER_CALLS = 0x40000000
"""From this number on, x86_64 has its system calls a second time."""
_SIGKILL = 9
_MAX_NAMESPACES = "/proc/sys/user/max_user_namespaces"
_NOBODY = 65534
_ROOT = "/proc"
"""The new file system is made there, because nothing of Python is below it."""
_TMP = _ROOT + "/tmp"

_libc = ctypes.CDLL(None, use_errno=True)


def main(report: str, limits: str, python: str, packages: str, *folders: str) -> None:
    """Runs the code of standard input.

    The file descriptor `report`, which the code does not get, is told why the code cannot be run.
    `limits` are bytes of memory, seconds and a number of processes. The interpreter is `python`. It
    imports from the folders `packages`, which ":" separates. It sees `folders` alone; one that
    begins with "-" is empty.
    """
    report_fd = int(report)
    memory, seconds, processes = map(int, limits.split())
    os.set_inheritable(report_fd, False)
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        _enter_namespaces()
        _make_file_system(folders, memory)
        child = os.fork()
        if not child:
            _limit(memory, seconds, processes)
            # NumPy would start as many threads as the machine has cores.
            environment = {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
            os.execve(python, [python, "-s", "-"], environment)
        _pid, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            os.write(1, b"[killed by signal %d]\n" % -code)
    except (OSError, ValueError) as error:
        os.write(report_fd, str(error).encode())


def _enter_namespaces() -> None:
    """Moves this process into new namespaces. A child that stays outside maps the users."""
    _libc.setgroups(0, None)  # only root can leave its groups
    reading, writing = os.pipe()
    mapper = os.fork()
    if not mapper:
        os.close(writing)
        if os.read(reading, 1):
            _map_users(f"/proc/{os.getppid()}")
        os._exit(0)
    result = _libc.unshare(_NEW_NAMESPACES)
    _check(result, "unshare")
    os.write(writing, b"1")
    os.waitpid(mapper, 0)


def _map_users(process: str) -> None:
    """Maps the user nobody of the namespace to the user of the process. For root it is nobody
    outside too, because the kernel does not limit how many processes root has."""
    _write(f"{process}/setgroups", "deny")
    owners = {"gid_map": os.getegid(), "uid_map": os.geteuid()}
    for file, owner in owners.items():
        try:
            _write(f"{process}/{file}", f"0 0 1\n{_NOBODY} {_NOBODY} 1")
        except OSError:  # this is not root, or a root that has no other users
            _write(f"{process}/{file}", f"{_NOBODY} {owner} 1")


def _make_file_system(folders: tuple[str, ...], memory: int) -> None:
    """Changes the root to a new file system with the folders, read-only, and an empty /tmp."""
    if os.access(_MAX_NAMESPACES, os.W_OK, effective_ids=True):  # not in some containers
        _write(_MAX_NAMESPACES, "0")
    _mount("tmpfs", _ROOT, "tmpfs", 0, "mode=755")
    os.mkdir(_TMP)  # first, because Python can lie below it
    _mount("tmpfs", _TMP, "tmpfs", _MS_NOSUID_NODEV, f"mode=1777,size={memory}")
    for folder in folders:
        target = _ROOT + folder.removeprefix("-")
        os.makedirs(target, exist_ok=True)
        if folder.startswith("-"):
            _mount("tmpfs", target, "tmpfs", 0, "")
        else:
            _mount(folder, target, "", _MS_BIND_RECURSIVE, "")
    _set_attributes(_ROOT, _AT_RECURSIVE, added=_READ_ONLY)
    _set_attributes(_TMP, 0, removed=_NO_WRITING)
    os.chdir(_ROOT)
    result = _libc.pivot_root(b".", b".")
    _check(result, "pivot_root")
    result = _libc.umount2(b".", _MNT_DETACH)
    _check(result, "umount")
    os.chdir("/tmp")


def _set_attributes(path: str, flags: int, added: int = 0, removed: int = 0) -> None:
    """Adds and removes attributes of the mount at a path."""
    attributes = (ctypes.c_uint64 * 4)(added, removed)
    size = ctypes.sizeof(attributes)
    file = path.encode()
    result = _libc.syscall(_SYS_MOUNT_SETATTR, -1, file, flags, attributes, size)
    _check(result, "mount_setattr")


def _limit(memory: int, seconds: int, processes: int) -> None:
    """Takes all rights from this process, and limits what it and its children can use."""
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    # A user that is not root loses all capabilities with the next program.
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    result = _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _check(result, "no_new_privs")
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    _forbid_calls()


def _forbid_calls() -> None:
    """Makes the system calls in `_FORBIDDEN` fail as if the kernel had none.

    Each instruction of the filter is (code, places to jump if true, if false, value), see
    https://docs.kernel.org/userspace-api/seccomp_filter.html. Raises ValueError on another machine.
    """
    machine = os.uname().machine
    if machine not in _FORBIDDEN:
        raise ValueError(f"the system calls of {machine} are not known")
    name, numbers = _FORBIDDEN[machine]
    load = 0x20
    equal = 0x15
    at_least = 0x35
    end = 0x06
    refusal = len(numbers) + 5
    program = [
        (load, 0, 0, 4),  # the machine
        (equal, 0, refusal - 2, name),
        (load, 0, 0, 0),  # the system call
        (at_least, refusal - 4, 0, _OTHER_CALLS),
    ]
    for place, number in enumerate(numbers, len(program)):
        program.append((equal, refusal - place - 1, 0, number))
    allow = 0x7FFF0000
    refuse = 0x50000 | errno.ENOSYS
    program.append((end, 0, 0, allow))
    program.append((end, 0, 0, refuse))
    code = b""
    for instruction in program:
        code += struct.pack("HBBI", *instruction)
    instructions = ctypes.create_string_buffer(code)
    address = ctypes.addressof(instructions)
    filter = struct.pack("HP", len(program), address)
    result = _libc.prctl(_PR_SET_SECCOMP, _FILTER, filter)
    _check(result, "seccomp")


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    texts = [text.encode() for text in (source, target, kind)]
    number = ctypes.c_ulong(flags)
    result = _libc.mount(*texts, number, options.encode())
    _check(result, f"mount {target}")


def _check(result: int, what: str) -> None:
    """Raises OSError if a call of the C library has failed."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(file: str, text: str) -> None:
    with open(file, "w") as opened:
        opened.write(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
