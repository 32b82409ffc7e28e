"""The runs of a sweep, and the tables of `--dry_run` and `--status`: their expected time and their progress."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posx.encodings import spec_text
from posx.errors import ConfigError, PosxError, join_problems
from posx.lab.config import RunConfig, Sections
from posx.lab.config.data import PLACES
from posx.lab.data import DataConfig, Dataset, prepare
from posx.lab.data.store import cache_folder
from posx.lab.files.locks import holder
from posx.lab.machine.ceiling import machine_ceiling, stored_ceiling
from posx.lab.progress import duration, group_by_reason, quantity, size
from posx.lab.runs import text
from posx.lab.runs.checks import check_run, unused_settings, with_text
from posx.lab.runs.folder import RunFolder
from posx.lab.sweeps.axes import folder_names, point_run, setting_text, sweep_points, varying_settings
from posx.lab.sweeps.engines.local import LocalEngine
from posx.lab.sweeps.schedule import START
from posx.lab.sweeps.tasks import Job
from posx.notices import say

#: The fraction of the speed of matrix products at which a run works, if no run here has measured it.
USUAL_SHARE = 0.5


def plan(config: Sections, workdir: Path, read: bool = False) -> list[Job]:
    """Return the runs of a sweep: every combination of the values on its axes, each in its folder.

    A run is in the folder that holds it already, else in a new one, named after the settings that vary. `read` reads
    the texts, whose digests tell runs apart. Without `read`, the texts of the runs in the folder count as unchanged.

    Raises:
      ConfigError: with every problem of every run; or two runs are the same.
      DataError: a text is missing, or too short for a run. Or a task has no items of a length.
    """
    points = sweep_points(config)
    held = _readable_runs(workdir)
    jobs, problems = list[Job](), list[tuple[str, str]]()
    for name, point in zip(folder_names(points), points, strict=True):
        try:
            jobs.append(Job(check_run(point_run(config, point)), RunFolder(workdir / name), point=point))
        except ConfigError as error:
            problems.append((name, str(error)))
    if problems:
        raise ConfigError(join_problems(group_by_reason(problems)))
    return _place_jobs(_drop_duplicates(_with_texts(jobs, held, read)), held, workdir)


def _with_texts(jobs: Sequence[Job], held: Mapping[RunFolder, RunConfig], read: bool) -> list[Job]:
    """Return the jobs with the digests of their texts, at the places known to earlier runs of the folder."""
    with_texts: list[Job] = []
    datasets: dict[DataConfig, Dataset] = {}
    for job in jobs:
        namesakes = (
            (folder, old) for folder, old in held.items() if len(text.shared_places(job.run, old)) == len(PLACES)
        )
        folder, before = next(namesakes, (job.folder, None))
        run = text.with_known_places(job.run, before) if before else job.run
        if read or job.run.data.is_task:  # items are drawn, not read
            data = text.with_saved_tokenizer(folder, run).data
            if data not in datasets:
                datasets[data] = prepare(data, log=say)
                say(datasets[data].summary())
            run = with_text(run, datasets[data])
        else:  # the run in the job's own folder counts wherever its text is
            own_first = {job.folder: held[job.folder], **held} if job.folder in held else held
            same = (old for at, old in own_first.items() if text.may_be_the_same(run, old, at == job.folder))
            text_, held_out = next(((old.text, old.held_out) for old in same), ("", ""))
            run = dataclasses.replace(run, text=text_, held_out=held_out)
        with_texts.append(dataclasses.replace(job, run=run))
    return with_texts


def _drop_duplicates(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs without those that differ from an earlier one only in settings that neither of them uses.

    The size of the vocabulary is such a setting for bytes, the multiplier of rates for an encoding without parameters.
    Raises ConfigError for an axis that no job uses, and for two points that train the same.
    """
    idle = [unused_settings(job.run) for job in jobs]
    for setting in jobs[0].point:
        values = list(dict.fromkeys(setting_text(setting, job.point[setting]) for job in jobs))
        if len(values) > 1 and all(setting in settings for settings in idle):
            raise ConfigError(f"{setting}={values[0]} and {values[1]} are the same run: {idle[0][setting]}")
    first: dict[str, Job] = {}
    for job, not_used in zip(jobs, idle, strict=True):
        other = first.setdefault(job.run.hash, job)
        apart = {s: v for s, v in job.point.items() if setting_text(s, v) != setting_text(s, other.point[s])}
        if any(s != "train.position_lr_multiplier" and s not in not_used for s in apart):
            told = ", ".join(
                f"{s}={setting_text(s, other.point[s])} and {setting_text(s, v)}" for s, v in apart.items()
            )
            raise ConfigError(
                f"{told} are the same run: the trained weights do not depend on {' and '.join(apart)}. Leave one of "
                "them out."
            )
    return list(first.values())


