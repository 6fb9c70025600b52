"""Whole runs of the CUDA path on a machine without a GPU, with their numbers: `make gpu-rehearsal`.

`make gpu-rehearsal CHOSEN="sft ppo_split_vllm"` does these runs alone, and `CHOSEN="sft ppo*"`
those of a pattern. From an empty folder it installs the GPU environment of scripts/environment.sh
in build/gpu_env (9 GB, kept while the lock is the same), builds the null GPU (scripts/null_gpu),
makes the toy world, does each run of `RUNS` and writes the table to build/gpu_rehearsal/table.md,
and after all runs to docs/gpu_rehearsal.md. It ends with an error if a run is not as it has to be.

On a machine with GPUs, `python scripts/gpu_rehearsal.py --on-gpu` does the same runs on them, with
the Python that it is called by: those that need no more GPUs than there are, nor a package that is
not installed, and no control.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from scripts.commit import commit  # noqa: E402
from scripts.gpu_rehearsal_runs import DRIFT_METRIC, KL_METRIC, RUNS, Run  # noqa: E402
from scripts.null_gpu.build import LIBRARY, build, environment, require_compiler  # noqa: E402

BUILD = ROOT / "build"
GPU_ENV = BUILD / "gpu_env"
NULL_GPU = BUILD / "null_gpu"
WORK = BUILD / "gpu_rehearsal"
ON_GPU = "--on-gpu" in sys.argv
PYTHON = Path(sys.executable) if ON_GPU else GPU_ENV / ".venv/bin/python"
# Of a step's loss from the same run on the CPU, and of a loss above 1 this share
LOSS_DIFFERENCE = 1e-3
MOST_HOST_BYTES = 16e9  # of a run without numbers
DRIFT = 2e-3  # mean difference of the probabilities of engine and trainer
MOST_ROUTERS_DIFFER = 0.02  # share of an engine's routings that the trainer would not select
TIMES = re.compile(r"timing_s/|(.*/)?perf/|reward/early_ratio")
"""Metrics that two equal runs have different numbers of."""
PAGE = ROOT / "docs" / "gpu_rehearsal.md"


@dataclass
class Result:
    """What a run did: its numbers, and what of it is not as it has to be."""

    seconds: float
    numbers: str = ""
    faults: list[str] = field(default_factory=list)
    device_bytes: int = 0
    """The most that was held of any device."""
    host_bytes: int = 0
    """The most that the processes of a run without numbers held of the machine's memory."""


def make_environment() -> None:
    """build/gpu_env/.venv: what scripts/environment.sh installs on a machine whose nvidia-smi is
    the null GPU's."""
    GPU_ENV.mkdir(parents=True, exist_ok=True)
    for name in ("scripts", "requirements", "pyproject.toml", "README.md", "LICENSE", "verl_like"):
        link = GPU_ENV / name
        if not link.is_symlink():
            link.symlink_to(Path("../..") / name)
    path = f"{ROOT}/scripts/null_gpu/bin:{os.environ['PATH']}"
    subprocess.run(
        ["bash", GPU_ENV / "scripts/environment.sh"],
        check=True,
        env=os.environ | {"PATH": path},
        timeout=7200,
    )


def build_null_gpu() -> None:
    """The null GPU for the libraries of that environment, kept while neither has changed."""
    sources = sorted((ROOT / "scripts/null_gpu").glob("*.[chp]*"))
    state = b"".join(
        path.read_bytes() for path in [*sources, GPU_ENV / ".venv/.verl_like_installed"]
    )
    stamp = NULL_GPU / "built"
    wanted = hashlib.sha256(state).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print("Building the null GPU: about a minute ...", flush=True)
        shutil.rmtree(NULL_GPU, ignore_errors=True)
        (site_packages,) = (GPU_ENV / ".venv/lib").glob("python*/site-packages")
        build(NULL_GPU, site_packages)
        stamp.write_text(wanted)


def check_kernels() -> None:
    """Whether the numbers that kernels give are the CPU's, before runs are judged by them."""
    variables = _on_null_gpus(f"check_{os.getpid()}", 1, 1_000_000_000)
    subprocess.run(
        [PYTHON, ROOT / "scripts/null_gpu/check_kernels.py"], check=True, env=variables, timeout=600
    )
    forget_devices(f"check_{os.getpid()}")


def check_names() -> None:
    """Whether torch and vLLM of this environment have the names and signatures that the source
    uses."""
    name = f"names_{os.getpid()}"
    variables = _common() | environment(NULL_GPU, name=name, count=1, size=1_000_000_000)
    try:
        subprocess.run(
            [PYTHON, ROOT / "scripts/null_gpu/names.py"], check=True, env=variables, timeout=600
        )
    except subprocess.CalledProcessError:
        sys.exit("The source does not go with the CUDA builds, see above.")
    forget_devices(name)


