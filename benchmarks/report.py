"""The reports of all benchmarks: medians with quartiles, ratios formed per round, Markdown tables, bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from posx.lab.plots import look, palette

Spread = tuple[float, float, float]
GREY = "#C4C4C4"


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


class Bar(NamedTuple):
    """One bar with whiskers.

    Attributes:
      spread: its length and whiskers.
      color: of the bar.
      label: text behind the bar.
      mark: the place of a white line across it.
    """

    spread: Spread
    color: str
    label: str = ""
    mark: float | None = None


def bars(
    path: Path, groups: Mapping[str, Sequence[Bar]], title: str, lines: Sequence[str], xlabel: str, is_log: bool = False
) -> None:
    """Draw the bars of each group under one another, the groups from the top down by their names."""
    with look.style():
        made = look.figure(7.5, 1.2 + 0.4 * len(groups))
        ax = made.add_subplot()
        made.subplots_adjust(top=0.99, left=0.24 if max(map(len, groups)) > 16 else None)
        for n, group in enumerate(reversed(groups.values())):
            thick = 0.76 / len(group)
            for m, bar in enumerate(group):
                middle, low, high = bar.spread
                at, whiskers = n + 0.38 - thick * (m + 0.5), [[middle - low], [high - middle]]
                ax.barh(at, middle, thick * 0.95, color=bar.color, xerr=whiskers, ecolor="#555555", capsize=2)
                behind = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
                ax.annotate(bar.label, (high, at), size=9, color="#333333", **behind)
                if bar.mark is not None:
                    ax.plot([bar.mark] * 2, [at - thick / 2, at + thick / 2], color="white", linewidth=2.5)
        if is_log:
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            ax.xaxis.set_minor_locator(NullLocator())
        ax.set_yticks(range(len(groups)), list(reversed(groups)))
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1 if is_log else 0.2, y=0.02)
        ax.set_xlabel(f"{xlabel} (median; whiskers: quartiles)")
        look.headings(made, title, lines)
        look.save_figure(made, path.parent, path.stem)


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
        look.legend(made, list(handles.values()), list(handles), 0.92, 0.88)
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