def _place_jobs(jobs: Sequence[Job], held: Mapping[RunFolder, RunConfig], workdir: Path) -> list[Job]:
    """Return the jobs in the folders that hold them, whatever the names of these folders.

    If the folder of a new run's name holds another run, the hash of the new run is appended to the name.
    """
    by_hash: dict[str, RunFolder] = {}
    wanted = {job.folder for job in jobs}
    for folder, run in sorted(held.items(), key=lambda item: (not item[0].is_finished(item[1]), item[0] not in wanted)):
        by_hash.setdefault(run.hash, folder)  # of two copies the finished one
    taken = {by_hash[job.run.hash].path for job in jobs if job.run.hash in by_hash}
    placed, beside = [], []
    for job in jobs:
        folder = by_hash.get(job.run.hash, job.folder)
        if job.run.hash not in by_hash and (folder in held or folder.path in taken):
            apart = held[folder].differences(job.run) if folder in held else []
            folder = RunFolder(workdir / f"{job.name}-{job.run.hash}")
            beside.append(f"{folder.path.name} ({'; '.join(apart) or 'its name is taken'})")
        placed.append(dataclasses.replace(job, folder=folder))
    if beside:
        taken_names = "1 folder name is" if len(beside) == 1 else f"{len(beside)} folder names are"
        say(f"notice: {taken_names} taken by runs with other settings; the new runs go to {beside[0]}")
    return placed


def _readable_runs(workdir: Path) -> dict[RunFolder, RunConfig]:
    """Return the runs in `workdir` whose settings can be read, whatever their folders are called."""
    runs = {}
    with contextlib.suppress(OSError):  # writing there says why a folder cannot be read
        for path in sorted(workdir.glob("*/config.json")):
            with contextlib.suppress(PosxError):
                folder = RunFolder(path.parent)
                runs[folder] = folder.read_config()
    return runs


