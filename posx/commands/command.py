"""What a command of `posx` is, and the folders that commands are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from posx.errors import ConfigError, WorkdirError
from posx.runs.folder import RunFolder

#: Flags of more than one command: (default, help).
STOP_WITH_STDIN = (False, "end when standard input closes: processes that a sweep starts end with it")
JOBS = (0, "runs at a time; 0: as many, and on as many cores each, as this machine is fastest with")


class Command(NamedTuple):
    """`run(values, config)` does it: the values of its flags, and the ConfigDict where it `takes_config`.

    flags: {name: (default, help)}. text: one line for the list of commands. operand: what the word after its name is.
    sections: of a stored run's settings, those that --config.SECTION.NAME sets anew; their words are "overrides".
    """

    run: Callable[[dict[str, Any], Any], None]
    text: str
    flags: Mapping[str, tuple[Any, str]] = {}
    takes_config: bool = False
    operand: str = ""
    sections: tuple[str, ...] = ()


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
