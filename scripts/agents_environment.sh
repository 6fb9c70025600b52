#!/usr/bin/env bash
# Makes an environment for agents, build/agents/NAME, if there is none: exact versions, which do not fit beside those of .venv.
#   bash scripts/agents_environment.sh NAME     verifiers or openenv, which serve environments, or harnesses
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=${1:-}
lock=requirements/agents/$name.txt
if [ ! -f "$lock" ]; then
  echo "There is no environment '$name': give verifiers, openenv or harnesses." >&2
  exit 1
fi
venv=build/agents/$name
stamp=$venv/.installed
wanted=$(cat "$lock" scripts/agents_environment.sh | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
echo "Making the environment $venv: a few minutes and at most 0.6 GB, once."
"${PYTHON:-python3}" -m venv --clear "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps -r "$lock"
echo "$wanted" > "$stamp"
