"""`posx sweep`: all runs of a config, their figures and their table."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from posx.commands import work_folder
from posx.config.flags import load_config
from posx.config.overrides import override, setting_of, settings
from posx.data.store import cache_folder
from posx.encodings import spec_text
from posx.errors import ConfigError, OutOfMemoryError, PartialFailure, WorkdirError
from posx.files.copies import Copies
from posx.progress import by_reason, say
from posx.runs.checks import check_work_folder, check_writable, say_unused
from posx.runs.folder import RunFolder
from posx.sweeps.axes import points_of, run_at, text_of
from posx.sweeps.engines import slurm
from posx.sweeps.engines.here import Here, here, measure_ceilings
from posx.sweeps.engines.shared import warn_of
from posx.sweeps.plan import Job, plan
from posx.sweeps.preview import preview, status
from posx.sweeps.work import Engine, run_all

#: {engine: the module that it needs}.
ENGINES = {"ray": "ray", "slurm": "submitit"}


def main(values: dict[str, Any], config: ConfigDict) -> None:
    where = _where(values)
    only_told = values["dry_run"] or values["status"]
    workdir = work_folder(values, needed=not values["dry_run"])
    if values["workdir"]:
        check_work_folder(workdir, sweep=True)
    argument = values.get("config", "").partition(":")[2]
    if argument and _is_idle(values, config):
        raise ConfigError(
            f"--config={values['config']}: the sweep makes the same runs without {argument!r}. Leave it out, or choose "
            f"the encodings with --config.sweep.encodings={argument}"
        )
    if not only_told:
        check_writable(workdir)
    jobs = plan(config, workdir, read=not only_told)
    local = here(jobs, values["jobs"])
    names = {word: setting_of(word).removeprefix("sweep.axes.") for word in values["overrides"]}
    say_unused((job.run for job in jobs), names)
    for word in _unused(values, config, jobs):
        say(f"notice: {word} is not used: the sweep sets {setting_of(word)} itself, see config.sweep")
    if only_told:
        print(
            status(jobs, workdir) if values["status"] else preview(jobs, local.schedule, values["on"], values["cpus"])
        )
        return
    copies = Copies(values["copy_to"]) if values["copy_to"] else None
    todo = [job for job in jobs if not job.finished()]
    with RunFolder(workdir).held():
        failed = _copied(copies, [job for job in jobs if job not in todo])
        if where == "slurm" and todo:
            for job in todo:
                if why := job.failure():
                    say(f"{job.name} has failed ({why})")
            print(_submitted(slurm.submit(todo, workdir, values["cpus"], values["gpus"], values["slurm."]), len(jobs)))
        else:
            failed |= _run(jobs, todo, values, local, copies)
        if where != "slurm" or len(todo) < len(jobs):
            _draw(workdir, bool(failed))
    if failed:
        raise PartialFailure(
            f"{len(failed)} of {len(jobs)} runs failed ({'; '.join(by_reason(failed.items()))}); "
            "once that is mended, the same command tries them again"
        )


def _draw(workdir: Path, failed: bool) -> None:
    """The figures and the table of what there is."""
    from posx import plots  # Matplotlib: once the settings are known to be right

    try:
        made = plots.plot(workdir)
    except (WorkdirError, OutOfMemoryError) as error:
        say(f"no figures: {error}")
        if isinstance(error, OutOfMemoryError) and not failed:
            raise
        return
    if (workdir / "table.md").is_file():
        print((workdir / "table.md").read_text(encoding="utf-8"), end="")
    for path in made:
        if path.suffix == ".png":
            print(path)


def _where(values: dict[str, Any]) -> str:
    """The engine that is asked for, empty for this machine. Raises ConfigError for words that do not fit it."""
    where = values["on"].partition(":")[0]
    if where and where not in ENGINES:
        raise ConfigError(f"--on={values['on']} is unknown; allowed: {', '.join(ENGINES)}, or nothing for this machine")
    cpus, gpus = values["cpus"], values["gpus"]
    if cpus < 1 or gpus < 0 or (gpus > 1 and gpus % 1):
        raise ConfigError(f"--cpus={cpus}, --gpus={gpus:g}: at least one CPU, and a part of one GPU or a whole number")
    unused = [f"--{name}" for name, usual in (("cpus", 1), ("gpus", 0), ("slurm.", {})) if values[name] != usual]
    if unused and not where:
        raise ConfigError(f"{', '.join(unused)}: for runs that are made elsewhere, which --on says")
    if where and importlib.util.find_spec(ENGINES[where]) is None:
        missing = f"--on {where} needs {ENGINES[where]}, which is not installed: pip install 'posx[{where}]'"
        if not (values["dry_run"] or values["status"]):
            raise ConfigError(missing)
        say(f"notice: {missing}")
    if where and values["jobs"]:
        say(f"notice: --jobs={values['jobs']} is not used: --on {where} decides how many runs go at once")
    return where


def _run(
    jobs: Sequence[Job], todo: Sequence[Job], values: dict[str, Any], local: Here, copies: Copies | None
) -> dict[str, str]:
    """Makes the runs that are `todo`; returns {name: why it failed}."""
    if len(todo) < len(jobs):
        say(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already")
    if not todo:
        return {}
    names = {job.name for job in todo}
    numbers = [number for number, job in enumerate(jobs) if job.name in names]
    engine = _engine(values, jobs, todo, local)
    say(f"{engine.schedule}; --jobs=N for another number" if isinstance(engine, Here) else str(engine))
    failed = run_all(
        engine, jobs, numbers, "sweep", ended=lambda task: copies.keep(task.folder.path) if copies else None
    )
    return {jobs[number].name: reason for number, reason in failed.items()}


def _copied(copies: Copies | None, jobs: Sequence[Job]) -> dict[str, str]:
    """Copies runs that have ended before; returns {name: why it could not be copied}."""
    failed = {}
    for job in jobs if copies else ():
        try:
            copies.keep(job.folder.path)  # type: ignore[union-attr]
        except WorkdirError as error:
            failed[job.name] = str(error)
    return failed


def _engine(values: dict[str, Any], jobs: Sequence[Job], todo: Sequence[Job], local: Here) -> Engine[Any]:
    """Where the runs are made, for all `jobs`; this machine is measured before those that are `todo` compete for it."""
    where, _, address = values["on"].partition(":")
    if where == "ray":
        from posx.sweeps.engines.ray import Cluster  # and Ray with it

        warn_of(todo[0].folder.path.parent)
        return Cluster(jobs, address, values["cpus"], values["gpus"])
    names = {job.name for job in todo}
    widths = [width for job, width in zip(jobs, local.schedule.widths, strict=True) if job.name in names]
    measure_ceilings(cache_folder(todo[0].run.data) / "machine", todo[0].run.model.dtype, local.cores, widths)
    return local


def _submitted(found: tuple[dict[str, str], dict[str, str]], runs: int) -> str:
    """What became of a submission, and what comes next."""
    made, alive = found
    first = next(iter({**made, **alive}.values()))
    return (
        f"{len(made)} of {runs} runs submitted, {len(alive)} are with SLURM already (jobs {first} ...); "
        "--status tells how far they are, and the same command draws the figures once they have ended"
    )


def _unused(values: dict[str, Any], config: ConfigDict, jobs: Sequence[Job]) -> list[str]:
    """The words of the command about settings that vary over the runs, none of which has the value that they give."""
    given = settings(config) | {"encoding": config.encoding.to_dict()}
    used = {name: {text_of(name, job.point[name]) for job in jobs} for name in jobs[0].point}
    names = {word: setting_of(word) for word in values["overrides"]}
    for word, name in names.items():  # a field belongs to the encoding that the config has chosen
        names[word] = "encoding" if name.startswith("encoding.") and name not in used else name
    return [word for word, name in names.items() if name in used and text_of(name, given.get(name)) not in used[name]]


def _is_idle(values: dict[str, Any], config: ConfigDict) -> bool:
    """Tell whether the argument of the config file changes no run of the sweep, and is not the encoding of all."""
    with contextlib.suppress(ConfigError), contextlib.redirect_stderr(io.StringIO()):  # some files need an argument
        override(default := load_config({"config": values["config"].partition(":")[0]}), values["overrides"])
        runs, others = ([run_at(one, point) for point in points_of(one)] for one in (config, default))
        return runs == others and any(run.encoding != spec_text(config.encoding.to_dict()) for run in runs)
    return False
