#!/usr/bin/env bash
# Sets up .venv with posx and the extras given as arguments: scripts/setup.sh dev peers
# Does nothing if that was done before for the same pyproject.toml. PYTHON names another interpreter (3.11 or newer),
# VENV another folder than .venv, CONSTRAINTS a file of versions to install.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
venv="${VENV:-.venv}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "posx needs Python 3.11 or newer; $("$python" --version 2>&1) found: set PYTHON=/path/to/python3.11" >&2
  exit 2
}
extras=$(IFS=,; echo "$*")
stamp="$venv/.posx-$(echo "$extras" | tr ',' '-')-$(cat pyproject.toml ${CONSTRAINTS:+"$CONSTRAINTS"} | cksum | tr ' ' '-')"
[ -e "$stamp" ] && exit 0
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing posx${extras:+ with $extras} into $venv" >&2
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${CONSTRAINTS:+--constraint "$CONSTRAINTS"} \
  -e ".${extras:+[$extras]}"
touch "$stamp"
