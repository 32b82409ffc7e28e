"""The script of an hour on a GPU: a failing stage stops no other, done stages stay, one file has all results."""

import json
import os
import subprocess
import sys

import pytest

from tests.tiny import ROOT

#: An interpreter that notes its arguments and fails for the ceiling, until a file says that all is well.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
  *benchmarks.stages*) exec {python} "$@" ;;
  *"benchmarks ceiling"*) echo "{folder}" >> "{folder}/calls"; test -e "{folder}/well" ;;
  *) echo "$*" >> "{folder}/calls"; echo printed ;;
esac
"""


@pytest.mark.slow
def test_a_failing_stage_is_reported_and_tried_again(tmp_path):
    (stand_in := tmp_path / "python").write_text(STAND_IN.format(python=sys.executable, folder=tmp_path))
    stand_in.chmod(0o755)

    def run():
        words = [str(ROOT / "benchmarks" / "accelerator.sh"), str(tmp_path / "out")]
        env = os.environ | {"PYTHON": str(stand_in), "STAGES": "doctor ceiling decode study", "TINY": "1"}
        done = subprocess.run(words, env=env, text=True, capture_output=True, check=False)
        rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
        return done, {row["stage"]: row["status"] for row in rows}

    done, found = run()
    assert done.returncode == 1 and "failed: ceiling" in done.stderr
    assert found == {"doctor": "done", "ceiling": "failed with exit code 1", "decode": "done", "study": "done"}
    (tmp_path / "well").touch()
    done, found = run()
    assert done.returncode == 0 and set(found.values()) == {"done"}, done.stderr
    assert done.stdout.count("done before") == 3
    assert len((tmp_path / "calls").read_text().splitlines()) == 5
    assert "## decode\n\nprinted" in (tmp_path / "out" / "summary.md").read_text()
