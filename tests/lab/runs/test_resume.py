"""Killed with kill -9 and started again: as if nothing had happened. What is killed is a real process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from posx.lab.files.lines import append, read_lines
from posx.machine.cores import usable_cores
from tests import cheap, tiny

STEPS, CHECKPOINT_STEPS = tiny.STEPS, tiny.CHECKPOINT_STEPS


def words(site, workdir, *more) -> list[str]:
    """Of the run in `site`: dropout and a table make the state depend on more than weights and data."""
    return ["train", f"--config={site / 'tiny.py'}:t5", f"--workdir={workdir}", *more]


def attempts(workdir) -> int:
    return max((row["attempt"] for row in read_lines(workdir / "metrics.jsonl")), default=0)


def last_step(workdir, attempt: int = 1) -> int:
    """The newest step of an attempt that is in the metrics; 0 before its first."""
    rows = read_lines(workdir / "metrics.jsonl")
    return max((row["step"] for row in rows if row["attempt"] == attempt), default=0)


def kill_after(step: int, command: list[str], workdir, **environment: str) -> int:
    """Starts the command, kills it once it has passed `step`; returns the newest checkpoint it left."""
    attempt = attempts(workdir) + 1
    process = tiny.start(*command, **environment)
    tiny.until(lambda: last_step(workdir, attempt) >= step, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    saved = [int(path.stem) for path in (workdir / "checkpoints").glob("*.json") if path.stem.isdigit()]
    assert saved and max(saved) < STEPS, "killed too late to show anything"
    return max(saved)


def without_place(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in ("run_id", "checksum")}


def assert_same_run(workdir, whole) -> None:
    assert tiny.digests(workdir, STEPS) == tiny.digests(whole, STEPS)
    rows, wanted = (tiny.rows(folder / "eval.jsonl") for folder in (workdir, whole))
    assert [without_place(row) for row in rows] == [without_place(row) for row in wanted]
    # Of steps that were made twice, the last attempt counts; both must have computed the same.
    losses = {
        folder: {row["step"]: row["loss"] for row in read_lines(folder / "metrics.jsonl")}
        for folder in (workdir, whole)
    }
    assert losses[workdir] == losses[whole] and set(losses[whole]) == set(range(1, STEPS + 1))


def resume_and_compare(site, workdir, whole, saved: int, **environment: str) -> None:
    code, _, err = tiny.run(*words(site, workdir), **environment)
    assert code == 0, err
    assert f"at step {saved}" in err and "notice" not in err
    assert_same_run(workdir, whole)
    assert (workdir / "DONE").exists()


@pytest.mark.slow
def test_a_terminated_run_saves_where_it_is_and_goes_on(site, tmp_path, whole):
    """SIGTERM, as schedulers send it before they kill: exit 75, and not a step is made twice."""
    workdir = tmp_path / "run"
    process = tiny.start(*words(site, workdir))
    tiny.until(lambda: last_step(workdir) > CHECKPOINT_STEPS, process)
    process.terminate()
    err = process.communicate()[1]
    assert process.returncode == 75, err
    saved = max(int(path.stem) for path in (workdir / "checkpoints").glob("*.json") if path.stem.isdigit())
    assert f"posx: run: stopped and saved at step {saved}; the same command resumes" in err and "Traceback" not in err
    assert saved == last_step(workdir) < STEPS
    assert not (workdir / "status.json").exists()
    resume_and_compare(site, workdir, whole, saved)
    steps = [row["step"] for row in read_lines(workdir / "metrics.jsonl")]
    assert steps == sorted(set(steps))


@pytest.fixture(scope="module")
def optimized(site, tmp_path_factory):
    """`whole`, its programs compiled as users' are."""
    workdir = tmp_path_factory.mktemp("optimized") / "whole"
    code, _, err = tiny.run(*words(site, workdir), **cheap.AS_USERS_HAVE_IT)
    assert code == 0, err
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(5, 13), (17, 18)])
def test_a_run_killed_twice_ends_the_same(site, tmp_path, optimized, steps):
    """Killed in two intervals between checkpoints, or twice in one."""
    workdir = tmp_path / "run"
    for step in steps:
        saved = kill_after(step, words(site, workdir), workdir, **cheap.AS_USERS_HAVE_IT)
        with open(workdir / "metrics.jsonl", "a") as file:
            file.write('{"step": 999, "lo')  # what a kill in the middle of a write leaves
    resume_and_compare(site, workdir, optimized, saved, **cheap.AS_USERS_HAVE_IT)
    made = [row["attempt"] for row in read_lines(workdir / "metrics.jsonl")]
    assert made == sorted(made) and set(made) == {1, 2, 3}
    assert len(json.loads((workdir / "env.json").read_text())["resumed"]) == 2


