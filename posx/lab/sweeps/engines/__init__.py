"""The engines that run the tasks of a sweep: this machine, Ray or SLURM. `--on` names one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from posx.errors import ConfigError
from posx.lab.sweeps.engines.local import Engine, LocalEngine
from posx.lab.sweeps.tasks import Job
from posx.notices import say

#: {word of --on: the library that it needs}.
LIBRARIES = {"": "", "ray": "ray", "slurm": "submitit"}


def make_engine(values: dict[str, Any], jobs: Sequence[Job]) -> Engine:
    """Return the engine that the flags name, for the runs of the plan."""
    where, _, address = values["on"].partition(":")
    if where == "ray":
        from posx.lab.sweeps.engines.ray import RayEngine

        return RayEngine(address, values["cpus"], values["gpus"])
    if where == "slurm":
        from posx.lab.sweeps.engines.slurm import SlurmEngine

        return SlurmEngine(jobs, values["cpus"], values["gpus"], values["slurm."])
    return LocalEngine(jobs, values["jobs"])


def check_flags(values: dict[str, Any]) -> None:
    """Check the flags of engines: raise ConfigError, or print a notice if no runs are to be made."""
    where, cpus, gpus = values["on"].partition(":")[0], values["cpus"], values["gpus"]
    if where not in LIBRARIES:
        names = ", ".join(filter(None, LIBRARIES))
        raise ConfigError(f"--on={values['on']} is unknown; allowed: {names}, or nothing for this machine.")
    if cpus < 1 or gpus < 0 or (gpus > 1 and gpus % 1):
        raise ConfigError(
            f"--cpus={cpus}, --gpus={gpus:g}: give at least one CPU, and a part of one GPU or a whole number of GPUs."
        )
    unused = [f"--{name}" for name, usual in (("cpus", 1), ("gpus", 0), ("slurm.", {})) if values[name] != usual]
    if unused and not where:
        raise ConfigError(
            f"{', '.join(unused)} needs --on, because it is for runs on other machines. Add --on=ray or "
            "--on=slurm, or leave it out."
        )
    if where and (why := _unusable(LIBRARIES[where])):
        missing = f"--on {where} needs {LIBRARIES[where]}: {why}. Install it: pip install 'posx[{where}]'"
        if not (values["dry_run"] or values["status"]):
            raise ConfigError(missing)
        say(f"notice: {missing}")
    if where and values["jobs"]:
        say(f"notice: --jobs={values['jobs']} is not used: --on {where} decides how many runs train at once")


def _unusable(library: str) -> str:
    """Return why a library cannot be imported, "" if it can."""
    try:
        importlib.import_module(library)
    except ImportError as error:
        return " ".join(str(error).split())
    return ""