def preview(jobs: Sequence[Job], values: Mapping[str, Any]) -> str:
    """Return the table of the runs and the sums under it, for an engine as the flags name it.

    No text is read. The matrix products of this machine are measured if no run has done so.
    """
    schedule, on, cpus = LocalEngine(jobs, values["jobs"]).schedule, values["on"].partition(":")[0], values["cpus"]
    width = cpus if on else schedule.width
    varying = varying_settings([job.point for job in jobs])
    logged = [(job, row) for job in jobs for row in job.folder.logged_rows()]
    known = [(job, row["mfu"]) for job, row in logged if isinstance(row.get("mfu"), float)]
    share = _median([mfu * job.expected_cost.per_useful_flop for job, mfu in known])
    # MFU is against wall time, in which other runs were at work on the same cores or accelerator.
    others = 1.0 if on or not share else schedule.turns(schedule.at_once) if schedule.width else schedule.at_once
    start = _median([row["start"].get("seconds") for _, row in logged if isinstance(row.get("start"), dict)]) or START

    def core_speed(folder: Path, dtype: str) -> float:
        """Return the speed of products on a core: the stored one if there is one, as the machine may be busy now."""
        if not on and schedule.width and (known := stored_ceiling(folder, dtype, schedule.width)):
            return known / schedule.width
        return machine_ceiling(folder, dtype, keep=False) / schedule.cores

    left: dict[str, float] = {}
    table = [["run", *varying, "resolved", "parameters", "memory", "time", "is"]]
    for job in jobs:
        speed = core_speed(cache_folder(job.run.data) / "machine", job.run.model.dtype)
        cost = job.cost._replace(speed=others * (share or USUAL_SHARE) * speed, start=start)
        part = job.part()
        left[job.name] = cost.seconds(width, 1 - part) if part < 1 else 0.0
        time = "at most " * bool(job.run.train.stop_check_steps) + duration(cost.seconds(width))
        time += " and evaluation" * (job.expected_cost.eval_flops is None)
        encodings = ", ".join(dict.fromkeys(map(spec_text, job.run.layers)))
        table.append([
            job.name, *(setting_text(s, job.point[s]) for s in varying), encodings, f"{job.expected_cost.num_params:,}",
            size(job.expected_cost.memory), time, _state(job, part),
        ])  # fmt: skip
    about = "at most" if any(job.run.train.stop_check_steps for job in jobs) else "about"
    in_order = sorted(jobs, key=lambda job: job.cost.order)
    told = f"{duration(schedule.wall_seconds(left[job.name] for job in in_order))} left, {schedule}"
    if on:
        each = quantity(cpus, "CPU")
        told = f"{duration(sum(left.values()))} of work left on {each} a run; {on} decides how many train at once"
    return "\n".join([
        *align_columns(table), "",
        f"{quantity(len(jobs), 'run')}, {sum(not seconds for seconds in left.values())} of them finished; "
        f"{about} {told}",
        f"The times assume a start of {start:.0f} s, then {share or USUAL_SHARE:.0%} of the speed of matrix products "
        f"on this machine{', as measured in runs here' if share else '. No run here has measured them yet'}.",
    ])  # fmt: skip


def status(jobs: Sequence[Job], workdir: Path) -> str:
    """Return the table of each run's progress, the process that works on it, and the state of its SLURM job."""
    queued: Mapping[str, tuple[str, str]] = {}
    if workdir.exists():
        from posx.lab.sweeps.engines.slurm import submitted_jobs  # for a folder that may hold jobs

        queued = submitted_jobs(workdir)
    table, ended = [["run", "is", "at work", "job"]], 0
    for job in jobs:
        part = job.part()
        why = job.failure() if part < 1 else ""  # a finished run may have that of a later evaluation
        state = f"failed: {why}" if why else _state(job, part)
        at_work = "" if job.is_new else holder(job.folder.path / ".lock")
        table.append([job.name, state, at_work, " ".join(queued.get(job.name, ()))])
        ended += part == 1
    return "\n".join([*align_columns(table), "", f"{ended} of {len(jobs)} runs are finished"])


def _median(measured: Sequence[Any]) -> float | None:
    """Return the median of the floats, None if there are none."""
    known = [value for value in measured if isinstance(value, float)]
    return statistics.median(known) if known else None


def _state(job: Job, part: float) -> str:
    """Return the progress of a run, of which `part` is finished, or its damage."""
    if part == 1:
        return "finished"
    if damages := job.damages():
        more = f" and {len(damages) - 1} more" if damages[1:] else ""
        return f"damaged: {damages[0].path.name}: {damages[0].problem}{more}"
    return f"{part:.0%} done" if job.folder.config_file.exists() else "new"


def align_columns(table: Sequence[Sequence[str]], words: Sequence[bool] = ()) -> list[str]:
    """Return the lines of a table with columns of equal width, words to the left and numbers to the right.

    words: whether each column has words; all if left out.
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    columns = [(str.ljust if is_word else str.rjust, n) for is_word, n in zip(words or widths, widths, strict=True)]
    return ["  ".join(pad(cell, n) for cell, (pad, n) in zip(row, columns, strict=True)).rstrip() for row in table]