def check_waits() -> None:
    """Whether updates wait for the device no more often than they may, by
    scripts/null_gpu/waits.py."""
    name = f"waits_{os.getpid()}"
    variables = _common() | environment(NULL_GPU, name=name, count=2, size=16_000_000_000)
    try:
        subprocess.run(
            [PYTHON, ROOT / "scripts/null_gpu/waits.py", WORK],
            check=True,
            env=variables,
            timeout=1800,
        )
    except subprocess.CalledProcessError:
        sys.exit("Updates wait for the device where they did not, see above.")
    forget_devices(name)


def make_data() -> None:
    if not (WORK / ".toy_world/walks/walks.jsonl").exists():
        WORK.mkdir(parents=True, exist_ok=True)
        command = [PYTHON, ROOT / "scripts/gpu_rehearsal_data.py", WORK]
        subprocess.run(command, check=True, cwd=WORK, env=_common(), timeout=3600)


def _common() -> dict[str, str]:
    """The environment of a process that has the GPUs of this machine, of which the null GPU's has
    none."""
    path = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH") if ON_GPU else None])
    )
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _on_null_gpus(name: str, count: int, size: int) -> dict[str, str]:
    """The environment of a process whose GPUs are null, and have numbers."""
    return (
        _common()
        | environment(NULL_GPU, name=name, count=count, size=size)
        | {
            "PYTHONPATH": f"{ROOT}/scripts/null_gpu/site:{ROOT}",
            "NULL_GPU_NUMBERS": "1",
            "TRITON_INTERPRET": "1",
            "VLLM_NCCL_SO_PATH": str(NULL_GPU / LIBRARY),
        }
    )


