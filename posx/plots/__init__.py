"""Figures and tables from stored rows (`posx plot`). Only "encodings" imports JAX; the rest reads files."""

from __future__ import annotations

import difflib
import functools
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from posx.errors import ConfigError, WorkdirError
from posx.evaluation.protocols import Nonoverlapping, Sliding
from posx.files.atomic import disk_errors, write_bytes
from posx.lazy import modules_of
from posx.plots import backend, curves, lengths, look, positions  # noqa: F401  backend goes first
from posx.plots.groups import Panel, panels
from posx.plots.rows import PER_POSITION, PROTOCOLS, Row, complete, diverged, read_rows, unfinished
from posx.plots.tables import is_table, table
from posx.progress import say
from posx.runs.folder import typed_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from posx.runs.folder import RunFolder

__all__ = ["WHAT", "draw_again", "is_table", "picture", "plot", "read_rows", "table"]

__getattr__ = modules_of(__name__)

WHAT = ("all", "extrapolation", "ratio", "per_position", "training", "encodings")
#: The endings that `_suffix` gives, of today's rows and of rows that are gone.
_SUFFIX = rf"(-lengths)?(-L\d+)?(-({'|'.join(PROTOCOLS)}))?(-s\d+)?"


def plot(workdir: str | pathlib.Path, what: str = "all") -> list[pathlib.Path]:
    """Draws a run's or a sweep's figures as PNG and SVG into `workdir/figures` and returns their paths.

    "all" is every figure that the stored rows allow, and their table as `workdir/table.md`; "encodings" (pictures of
    the encodings of the folder's runs, as trained; without runs, of a few well-known ones) is drawn only when asked for
    by name and needs no rows. Figures of these kinds that were
    drawn of earlier rows and of which there are no rows now are removed. A kind asked for by name whose rows are
    missing raises WorkdirError, as does a folder that cannot be written; a full disk OutOfMemoryError.
    """
    if what not in WHAT:
        near = difflib.get_close_matches(what, WHAT, 1) or [WHAT[0]]
        raise ConfigError(f"cannot plot {look.shown(what)!r}; did you mean {near[0]!r}? (one of {', '.join(WHAT)})")
    folder = pathlib.Path(workdir)
    figures = folder / "figures"
    if what == "encodings":
        return _encodings(folder, figures)
    stored = read_rows(folder)
    kinds = WHAT[1:-1] if what == "all" else (what,)
    split = panels(row for row in stored if row["protocol"] != PER_POSITION or complete(row))
    written: list[pathlib.Path] = []
    for kind in kinds:
        written += _training(folder, figures, stored) if kind == "training" else _curves(kind, folder, figures, split)
    measure = f"posx evaluate --workdir {shlex.quote(typed_path(folder))}"
    if not written:
        wanted = "rows" if what == "all" else f"rows for {what!r}"
        how = f"Measure its runs with {measure}{' --protocol per_position' if what == PER_POSITION else ''}"
        raise WorkdirError(
            f"work folder {str(folder)!r} holds no {wanted} to plot: no usable line in "
            f"{'metrics.jsonl' if what == 'training' else 'eval.jsonl'} here or in its sub-folders. "
            + ("Train a run there first" if what == "training" else how)
        )
    _remove_stale(figures, kinds, written)
    if what == "all" and not _write_table(folder, stored):
        say(f"notice: no run in {folder} has a perplexity yet, so there is no table.md. Measure them with {measure}")
    return written


def draw_again(folder: pathlib.Path) -> None:
    """Redraw the figures and the table in a run's or a sweep's folder from its present rows.

    Figures of posx are known by their names and by an SVG beside each PNG, its table by its head.
    """
    drawn = _drawn(folder / "figures", WHAT[1:-1])
    if any(path.suffix == ".png" and path.with_suffix(".svg") in drawn for path in drawn):
        plot(folder)
    elif is_table(folder / "table.md"):
        _write_table(folder, read_rows(folder))


def _write_table(folder: pathlib.Path, stored: Sequence[Row]) -> bool:
    """Write `folder/table.md`, or remove the one of earlier rows if there is nothing to show; tell which."""
    path, text = folder / "table.md", table(stored, unfinished(folder))
    with disk_errors(path):
        if text:
            write_bytes(path, (text + "\n").encode())
        elif is_table(path):
            path.unlink()
    return bool(text)


