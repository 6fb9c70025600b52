#!/usr/bin/env bash
# Number of makers: 1. Number of trainers: 1.
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" 1 1 "$@"
