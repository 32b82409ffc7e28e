"""`python -m benchmarks sweep`: the best baseline is the bar, stored runs are not repeated, cold and warm caches."""

import contextlib
import itertools
import json
from pathlib import Path

import pytest

from tests.benchmarks.tables import cells

WORDS = "sweep --config=configs/quick.py --baseline=HEAD --jobs=1,4".split()


@pytest.fixture
def commands(bench, monkeypatch, tmp_path):
    """What would have been run, after the stub that stands in for it; a command takes 4 s more than the one before."""
    log, clock = [], itertools.count()

    class Ended:
        returncode = 0

    def run(command, env, stdout, **_):
        words = {word.split("=")[0]: word.partition("=")[2] for word in command[5:]}
        log.append(words | {"code": env["PYTHONPATH"].split(":")[0], "new": not Path(words[CACHE]).exists()})
        (Path(words["--workdir"]) / "run").mkdir(parents=True)
        (Path(words["--workdir"]) / "run" / "eval.jsonl").write_text("{}\n" * 4)
        Path(words[CACHE]).mkdir(exist_ok=True)
        Ended.returncode = run.code
        stdout.write("a reason\n" if run.code else "")
        stdout.flush()
        return Ended

    run.code = 0
    real = bench.sweeps.subprocess
    monkeypatch.setattr(
        bench.sweeps, "subprocess", type("Stub", (), {"run": staticmethod(run), "DEVNULL": real.DEVNULL})
    )
    monkeypatch.setattr(bench.sweeps.time, "perf_counter", lambda: float(next(clock)) ** 2)
    monkeypatch.setattr(bench.sweeps, "checkout", lambda commit: contextlib.nullcontext(tmp_path / "before"))
    (tmp_path / "before" / "configs").mkdir(parents=True)
    (tmp_path / "before" / "configs" / "quick.py").touch()
    log.append(run)
    return log


CACHE = "--config.data.cache_dir"


def test_the_best_baseline_is_the_bar_and_all_runs_are_fresh(bench, commands, tmp_path, capsys):
    """Clock 0, 1, 4, 9, 16, 25: posx takes 1 s, one job 5, four jobs 9."""
    bench.main([*WORDS, f"--out={tmp_path}/s.json", f"--figure={tmp_path}/s.png"])
    out, (_, *made) = capsys.readouterr().out, commands
    assert cells(out) == {
        "posx": ["1 [1, 1]", "4", "1"], "jobs=1 at HEAD, best": ["5 [5, 5]", "4", "1"],
        "jobs=4 at HEAD": ["9 [9, 9]", "4", "1"],
    }  # fmt: skip
    assert "over posx's: 5.00 [5.00, 5.00]" in out
    assert [one.get("--jobs") for one in made] == [None, "1", "4"] and all(one["new"] for one in made)
    assert made[0]["code"] != made[1]["code"] == made[2]["code"], "the baseline runs its own code"
    assert made[1]["--config"].startswith(made[1]["code"]) and len({one["--workdir"] for one in made}) == 3
    assert (tmp_path / "s.png").stat().st_size > 1000


def test_stopped_bench_resumes_and_retries_failures(bench, commands, tmp_path, capsys):
    run, out = commands[0], [f"--out={tmp_path}/s.json"]
    run.code = 3
    bench.main([*WORDS, "--jobs=4", *out])
    assert "failed: jobs=4: exit code 3: a reason" in capsys.readouterr().out
    run.code = 0
    bench.main([*WORDS, "--jobs=4", *out])
    assert len(commands) - 1 == 2 + 2
    bench.main([*WORDS, *out])
    assert [one.get("--jobs") for one in commands[5:]] == ["1"], "the others are known"
    bench.main([*WORDS, *out, "--words=--config.train.steps=9"])
    assert len(commands) - 1 == 5 + 3, "another command"


def test_a_warm_cache_is_filled_by_a_run_that_does_not_count(bench, commands, tmp_path, capsys):
    bench.main([*WORDS, "--jobs=4", "--cache=warm", f"--out={tmp_path}/s.json"])
    made = commands[1:]
    assert [(one.get("--jobs"), one["new"]) for one in made] == [(None, True), ("4", True), ("4", False), (None, False)]
    report = json.loads((tmp_path / "s.json").read_text())
    assert len(report["runs"]) == 4 and {len(v) for v in bench.sweeps.summarise(report)["seconds"].values()} == {1}
