"""What scripts/environment.sh does before it installs anything.

The programs that it finds are stand-ins that print what a machine of that kind prints, and none
makes an environment. Where a module of Python is missing, the real Python finds a file of that name
that cannot be imported.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in *sysconfig*) echo {include};; "-m venv"*) echo "a new environment in $3"; exit 7;; esac
"""
PYTHON_WITHOUT_A_MODULE = """#!/bin/sh
case "$1" in -m) echo "a new environment in $3"; exit 7;; esac
PYTHONPATH="{folder}" exec "{python}" "$@"
"""
NVIDIA_SMI = """#!/bin/sh
case "$*" in -L) echo "GPU 0: an accelerator";; *driver_version*) echo "{driver}"; echo "{driver}";; esac
"""


def set_up(
    folder: Path,
    *,
    driver: str | None,
    gcc: bool = True,
    header: bool = True,
    lacking: str = "",
    script: str = "environment.sh",
    arguments: tuple[str, ...] = (),
) -> str:
    """Runs the script on a machine with this driver and these packages; what it printed, its exit
    code at the end."""
    (folder / "scripts").mkdir(parents=True, exist_ok=True)
    for each in ("environment.sh", "cpu_environment.sh", "agents_environment.sh"):
        shutil.copy(ROOT / "scripts" / each, folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements", dirs_exist_ok=True)
    tools = folder / "tools"
    shutil.rmtree(tools, ignore_errors=True)
    tools.mkdir()
    for tool in ("bash", "sh", "dirname", "cat", "sha256sum", "cut"):
        (tools / tool).symlink_to(shutil.which(tool))
    programs = {"python3": PYTHON.format(include=folder)}
    if lacking:
        (folder / "broken").mkdir()
        (folder / "broken" / f"{lacking}.py").write_text(
            f"raise ModuleNotFoundError('No module named {lacking}')"
        )
        programs["python3"] = PYTHON_WITHOUT_A_MODULE.format(
            folder=folder / "broken", python=sys.executable
        )
    programs |= {"nvidia-smi": NVIDIA_SMI.format(driver=driver)} if driver else {}
    programs |= {"gcc": "#!/bin/sh\n"} if gcc else {}
    for name, text in programs.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    if header:
        (folder / "Python.h").touch()
    done = subprocess.run(
        ["bash", folder / "scripts" / script, *arguments],
        cwd=folder,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return f"{done.stdout}{done.stderr}exit {done.returncode}"


def test_a_driver_too_old_for_cuda_13_is_named(tmp_path: Path):
    output = set_up(tmp_path, driver="570.172.08")
    assert (
        "driver 570.172.08 is too old for CUDA 13, which needs 580" in output
        and output.endswith("exit 1")
    )


@pytest.mark.parametrize("missing", ["gcc", "header"])
def test_what_triton_compiles_with_is_asked_for_first(tmp_path: Path, missing: str):
    output = set_up(tmp_path, driver="580.65.06", **{missing: False})
    assert "install the packages gcc and python3-dev" in output and output.endswith("exit 1")


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_that_cannot_make_an_environment_is_named_with_its_package(
    tmp_path: Path, module: str
):
    output = set_up(tmp_path, driver=None, lacking=module)
    assert output == (
        "python3 has no venv and ensurepip, which make .venv: install its package, apt install "
        "python3-venv.\nexit 1"
    )
    assert not (tmp_path / ".venv").exists()


def test_a_machine_that_has_everything_gets_an_environment(tmp_path: Path):
    assert set_up(tmp_path, driver="580.65.06").endswith("a new environment in .venv\nexit 7")
    assert set_up(tmp_path / "without", driver=None, gcc=False, header=False).endswith(
        "a new environment in .venv\nexit 7"
    )


def test_an_environment_for_the_cpu_is_made_anew_when_there_is_a_gpu(tmp_path: Path):
    (tmp_path / ".venv").mkdir(parents=True)
    set_up(tmp_path, driver=None)
    requirements = sorted((tmp_path / "requirements").glob("*.*"))
    inputs = [tmp_path / "pyproject.toml", *requirements, tmp_path / "scripts/environment.sh"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    (tmp_path / ".venv/.verl_like_installed").write_text(f"cpu {digest}\n")
    assert set_up(tmp_path, driver=None) == "exit 0"
    assert set_up(tmp_path, driver="580.65.06").endswith("a new environment in .venv\nexit 7")


def test_scripts_that_train_on_the_cpu_have_the_cpu_build_in_a_folder_of_its_own_where_there_is_a_gpu(
    tmp_path: Path,
):
    # Which CUDA 13 could not use
    cpu = {"driver": "570.172.08", "gcc": False, "arguments": ("cpu",)}
    assert set_up(tmp_path, **cpu).endswith("a new environment in .venv_cpu\nexit 7")
    assert set_up(tmp_path, driver=None, arguments=("cpu",)).endswith(
        "a new environment in .venv\nexit 7"
    )


@pytest.mark.parametrize(("driver", "python"), [("580.65.06", ".venv_cpu"), (None, ".venv")])
def test_their_python_is_that_of_the_cpu_build_and_sees_no_gpu(
    tmp_path: Path, driver: str | None, python: str
):
    set_up(tmp_path, driver=driver)
    (tmp_path / "scripts/environment.sh").write_text('[ "$*" = cpu ]')
    show = 'source scripts/cpu_environment.sh; echo "$python ${CUDA_VISIBLE_DEVICES-all}"'
    done = subprocess.run(
        ["bash", "-euc", show],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}/tools"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{python}/bin/python {'' if driver else 'all'}\n"


def test_what_the_makefile_runs_is_the_python_of_the_cpu_build(tmp_path: Path):
    set_up(tmp_path, driver="580.65.06")
    (tmp_path / "scripts/environment.sh").write_text('[ "$*" = cpu ]')
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv_cpu/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$* on [$CUDA_VISIBLE_DEVICES]"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [shutil.which("make"), "--silent", "test", "docs"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}/tools", "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("-m")] == [
        "ruff",
        "ruff",
        "mypy",
        "pytest",
    ]
    assert lines[-1].startswith("scripts/generate_docs.py") and all(
        line.endswith("on []") for line in lines
    )
    assert ".venv/" not in (ROOT / "Makefile").read_text()


def test_an_environment_for_agents_is_made_once_from_its_lock(tmp_path: Path):
    def run(*names: str) -> str:
        return set_up(tmp_path, driver=None, script="agents_environment.sh", arguments=names)

    for names in ((), ("verifier",)):
        assert "give verifiers, openenv or harnesses" in run(*names) and run().endswith("exit 1")
    making = (
        "Making the environment build/agents/verifiers: a few minutes and at most 0.6 GB, once."
    )
    assert making in run("verifiers")
    stamp = tmp_path / "build/agents/verifiers/.installed"
    stamp.parent.mkdir(parents=True)
    lock = tmp_path / "requirements/agents/verifiers.txt"
    script = tmp_path / "scripts/agents_environment.sh"
    digest = hashlib.sha256(lock.read_bytes() + script.read_bytes()).hexdigest()
    stamp.write_text(f"{digest}\n")
    assert run("verifiers") == "exit 0"
    assert "Making the environment build/agents/openenv" in run("openenv")
