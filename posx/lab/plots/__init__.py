"""Figures and tables from stored rows (`posx plot`). Only "encodings" computes with JAX; the rest reads files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

# Matplotlib cannot be imported if MPLBACKEND names a backend that is not installed. Jupyter sets it for the commands
# that a notebook starts. posx draws without a backend, and leaves a usable choice of the user as it is.
if "matplotlib" not in sys.modules:
    _asked = os.environ.pop("MPLBACKEND", "")
    import matplotlib

    if _asked:
        os.environ["MPLBACKEND"] = _asked
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = _asked

from posx.errors import ConfigError, WorkdirError, nearest
from posx.evaluation.answers import Answers
from posx.evaluation.protocols import PROTOCOLS, Nonoverlapping
from posx.lab.files.atomic import disk_errors, write_bytes
from posx.lab.plots import curves, look
from posx.lab.plots.convergence import TRAINING, convergence_tables
from posx.lab.plots.formats import FORMATS
from posx.lab.plots.groups import Panel, group_by_rule, panels
from posx.lab.plots.points import average_log, read_training
from posx.lab.plots.tables import RowTable, as_markdown, is_table, table, tables
from posx.lab.results.table import PER_POSITION, diverged_runs, missing_runs, read_results
from posx.lab.runs.finding import workdir_flag
from posx.lab.runs.folder import RunFolder
from posx.lazy import module_getter
from posx.notices import say

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from posx.lab.plots.points import Log

    _Training = Callable[[], tuple[pd.DataFrame, dict[str, Log]]]  # reads the logs of training

__all__ = [
    "FORMS", "TRAINING", "WHAT", "draw_again", "folder_table", "format_table", "is_table", "picture", "plot", "table"
]  # fmt: skip

__getattr__ = module_getter(__name__)

FORMS = ("markdown", *FORMATS)
WHAT = ("all", *curves.DRAW, *(kind for kind in curves.ACROSS if kind not in curves.DRAW), "training", "encodings")
#: The ends of names that `_figures` gives, for present rows and for rows that are gone.
_SUFFIX = rf"(-masked)?(-lengths)?(-L\d+)?(-({'|'.join(PROTOCOLS)}))?(-s\d+)?"


def plot(workdir: str | pathlib.Path, what: str = "all") -> list[pathlib.Path]:
    """Draw a run's or a sweep's figures as PNG and SVG into `workdir/figures` and return their paths.

    "all" draws every figure that the stored rows allow and writes their table to `workdir/table.md`. "encodings"
    needs no rows and is drawn only when asked for: the encodings of the runs as trained, or a few well-known ones.
    Figures whose rows are gone are removed. Raises WorkdirError if there are no rows to draw or if the folder cannot be
    written, OutOfMemoryError if the disk is full.
    """
    if what not in WHAT:
        raise ConfigError(f"{what!r} cannot be plotted. {nearest(what, WHAT)}The figures are: {', '.join(WHAT)}.")
    folder = pathlib.Path(workdir)
    if what == "encodings":
        from posx.lab.plots import effects, pictures

        subjects = effects.folder_encodings(folder) or effects.catalogue()
        return _save(lambda: pictures.encodings(subjects), folder / "figures", what)
    stored = read_results(folder)
    kinds = WHAT[1:-1] if what == "all" else (what,)
    training = functools.cache(functools.partial(read_training, folder, stored))  # for the figure and the table
    figures = _figures(folder, stored, kinds, training)
    written = [path for name, draw in figures.items() for path in _save(draw, folder / "figures", name)]
    measure = f"posx evaluate {workdir_flag(folder)}"
    if not written:
        raise WorkdirError(f"work folder {str(folder)!r}{_why_nothing(what, panels(stored), measure)}")
    for path in set(_figure_files(folder, kinds)) - set(written):
        with disk_errors(path):
            path.unlink()
    if what == "all" and not _write_table(folder, stored, training):
        say(f"notice: {_why_no_table(folder, stored)}, so there is no table.md. Evaluate the runs with {measure}")
    return written


def _why_nothing(what: str, split: Sequence[Panel], measure: str) -> str:
    """Return why the panels of a folder have no such figure. measure: the command that measures its runs."""
    if what == PER_POSITION:
        measure += f" --protocol {PER_POSITION}"
    if what in curves.NEEDS and split:
        protocols = sorted({panel.protocol for panel in split})
        # Another measurement helps runs of a text alone, and gives no other training length.
        of_text = what not in curves.FIGURES_OF[Answers.name] and protocols != [Answers.name]
        helps = of_text and not any(curves.draws(what, panel) for panel in split)
        are = f"The rows here are of {', '.join(map(look.one_line, protocols))}"
        how = f". Measure more with {measure}" if helps else ""
        return f": {what} needs runs of {curves.NEEDS[what]}. {are}{how}"
    wanted = "rows" if what == "all" else f"rows for {what!r}"
    file, how = ("eval.jsonl", f"Measure its runs with {measure}")
    if what == "training":
        file, how = "metrics.jsonl", "Train a run there first"
    return f" holds no {wanted} to plot: no usable line in {file} here or in its sub-folders. {how}"


def _why_no_table(folder: pathlib.Path, stored: pd.DataFrame) -> str:
    if panels(stored):
        return f"the runs in {folder} are measured by {PER_POSITION} alone"
    return f"no run in {folder} has a perplexity yet"


def draw_again(folder: pathlib.Path) -> None:
    """Draw the figures and the table of a run's or a sweep's folder again, from its present rows.

    posx knows its figures by their names and by an SVG beside each PNG, its table by its head.
    """
    drawn = _figure_files(folder, WHAT[1:-1])
    if any(path.suffix == ".png" and path.with_suffix(".svg") in drawn for path in drawn):
        plot(folder)
    elif is_table(folder / "table.md"):
        stored = read_results(folder)
        _write_table(folder, stored, _silent_training(folder, stored))


def picture(
    name: str, encoding: Any, dims: Any, figures: pathlib.Path, run: RunFolder | None = None
) -> list[pathlib.Path]:
    """Draw one encoding into `figures`, as trained in `run`, else as initialised for `dims`. Return the paths."""
    from posx.lab.plots import effects, pictures

    trained = [
        one for one in (effects.load_run_encodings(run, run.path.name) if run else []) if one.encoding == encoding
    ]
    subject = dataclasses.replace(trained[0], name=name) if trained else effects.initial(name, encoding, dims)
    file = "encoding-" + re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:60]
    return _save(lambda: pictures.encodings([subject]), figures, file)


def format_table(workdir: str | pathlib.Path, form: str) -> str:
    """Return the tables of the runs in a folder as Markdown, CSV, JSON or LaTeX.

    Raises:
      ConfigError: the format is unknown.
      WorkdirError: no run there has a perplexity.
    """
    if form not in FORMS:
        raise ConfigError(f"--format={form} is unknown. {nearest(form, FORMS)}The formats are: {', '.join(FORMS)}.")
    folder = pathlib.Path(workdir)
    stored = read_results(folder)
    made = _folder_tables(folder, stored, lambda: read_training(folder, stored, say))
    if not made:
        measure = f"posx evaluate {workdir_flag(folder)}"
        raise WorkdirError(f"{_why_no_table(folder, stored)}, so there is no table. Measure with {measure}")
    return FORMATS[form](made) if form in FORMATS else as_markdown(made) + "\n"


def folder_table(folder: pathlib.Path) -> str:
    """Return the text of `table.md`: the tables of a folder as Markdown, "" if no run has a perplexity."""
    stored = read_results(folder)
    return as_markdown(_folder_tables(folder, stored, _silent_training(folder, stored)))


def _silent_training(folder: pathlib.Path, stored: pd.DataFrame) -> _Training:
    """Return what reads the logs of training without a word on damaged rows."""
    return lambda: read_training(folder, stored, lambda words: None)


def _folder_tables(folder: pathlib.Path, stored: pd.DataFrame, training: _Training) -> list[RowTable]:
    """Return the tables of stored rows, then those of the steps to a training loss of the runs that have rows."""
    made = tables(stored, missing_runs(folder))
    if not made:
        return []
    runs, logs = training()
    return [*made, *convergence_tables(runs[runs.run.isin(stored.run)], logs)]


def _write_table(folder: pathlib.Path, stored: pd.DataFrame, training: _Training) -> bool:
    """Write `folder/table.md`, or remove an earlier table if there are no rows for it. Tell whether it is there."""
    path, text = folder / "table.md", as_markdown(_folder_tables(folder, stored, training))
    with disk_errors(path):
        if text:
            write_bytes(path, (text + "\n").encode())
        elif is_table(path):
            path.unlink()
    return bool(text)


def _figure_files(folder: pathlib.Path, kinds: Iterable[str]) -> list[pathlib.Path]:
    """Return the files in `folder/figures` whose names only posx gives to figures of `kinds`."""
    own = re.compile(rf"({'|'.join(kinds)}){_SUFFIX}\.(png|svg)")
    return [path for path in (folder / "figures").glob("*") if own.fullmatch(path.name)]


def _figures(
    folder: pathlib.Path, stored: pd.DataFrame, kinds: Iterable[str], training: _Training
) -> dict[str, Callable[[], Figure]]:
    """Return {name: function that draws it} of the figures of `kinds` that the rows allow."""
    made: dict[str, Callable[[], Figure]] = {}
    split = panels(stored, missing_runs(folder))
    for kind in kinds:
        if kind == "training":
            runs, logs = training()
            for objective, own in runs.groupby(curves.objectives(runs)) if logs else ():  # losses of other targets
                drawn = {run: [row[:2] for row in average_log(logs[run])] for run in own.run}
                name = kind + ("-masked" if objective == "masked" else "")
                made[name] = functools.partial(curves.training, own, drawn, diverged_runs(stored))
            continue
        own = [panel for panel in split if curves.draws(kind, panel)]
        several = len({panel.train_len for panel in own}) > 1
        for panel in own if kind in curves.DRAW else ():
            name = kind + (f"-L{panel.train_len}" if several else "") + _rule(panel)
            made[name] = functools.partial(curves.DRAW[kind], panel)
        for alike in group_by_rule(own).values() if kind in curves.ACROSS else ():
            if len(alike) > 1:
                end, draw = curves.ACROSS[kind]
                made[f"{kind}{end}{_rule(alike[0])}"] = functools.partial(draw, alike)
    return made


def _rule(panel: Panel) -> str:
    """Return the end of a figure's name, "" or such as "-sliding-s16", whatever other protocols the folder has."""
    protocol, stride = panel.rule
    name = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in protocol)[:40]
    plain = protocol == Nonoverlapping.name or protocol in curves.FIGURES_OF
    return ("" if plain else f"-{name}") + ("" if stride is None else f"-s{stride}")


def _save(draw: Callable[[], Figure], figures: pathlib.Path, name: str) -> list[pathlib.Path]:
    with look.style(), disk_errors(figures):
        return look.save_figure(draw(), figures, name)
