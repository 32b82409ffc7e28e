"""The tables of `--dry_run` and `--status`: the runs of a sweep, the time they take, and how far they are."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posx.data.store import cache_folder
from posx.encodings import spec_text
from posx.files.locks import holder
from posx.machine.devices import machine_ceiling
from posx.progress import duration, size
from posx.sweeps.axes import text_of
from posx.sweeps.engines.here import Here
from posx.sweeps.engines.slurm import jobs_of, states
from posx.sweeps.plan import Job
from posx.sweeps.schedule import START, one_or_more

#: The fraction of the speed of matrix products at which a run works, if no run here has measured it.
USUAL_SHARE = 0.5


def preview(jobs: Sequence[Job], values: Mapping[str, Any]) -> str:
    """Return the table of the runs and the sums under it, for an engine as the flags name it.

    No text is read. The matrix products of this machine are measured if no run has done so.
    """
    schedule, on, cpus = Here(jobs, values["jobs"]).schedule, values["on"].partition(":")[0], values["cpus"]
    widths = (cpus,) * len(jobs) if on else schedule.widths
    varying = [s for s in jobs[0].point if len({text_of(s, job.point[s]) for job in jobs}) > 1]
    rows = [row for job in jobs for row in job.folder.logged()]
    share = _median([row.get("mfu") for row in rows])
    start = _median([row["start"].get("seconds") for row in rows if isinstance(row.get("start"), dict)]) or START
    # One measurement for all runs. It is not stored, as the machine may be busy now.
    ceiling = functools.cache(lambda folder, dtype: machine_ceiling(folder, dtype, max_age=3600, keep=False))
    costs, left = [], []
    table = [["run", *varying, "resolved", "parameters", "memory", "time", "is"]]
    for job, cost, width in zip(jobs, schedule.costs, widths, strict=True):
        flops = ceiling(cache_folder(job.run.data) / "machine", job.run.model.dtype)
        cost = cost._replace(speed=(share or USUAL_SHARE) * flops / schedule.cores, start=start)
        costs.append(cost)
        part = job.part()
        left.append(cost.seconds(width, 1 - part) if part < 1 else 0.0)
        time = duration(cost.seconds(width)) + " and evaluation" * (job.expected.eval_flops is None)
        encodings = ", ".join(dict.fromkeys(map(spec_text, job.run.layers)))
        table.append([
            job.name, *(text_of(s, job.point[s]) for s in varying), encodings, f"{job.expected.num_params:,}",
            size(job.expected.memory), time, _state(job, part),
        ])  # fmt: skip
    seconds = dataclasses.replace(schedule, costs=tuple(costs)).wall_seconds(left)
    told = f"{duration(seconds)} left, {schedule}"
    if on:
        each = one_or_more(cpus, "CPU")
        told = f"{duration(sum(left))} of work left on {each} a run, {on} decides how many go at once"
    return "\n".join([
        *_aligned(table), "", f"{len(jobs)} runs, {left.count(0.0)} of them finished; about {told}",
        f"The times assume a start of {start:.0f} s, then {share or USUAL_SHARE:.0%} of the speed of matrix products "
        f"on this machine{', as measured in runs here' if share else '. No run here has measured them yet'}.",
    ])  # fmt: skip


def status(jobs: Sequence[Job], workdir: Path) -> str:
    """Return the table of how far each run is, which process is at it, and the state of its SLURM job."""
    queued, numbers = states(workdir), jobs_of(workdir)
    table = [["run", "is", "at work", "job"]]
    for job in jobs:
        state = f"failed: {why}" if (why := job.failure()) else _state(job, job.part())
        told = f"{numbers[job.name]} {queued.get(job.name, '')}" if job.name in numbers else ""
        table.append([job.name, state, holder(job.folder.path / ".lock"), told])
    ended = sum(job.finished() for job in jobs)
    return "\n".join([*_aligned(table), "", f"{ended} of {len(jobs)} runs are finished"])


def _median(measured: Sequence[Any]) -> float | None:
    """Return the median of the floats, None if there are none."""
    known = [value for value in measured if isinstance(value, float)]
    return statistics.median(known) if known else None


def _state(job: Job, part: float) -> str:
    """Return how far a run is, of which a part is finished."""
    if part == 1:
        return "finished"
    return f"{part:.0%} done" if job.folder.config_file.exists() else "new"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
