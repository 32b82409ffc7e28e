"""The shared parts of all figures of curves: a curve with its band, failures in lanes above the axes, the legend."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from posx.plots import captions, look
from posx.plots.groups import Panel
from posx.plots.look import Look
from posx.plots.points import Curve

FAILURE_MARKS = {"undefined": "o", "nonfinite": "*", "oom": "x", "diverged": "d", "apart": "+"}
LANE = 0.037  # of the axes' height
_RUNAWAY = 1e30  # above every axis; matplotlib's own arithmetic overflows somewhere beyond
_APART = 0.14  # of the axes' diagonal, between the markers on a line of many points


def line_style(of: Look) -> dict[str, Any]:
    """How a line with this look is drawn, in the axes and in the legend."""
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.5}
    return {"color": of.color, "linestyle": of.dashes, "marker": of.marker} | edge


def sparse(turn: int) -> tuple[float, float]:
    """Where a line of many points has markers: at even steps, from another place for each curve, so that none hide."""
    return (0.4 * turn % 1) * _APART, _APART


def draw_curve(ax: Axes, curve: Curve, bars: bool = True, turn: int | None = None) -> None:
    """The mean with its gaps, bars for its intervals; of several runs a dot each, and a band over all of them.

    `turn` is the curve's number where it has so many points that only some get a marker, and runs none.
    """
    x, color = [point.x for point in curve.points], curve.look.color
    mean, low, high = (
        np.minimum([getattr(point, name) for point in curve.points], _RUNAWAY) for name in ("mean", "low", "high")
    )
    ax.plot(x, mean, **line_style(curve.look), markevery=None if turn is None else sparse(turn), zorder=3)
    several = [len(point.values) > 1 for point in curve.points]
    if any(several):
        ax.fill_between(x, low, high, where=several, color=color, alpha=0.22, linewidth=0, zorder=2)
        if turn is None:
            dots = [(point.x, value) for point in curve.points if len(point.values) > 1 for value in point.values]
            places, values = np.minimum(np.array(dots).T, _RUNAWAY)
            ax.plot(places, values, ".", markersize=4.5, markeredgewidth=0, color=color, zorder=2.6)
    if ends := [(point.x, *point.interval) for point in curve.points if bars and point.interval]:
        places, low, high = np.minimum(np.array(ends).T, _RUNAWAY)
        ax.vlines(places, low, high, color=color, linewidth=1.2, zorder=2.5)


def mark_failures(ax: Axes, curves: Sequence[Curve]) -> int:
    """A lane above the axes for every curve that failed somewhere; returns the number of lanes."""
    lanes = [curve for curve in curves if any(point.failures for point in curve.points)]
    for level, curve in enumerate(lanes):
        style: dict[str, Any] = {"linestyle": "", "transform": ax.get_xaxis_transform(), "clip_on": False}
        style |= {"markersize": 5.5, "markerfacecolor": "none", "markeredgecolor": curve.look.color}
        for x, kind in [(point.x, kind) for point in curve.points for kind in sorted(set(point.failures))]:
            ax.plot([x], [1.03 + LANE * level], marker=FAILURE_MARKS[kind], **style)
    return len(lanes)


def legend_of(made: Figure, curves: Sequence[Curve], right: float, seeds: int) -> None:
    """Draw the legend right of the axes: curves by name, as in all figures, then the failure marks in use.

    A name is followed by the number of seeds if that is not `seeds`, that of most curves.
    """
    curves = sorted(curves, key=lambda curve: curve.label)
    handles, texts = [Line2D([], [], **line_style(curve.look)) for curve in curves], list[str]()
    for curve in curves:
        few, many = curve.seeds
        n = " (no value)" if not many else f" (n = {few})" if few == many else f" (n = {few} to {many})"
        texts.append(look.wrapped(curve.label) + (n if (few, many) != (seeds, seeds) or not many else ""))
    for kind in FAILURE_MARKS:
        if any(kind in point.failures for curve in curves for point in curve.points):
            handles.append(mark_of(kind))
            texts.append(captions.FAILURE_NAMES[kind])
    look.legend(made, handles, texts, right + 0.015, 0.985)


def mark_of(kind: str, *at: float, color: str = "#555555") -> Line2D:
    """Return a failure mark at a point, or for a legend."""
    x, y = ([place] for place in at) if at else ([], [])
    style: dict[str, Any] = {"linestyle": "", "markerfacecolor": "none", "markersize": 8, "zorder": 5}
    return Line2D(x, y, color=color, marker=FAILURE_MARKS[kind], **style)


def nothing(ax: Axes, text: str) -> None:
    ax.yaxis.set_major_locator(NullLocator())
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="#777777")


def extent(curves: Sequence[Curve]) -> list[float]:
    """Every finite value that the curves' lines, bands and bars reach."""
    points = [point for curve in curves for point in curve.points]
    ends = [value for point in points for value in (point.low, point.high, *(point.interval or ()))]
    return list(filter(math.isfinite, ends))


def off_frame(values: Iterable[tuple[str, float]], top: float) -> list[str]:
    """Return a line on the labels that have a value above the `top` of the frame."""
    left = list(dict.fromkeys(label for label, value in values if value > top))
    return [f"Leaves the frame at its top: {captions.listed(left)}"] if left else []


def highs(curves: Sequence[Curve]) -> Iterable[tuple[str, float]]:
    """Return (label, value) of the highest values of all curves."""
    return ((curve.label, point.high) for curve in curves for point in curve.points)


def headings(
    made: Figure, title: str, panels: Sequence[Panel], curves: Sequence[Curve], interval: str = "", lanes: int = 0
) -> None:
    """Title, what was measured and what the bars are, with `lanes` left free above the axes for failure marks."""
    lines = [*captions.facts(panels), *captions.spreads(curves, interval)]
    look.headings(made, title, lines, captions.mixture([row for one in panels for row in one.rows]), LANE * lanes)
