"""Find the run folders of a work folder, and name them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from posx.errors import WorkdirError
from posx.lab.runs.folder import RunFolder

#: How many runs a message lists.
_MOST_NAMES = 12


def all_paths(workdir: Path, name: str) -> Iterator[Path]:
    """Yield the paths of a name or a pattern in the folder of a run, of a sweep, or of sweeps."""
    for level in ("", "*/", "*/*/"):
        yield from workdir.glob(f"{level}{name}")


def run_folders(workdir: Path, holding: str) -> list[Path]:
    """Return the run folders at or below `workdir` that hold a file named `holding`, sorted.

    A folder that several links name is returned once, without links if it lies below `workdir`.

    Raises WorkdirError if `workdir` is no folder.
    """
    if not os.path.isdir(workdir):  # a name that is too long is none either
        what = "is a file" if os.path.isfile(workdir) else "does not exist"
        raise WorkdirError(f"work folder {str(workdir)[:300]} {what}. Give the folder of a run or of a sweep.")
    folders = {path.parent for path in all_paths(workdir, holding) if path.is_file()}
    root, places = workdir.resolve(), dict[Path, Path]()
    for path in sorted(folders, key=lambda path: (path.resolve() != root / path.relative_to(workdir), path)):
        places.setdefault(path.resolve(), path)
    return sorted(places.values())


def run_name(run: Path, workdir: str | Path) -> str:
    """Return the path of a run folder below `workdir`, or its own name if `workdir` is the run itself."""
    path = run.relative_to(workdir).as_posix()
    return run.resolve().name if path == "." else path


def typed_path(folder: str | Path) -> str:
    """Return a folder as a command can name it: relative to the current directory if it lies below it."""
    path, here = Path(folder).resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def workdir_flag(folder: str | Path) -> str:
    """Return the flag that names a folder, to be pasted into a shell."""
    return f"--workdir {shlex.quote(typed_path(folder))}"


def find_runs(workdir: Path) -> list[RunFolder]:
    """Return the runs at or below `workdir`. Raises WorkdirError if there is none."""
    folders = run_folders(workdir, "config.json")
    if not folders:
        others = [path for path in workdir.parents[:2] if (path / "config.json").is_file()]
        others += sorted(workdir.glob("*.safetensors"))
        near = f". Did you mean {others[0]}?" if others else ""
        raise WorkdirError(f"{workdir} holds no run: there is no config.json in it or up to two folders below{near}")
    return list(map(RunFolder, folders))


def find_run(workdir: Path) -> RunFolder:
    """Return the only run at or below `workdir`. Raises WorkdirError if there is none, and names them if several."""
    first, *others = find_runs(workdir)
    if others:
        names = [run_name(run.path, workdir) for run in (first, *others)]
        listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if names[_MOST_NAMES:] else "")
        raise WorkdirError(
            f"{workdir} holds {len(names)} runs, but one is needed. Name one, for example {first.path}; runs: {listed}"
        )
    return first
