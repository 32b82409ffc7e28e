"""What a sweep would do, as a table: how its runs differ, what each takes, and what is there already."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path

from posx.config import RunConfig
from posx.data.store import cache_folder
from posx.encodings import spec_text
from posx.files import lines
from posx.machine.ceiling import machine_ceiling
from posx.progress import duration
from posx.runs.describe import Expected, expected
from posx.sweeps.axes import text_of
from posx.sweeps.plan import Job

#: Where no run here has measured them: the part of the matrix-product ceiling at which a run works, and the seconds
#: from its start to its second step, which are Python's and the compiler's.
USUAL_SHARE, USUAL_START = 0.35, 10.0


def preview(jobs: Sequence[Job]) -> str:
    """The table, and the sums under it. Reads no text; measures the machine's matrix products where nobody has yet."""
    varying = [s for s in jobs[0].point if len({text_of(s, job.point[s]) for job in jobs}) > 1]
    costs = [expected(job.run) for job in jobs]
    rows = [row for job in jobs for row in lines.read(job.folder.metrics_file)]
    share = _median([row.get("mfu") for row in rows])
    start = _median([row["start"].get("seconds") for row in rows if "start" in row])
    ceiling = functools.cache(_ceiling)  # not kept on disk, so each look would measure anew
    speeds = [(share or USUAL_SHARE) * ceiling(cache_folder(job.run.data), job.run.model.dtype) for job in jobs]
    seconds = [(start or USUAL_START) + _flops(cost) / speed for cost, speed in zip(costs, speeds, strict=True)]
    parts = [job.part() for job in jobs]
    table = [["run", *varying, "resolved", "parameters", "memory", "time", "is"]]
    for job, cost, time, part in zip(jobs, costs, seconds, parts, strict=True):
        known = "" if cost.eval_flops is not None else " and evaluation"
        table.append([
            job.name, *(text_of(s, job.point[s]) for s in varying), _resolved(job.run), f"{cost.num_params:,}",
            f"{cost.memory / 1e6:,.0f} MB", f"{duration(time)}{known}", _state(job, part),
        ])  # fmt: skip
    left = sum(time * (1 - part) for time, part in zip(seconds, parts, strict=True))
    return "\n".join([
        *_aligned(table), "",
        f"{len(jobs)} runs, {parts.count(1)} of them finished; about {duration(left)} left one after another, each at "
        f"{share or USUAL_SHARE:.2g} of the machine's matrix products after a start of {start or USUAL_START:.0f} s, "
        f"{'as measured here' if share else 'which no run here has measured'}",
    ])  # fmt: skip


def _resolved(run: RunConfig) -> str:
    """The encodings of the layers with nothing left open."""
    return ", ".join(dict.fromkeys(map(spec_text, run.resolution.layers)))


def _ceiling(cache: Path, dtype: str) -> float:
    """FLOP/s of all devices, as a run's log lines count them."""
    return machine_ceiling(cache / "machine", dtype, keep=False)


def _flops(cost: Expected) -> float:
    return cost.flops + (cost.eval_flops or 0)


def _median(measured: Sequence[float | None]) -> float | None:
    known = [value for value in measured if value is not None]
    return statistics.median(known) if known else None


def _state(job: Job, part: float) -> str:
    if part == 1:
        return "finished"
    return f"{part:.0%} done" if job.folder.config_file.exists() else "new"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
