"""A second start finds its programs compiled; a cache that cannot be used costs time and nothing else."""

import os
import subprocess
import sys
import time

import jaxlib
import pytest

from posx.lab.machine.compile_cache import machine_key, prune
from tests import tiny

COMPILES = """
import os, sys, warnings
from pathlib import Path
from posx.lab.machine.compile_cache import start_cost, use_compile_cache
use_compile_cache(Path(sys.argv[1]))
import jax
jax.jit(lambda x: x * 2 + 1)(3.0)
if "WARN" in os.environ:
    warnings.warn(os.environ["WARN"])
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


@pytest.mark.slow
def test_a_second_process_compiles_nothing_again(filled):
    """It shows the warnings of others."""
    hits, misses, said = compiling(filled, WARN="Error reading something else")
    assert hits > 0 and misses == 0 and "UserWarning: Error reading something else" in said


def used(path, days: float) -> None:
    """Sets when `path` was last read and written, `days` ago."""
    os.utime(path, (time.time() - days * 86400,) * 2)


def test_pruning_keeps_the_programs_that_were_used_last(tmp_path):
    sizes = {"own/a": 3, "own/b": 2, "other/c": 4, "unused/d": 1, "mine/e": 1}
    ages = {"own/a": 40, "own/b": 2, "other/c": 5, "unused/d": 31, "mine/e": 99}
    for name, size in sizes.items():
        path = tmp_path / (f"jaxlib-{name}" if name != "mine/e" else name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
        used(path, ages[name])

    def left(most: int) -> set[str]:
        prune(tmp_path, most, "jaxlib-own")
        return {f"{path.parent.name}/{path.name}".removeprefix("jaxlib-") for path in tmp_path.glob("*/*")}

    assert left(9) == {"own/a", "own/b", "other/c", "mine/e"}
    assert left(8) == {"own/b", "other/c", "mine/e"}
    used(tmp_path / "jaxlib-own" / "b", 6)
    os.utime(tmp_path / "jaxlib-other" / "c", (0, time.time()))  # written just now
    assert left(5) == {"other/c", "mine/e"}
    assert left(0) == {"mine/e"} and left(0) == {"mine/e"}


@pytest.mark.slow
def test_a_start_deletes_the_program_used_longest_ago(filled):
    folder = filled / "compiled" / machine_key()
    programs = list(folder.iterdir())
    used(programs[0], 1)
    total = sum(path.stat().st_size for path in programs)
    hits, misses, said = compiling(filled, JAX_COMPILATION_CACHE_MAX_SIZE=str(total - 1))
    assert (hits, misses, said) == (len(programs) - 1, 1, "")
    assert compiling(filled) == (len(programs), 0, "")


@pytest.mark.slow
def test_a_process_killed_while_writing_leaves_a_usable_cache(tmp_path):
    folder = tmp_path / "compiled" / machine_key()
    writes = COMPILES.split("cost =")[0] + "for n in range(9999): jax.jit(lambda x: x * n + n)(3.0)"
    with subprocess.Popen([sys.executable, "-c", writes, str(tmp_path)], env=tiny.environment()) as process:
        tiny.until(lambda: len(list(folder.glob("jit__lambda*"))) > 3, process)
        process.kill()
    hits, misses, said = compiling(tmp_path)
    assert hits > 0 and misses == 0 and not said


@pytest.mark.slow
@pytest.mark.parametrize("strict", [{}, {"PYTHONWARNINGS": "error", "JAX_RAISE_PERSISTENT_CACHE_ERRORS": "1"}])
def test_a_torn_entry_is_compiled_and_written_once_more(filled, strict):
    programs = sorted((filled / "compiled" / machine_key()).glob("*-cache"))
    torn = programs[-1]
    whole, others = torn.stat().st_size, [path.stat().st_mtime_ns for path in programs[:-1]]
    torn.write_bytes(torn.read_bytes()[:20])
    assert compiling(filled, **strict) == (len(programs) - 1, 1, "")
    assert torn.stat().st_size > whole // 2 and others == [path.stat().st_mtime_ns for path in programs[:-1]]
    assert compiling(filled, **strict) == (len(programs), 0, "")


def test_a_folder_that_cannot_be_made_is_one_notice(tmp_path):
    (tmp_path / "compiled").write_text("in the way")
    hits, misses, said = compiling(tmp_path)
    assert hits == misses == 0 and said.startswith("notice: ") and len(said.splitlines()) == 1


@pytest.mark.slow
def test_jax_s_own_variables_turn_it_off_and_move_it(tmp_path):
    assert compiling(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false") == (0, 0, "")
    elsewhere = tmp_path / "elsewhere"
    compiling(tmp_path / "root", JAX_COMPILATION_CACHE_DIR=str(elsewhere))
    assert not (tmp_path / "compiled").exists() and not (tmp_path / "root").exists()


def test_programs_of_another_jaxlib_or_cpu_are_kept_apart(monkeypatch):
    assert f"jaxlib-{jaxlib.__version__}-" in machine_key()
    mine = machine_key()
    monkeypatch.setattr("pathlib.Path.read_text", lambda self, encoding: "model name : other\nflags : none\n")
    assert machine_key() != mine


@pytest.mark.slow
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
