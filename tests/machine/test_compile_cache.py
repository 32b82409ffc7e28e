"""A second start finds its programs compiled; a cache that cannot be used costs time and nothing else."""

import subprocess
import sys

import jaxlib
import pytest

from posx.machine.compile_cache import machine_key
from tests import tiny

COMPILES = """
import sys
from pathlib import Path
from posx.machine.compile_cache import start_cost, use_compile_cache
use_compile_cache(Path(sys.argv[1]))
import jax
jax.jit(lambda x: x * 2 + 1)(3.0)
cost = start_cost()
print(cost["cache_hits"], cost["cache_misses"])
"""


def compiling(root, **extra: str) -> tuple[int, int, str]:
    """Hits and misses of a process that compiles something, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILES, str(root)], env=tiny.environment(**extra), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    hits, misses = map(int, done.stdout.split())
    return hits, misses, done.stderr


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    hits, misses, _ = compiling(root)
    assert hits == 0 and misses > 0
    return root


def test_a_second_process_compiles_nothing_again(filled):
    hits, misses, said = compiling(filled)
    assert hits > 0 and misses == 0 and not said


def test_a_broken_entry_is_compiled_again_without_a_word(filled):
    for path in (filled / "compiled" / machine_key()).glob("*-cache"):
        path.write_bytes(path.read_bytes()[:20])
    hits, misses, said = compiling(filled)
    assert hits == 0 and misses > 0 and not said


def test_a_folder_that_cannot_be_made_is_one_notice(tmp_path):
    (tmp_path / "compiled").write_text("in the way")
    hits, misses, said = compiling(tmp_path)
    assert hits == misses == 0 and said.startswith("notice: ") and len(said.splitlines()) == 1


def test_jax_s_own_variables_turn_it_off_and_move_it(tmp_path):
    assert compiling(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false") == (0, 0, "")
    elsewhere = tmp_path / "elsewhere"
    compiling(tmp_path / "root", JAX_COMPILATION_CACHE_DIR=str(elsewhere))
    assert not (tmp_path / "compiled").exists() and not (tmp_path / "root").exists()


def test_programs_of_another_jaxlib_or_cpu_are_kept_apart(monkeypatch):
    assert f"jaxlib-{jaxlib.__version__}-" in machine_key()
    mine = machine_key()
    monkeypatch.setattr("pathlib.Path.read_text", lambda self: "model name : other\nflags : none\n")
    assert machine_key() != mine


def test_the_same_run_elsewhere_starts_from_what_was_compiled(site, whole, tmp_path):
    words = [f"--config={site / 'tiny.py'}:t5", f"--workdir={tmp_path / 'second'}"]
    code, _, err = tiny.run("train", *words)
    assert code == 0, err
    assert "reading" in (site / "whole.err").read_text() and "reading" not in err, "the text is tokenised once"
    costs = []
    for folder in (whole, tmp_path / "second"):
        rows = tiny.rows(folder / "metrics.jsonl")
        costs.append(rows[0]["start"])
        assert not any("start" in row for row in rows[1:])
    first, second = costs
    assert first["cache_misses"] > 0 and second["cache_misses"] == 0
    assert second["cache_hits"] == first["cache_hits"] + first["cache_misses"]
    assert all(cost["seconds"] > cost["compile_seconds"] > 0 for cost in costs)
    assert tiny.digests(whole, tiny.STEPS) == tiny.digests(tmp_path / "second", tiny.STEPS)