def test_damaged_newest_checkpoint_costs_only_steps(capsys, tmp_path, whole, site):
    workdir = shutil.copytree(whole, tmp_path / "run")
    for name in ("DONE", "eval.jsonl"):
        (workdir / name).unlink()
    newest = workdir / "checkpoints" / str(STEPS)
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    code, _, err = tiny.call(capsys, *words(site, workdir))
    assert code == 0, err
    assert f"checkpoint {STEPS}" in err and "skipped" in err and f"at step {STEPS - CHECKPOINT_STEPS}" in err
    assert_same_run(workdir, whole)


@pytest.mark.slow
def test_another_thread_layout_resumes_with_a_notice(site, tmp_path, whole):
    workdir = tmp_path / "run"
    kill_after(CHECKPOINT_STEPS + 1, words(site, workdir), workdir)
    code, _, err = tiny.run(*words(site, workdir), NPROC="1")
    assert code == 0, err
    assert "notice" in err and "not bit for bit" in err and "threads" in err
    resumed = json.loads((workdir / "env.json").read_text())["resumed"]
    assert any("NPROC" in change for change in resumed[-1]["changes"])
    rows, wanted = (tiny.rows(folder / "eval.jsonl") for folder in (workdir, whole))
    for row, other in zip(rows, wanted, strict=True):
        assert row["nll"] == pytest.approx(other["nll"], rel=1e-4)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"resumed": 3, "num_devices": "x", "threads": 1}'])
def test_damaged_env_json_is_noticed_and_written_anew(capsys, tmp_path, whole, site, text):
    workdir = shutil.copytree(whole, tmp_path / "run")
    (workdir / "DONE").unlink()
    (workdir / "env.json").write_text(text)
    code, _, err = tiny.call(capsys, *words(site, workdir))
    assert code == 0 and "env.json is damaged and is written again" in err, err
    env = json.loads((workdir / "env.json").read_text())
    assert env["num_devices"] == 1 and len(env["resumed"]) == 1
    assert_same_run(workdir, whole)


def test_checkpoints_without_their_settings_are_nobodys(capsys, tmp_path, whole, site):
    workdir = shutil.copytree(whole, tmp_path / "run")
    for name in ("DONE", "config.json"):
        (workdir / name).unlink()
    code, _, err = tiny.call(capsys, *words(site, workdir, "--config.train.learning_rate=0.02"))
    assert code == 4 and "holds checkpoints but no config.json" in err and "Traceback" not in err
    assert not (workdir / "config.json").exists()


