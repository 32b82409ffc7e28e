"""The reports of all benchmarks: medians with quartiles, ratios formed per round, Markdown tables, curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from posx.lab.plots import look, palette

Spread = tuple[float, float, float]


def quartiles(values: Iterable[float]) -> Spread:
    """Return the median, the lower and the upper quartile."""
    low, middle, high = np.quantile(list(values), (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


def ratios(top: Iterable[float] | None, bottom: Iterable[float] | None) -> Spread | None:
    """Return the quartiles of top / bottom, formed per round that both have; None if one of them is missing."""
    if top is None or bottom is None:
        return None
    return quartiles(a / b for a, b in zip(top, bottom, strict=False))


def cell(value: Spread | None, form: str) -> str:
    """Format "median [lower, upper]" for a table, "-" for None."""
    return "-" if value is None else f"{value[0]:{form}} [{value[1]:{form}}, {value[2]:{form}}]"


def place(report: dict[str, Any]) -> str:
    """Describe the machine of a report and its load, for the line over its table."""
    loads, device = report["load_average"], report.get("device", "cpu")
    where = report["cpu"] if device == "cpu" else f"{device}, {report['cpu']}"
    return f"{where}, {report['cores']} cores, load {loads[0][0]} before and {loads[-1][0]} after"


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, its first column to the left."""
    return [f"| {' | '.join(line)} |" for line in (head, [":--", *["---:"] * (len(head) - 1)], *body)]


class Curve(NamedTuple):
    """One curve against length in tokens: values, or medians with whiskers."""

    label: str
    points: Mapping[int, float | Spread]
    look: palette.Look


class Panel(NamedTuple):
    curves: Sequence[Curve]
    ylabel: str
    is_log: bool = False


def panels(path: Path, drawn: Mapping[str, Panel], title: str, lines: Sequence[str]) -> None:
    """Draw panels side by side, by their titles, with one legend of all their curves."""
    handles: dict[str, Line2D] = {}
    with look.style():
        made = look.figure(1.6 + 4.5 * len(drawn), 4.2)
        made.subplots_adjust(wspace=0.28)
        for n, (name, panel) in enumerate(drawn.items()):
            ax = made.add_subplot(1, len(drawn), n + 1)
            ax.set_title(name)
            handles |= {curve.label: _curve(ax, curve) for curve in panel.curves}
            lengths = sorted({length for curve in panel.curves for length in curve.points})
            look.length_axis(ax, lengths, lengths[0])
            if panel.is_log:
                look.log_axis(ax, [_middle(value) for curve in panel.curves for value in curve.points.values()])
            else:
                ax.set_ylim(bottom=0)
            ax.set_xlabel("length (tokens)")
            ax.set_ylabel(panel.ylabel)
        look.legend(made, [(handle, label) for label, handle in handles.items()], 0.92, 0.88)
        look.headings(made, title, lines, lift=-0.04)
        look.save_figure(made, path.parent, path.stem)


def _curve(ax: Axes, curve: Curve) -> Line2D:
    color, lengths, middle = curve.look.color, list(curve.points), [*map(_middle, curve.points.values())]
    if spreads := [value for value in curve.points.values() if isinstance(value, tuple)]:
        whiskers = [[m - low for m, low, _ in spreads], [high - m for m, _, high in spreads]]
        ax.errorbar(lengths, middle, whiskers, fmt="none", ecolor=color, elinewidth=0.8, capsize=1.5)
    return ax.plot(lengths, middle, color=color, linestyle=curve.look.dashes, marker=curve.look.marker)[0]


def _middle(value: float | Spread) -> float:
    return value[0] if isinstance(value, tuple) else value
