#!/usr/bin/env bash
# Makes the environment of the peers, benchmarks/.peers: verl, TRL and OpenRLHF with the project's version of torch and Ray.
# verifiers has one of its own, build/agents/verifiers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
bash ../scripts/agents_environment.sh verifiers
python=${PYTHON:-python3}
stamp=.peers/.installed
wanted=$(cat peers.lock setup_peers.sh | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
echo "Making the peers' environment benchmarks/.peers: a few minutes, once."
"$python" -m venv .peers
pip() { .peers/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
pip install torch==2.13.0+cpu 2>/dev/null || pip install torch==2.13.0
# Without dependencies: OpenRLHF asks for flash-attn and deepspeed, which its planner does not load.
pip install --no-deps -r peers.lock
echo "$wanted" > "$stamp"