@pytest.mark.slow
def test_full_disk_is_one_line_and_the_run_resumes_later(site, tmp_path, whole):
    """Files of 32 KB at most (`ulimit -f`): exit 6; then with room as if nothing had happened."""
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "posx.lab.cli", *words(site, workdir)]
    limited = ["bash", "-c", 'ulimit -f 32; exec "$@"', "limited", *command]
    done = subprocess.run(limited, env=tiny.environment(), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 6 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("posx: ") and ("full" in last or "no room" in last or "could not be written" in last)
    code, _, err = tiny.run(*words(site, workdir))
    assert code == 0, err
    assert_same_run(workdir, whole)


def test_an_interrupted_evaluation_computes_only_what_is_missing(capsys, tmp_path, whole, site):
    """As a kill between two lengths leaves it: the first row whole, the second torn."""
    workdir = shutil.copytree(whole, tmp_path / "run")
    (workdir / "DONE").unlink()
    lines = (workdir / "eval.jsonl").read_text().splitlines(keepends=True)
    tiny.write_rows(workdir / "eval.jsonl", [json.loads(lines[0]) | {"mark": "not computed again"}])
    with open(workdir / "eval.jsonl", "a") as file:
        file.write(lines[1][:40])
    code, _, err = tiny.call(capsys, *words(site, workdir))
    assert code == 0, err
    rows = read_lines(workdir / "eval.jsonl")
    assert rows[0]["mark"] and len(rows) == len(lines)
    assert [without_place(row) for row in rows[1:]] == [without_place(json.loads(line)) for line in lines[1:]]
    assert (workdir / "DONE").exists()


def test_rows_after_a_torn_line_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, {"step": 1, "loss": float("nan")})
    with open(path, "a") as file:
        file.write('{"step": 2, "lo')
    append(path, {"step": 2, "loss": 0.5})
    assert read_lines(path) == [{"step": 1, "loss": "nan"}, {"step": 2, "loss": 0.5}]
    assert "NaN" not in path.read_text()


# Sweeps


def sweep_words(site, workdir, *more) -> list[str]:
    return ["sweep", f"--config={site / 'tiny.py'}", f"--workdir={workdir}", *more]


def workers(workdir) -> list[int]:
    """Processes whose command line names `workdir` as that of a run to train."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline") as file:
                command = file.read()
        except (OSError, ValueError):
            continue
        if entry.isdigit() and str(workdir) in command and "posx.lab.sweeps.worker" in command:
            found.append(int(entry))
    return found


@pytest.mark.slow
def test_a_sweep_goes_on_after_its_driver_was_killed(capsys, site, whole, tmp_path):
    """One kill -9 leaves no orphan; the same command does only what is missing, then plots; and then nothing.

    Runs that are at work together have cores of their own, and after the kill as many as before.
    """
    workdir = tmp_path / "sweep"
    command = sweep_words(site, workdir, "--config.sweep.encodings=t5", "--config.sweep.seeds=0,1,2", "--jobs=2")
    finished = shutil.copytree(whole, workdir / "t5-L16-s0")
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    process = tiny.start(*command)
    others = [workdir / f"t5-L16-s{seed}" for seed in (1, 2)]
    tiny.until(lambda: any(last_step(folder) > CHECKPOINT_STEPS for folder in others), process)
    bound = [os.sched_getaffinity(pid) for pid in workers(workdir)]
    assert len(bound) == 2 and (len(usable_cores()) == 1 or not set.intersection(*bound)), "runs share a core"
    process.kill()
    process.communicate()
    end = time.monotonic() + 600
    while workers(workdir):
        assert time.monotonic() < end, "a worker outlived its driver"
        time.sleep(0.05)
    assert not any((folder / "DONE").exists() for folder in others), "killed too late to show anything"
    code, out, err = tiny.call(capsys, *command)
    assert code == 0, err
    assert "1 of 3 runs are finished already" in err
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path in before}
    assert {1, 2} in [{row["attempt"] for row in read_lines(folder / "metrics.jsonl")} for folder in others]
    for folder in others:
        assert "not bit for bit" not in (folder / "log.txt").read_text(), "resumed as it was started"
    assert (workdir / "table.md").exists() and list(workdir.glob("**/*.png")) and "| t5 | 3 |" in out
    rows = {path: path.read_bytes() for path in workdir.glob("*/eval.jsonl")}
    code, _, err = tiny.call(capsys, *command)
    assert code == 0 and "3 of 3 runs are finished already" in err
    assert rows == {path: path.read_bytes() for path in workdir.glob("*/eval.jsonl")}


@pytest.mark.slow
def test_terminated_sweep_and_run_save_and_resume(site, whole, tmp_path):
    """SIGTERM to one run: the sweep starts it again. To the sweep: its run saves, exit 75; the same command ends it."""
    workdir = tmp_path / "sweep"
    command = sweep_words(site, workdir, "--config.sweep.encodings=t5", "--config.sweep.seeds=0", "--jobs=1")
    folder = workdir / "t5-L16-s0"
    process = tiny.start(*command)
    for attempt in (1, 2):
        tiny.until(lambda n=attempt: last_step(folder, n) > CHECKPOINT_STEPS, process)
        os.kill(workers(workdir)[0] if attempt == 1 else process.pid, signal.SIGTERM)
    err = process.communicate()[1]
    assert process.returncode == 75 and not workers(workdir), err
    assert "t5-L16-s0 was stopped and resumes" in err and "the same command resumes" in err and "Traceback" not in err
    log = (folder / "log.txt").read_text()
    assert log.count("stopped and saved at step") == 2 and not (folder / "DONE").exists()
    code, _, err = tiny.run(*command)
    assert code == 0, err
    assert_same_run(folder, whole)
    assert {row["attempt"] for row in read_lines(folder / "metrics.jsonl")} == {1, 2, 3}


BREAKS = '''
import dataclasses
import jax.numpy as jnp
import posx

@dataclasses.dataclass(frozen=True)
class Breaks(posx.Encoding):
    """A user's encoding whose logits are not finite."""
    def by_distance(self, params, distance):
        return posx.ByDistance(bias=jnp.full((1, distance.shape[0]), jnp.nan))
