"""The folders that commands are given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posx.errors import ConfigError, WorkdirError
from posx.runs.folder import RunFolder


def work_folder(values: Mapping[str, Any], needed: bool = True) -> Path:
    """The folder that `--workdir` names, absolute. Raises ConfigError where it is needed and missing."""
    if not values["workdir"]:
        if needed:
            raise ConfigError("--workdir is missing: name the folder of the run, for example --workdir runs/quick")
        return Path("runs")
    return Path(values["workdir"]).expanduser().resolve()


def run_folders(workdir: Path) -> list[RunFolder]:
    """The run in `workdir`, or the runs of the sweep in it. Raises WorkdirError if there is none."""
    if (workdir / "config.json").exists():
        return [RunFolder(workdir)]
    inside = sorted(path.parent for path in workdir.glob("*/config.json"))
    if not inside:
        raise WorkdirError(f"{workdir} holds no run: there is no config.json in it or in its folders")
    return [RunFolder(path) for path in inside]
