"""`posx sweep`: all runs of a config, their figures and their table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from posx.commands import work_folder
from posx.config.flags import repeated_run
from posx.config.overrides import setting_of, settings
from posx.data.store import cache_folder
from posx.errors import OutOfMemoryError, PartialFailure, WorkdirError
from posx.progress import say
from posx.runs.checks import check_writable
from posx.runs.folder import RunFolder
from posx.sweeps.axes import text_of
from posx.sweeps.plan import Job, plan, unfinished
from posx.sweeps.preview import preview
from posx.sweeps.processes import measure_ceilings, run_all, schedule_here
from posx.sweeps.schedule import Schedule


def main(values: dict[str, Any], config: ConfigDict) -> None:
    workdir = work_folder(values, needed=not values["dry_run"])
    jobs = plan(config, workdir, repeated_run(values))
    if not values["dry_run"]:
        check_writable(workdir)
    schedule, cores = schedule_here(jobs, values["jobs"])
    for word in _unused(values, config, jobs):
        say(f"notice: {word} is not used: the sweep sets {setting_of(word)} itself, see config.sweep")
    if values["dry_run"]:
        print(preview(jobs, schedule))
        return
    from posx import plots  # Matplotlib: once the settings are known to be right

    todo = unfinished(jobs)
    with RunFolder(workdir).held():
        failed = _run(jobs, todo, schedule, cores)
        try:
            made = plots.plot(workdir)
        except (WorkdirError, OutOfMemoryError) as error:
            say(f"no figures: {error}")
            if isinstance(error, OutOfMemoryError) and not failed:
                raise
        else:
            print((workdir / "table.md").read_text(), end="")
            for path in made:
                if path.suffix == ".png":
                    print(path)
    if failed:
        raise PartialFailure(
            f"{len(failed)} of {len(jobs)} runs failed ({'; '.join(f'{k}: {v}' for k, v in failed.items())}); "
            "once that is mended, the same command tries them again"
        )


def _run(jobs: Sequence[Job], todo: Sequence[Job], schedule: Schedule, cores: Sequence[int]) -> dict[str, str]:
    """Makes the runs that are `todo`; returns {name: why it failed}."""
    if len(todo) < len(jobs):
        say(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already")
    if not todo:
        return {}
    say(f"{schedule}; --jobs=N for another number")
    names = {job.name for job in todo}
    numbers = [number for number, job in enumerate(jobs) if job.name in names]
    first, widths = todo[0].run, [schedule.widths[number] for number in numbers]
    measure_ceilings(cache_folder(first.data) / "machine", first.model.dtype, cores, widths)
    failed = run_all(jobs, numbers, schedule, cores, "sweep")
    return {jobs[number].name: reason for number, reason in failed.items()}


def _unused(values: dict[str, Any], config: ConfigDict, jobs: Sequence[Job]) -> list[str]:
    """The words of the command about settings that vary over the runs, none of which has the value that they give."""
    given = settings(config) | {"encoding": config.encoding.to_dict()}
    used = {name: {text_of(name, job.point[name]) for job in jobs} for name in jobs[0].point}
    spec = values.get("config", "").partition(":")[2]
    words = [*([f"--config.encoding={spec}"] if spec else []), *values["overrides"]]
    names = {word: setting_of(word) for word in words}
    return [word for word, name in names.items() if name in used and text_of(name, given.get(name)) not in used[name]]
