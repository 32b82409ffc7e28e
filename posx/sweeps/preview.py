"""What a sweep would do, as a table: how its runs differ, what each takes, and what is there already."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from posx.config import RunConfig
from posx.data.store import cache_folder
from posx.encodings import spec_text
from posx.files import lines
from posx.machine.ceiling import matmul_ceiling
from posx.progress import duration
from posx.runs.describe import Expected, expected
from posx.sweeps.axes import text_of
from posx.sweeps.plan import Job

#: The part of the matrix-product ceiling at which a run works, where none here has been measured.
USUAL_SHARE = 0.35


def preview(jobs: Sequence[Job], at_once: int) -> str:
    """The table, and the sums under it. Reads no text; measures the machine's matrix products where nobody has yet."""
    varying = [s for s in jobs[0].point if len({text_of(s, job.point[s]) for job in jobs}) > 1]
    costs = [expected(job.run) for job in jobs]
    share = _measured_share([job.folder.metrics_file for job in jobs])
    seconds = [_seconds(job.run, cost, share or USUAL_SHARE) for job, cost in zip(jobs, costs, strict=True)]
    table = [["run", *varying, "resolved", "parameters", "memory", "time", "is"]]
    for job, cost, time in zip(jobs, costs, seconds, strict=True):
        known = "" if cost.eval_flops is not None else " and evaluation"
        table.append([
            job.name, *(text_of(s, job.point[s]) for s in varying), _resolved(job.run), f"{cost.num_params:,}",
            f"{cost.memory / 1e6:,.0f} MB", f"{duration(time)}{known}", _state(job),
        ])  # fmt: skip
    left = sum(time * (1 - job.part()) for job, time in zip(jobs, seconds, strict=True))
    finished = sum(job.finished() for job in jobs)
    source = "as measured here" if share else "of the machine's matrix products, which no run here has measured"
    return "\n".join([
        *_aligned(table), "",
        f"{len(jobs)} runs, {finished} of them finished; about {duration(left)} left with the machine to themselves"
        f" (--jobs={at_once}), at {share or USUAL_SHARE:.2f} {'of its matrix products, ' if share else ''}{source}",
    ])  # fmt: skip


def _resolved(run: RunConfig) -> str:
    """The encodings of the layers with nothing left open."""
    return ", ".join(dict.fromkeys(map(spec_text, run.resolution.layers)))


def _seconds(run: RunConfig, cost: Expected, share: float) -> float:
    ceiling = matmul_ceiling(cache_folder(run.data) / "machine", run.model.dtype, keep=False)
    return (cost.flops + (cost.eval_flops or 0)) / (share * ceiling)


def _measured_share(files: Sequence[Path]) -> float | None:
    """The median share of the ceiling over the log lines of runs that are there."""
    shares = [row["mfu"] for file in files for row in lines.read(file) if isinstance(row.get("mfu"), float)]
    return statistics.median(shares) if shares else None


def _state(job: Job) -> str:
    if job.finished():
        return "finished"
    return f"{job.part():.0%} done" if job.folder.config_file.exists() else "new"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
