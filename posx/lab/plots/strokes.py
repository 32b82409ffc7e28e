"""The strokes that figures of curves share: one curve, its failures, the legend, and the words around the axes."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from posx.lab.plots import captions, look
from posx.lab.plots.groups import Curve, Panel
from posx.lab.plots.palette import Look
from posx.lab.results.columns import FAILED

FAILURE_MARKS = {"undefined": "o", "nonfinite": "*", "oom": "x", "diverged": "d", "apart": "+"}
LANE = 0.037  # of the axes' height
_RUNAWAY = 1e30  # above every axis; matplotlib's own arithmetic overflows somewhere beyond
_APART = 0.14  # of the axes' diagonal, between the markers on a line of many points


def line_style(of: Look) -> dict[str, Any]:
    """Return matplotlib's settings of a line with this look, in the axes and in the legend."""
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.5}
    return {"color": of.color, "linestyle": of.dashes, "marker": of.marker} | edge


def spread_markers(turn: int) -> tuple[float, float]:
    """Return `markevery` for a line of many points. Each curve starts elsewhere, so that no marker hides another."""
    return (0.4 * turn % 1) * _APART, _APART


def draw_curve(ax: Axes, curve: Curve, bars: bool = True, turn: int | None = None) -> None:
    """Draw the mean with its gaps and bars for its intervals; for several runs a dot each, and a band over them.

    turn: the number of a curve with so many points that only some get a marker, and runs get no dots.
    """
    x, color = [point.x for point in curve.points], curve.look.color
    mean, low, high = (
        np.minimum([getattr(point, name) for point in curve.points], _RUNAWAY) for name in ("mean", "low", "high")
    )
    ax.plot(x, mean, **line_style(curve.look), markevery=None if turn is None else spread_markers(turn), zorder=3)
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
    """Draw a lane above the axes for every curve that failed somewhere. Return the number of lanes."""
    lanes = [curve for curve in curves if any(point.failures for point in curve.points)]
    for level, curve in enumerate(lanes):
        style: dict[str, Any] = {"linestyle": "", "transform": ax.get_xaxis_transform(), "clip_on": False}
        style |= {"markersize": 5.5, "markerfacecolor": "none", "markeredgecolor": curve.look.color}
        for x, kind in [(point.x, kind) for point in curve.points for kind in sorted(set(point.failures))]:
            ax.plot([x], [1.03 + LANE * level], marker=FAILURE_MARKS[kind], **style)
    return len(lanes)


def failure_mark(kind: str, *at: float, color: str = "#555555") -> Line2D:
    """Return a failure mark at a point, or for a legend."""
    x, y = ([place] for place in at) if at else ([], [])
    style: dict[str, Any] = {"linestyle": "", "markerfacecolor": "none", "markersize": 8, "zorder": 5}
    return Line2D(x, y, color=color, marker=FAILURE_MARKS[kind], **style)


def draw_legend(
    made: Figure, panel: Panel, curves: Sequence[Curve], right: float, more: Iterable[tuple[Line2D, str]] = ()
) -> None:
    """Draw the legend: curves by name, with their number of seeds if others have more, then failure marks in use.

    more: the last entries.
    """
    seeds = max((len(curve.runs) for curve in panel.curves), default=0)
    entries = list[tuple[Line2D, str]]()
    for curve in sorted(curves, key=lambda curve: curve.label):
        few, many = curve.seeds
        n = " (no value)" if not many else f" (n = {few})" if few == many else f" (n = {few} to {many})"
        text = look.wrap(curve.label) + (n if (few, many) != (seeds, seeds) or not many else "")
        entries.append((Line2D([], [], **line_style(curve.look)), text))
    failures = {kind for curve in curves for point in curve.points for kind in point.failures}
    entries += [(failure_mark(kind), FAILED[kind]) for kind in FAILURE_MARKS if kind in failures]
    look.legend(made, [*entries, *more], right + 0.015, 0.985)


def drawn_values(curves: Sequence[Curve]) -> list[float]:
    """Return every finite value that the curves' lines, bands and bars reach."""
    drawn = [point for curve in curves for point in curve.points]
    ends = [value for point in drawn for value in (point.low, point.high, *(point.interval or ()))]
    return list(filter(math.isfinite, ends))


def frame_notice(curves: Iterable[Curve], top: float, more: Iterable[str] = ()) -> list[str]:
    """Return a line on the curves that have a value above the `top` of the frame. more: the names of what else has."""
    left = [*(curve.label for curve in curves if any(point.high > top for point in curve.points)), *more]
    return [f"Leaves the frame at its top: {captions.join_names(left)}"] if left else []


def write_words(
    made: Figure, title: str, panels: Sequence[Panel], curves: Sequence[Curve], facts: Iterable[str], lanes: int = 0,
    unit: str = "", more: Iterable[str] = (),
) -> None:  # fmt: skip
    """Write the text over and under the axes.

    Args:
      made: the figure.
      title: of the figure.
      panels: the panels that it shows.
      curves: the curves that it shows.
      facts: the last lines over the axes.
      lanes: lanes of failure marks, which stay free.
      unit: the text before abscissas in notes.
      more: the last notes.
    """
    warning = captions.mixture(captions.panel_rows(panels))
    look.headings(made, title, [*captions.subtitle(panels), *facts], warning, LANE * lanes)
    look.draw_notes(made, [*captions.notes(panels, curves, unit), *more])


def make_axes(made: Figure, count: int, wspace: float = 0.24) -> list[Axes]:
    """Return one or two axes side by side, with a place for the legend at their right."""
    left, right = (look.MARGIN, 0.80) if count > 1 else (look.MARGIN + 0.02, 0.76)
    place = {"left": left, "right": right, "top": 0.98, "bottom": 0.13, "wspace": wspace}
    return list(made.subplots(1, count, squeeze=False, gridspec_kw=place)[0])


def show_nothing(ax: Axes, text: str) -> None:
    ax.yaxis.set_major_locator(NullLocator())
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="#777777")
