#!/usr/bin/env bash
# Builds the sdist and the wheel, and tries the wheel in a fresh environment outside the clone. It publishes nothing: its
# last lines are the two commands that do. It first checks that version, changelog and tag name the same release.
# --untagged leaves these checks and `dist` out, to try the wheel between releases. PYTHON names another interpreter,
# CONSTRAINTS a file of versions for the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -eq 0 || "$*" == --untagged ]] || { echo "$*: the only flag is --untagged" >&2; exit 2; }
unset PYTHONPATH
python=${PYTHON:-python3}
constraints=${CONSTRAINTS:+$(realpath "$CONSTRAINTS")}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

check_names() {
  local problems=() heading
  [ "$(sed -n 's/^__version__ = "\(.*\)"/\1/p' posx/__init__.py)" = "$version" ] ||
    problems+=("posx/__init__.py: __version__ differs from $version in pyproject.toml. Make them equal.")
  [ "$(sed -n 's/^version: //p' CITATION.cff)" = "$version" ] ||
    problems+=("CITATION.cff: version differs from $version in pyproject.toml. Make them equal.")
  heading=$(sed -n '/^## [0-9]/{s/^## //p;q}' CHANGELOG.md)
  [[ "$heading" =~ ^"$version - "[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] ||
    problems+=("CHANGELOG.md: its newest release is '$heading'. Head this one with: ## $version - $(date +%F)")
  [ -z "$(sed -n '/^## Unreleased/,/^## [0-9]/{/^- /p}' CHANGELOG.md)" ] ||
    problems+=("CHANGELOG.md: entries are under Unreleased. Move them below the heading of $version.")
  [ -z "$(git status --porcelain)" ] || problems+=("git: files differ from the commit. Commit them.")
  [ "$(git rev-parse --quiet --verify "v$version^{commit}")" = "$(git rev-parse HEAD)" ] ||
    problems+=("git: tag v$version is not at this commit. Set it: git tag -a v$version -m 'posx $version'")
  [ ${#problems[@]} -eq 0 ] || { printf '%s\n' "${problems[@]}" >&2; exit 1; }
}

try_wheel() {  # in the folder $1, which has dist
  "$python" -m venv "$1/venv"
  "$1/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    ${constraints:+--constraint "$constraints"} "$1"/dist/posx-*.whl
  cd "$1"
  test "$(venv/bin/posx --version)" = "posx $version"
  test -e venv/lib/python3*/site-packages/posx/py.typed
  venv/bin/posx encodings alibi >/dev/null
  venv/bin/posx sweep --config quick --dry_run
  venv/bin/python - <<'CODE'
import pathlib, runpy

import jax, numpy as np, posx

for preset in pathlib.Path(posx.__file__).with_name("configs").glob("[a-z]*.py"):
    runpy.run_path(str(preset))["get_config"]()
dims = posx.Dims(model_dim=16, num_heads=2, head_dim=8, num_layers=1, train_len=8)
ones, alibi = np.ones((1, 8, 2, 8), np.float32), posx.build("alibi", dims)
o = posx.attend(alibi, alibi.init(jax.random.key(0), dims), ones, ones, ones, np.arange(8, dtype=np.int32))
np.testing.assert_allclose(o, ones, rtol=1e-6, err_msg="attend: weights must sum to 1")
CODE
  cd - >/dev/null
}

[ $# -eq 1 ] || check_names
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv "$place/build"
"$place/build/bin/python" -m pip install --quiet --disable-pip-version-check build
"$place/build/bin/python" -m build --outdir "$place/dist" . >"$place/log" 2>&1 || { cat "$place/log" >&2; exit 1; }
try_wheel "$place"
[ $# -eq 1 ] && exit
mkdir -p dist
cp "$place"/dist/* dist
echo "posx $version is in dist. These commands publish it:"
echo "  git push origin v$version"
echo "  pipx run twine upload dist/posx-$version.tar.gz dist/posx-$version-py3-none-any.whl"
