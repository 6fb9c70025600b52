"""The script by which Ray starts a worker, in place of Ray's own of the same name.

It does the same for workers in Python on Linux, but Ray's imports Ray for that, which takes 0.3 s
of CPU time before the worker's own imports. This one imports only the standard library. Ray knows
the script by its name, and leaves it out where a worker has no environment of its own.
"""

import argparse
import json
import os
import re
import shlex
import sys


def become_worker() -> None:
    """Replaces this process by a worker, with the environment variables and the command that its
    runtime environment has. Ray gives them as JSON: variables with `${NAME}` to be expanded, and
    commands for a shell."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, arguments = parser.parse_known_args()
    context = json.loads(known.serialized_runtime_env_context or "{}")
    variables = context.get("env_vars") or {}
    for name, value in variables.items():
        expanded = os.path.expandvars(value)
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", expanded)
    prefix = context.get("command_prefix") or []
    python = context.get("py_executable") or sys.executable
    words = [*prefix, "exec", python, *map(shlex.quote, arguments)]
    os.execvp("bash", ["bash", "-c", " ".join(words)])


if __name__ == "__main__":
    become_worker()
