"""A reward function that goes wrong in every way, and a look at the processes that run it."""

from pathlib import Path

from verl_like.rewards.manager import RewardSample

REWARD_FILE = """
import asyncio, os, sys, time

class OwnError(Exception):
    def __init__(self, one, two):  # cannot be unpickled
        super().__init__(f"{one} and {two}")

def inner(number):
    return 1 / number

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str.startswith("long wait"): time.sleep(0.01)
    if solution_str == "divide": return inner(0)
    if solution_str == "own error": raise OwnError("this", "that")
    if solution_str == "leave": sys.exit(0)
    if solution_str == "hang":
        while True: pass
    if solution_str == "segfault":
        import ctypes
        ctypes.string_at(0)
    if solution_str.startswith("exit "): os._exit(int(solution_str[5:]))
    if solution_str.startswith("start "):
        import subprocess
        program = subprocess.Popen(["sleep", "600"])
        open(solution_str[6:], "w").write(str(program.pid))
        program.wait()
    if solution_str.startswith("daemon "):  # a session of its own, and no parent
        import subprocess
        program = "import os, sys, time; os.fork() and os._exit(0); open(sys.argv[1], 'w').write(str(os.getpid()))"
        program += "; time.sleep(600)"
        _, how, file = solution_str.split()
        subprocess.run([sys.executable, "-c", program, file], start_new_session=True, env={}, timeout=60)
        while not os.path.exists(file) or not open(file).read(): time.sleep(0.01)
        if how == "exit": os._exit(5)
        time.sleep(600)
    if solution_str == "eat":
        blocks = []
        while True: blocks.append(b"x" * (1 << 26))
    if solution_str == "program eats":
        import subprocess
        subprocess.run([sys.executable, "-c", "import time; x = b'x' * (1300 << 20); time.sleep(600)"])
    if solution_str.startswith("write "):
        import gc
        (socket,) = [each.fileno() for each in gc.get_objects() if type(each).__name__ == "Connection"]
        contents = {"bytes": b"\\xff\\xfe", "list": b"[1]", "deep": b"[" * 9000, "key": b'{"score": 1.0, "more": 2}',
                    "text": b'{"score": "1", "ran": [1, 2, 3]}', "early": b'{"score": 7.0, "ran": [1, 2, 3]}',
                    "true": b'{"score": true, "ran": [1, 2, 3]}', "no time": b'{"score": 7.0}',
                    "null time": b'{"score": 7.0, "ran": null}', "short time": b'{"score": 7.0, "ran": [1, 2]}',
                    "odd process": b'{"score": 7.0, "ran": [NaN, 2, 3]}'}
        content = contents[solution_str[6:]]
        os.write(socket, len(content).to_bytes(4, "big") + content)
    if solution_str == "raise long": raise ValueError("x" * 50_000_000 + "the end")
    if solution_str == "raise half": raise ValueError("a \\ud800 b")
    if solution_str.startswith("sleep "): time.sleep(float(solution_str[6:]))
    if solution_str.startswith("return "):
        import numpy as np
        return {"nan": float("nan"), "inf": float("inf"), "huge": 1e39, "text": "1.0", "list": [1.0], "none": None,
                "true": True, "int": 3, "float32": np.float32(0.5), "no score": {"acc": 1.0}, "array": np.ones(2),
                "none score": {"score": None, "why": "x"}, "odd extra": {"score": 1.0, "thing": {1}},
                "inf extra": {"score": 1.0, "acc": float("inf")}, "nan extra": {"score": 1.0, "length": float("nan")},
                "inf inside": {"score": 1.0, "all": [float("-inf")]}, "large extra": {"score": 1.0, "n": 10**400},
                "long extra": {"score": 1.0, "said": "x" * 70_000}, "long key": {"score": 1.0, "x" * 70_000: 1},
                "half extra": {"score": 1.0, "said": "\\ud800"}, "none inf": {"score": None, "acc": float("inf")},
                "nan score": {"score": float("nan")}}[solution_str[7:]]
    return {"score": float(ground_truth) + bonus, "length": len(solution_str), "said": solution_str,
            "loaded": ",".join(m for m in ("torch", "ray", "pytest", "numpy") if m in sys.modules)}

class Judge:
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return inner(len(solution_str))

judge = Judge()

async def compute_async(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.001)
    return extra_info["index"] + 0.5
"""


def sample(solution_str: str, index: int = 0, ground_truth: str = "1") -> RewardSample:
    return RewardSample(
        f"sample uid '0-{index}'", "test/source", solution_str, ground_truth, {"index": index}
    )


def worker_pids(driver: int) -> list[int]:
    """The reward workers of a process: each is the child of its supervisor, which is the process's
    child."""
    below = [
        int(pid)
        for file in Path(f"/proc/{driver}/task").glob("*/children")
        for pid in file.read_text().split()
    ]
    supervisors = [
        pid
        for pid in below
        if b"rewards.scoring_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return [
        int(pid)
        for one in supervisors
        for pid in Path(f"/proc/{one}/task/{one}/children").read_text().split()
    ]


def is_running(pid: int) -> bool:
    """False also for a zombie, which nobody may be there to collect."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"
