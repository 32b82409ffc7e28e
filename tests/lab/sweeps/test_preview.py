"""Test the time that a dry run of a sweep names, and the finished part of a run."""

import dataclasses
from types import SimpleNamespace

import pytest

from posx.lab.config import base_config, read_sections
from posx.lab.sweeps import plan as planning
from posx.lab.sweeps.plan import plan, preview
from posx.lab.sweeps.schedule import TURNS, Schedule, choose
from tests.made_rows import UNDISTURBED


def test_preview_counts_each_start(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "stored_ceiling", lambda *_: 0.0)
    monkeypatch.setattr(planning, "machine_ceiling", lambda folder, dtype, **how: 1e30)
    config = base_config("rope")
    config.sweep.update(encodings=("rope", "alibi"), seeds=(0, 1, 2))
    jobs = plan(read_sections(config), tmp_path)
    schedule = choose([job.cost for job in jobs], cores=2, memory=64e9)
    monkeypatch.setattr(planning, "LocalEngine", lambda jobs, at_once: SimpleNamespace(schedule=schedule))
    text = preview(jobs, {"jobs": 0, "on": "", "cpus": 1})
    assert "about 1 min 15 s left, 2 runs at a time, 1 core each\n" in text
    assert "a start of 10 s, then 50%" in text and "No run here has measured them" in text


@pytest.mark.parametrize(("schedule", "turns"), [(Schedule(2, 3, 1), 3 / (TURNS * 2)), (Schedule(2, 2, 0), 2)])
def test_preview_counts_the_time_of_runs_side_by_side_once(tmp_path, monkeypatch, schedule, turns):
    """The speed that runs log is against wall time, in which others were at work on the same device."""
    monkeypatch.setattr(planning, "stored_ceiling", lambda *_: 0.0)
    monkeypatch.setattr(planning, "machine_ceiling", lambda folder, dtype, **how: 1e11)
    monkeypatch.setattr(planning, "LocalEngine", lambda jobs, at_once: SimpleNamespace(schedule=schedule))
    config = base_config("rope")
    config.sweep.update(encodings=("rope", "alibi", "nope"), seeds=(0,))
    jobs = plan(read_sections(config), tmp_path)

    def left() -> str:
        return preview(jobs, {"jobs": 0, "on": "", "cpus": 1}).partition("; about ")[2].partition(" left")[0]

    first = left()
    for job in jobs:
        job.folder.path.mkdir()
        job.folder.write_config(job.run)
        row = {"step": 1, "hash": job.run.hash, "mfu": planning.USUAL_SHARE / turns} | UNDISTURBED
        job.folder.append(job.folder.metrics_file, row)
    assert left() == first and "min" in first


@pytest.mark.parametrize("log", [True, False])
def test_a_busy_machine_makes_no_run_slower(tmp_path, monkeypatch, log):
    """The stored speed of one core counts. Runs logged shares of it, or no run of this sweep has begun."""
    monkeypatch.setattr(planning, "LocalEngine", lambda jobs, at_once: SimpleNamespace(schedule=Schedule(2, 2, 1)))
    monkeypatch.setattr(planning, "machine_ceiling", lambda folder, dtype, **how: 2e10)  # on two busy cores
    config = base_config("rope")
    config.sweep.seeds = (0, 1)
    jobs = plan(read_sections(config), tmp_path)
    for job in jobs if log else ():
        job.folder.path.mkdir()
        job.folder.write_config(job.run)
        job.folder.append(job.folder.metrics_file, {"step": 1, "hash": job.run.hash, "mfu": 0.5} | UNDISTURBED)

    def left(stored: float) -> str:
        monkeypatch.setattr(planning, "stored_ceiling", lambda folder, dtype, cores: stored * (cores == 1))
        return preview(jobs, {"jobs": 0, "on": "", "cpus": 1}).partition("; about ")[2].partition(" left")[0]

    assert left(0.0) == left(1e10) != left(1e11)


def test_work_lost_at_a_kill_is_not_done(tmp_path):
    config = base_config("rope")
    config.train.update(steps=320, checkpoint_steps=200)
    config.sweep.encodings = ("rope",)
    (job,) = plan(read_sections(config), tmp_path)
    job.folder.path.mkdir()
    job.folder.write_config(job.run)

    def log(step: int) -> None:
        job.folder.append(job.folder.metrics_file, {"step": step, "hash": job.run.hash} | UNDISTURBED)

    def trained() -> float:
        """The steps that the progress means, as a process sees it that has not looked before."""
        return dataclasses.replace(job).progress() / whole * 320

    log(320)
    with job.folder.hold():
        whole = dataclasses.replace(job).progress()
        log(180)  # a process that was resumed
        assert trained() == pytest.approx(180)
    assert job.progress() == trained() == 0
    log(40)  # by a worker of the sweep that has looked before
    assert job.progress() / whole * 320 == pytest.approx(40)
    job.folder.checkpoints.mkdir()
    (job.folder.checkpoints / "200.json").touch()
    assert trained() == pytest.approx(200)
