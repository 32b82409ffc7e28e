"""The script of an hour on a GPU: a failing stage stops no other, done stages stay, one file has all results.

A stage that is cut keeps what it had.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks import measure, stages
from benchmarks.train import SHAPES
from tests.tiny import ROOT

#: An interpreter that notes its arguments and fails for the ceiling, until a file says that all is well.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
  *benchmarks.stages*) exec {python} "$@" ;;
  *"-m pytest"*) echo "[gw0] [  1%] FAILED tests/lab/test_model.py::test_one[rope] "; exec sleep 60 ;;
  *"benchmarks ceiling"*) echo "{folder}" >> "{folder}/calls"; test -e "{folder}/well" ;;
  *) echo "$*" >> "{folder}/calls"; echo printed ;;
esac
"""


def make_stand_in(folder):
    (stand_in := folder / "python").write_text(STAND_IN.format(python=sys.executable, folder=folder))
    stand_in.chmod(0o755)
    return os.environ | {"PYTHON": str(stand_in), "TINY": "1"}


@pytest.mark.slow
def test_a_script_that_is_stopped_says_what_it_had(tmp_path):
    out = tmp_path / "out"
    words = [str(ROOT / "benchmarks" / "accelerator.sh"), str(out), "--minutes=10"]
    env = make_stand_in(tmp_path) | {"STAGES": "doctor tests study"}
    process = subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while not ((text := out / "tests.txt").exists() and text.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.terminate()
    said = process.communicate(timeout=60)[0]
    rows = {row["stage"]: row for row in map(json.loads, (out / "results.jsonl").read_text().splitlines())}
    assert rows["doctor"]["status"] == "done" and rows["tests"]["status"] == "cut" and "study" not in rows
    assert rows["tests"]["failed"] == ["FAILED tests/lab/test_model.py::test_one[rope]"]
    assert (
        "| tests | cut |" in said
        and "FAILED tests/lab/test_model.py::test_one[rope]" in (out / "summary.md").read_text()
    )


@pytest.mark.slow
def test_tiny_stages_measure_and_end_with_their_tables(tmp_path):
    """Real stages at tiny sizes: every flag that the script gives is one of the benchmark."""
    env = os.environ | {"PYTHON": sys.executable, "TINY": "1", "STAGES": "train attention_all profile"}
    words = [str(ROOT / "benchmarks" / "accelerator.sh"), str(tmp_path / "out")]
    done = subprocess.run(words, env=env, text=True, capture_output=True, check=False)
    rows = {row["stage"]: row for row in map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())}
    assert done.returncode == 0 and {row["status"] for row in rows.values()} == {"done"}, done.stderr
    assert {row["encoding"] for row in rows["train"]["report"]["results"]} == {"nope", "t5"}
    (group,) = rows["attention_all"]["report"]["groups"]
    assert {row["encoding"] for row in group["results"]} == {"nope", "shaw"}
    assert "| shaw | posx |" in (tmp_path / "out" / "summary.md").read_text()


def test_a_report_that_was_cut_has_its_table():
    """In the first round some contestants have no turn yet. Later rounds count once they are finished."""
    measured = []
    for results in measure.interleaved([lambda n=n: float(n) for n in range(3)], 2):
        measured.append(results)
    assert measured[0] == [[0.0], [], []] and measured[2] == measured[4] == [[0.0], [1.0], [2.0]]
    assert measured[5] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    row = {"library": "posx", "encoding": "rope", "processes": 1, "parameters": 9, "flops_per_token": 2}
    rates = {"tokens_per_second": [7.0], "losses": [3.0]}
    machine = {"load_average": [[0.1], [0.1]], "cpu": "one", "cores": 1, "device": "cpu"}
    cut = {"bench": "train", **machine, "shape": dataclasses.asdict(SHAPES["tiny"]), "steps": 1, "ceiling": [1e9]}
    assert "| rope | 7 [7, 7] |" in stages.table(cut | {"results": [row | rates]})
    assert stages.table(cut | {"results": []}) == ""


@pytest.mark.slow
def test_a_failing_stage_is_reported_and_tried_again(tmp_path):
    def run():
        words = [str(ROOT / "benchmarks" / "accelerator.sh"), str(tmp_path / "out")]
        env = make_stand_in(tmp_path) | {"STAGES": "doctor ceiling decode study"}
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
