"""The script by which Ray starts a worker here does what Ray's own does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray._private.workers

from verl_like.single_controller.ray import setup_worker

RAYS_OWN = Path(next(iter(ray._private.workers.__path__)), "setup_worker.py")
SEEN = "[sys.argv[1:], os.environ['TOLD'], os.environ['ALSO']]"
PROGRAM = f"import json, os, sys; print(json.dumps({SEEN}))"


def started_by(script: str, context: dict | None) -> list:
    """What a worker sees that the script starts."""
    given = [] if context is None else [f"--serialized-runtime-env-context={json.dumps(context)}"]
    command = [sys.executable, script, "--language=PYTHON", *given]
    if context is None or context["py_executable"] is None:
        command += ["-c", PROGRAM]
    done = subprocess.run(
        [*command, "a script.py", "--port=7", "--language-of-others=x"],
        env=os.environ | {"TOLD": "before", "ALSO": "kept", "HERE": "there"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


CONTEXTS = {
    "of a template": {
        "command_prefix": [],
        "env_vars": {"TOLD": "${HERE}:${NOWHERE}:$HERE"},
        "py_executable": f"{sys.executable} -S -c \"{PROGRAM}\" 'two words'",
    },
    "with a prefix": {
        "command_prefix": ["export", "ALSO=said", "&&"],
        "env_vars": {},
        "py_executable": f'{sys.executable} -c "{PROGRAM}"',
    },
    "of nulls": {"command_prefix": None, "env_vars": None, "py_executable": None},
    "none": None,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_worker_sees_what_it_would_see_if_rays_own_script_started_it(context):
    seen = started_by(setup_worker.__file__, context)
    assert seen == started_by(str(RAYS_OWN), context)
    assert seen[0][-3:] == ["a script.py", "--port=7", "--language-of-others=x"]


def test_the_variables_of_the_runtime_environment_are_expanded_and_replace_those_that_there_were():
    _arguments, told, also = started_by(setup_worker.__file__, CONTEXTS["of a template"])
    assert told == "there::there"
    assert also == "kept"
    _arguments, told, also = started_by(setup_worker.__file__, CONTEXTS["with a prefix"])
    assert told == "before"
    assert also == "said"


def test_it_imports_nothing_but_the_standard_library():
    """It runs before each worker."""
    program = (
        f"import runpy, sys; runpy.run_path({setup_worker.__file__!r}); "
        "print([name for name in sys.modules if name.startswith(('ray', 'verl_like', 'torch'))])"
    )
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
