#!/usr/bin/env bash
# From a fresh clone to extrapolation curves: sets up .venv, then runs the quick sweep (under 10 minutes on 2 cores).
# The same command resumes. Further arguments go to `posx sweep`, for example --jobs=2. VENV names another folder than
# .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec "${VENV:-.venv}/bin/posx" sweep --config quick --workdir runs/quick "$@"
