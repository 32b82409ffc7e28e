"""`posx verify`: whether the files of runs, sweeps and exported models are whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posx.errors import Damaged, PosxError, WorkdirError
from posx.lab.commands import work_folders
from posx.lab.files import manifests, rows
from posx.lab.progress import quantity
from posx.lab.runs.damage import COVERED, Damage, damages
from posx.lab.runs.exported import SUFFIX, check_export, is_export
from posx.lab.runs.finding import all_paths, run_folders, workdir_flag
from posx.lab.runs.folder import RunFolder


def run_verify(values: dict[str, Any], _: None) -> None:
    """Print a line for each damage, or one line if there is none. Raises PosxError, exit code 1, for damage."""
    places = work_folders(values)
    if values["dry_run"]:
        print(f"would check the runs in {', '.join(map(str, places))}")
        return
    runs = {folder: None for place in places if not place.is_file() for folder in _runs(place)}
    runs |= {parent: None for run in runs for parent in _parents(run)}
    exports = [path for place in places for path in _exports(place)]
    if not runs and not exports:
        raise WorkdirError(f"{', '.join(map(str, places))} holds no run. Give the folder of a run or of a sweep.")
    count = 0
    for damage in _all(places, list(runs), exports):
        print(json.dumps(dataclasses.asdict(damage), default=str) if values["json"] else damage, flush=True)
        count += 1
    if count:
        raise PosxError(
            f"{quantity(count, 'damaged part')} found in {quantity(len(runs), 'run')}. Nothing was changed. Mend them "
            "as the lines say (docs/guides/resuming.md)."
        )
    if not values["json"]:
        print(_summary(list(runs), len(exports)))


def _runs(place: Path) -> list[RunFolder]:
    """Return the folders with a file of a run, however damaged. A tokenizer alone makes no run."""
    folders = {path for name in COVERED if name != "tokenizer.json" for path in run_folders(place, name)}
    folders |= {path.parent for path in all_paths(place, "checkpoints") if path.is_dir()}
    return [RunFolder(path) for path in sorted(folders)]


def _parents(run: RunFolder) -> list[RunFolder]:
    """Return the run whose weights a run has, wherever it is."""
    try:
        return [RunFolder(run.weights)] if run.is_borrowed and run.weights.is_dir() else []
    except Damaged:
        return []  # `damages` names it


def _exports(place: Path) -> list[Path]:
    """Return exported models: the file that is named, whatever it is, or those in a folder that posx wrote."""
    if place.is_file():
        return [place]
    return [path for path in sorted(set(all_paths(place, f"*{SUFFIX}"))) if is_export(path)]


def _all(places: Sequence[Path], runs: Sequence[RunFolder], exports: Sequence[Path]) -> Iterator[Damage]:
    damaged = [damage for run in runs for damage in damages(run, thorough=True)]
    yield from damaged
    for path in exports:
        try:
            check_export(path)
        except WorkdirError as error:
            yield Damage(path, str(error).removeprefix(f"{path} ").partition(". ")[0], "Export the run again")
    for place in [] if damaged else dict.fromkeys(place for place in places if not place.is_file()):
        yield from _tables(place)


def _tables(place: Path) -> Iterator[Damage]:
    """Yield the tables that are not those of the stored rows."""
    files = sorted(set(all_paths(place, "table.md")))
    if not files:
        return
    from posx.lab import plots  # Matplotlib: only if there is a table

    for path in filter(plots.is_table, files):
        wanted = f"{plots.folder_table(path.parent)}\n"
        if path.read_text(encoding="utf-8", errors="replace") != wanted:
            again = f"Write it again: posx plot {workdir_flag(path.parent)}"
            yield Damage(path, "it is not the table of the stored rows", again)


def _summary(runs: Sequence[RunFolder], exports: int) -> str:
    """Return the line of folders without damage."""
    measured = sum(len(rows.read_row_file(run.eval_file)) for run in runs)
    saved = sum(len(manifests.steps(run.checkpoints)) for run in runs)
    parts = [quantity(len(runs), "run"), quantity(measured, "row"), quantity(saved, "checkpoint")]
    parts += [quantity(exports, "exported model")] if exports else []
    begun = sum(not run.done_file.exists() and run.metrics_file.exists() for run in runs)
    return f"{', '.join(parts)}: no damage" + (f"; {quantity(begun, 'run')} not finished" if begun else "")
