#!/usr/bin/env bash
# Number of makers: 2. Number of trainers: 1.
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" 2 1 "$@"
