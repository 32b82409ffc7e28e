"""`posx sweep`: all runs of a config, their figures and their table."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posx.errors import ConfigError, Damaged, OutOfMemoryError, PartialFailure, PosxError, WorkdirError
from posx.lab.argv.settings import AXES, settings
from posx.lab.commands import work_folder
from posx.lab.config import RunConfig, Sections, encoding_fields
from posx.lab.config.sections import LISTS
from posx.lab.files.copies import CopyTarget
from posx.lab.progress import group_by_reason, quantity
from posx.lab.runs.checks import check_work_folder, check_writable, say_unused
from posx.lab.runs.folder import RunFolder
from posx.lab.sweeps import engines
from posx.lab.sweeps.axes import point_run, setting_text, sweep_points
from posx.lab.sweeps.plan import plan, preview, status
from posx.lab.sweeps.tasks import Job
from posx.notices import say


def run_sweep(values: dict[str, Any], config: Sections | RunConfig) -> None:
    """Plan the runs, run those that are missing, and draw the figures."""
    config = config.as_given() if isinstance(config, RunConfig) else config
    engines.check_flags(values)
    only_told = values["dry_run"] or values["status"]
    workdir = work_folder(values, needed=not values["dry_run"])
    if values["workdir"]:
        check_work_folder(workdir, sweep=True)
    if values["without_argument"] and _is_idle(values, config):
        argument = values["config"].partition(":")[2]
        raise ConfigError(
            f"--config={values['config']}: the sweep makes the same runs without {argument!r}. Leave it out, or choose "
            f"the encodings with --config.sweep.encodings={argument}"
        )
    if not only_told:
        check_writable(workdir)
    planned = plan(config, workdir, read=not only_told)
    jobs = [dataclasses.replace(job, debug=values["debug"]) for job in planned]
    names = {word: name.removeprefix("sweep.axes.") for word, name in values["overrides"].items()}
    say_unused((job.run for job in jobs), names)
    for word, axis in _unused_words(values, config, jobs).items():
        say(f"notice: {word} is not used: an axis of the sweep sets {axis}. Use --config.{_axis_word(axis)}=VALUES")
    if only_told:
        print(status(jobs, workdir) if values["status"] else preview(jobs, values))
        return
    engine = engines.make_engine(values, jobs)
    keep = _copier(values["copy_to"], jobs)
    todo = [job for job in jobs if not job.is_finished()]
    _say_damage(workdir, todo)
    with RunFolder(workdir).hold():
        failed = _copy_ended(keep, [job for job in jobs if job not in todo])
        if len(todo) < len(jobs):
            rest = f"; {quantity(len(todo), 'run')} left" if todo else ""
            say(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already{rest}")
        if todo:
            reasons = engine.run(todo, "sweep", ended=lambda job: keep(job.folder.path))
            failed |= {folder.path.name: why for folder, why in reasons.items()}
        if failed or any(job.folder.is_finished(job.run) for job in jobs):
            _draw(workdir, bool(failed))
    if failed:
        raise PartialFailure(
            f"{len(failed)} of {len(jobs)} runs failed ({'; '.join(group_by_reason(failed.items()))}). Fix the cause "
            "and run the same command again: it keeps the finished runs. See docs/guides/troubleshooting.md."
        )


def _say_damage(workdir: Path, todo: Sequence[Job]) -> None:
    """Say which files of the runs are damaged, and which other folders of the sweep hold no run that can be read."""
    for job in todo:
        for damage in job.damages():
            say(f"notice: {damage}")
    own = {job.folder.path for job in todo}
    for path in sorted(workdir.glob("*/config.json")):
        try:
            RunFolder(path.parent).read_config()
        except Damaged as error:
            if path.parent not in own:
                say(f"notice: {error}. No run of this sweep is in that folder.")
        except PosxError:
            continue


def _draw(workdir: Path, failed: bool) -> None:
    """Draw the figures and the table of the stored rows."""
    from posx.lab import plots  # Matplotlib: once the settings are known to be right

    try:
        made = plots.plot(workdir)
    except (WorkdirError, OutOfMemoryError) as error:
        say(f"notice: there are no figures: {error}")
        if isinstance(error, OutOfMemoryError) and not failed:
            raise
        return
    if (workdir / "table.md").is_file():
        print((workdir / "table.md").read_text(encoding="utf-8"), end="")
    for path in made:
        if path.suffix == ".png":
            print(path)


def _copier(url: str, jobs: Sequence[Job]) -> Callable[[Path], None]:
    """Return a function that copies the folder of a finished run to a URL if there is one. Raises ConfigError."""
    if not url:
        return lambda folder: None
    target = CopyTarget(url)
    for job in jobs:
        target.check(job.name, job.run.hash)
    return target.keep


def _copy_ended(keep: Callable[[Path], None], jobs: Sequence[Job]) -> dict[str, str]:
    """Copy runs that ended before; return {name: reason} of the failures."""
    failed = {}
    for job in jobs:
        try:
            keep(job.folder.path)
        except WorkdirError as error:
            failed[job.name] = str(error)
    return failed


def _axis_word(setting: str) -> str:
    """Return the name of the axis of a setting, as it is typed: a list of the sweep if it has one."""
    lists = {of: name for name, of in LISTS.items()}
    return f"sweep.{lists[setting]}" if setting in lists else f"{AXES}{setting}"


def _unused_words(values: dict[str, Any], config: Sections, jobs: Sequence[Job]) -> dict[str, str]:
    """Return {word: setting of an axis} of the words that set it to a value that no run has."""
    given = settings(config) | {"encoding": config.encoding}
    used = {name: {setting_text(name, job.point[name]) for job in jobs} for name in jobs[0].point}
    names = {  # a field belongs to the encoding that the config has chosen
        word: "encoding" if name.startswith("encoding.") and name not in used else name
        for word, name in values["overrides"].items()
    }
    return {
        word: name
        for word, name in names.items()
        if name in used and setting_text(name, given.get(name)) not in used[name]
    }


def _is_idle(values: dict[str, Any], config: Sections) -> bool:
    """Return whether the argument of the config file names an encoding, and the sweep makes the same runs without it.

    An argument of another kind may be the default of the file, as 64x64 is of `scaling`.
    """
    with contextlib.suppress(ConfigError), contextlib.redirect_stderr(io.StringIO()):  # some files need an argument
        encoding_fields(values["config"].partition(":")[2])
        default = values["without_argument"]()
        runs, others = ([point_run(one, point) for point in sweep_points(one)] for one in (config, default))
        return runs == others and any(run.encoding != config.encoding for run in runs)
    return False
