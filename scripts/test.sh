#!/usr/bin/env bash
# Sets up .venv and runs the default tests. Arguments go to pytest: scripts/test.sh tests/encodings -m "slow or not slow"
# VENV names another folder than .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
exec "${VENV:-.venv}/bin/python" -m pytest -n 2 --dist worksteal "$@"