def _environment(run: Run) -> dict[str, str]:
    if ON_GPU:
        return _common()
    variables = _on_null_gpus(_device_name(run), run.num_gpus, run.gpu_bytes)
    if not run.has_numbers:
        variables |= {
            "NULL_GPU_NUMBERS": "0",
            "NULL_GPU_SIZES": "1",
            "NULL_GPU_LARGEST_COPY": str(1 << 20),
        }
        del variables["TRITON_INTERPRET"]
    variables |= {
        "NULL_GPU_CONTROL": run.control,
        "NULL_GPU_LOG": str(_said_by_null_gpu(WORK / run.name)),
    }
    # Without torch's cache freed memory is gone, so that what reads it fails; vLLM's sleep needs
    # the cache.
    return variables | ({} if run.caches_memory else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def _said_by_null_gpu(folder: Path) -> Path:
    """The file in which the null GPU says what nothing answers."""
    return folder / "null_gpu.log"


def _device_name(run: Run) -> str:
    return f"rehearsal_{os.getpid()}_{run.name}"


def start(run: Run, folder: Path, *, device: str) -> tuple[int, Result]:
    """Does a run in a new folder, with its output in log.txt; its exit code, -9 at its time limit,
    and what it took."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / ".toy_world").symlink_to(WORK / ".toy_world")
    began = time.monotonic()
    host_bytes = 0
    with (folder / "log.txt").open("w") as log:
        if run.killed_after:
            with _process(run, folder, device, log) as process:
                _wait_for_checkpoint(run, folder, process)
        with _process(run, folder, device, log) as process:
            deadline = time.monotonic() + run.limit
            while (code := process.poll()) is None and time.monotonic() < deadline:
                if not run.has_numbers:
                    host_bytes = max(host_bytes, host_memory(_device_name(run)))
                time.sleep(0.5)
    held = [most_held(file) for file in files_of_devices(_device_name(run))]
    forget_devices(_device_name(run))
    seconds = time.monotonic() - began
    result = Result(seconds, device_bytes=max(held, default=0), host_bytes=host_bytes)
    return -9 if code is None else code, result


@contextlib.contextmanager
def _process(run: Run, folder: Path, device: str, log: TextIO) -> Iterator[subprocess.Popen]:
    """The process of a run, which is killed at the end if it has not ended."""
    command = [
        PYTHON,
        "-m",
        run.module,
        *run.arguments(ROOT, device),
        f"trainer.default_local_dir={folder}/runs",
    ]
    variables = _environment(run) if device == "cuda" else _common()
    process = subprocess.Popen(
        command, cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:  # its Ray and workers are of its session
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def _wait_for_checkpoint(run: Run, folder: Path, process: subprocess.Popen) -> None:
    """Returns when the checkpoint is there after which the run is killed, when the run has ended,
    or at its limit."""
    deadline = time.monotonic() + run.limit
    while process.poll() is None and time.monotonic() < deadline:
        if any(folder.glob(f"runs/*/global_step_{run.killed_after}/manifest.json")):
            return
        time.sleep(0.2)


def files_of_devices(name: str) -> list[Path]:
    """What the null GPUs of that name know of the processes that use them, a file a device."""
    return list(Path("/dev/shm").glob(f"null_gpu.{name}.*"))


def most_held(file: Path) -> int:
    """The bytes in the last entry of a device's file: pid, start and bytes, 64 bits each."""
    return int.from_bytes(file.read_bytes()[-8:], "little")


def forget_devices(name: str) -> None:
    for file in files_of_devices(name):
        file.unlink()


def host_memory(name: str) -> int:
    """Bytes of the host that the processes with null GPUs of that name hold, shared pages divided
    among them."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"NULL_GPU_NAME={name}".encode() in variables:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += sum(
                    int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")
                )
    return total


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """A row a step, of the last run in the folder."""
    file = folder / "runs/latest/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def judge(run: Run) -> Result:
    """Does the run, and for one whose losses count its reference on the CPU, and compares."""
    folder = WORK / run.name
    code, result = start(run, folder, device="cuda")
    log = (folder / "log.txt").read_text()
    rows = metrics_of(folder)
    if run.refused_with:
        if code == 0 or not re.search(run.refused_with, log):
            result.faults.append(f"ended with {code} and without: {run.refused_with}")
        result.numbers = "red, as it has to be" if not result.faults else ""
        return result
    steps = [row for row in rows if run.measure in row]
    if code or len(steps) != run.num_steps:
        result.faults.append(
            f"ended with {code} after {len(steps)} of {run.num_steps} steps: {folder}/log.txt"
        )
    elif not run.has_numbers:
        result.numbers = f"sizes alone; {result.host_bytes / 1e9:.1f} GB of the machine's memory"
        if result.host_bytes > MOST_HOST_BYTES:
            result.faults.append(
                f"the run took {result.host_bytes / 1e9:.1f} GB of the machine's memory"
            )
    elif run.equal_to:
        _compare_numbers(run, rows, result)
    elif run.measure in (DRIFT_METRIC, KL_METRIC):
        drifts = [abs(row[run.measure]) for row in steps]
        result.numbers = f"drift {', '.join(f'{drift:.1e}' for drift in drifts)}"
        result.faults += [
            f"drift {drift:.1e} is above {DRIFT:.0e}" for drift in drifts if not drift <= DRIFT
        ]
    else:
        _compare_losses(run, [row[run.measure] for row in steps], result)
    differing = max((row.get("router_replay/routers_differ", 0.0) for row in rows), default=0.0)
    if differing > MOST_ROUTERS_DIFFER:
        result.faults.append(f"{differing:.3f} of the recorded routings are not the trainer's own")
    if run.positive and not any(row.get(run.positive, 0.0) > 0 for row in rows):
        result.faults.append(f"{run.positive} is above 0 in no step")
    said = _said_by_null_gpu(folder)
    result.faults += said.read_text().splitlines()[:1] if said.exists() else []
    return result


def _compare_losses(run: Run, losses: list[float], result: Result) -> None:
    cpu_folder = WORK / f"{run.reference or run.name}_cpu"
    if not (cpu_folder / "runs/latest/report.html").exists():
        start(run, cpu_folder, device="cpu")
    references = [row[run.measure] for row in metrics_of(cpu_folder) if run.measure in row]
    if len(references) != len(losses):
        result.faults.append(
            f"the reference on the CPU has {len(references)} steps: {cpu_folder}/log.txt"
        )
        return
    pairs = zip(losses, references, strict=True)
    difference = max(abs(loss - reference) / max(1.0, abs(reference)) for loss, reference in pairs)
    result.numbers = (
        f"losses {', '.join(f'{loss:.4f}' for loss in losses)}; at most "
        f"{difference:.1e} from the CPU's"
    )
    if not difference <= LOSS_DIFFERENCE:
        result.faults.append(f"the losses of the CPU are {references}")


def _compare_numbers(run: Run, rows: list[dict[str, float]], result: Result) -> None:
    """Bit for bit with those of a run that was not killed, without times."""
    (whole,) = (each for each in RUNS if each.name == run.equal_to)
    folder = WORK / whole.name
    if not (folder / "runs/latest/report.html").exists():
        start(whole, folder, device="cuda")
    if f"after step {run.killed_after}." not in (WORK / run.name / "log.txt").read_text():
        result.faults.append("the second process did not continue the first one's run")
    own = _numbers(rows)
    expected = _numbers(metrics_of(folder))
    different = sorted(
        f"{name} of step {step}"
        for step, name in own.keys() | expected.keys()
        if own.get((step, name)) != expected.get((step, name))
    )
    result.numbers = f"{len(own)} numbers are bit for bit those of {whole.name}"
    result.faults += [f"differs from {whole.name}: {', '.join(different)}"] if different else []


def _numbers(rows: list[dict[str, float]]) -> dict[tuple[int, str], str]:
    """Of each step and metric but times; as text, in which NaN is equal to NaN."""
    return {
        (step, name): repr(value)
        for step, row in enumerate(rows, start=1)
        for name, value in row.items()
        if not TIMES.match(name)
    }


def make_null_gpu() -> None:
    """The environment, the null GPU and a check of its numbers."""
    try:
        require_compiler()
    except RuntimeError as missing:
        sys.exit(str(missing))
    make_environment()
    build_null_gpu()
    check_kernels()


def size_in_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def replaced_without_numbers() -> dict[str, str]:
    """Why, by the module in which something is replaced."""
    sys.path.append(str(ROOT / "scripts/null_gpu/site"))
    from null_gpu_sizes import REPLACED

    return {module: why for module, (_, why) in REPLACED.items()}


def _is_possible_here(run: Run) -> bool:
    """Whether this machine has the GPUs and the packages of a run, and the run is no control."""
    listed = subprocess.run(
        ["nvidia-smi", "-L"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    is_vllm_there = importlib.util.find_spec("vllm") is not None
    needs_vllm = (
        run.measure in (DRIFT_METRIC, KL_METRIC)
        and "actor_rollout_ref.rollout.name=hf" not in run.overrides
    )
    needs_null_gpu = bool(run.refused_with) or not run.has_numbers
    return (
        run.num_gpus <= len(listed.splitlines())
        and not needs_null_gpu
        and (is_vllm_there or not needs_vllm)
    )


def write_page(table: list[str], seconds: float) -> None:
    """docs/gpu_rehearsal.md."""
    about = (
        f"Written by `make gpu-rehearsal` on {date.today()}, of commit {commit()}, in "
        f"{seconds:.0f} s. The runs, and how they are judged, are explained in [what is proven "
        "about GPUs](gpu.md)."
    )
    PAGE.write_text("\n".join(["# The rehearsal's runs", "", about, "", *table, ""]))


def main() -> None:
    if sys.argv[1:] == ["--environment"]:
        make_null_gpu()
        return
    patterns = [argument for argument in sys.argv[1:] if argument != "--on-gpu"] or ["*"]
    chosen = [run for run in RUNS if any(fnmatch(run.name, pattern) for pattern in patterns)]
    if ON_GPU:
        chosen = [run for run in chosen if _is_possible_here(run)]
    if not chosen:
        sys.exit(
            f"No run is called {' or '.join(patterns)}; there are "
            f"{', '.join(run.name for run in RUNS)}."
        )
    began = time.monotonic()
    if not ON_GPU:
        make_null_gpu()
    make_data()
    is_whole = not ON_GPU and patterns == ["*"]
    if is_whole:
        check_names()
        check_waits()
    for folder in WORK.iterdir():
        if folder.name != ".toy_world" and folder.is_dir():
            shutil.rmtree(folder)
    print(f"What the runs need: {time.monotonic() - began:.0f} s", flush=True)
    lines = ["| run | what | numbers | most on a device | seconds |", "|---|---|---|---|---|"]
    if any(not run.has_numbers for run in chosen):
        print("What is replaced in runs without numbers, because values are garbage:")
        print(
            "\n".join(f"  {module}: {why}" for module, why in replaced_without_numbers().items()),
            flush=True,
        )
    failed = []
    for run in chosen:
        result = judge(run)
        said = "FAILED: " + "; ".join(result.faults) if result.faults else result.numbers
        failed += [run.name] if result.faults else []
        held = size_in_words(result.device_bytes)
        lines.append(f"| {run.name} | {run.what} | {said} | {held} | {result.seconds:.0f} |")
        print(f"{run.name:32} {result.seconds:4.0f} s  {held:>8}  {said}", flush=True)
    (WORK / "table.md").write_text("\n".join([*lines, ""]))
    if is_whole:
        write_page(lines, time.monotonic() - began)
    print(
        f"{len(chosen) - len(failed)} of {len(chosen)} as they have to be, in "
        f"{time.monotonic() - began:.0f} s"
    )
    if failed:
        sys.exit(f"Not as it has to be: {', '.join(failed)}")


if __name__ == "__main__":
    main()
