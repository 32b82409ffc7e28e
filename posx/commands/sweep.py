"""`posx sweep`: all runs of a config, their figures and their table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from posx.commands import work_folder
from posx.config.flags import repeated_run
from posx.config.overrides import setting_of, settings
from posx.errors import ConfigError, PartialFailure, WorkdirError
from posx.progress import say
from posx.runs.checks import check_writable
from posx.runs.folder import RunFolder
from posx.sweeps.axes import text_of
from posx.sweeps.plan import Job, plan, unfinished
from posx.sweeps.preview import preview
from posx.sweeps.processes import run_all


def main(values: dict[str, Any], config: ConfigDict) -> None:
    workdir = work_folder(values, needed=not values["dry_run"])
    jobs = plan(config, workdir, repeated_run(values))
    if values["jobs"] < 1:
        raise ConfigError(f"--jobs={values['jobs']} must be at least 1")
    for word in _unused(values, config, jobs):
        say(f"notice: {word} is not used: the sweep sets {setting_of(word)} itself, see config.sweep")
    if values["dry_run"]:
        print(preview(jobs))
        return
    from posx import plots  # Matplotlib: once the settings are known to be right

    check_writable(workdir)
    todo = unfinished(jobs)
    with RunFolder(workdir).held():
        failed = run_all(jobs, todo, values["jobs"])
        try:
            made = plots.plot(workdir)
        except WorkdirError as error:
            say(f"no figures: {error}")
        else:
            print((workdir / "table.md").read_text(), end="")
            for path in made:
                if path.suffix == ".png":
                    print(path)
    if failed:
        raise PartialFailure(
            f"{len(failed)} of {len(jobs)} runs failed ({'; '.join(f'{k}: {v}' for k, v in failed.items())}); "
            "the same command tries them again"
        )


def _unused(values: dict[str, Any], config: ConfigDict, jobs: Sequence[Job]) -> list[str]:
    """The words of the command about settings that vary over the runs, none of which has the value that they give."""
    given = settings(config) | {"encoding": config.encoding.to_dict()}
    used = {name: {text_of(name, job.point[name]) for job in jobs} for name in jobs[0].point}
    spec = values.get("config", "").partition(":")[2]
    words = [*([f"--config.encoding={spec}"] if spec else []), *values["overrides"]]
    names = {word: setting_of(word) for word in words}
    return [word for word, name in names.items() if name in used and text_of(name, given.get(name)) not in used[name]]