def _encodings(folder: pathlib.Path, figures: pathlib.Path) -> list[pathlib.Path]:
    from posx.plots import models, pictures

    stored = read_rows(folder) if folder.is_dir() else []
    subjects = models.encodings_of(folder, stored) or models.catalogue(stored[0]["train_len"] if stored else 64)
    return _save(functools.partial(pictures.encodings, subjects), figures, "encodings")


def picture(
    name: str, encoding: Any, dims: Any, figures: pathlib.Path, run: RunFolder | None = None
) -> list[pathlib.Path]:
    """Draws one encoding, as trained in `run` or as initialised for `dims`, into `figures`; returns the paths."""
    from posx.plots import models, pictures

    trained = models.of_run(run, run.read_config(), run.path.name, name) if run else []
    subject = next((one for one in trained if one.encoding == encoding), None) or models.initial(name, encoding, dims)
    file = "encoding-" + re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:60]
    return _save(functools.partial(pictures.encodings, [subject]), figures, file)


def _drawn(figures: pathlib.Path, kinds: Iterable[str]) -> list[pathlib.Path]:
    """The figures of `kinds` that are there, known by names that only posx gives."""
    own = re.compile(rf"({'|'.join(kinds)}){_SUFFIX}\.(png|svg)")
    return [path for path in figures.glob("*") if own.fullmatch(path.name)]


def _remove_stale(figures: pathlib.Path, kinds: Iterable[str], written: Sequence[pathlib.Path]) -> None:
    """Removes figures of `kinds` that were not `written` now."""
    for path in _drawn(figures, kinds):
        if path not in written:
            with disk_errors(path):
                path.unlink()


def _training(folder: pathlib.Path, figures: pathlib.Path, stored: Sequence[Row]) -> list[pathlib.Path]:
    runs = positions.read_training(folder, stored)
    shown = {one.run.path for one in runs}
    hidden = {path: why for path, why in diverged(stored).items() if path not in shown}
    return _save(functools.partial(curves.training, runs, hidden), figures, "training") if runs else []


def _curves(kind: str, folder: pathlib.Path, figures: pathlib.Path, split: Sequence[Panel]) -> list[pathlib.Path]:
    rows = [row for panel in split for row in panel.rows]
    split = [panel for panel in split if (panel.protocol == PER_POSITION) == (kind == "per_position")]
    missing, written = unfinished(folder), list[pathlib.Path]()
    if kind == "per_position":  # the other figures have a place for these runs
        missing |= diverged(rows)
    for panel in split:
        written += _save(functools.partial(curves.DRAW[kind], panel, missing), figures, kind + _suffix(panel, split))
    if kind == "extrapolation":
        for name, several in _across(split).items():
            written += _save(functools.partial(lengths.across, several, missing), figures, f"{kind}-lengths{name}")
    return written


def _across(split: Sequence[Panel]) -> dict[str, list[Panel]]:
    """Panels that differ in the training length alone, by what tells them from others; those of one length are none."""
    found: dict[str, list[Panel]] = {}
    for panel in split:
        found.setdefault(_rule(panel), []).append(panel)
    return {name: several for name, several in found.items() if len(several) > 1}


def _save(draw: Callable[[], Figure], figures: pathlib.Path, name: str) -> list[pathlib.Path]:
    with look.style(), disk_errors(figures):
        return look.save(draw(), figures, name)


def _suffix(panel: Panel, split: Sequence[Panel]) -> str:
    """Return the end of a figure's name: "", or such as "-L64-sliding-s16"."""
    several = len({other.train_len for other in split}) > 1
    return (f"-L{panel.train_len}" if several else "") + _rule(panel)


def _rule(panel: Panel) -> str:
    """Return the part of its protocol and stride, which other protocols in the folder do not change.

    That of non-overlapping windows is empty.
    """
    strides = {row.get("stride") for row in panel.rows} if panel.protocol == Sliding.name else {panel.stride}
    name = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in panel.protocol)[:40]
    plain = panel.protocol in (Nonoverlapping.name, PER_POSITION)
    return ("" if plain else f"-{name}") + "".join(f"-s{n}" for n in strides if n is not None and len(strides) == 1)