'''


@pytest.mark.slow
def test_a_failing_run_does_not_stop_the_others_and_is_named(site, tmp_path):
    (tmp_path / "breaking.py").write_text(BREAKS)
    workdir = tmp_path / "sweep"
    command = sweep_words(site, workdir, "--config.sweep.encodings=breaking:Breaks,nope", "--config.train.steps=6")
    code, out, err = tiny.run(*command, "--jobs=2", PYTHONPATH=str(tmp_path))
    last = err.strip().splitlines()[-1]
    assert code == 7 and last.startswith("posx: 1 of 2 runs failed"), err
    assert "breaking.Breaks-L16-s0" in last and "at step 1. posx check breaking:Breaks" in last, last
    assert "nope-L16-s0:" not in last
    assert (workdir / "nope-L16-s0" / "DONE").exists() and "| nope |" in out
    assert json.loads((workdir / "breaking.Breaks-L16-s0" / "status.json").read_text())["code"] == 5
    code, _, err = tiny.run(*command, PYTHONPATH=str(tmp_path))
    assert code == 7 and "1 of 2 runs are finished already" in err


def without_numbers(row: dict) -> dict:
    """Which targets a row is of; another number of devices rounds its losses otherwise."""
    return {name: value for name, value in without_place(row).items() if not isinstance(value, float | list)}


@pytest.mark.slow
def test_runs_evaluated_side_by_side_equal_each_alone(capsys, site, whole, tmp_path):
    """Notices, lines and failures of the processes are told, and the rows of all make one table."""
    good, lost = (shutil.copytree(whole, tmp_path / "sweep" / name) for name in ("good", "lost"))
    (good / "eval.jsonl").unlink()
    shutil.rmtree(lost / "checkpoints")
    code, out, err = tiny.call(capsys, "evaluate", f"--workdir={tmp_path / 'sweep'}")
    assert code == 7 and "lost" in err.splitlines()[-1] and "no checkpoint" in err.splitlines()[-1], err
    assert sum(line.startswith("posx: ") for line in err.splitlines()) == 1
    found, wanted = tiny.rows(good / "eval.jsonl"), tiny.rows(whole / "eval.jsonl")
    assert [row["nll"] for row in found] == pytest.approx([row["nll"] for row in wanted], rel=1e-5)
    assert list(map(without_numbers, found)) == list(map(without_numbers, wanted))
    assert "| t5 | 1 |" in out and "at a time" in err
    for row in found:
        assert f"good  {row['protocol']} at {row['eval_len']}: ppl" in err
