"""Figures and tables from stored rows (`posx plot`). Only "encodings" imports JAX; the rest reads files."""

import difflib
import pathlib
from collections.abc import Sequence

from posx.errors import ConfigError, WorkdirError
from posx.plots import curves, look, positions
from posx.plots.rows import PER_POSITION, Panel, Row, panels, read_rows, unfinished
from posx.plots.tables import table

__all__ = ["WHAT", "plot", "read_rows", "table"]

WHAT = ("all", "extrapolation", "ratio", "per_position", "training", "encodings")


def plot(workdir: str | pathlib.Path, what: str = "all") -> list[pathlib.Path]:
    """Draws a run's or a sweep's figures as PNG and SVG into `workdir/figures` and returns their paths.

    "all" is every figure that the stored rows allow; "encodings" (pictures of the encodings themselves) is drawn only
    when asked for by name and needs no rows. A kind asked for by name whose rows are missing raises WorkdirError.
    """
    if what not in WHAT:
        near = difflib.get_close_matches(what, WHAT, 1) or [WHAT[0]]
        raise ConfigError(f"cannot plot {look.shown(what)!r}; did you mean {near[0]!r}? (one of {', '.join(WHAT)})")
    folder = pathlib.Path(workdir)
    stored = read_rows(folder)
    figures = folder / "figures"
    if what == "encodings":
        from posx.plots import pictures

        with look.style():
            return look.save(pictures.encodings(stored[0]["train_len"] if stored else 64), figures, "encodings")
    written: list[pathlib.Path] = []
    for kind in WHAT[1:-1] if what == "all" else (what,):
        written += _training(folder, figures, stored) if kind == "training" else _curves(kind, folder, figures, stored)
    if not written:
        wanted = "rows" if what == "all" else f"rows for {what!r}"
        raise WorkdirError(
            f"work folder {str(folder)!r} holds no {wanted} to plot: no usable line in "
            f"{'metrics.jsonl' if what == 'training' else 'eval.jsonl'} here or in its sub-folders"
        )
    return written


def _training(folder: pathlib.Path, figures: pathlib.Path, stored: Sequence[Row]) -> list[pathlib.Path]:
    runs = positions.read_training(folder, stored)
    if not runs:
        return []
    with look.style():
        return look.save(curves.training(runs), figures, "training")


def _curves(kind: str, folder: pathlib.Path, figures: pathlib.Path, stored: Sequence[Row]) -> list[pathlib.Path]:
    usable = [row for row in stored if (row["protocol"] == PER_POSITION) == (kind == "per_position")]
    if kind == "per_position":
        usable = [row for row in usable if positions.complete(row)]
    written, split = [], panels(usable)
    for panel in split:
        with look.style():
            written += look.save(curves.DRAW[kind](panel, unfinished(folder)), figures, kind + _suffix(panel, split))
    return written


def _suffix(panel: Panel, split: Sequence[Panel]) -> str:
    """What tells a figure's file from its siblings: "", or such as "-L64-sliding-s16"."""
    parts = []
    if len({other.train_len for other in split}) > 1:
        parts.append(f"L{panel.train_len}")
    if len({other.protocol for other in split}) > 1:
        parts.append("".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in panel.protocol)[:40])
    if panel.stride is not None:
        parts.append(f"s{panel.stride}")
    return "".join(f"-{part}" for part in parts)
