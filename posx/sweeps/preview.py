"""What a sweep would do, as a table: how its runs differ, what each takes, and what is there already."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posx.config import RunConfig
from posx.data.store import cache_folder
from posx.encodings import spec_text
from posx.files.locks import holder
from posx.machine.ceiling import machine_ceiling
from posx.progress import duration, size
from posx.sweeps.axes import text_of
from posx.sweeps.engines.slurm import jobs_of, states
from posx.sweeps.plan import Job
from posx.sweeps.schedule import START, Schedule

#: Of the matrix-product ceiling, at which a run works: where no run here has measured it.
USUAL_SHARE = 0.5


def preview(jobs: Sequence[Job], schedule: Schedule, on: str = "", cpus: int = 1) -> str:
    """Return the table, and the sums under it. Reads no text; measures this machine's matrix products if nobody has.

    Args:
      jobs: the runs.
      schedule: how they would be made on this machine.
      on: where they are made instead, as `--on` says, with so many `cpus` each.
    """
    widths = (cpus,) * len(jobs) if on else schedule.widths
    varying = [s for s in jobs[0].point if len({text_of(s, job.point[s]) for job in jobs}) > 1]
    rows = [row for job in jobs for row in job.folder.logged()]
    share = _median([row.get("mfu") for row in rows])
    start = _median([row["start"].get("seconds") for row in rows if isinstance(row.get("start"), dict)]) or START
    ceiling = functools.cache(_ceiling)  # not kept on disk, so each look would measure anew
    costs = []
    for job, cost in zip(jobs, schedule.costs, strict=True):
        speed = (share or USUAL_SHARE) * ceiling(cache_folder(job.run.data), job.run.model.dtype) / schedule.cores
        costs.append(cost._replace(speed=speed, start=start))
    parts = [job.part() for job in jobs]
    table = [["run", *varying, "resolved", "parameters", "memory", "time", "is"]]
    for job, cost, width, part in zip(jobs, costs, widths, parts, strict=True):
        known = "" if job.expected.eval_flops is not None else " and evaluation"
        table.append([
            job.name, *(text_of(s, job.point[s]) for s in varying), _resolved(job.run), f"{job.expected.num_params:,}",
            size(job.expected.memory), f"{duration(cost.seconds(width))}{known}", _state(job, part),
        ])  # fmt: skip
    left = [
        cost.seconds(width, 1 - part) if part < 1 else 0.0
        for cost, width, part in zip(costs, widths, parts, strict=True)
    ]
    here = dataclasses.replace(schedule, costs=tuple(costs))
    told = f"about {duration(here.wall_seconds(left))} left, {schedule}"
    if on:
        each, engine = "one CPU" if cpus == 1 else f"{cpus} CPUs", on.partition(":")[0]
        told = f"about {duration(sum(left))} of work left on {each} a run, {engine} decides how many go at once"
    return "\n".join([
        *_aligned(table), "",
        f"{len(jobs)} runs, {parts.count(1)} of them finished; {told}",
        f"The times assume a start of {start:.0f} s, then {share or USUAL_SHARE:.0%} of the speed of matrix products "
        f"on this machine{', as measured in runs here' if share else '. No run here has measured them yet'}.",
    ])  # fmt: skip


def status(jobs: Sequence[Job], workdir: Path) -> str:
    """What has become of every run, as a table: how far it is, who is at it, and what SLURM says of its job."""
    queued, numbers = states(workdir), jobs_of(workdir)
    table = [["run", "is", "at work", "job"]]
    for job in jobs:
        part = job.part()
        told = f"{numbers[job.name]} {queued.get(job.name, '')}" if job.name in numbers else ""
        why = job.failure()
        table.append(
            [job.name, f"failed: {why}" if why else _state(job, part), holder(job.folder.path / ".lock"), told]
        )
    ended = sum(job.finished() for job in jobs)
    return "\n".join([*_aligned(table), "", f"{ended} of {len(jobs)} runs are finished"])


def _resolved(run: RunConfig) -> str:
    """The encodings of the layers with nothing left open."""
    return ", ".join(dict.fromkeys(map(spec_text, run.layers)))


def _ceiling(cache: Path, dtype: str) -> float:
    """FLOP/s of all devices, as a run's log lines count them."""
    return machine_ceiling(cache / "machine", dtype, max_age=3600, keep=False)  # it may have been busy then


def _median(measured: Sequence[Any]) -> float | None:
    known = [value for value in measured if isinstance(value, float)]
    return statistics.median(known) if known else None


def _state(job: Job, part: float) -> str:
    if part == 1:
        return "finished"
    return f"{part:.0%} done" if job.folder.config_file.exists() else "new"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
