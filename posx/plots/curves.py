"""Figures from stored rows: perplexity and R_k against length, loss against position, training loss.

Figures are returned unsaved. Lengths and positions are in tokens, losses in nats per token. `missing` is
{run without results: why it failed}.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

from posx.plots import captions, look, points
from posx.plots.groups import Panel, groups_of_runs
from posx.plots.palette import Look
from posx.plots.points import Curve, nearly_all_text, perplexity_curves, ratio_curves
from posx.plots.rows import FAILED, perplexity

FAILURE_MARKS = {"undefined": "o", "nonfinite": "*", "oom": "x", "diverged": "d", "apart": "+"}
LANE = 0.037  # of the axes' height
_RUNAWAY = 1e30  # above every axis; matplotlib's own arithmetic overflows somewhere beyond
_APART = 0.14  # of the axes' diagonal, between the markers on a line of many points
_RIGHT = 0.80  # of the figure's width; the legend stands right of it
_EVEN = [1, 2, 2.5, 5, 10]  # steps between ticks


def line_style(of: Look) -> dict[str, Any]:
    """Return matplotlib's settings of a line with this look, in the axes and in the legend."""
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.5}
    return {"color": of.color, "linestyle": of.dashes, "marker": of.marker} | edge


def sparse(turn: int) -> tuple[float, float]:
    """Return `markevery` for a line of many points: even steps, from another start for each curve so that none hide."""
    return (0.4 * turn % 1) * _APART, _APART


def draw_curve(ax: Axes, curve: Curve, bars: bool = True, turn: int | None = None) -> None:
    """Draw the mean with its gaps and bars for its intervals; for several runs a dot each, and a band over them.

    turn: the number of a curve with so many points that only some get a marker, and runs get no dots.
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
    """Draw a lane above the axes for every curve that failed somewhere. Return the number of lanes."""
    lanes = [curve for curve in curves if any(point.failures for point in curve.points)]
    for level, curve in enumerate(lanes):
        style: dict[str, Any] = {"linestyle": "", "transform": ax.get_xaxis_transform(), "clip_on": False}
        style |= {"markersize": 5.5, "markerfacecolor": "none", "markeredgecolor": curve.look.color}
        for x, kind in [(point.x, kind) for point in curve.points for kind in sorted(set(point.failures))]:
            ax.plot([x], [1.03 + LANE * level], marker=FAILURE_MARKS[kind], **style)
    return len(lanes)


def legend_of(made: Figure, panel: Panel, curves: Sequence[Curve], right: float) -> None:
    """Draw the legend: curves by name, with their number of seeds if others have more, then failure marks in use."""
    seeds = max((len(group.runs) for group in panel.groups), default=0)
    curves = sorted(curves, key=lambda curve: curve.label)
    handles, texts = [Line2D([], [], **line_style(curve.look)) for curve in curves], list[str]()
    for curve in curves:
        few, many = curve.seeds
        n = " (no value)" if not many else f" (n = {few})" if few == many else f" (n = {few} to {many})"
        texts.append(look.wrapped(curve.label) + (n if (few, many) != (seeds, seeds) or not many else ""))
    for kind in FAILURE_MARKS:
        if any(kind in point.failures for curve in curves for point in curve.points):
            handles.append(mark_of(kind))
            texts.append(FAILED[kind])
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
    """Return every finite value that the curves' lines, bands and bars reach."""
    drawn = [point for curve in curves for point in curve.points]
    ends = [value for point in drawn for value in (point.low, point.high, *(point.interval or ()))]
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
    """Draw the title and the subtitle, with `lanes` left free above the axes for failure marks."""
    lines = [*captions.facts(panels), *captions.spreads(curves, interval)]
    look.headings(made, title, lines, captions.mixture([row for one in panels for row in one.rows]), LANE * lanes)


def _pair(made: Figure, wspace: float = 0.24) -> list[Axes]:
    place = {"left": look.MARGIN, "right": _RIGHT, "top": 0.98, "bottom": 0.13, "wspace": wspace}
    return list(made.subplots(1, 2, gridspec_kw=place))


def _alone(made: Figure) -> Axes:
    """Return the axes of a figure that has a single plot."""
    return made.subplots(gridspec_kw={"left": look.MARGIN + 0.02, "right": 0.76, "top": 0.98, "bottom": 0.13})


def _bits_axis(ax: Axes, panel: Panel) -> None:
    """Draw an axis of bits per byte, if all rows have as many bytes a token and few targets that are separators."""
    scored = [row for row in panel.rows if perplexity(row) is not None]
    known = all(row.get("num_bytes") and row.get("num_targets") and nearly_all_text(row) for row in scored)
    sizes = {row["num_bytes"] / row["num_targets"] for row in scored} if known else set()
    if len(sizes) != 1:
        return
    factor = math.log(2) * sizes.pop()
    right = ax.secondary_yaxis(
        "right", functions=(lambda ppl: np.log(np.maximum(ppl, 1e-9)) / factor, lambda bits: np.exp(factor * bits))
    )
    right.yaxis.set_major_locator(MaxNLocator(6, steps=_EVEN))
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    right.yaxis.set_minor_locator(NullLocator())
    right.set_ylabel("bits per byte")


def extrapolation(panel: Panel, missing: Mapping[str, str] | None = None) -> Figure:
    """Draw perplexity against evaluation length, in full and in a close view of [0.9, 1.5] times the best at L."""
    curves = perplexity_curves(panel)
    several = sum(any(point.values for point in curve.points) for curve in curves) > 1  # else one view shows all
    made = look.figure(12.5 if several else 8.6, 4.6)
    full, *closer = _pair(made, wspace=0.38) if several else [_alone(made)]
    lengths = sorted({row["eval_len"] for row in panel.rows} | {panel.train_len})
    for ax in (full, *closer):
        for curve in curves:
            draw_curve(ax, curve, bars=ax is full)  # they would hide what the close view is for
        look.train_line(ax, panel.train_len)
        look.length_axis(ax, lengths, panel.train_len)
        ax.set_xlabel("evaluation length (tokens)")
    full.set_ylabel("perplexity per token (all, log scale)" if several else "perplexity per token (log scale)")
    outside, values = list[str](), extent(curves)
    top = look.log_axis(full, values)
    if not values:
        nothing(full, "no finite perplexity")
    for close in closer:
        close.set_ylabel("perplexity per token (near the best at L, linear)")
        outside = _close_view(close, curves, panel.train_len)
    for ax in (full, *closer) if values else ():
        _bits_axis(ax, panel)
    lanes = mark_failures(full, curves)
    same = "" if captions.mixture(panel.rows) else ", the same text for all curves"
    interval = f"95 % interval over text{' (left)' if several else ''}{same}"
    headings(made, "Perplexity at and beyond the training length", [panel], curves, interval, lanes)
    legend_of(made, panel, curves, _RIGHT + 0.045 if several else 0.83)
    beyond = [f"Outside the right panel: {captions.listed(outside)}"] if outside else []
    look.notes(made, [*captions.notes([panel], curves, missing), *beyond, *off_frame(highs(curves), top)])
    return made


def _close_view(ax: Axes, curves: Sequence[Curve], train_len: int) -> list[str]:
    """Show the values near the best at L. Return the labels of curves that have no value there."""
    drawn = {curve.label: [point for point in curve.points if point.values] for curve in curves}
    everything, values = [point for own in drawn.values() for point in own], extent(curves)
    best = min([point.mean for point in everything if point.x == train_len] or values)
    low, high = min(0.9 * best, 0.98 * max(min(values), 0.5 * best)), 1.5 * best
    ax.set_ylim(low, high)
    ax.yaxis.set_major_locator(MaxNLocator(7, steps=_EVEN))
    return [name for name, own in drawn.items() if own and not any(low <= point.mean <= high for point in own)]


def ratio(panel: Panel, missing: Mapping[str, str] | None = None) -> Figure:
    """Draw R_k = ppl(kL) / ppl(L) against k, log-log: 1 is no loss from a text k times longer than in training."""
    curves = ratio_curves(panel)
    made = look.figure(8.6, 4.8)
    ax = _alone(made)
    for curve in curves:
        draw_curve(ax, curve)
    factors = sorted({point.x for curve in curves for point in curve.points}) or [1.0]
    look.length_axis(ax, factors, 1.0, "\N{MULTIPLICATION SIGN}")
    ax.set_xlabel(f"evaluation length / training length (L = {panel.train_len})")
    ax.set_ylabel("perplexity relative to that at L")
    values, top = extent(curves), math.inf
    if values:
        ax.axhline(1.0, color="#888888", linewidth=1.0, dashes=(4, 3), zorder=1)
        top = look.log_axis(ax, [*values, 0.95, 1.1])
    else:
        nothing(ax, "no run has a finite perplexity at L")
    lanes = mark_failures(ax, curves)
    unbased = [c for c in perplexity_curves(panel) if not any(p.x == panel.train_len and p.values for p in c.points)]
    lines = [f"{look.shown(curve.label)}: no value at L, so no ratio" for curve in unbased[:6]]
    title = "Perplexity relative to the training length, R_k = ppl(kL) / ppl(L)"
    headings(made, title, [panel], curves, "95 % interval of the ratio over text", lanes)
    legend_of(made, panel, curves, 0.76)
    look.notes(made, [*captions.notes([panel], curves, missing, "k = "), *lines, *off_frame(highs(curves), top)])
    return made


def per_position(panel: Panel, missing: Mapping[str, str] | None = None) -> Figure:
    """Draw the mean loss in each stored bin of positions, and the perplexity of all targets up to there."""
    made = look.figure(11.5, 4.6)
    left, right = _pair(made)
    binned, running = (points.averaged(panel, of) for of in (points.local, points.cumulative))
    last = max(point.x for curve in running for point in curve.points)
    inside = [x for n in range(-24, 25) if 1 < (x := panel.train_len * 2.0**n) < last]
    for ax, curves in ((left, binned), (right, running)):
        for turn, curve in enumerate(curves):
            draw_curve(ax, curve, turn=turn)
        look.train_line(ax, panel.train_len)
        look.length_axis(ax, [1.0, *inside, last], panel.train_len)
        ax.set_xlabel("position of the target in its window (tokens)")
    left.set_ylabel("loss in the bin (nats per token)")
    right.set_ylabel("perplexity of all targets up to here")
    beyond = off_frame(highs(running), look.log_axis(right, extent(running)))
    headings(made, "Loss along the window", [panel], binned)
    legend_of(made, panel, binned, _RIGHT)
    look.notes(made, [*captions.unlike_windows(panel), *captions.notes([panel], binned, missing), *beyond])
    return made


def training(runs: Sequence[points.TrainingRun], missing: Mapping[str, str] | None = None) -> Figure:
    """Draw training loss in nats per token against optimiser step, one thin line per run."""
    made = look.figure(8.6, 4.4)
    ax = _alone(made)
    groups = groups_of_runs([one.run for one in runs])
    whose = {run: group for group in groups for run in group.runs}
    seen: dict[str, Line2D] = {}
    finite = [loss for one in runs for loss in one.losses if math.isfinite(loss) and loss > 0]
    top = look.log_axis(ax, finite)
    for turn, one in enumerate(sorted(runs, key=lambda one: (-one.last[1], one.run.path))):
        group = whose[one.run]
        style = line_style(group.look) | {"markevery": sparse(turn) if len(one.steps) > 1 else None}
        (line,) = ax.plot(one.steps, one.losses, **style, linewidth=1.3, alpha=0.9)
        seen.setdefault(look.wrapped(group.label) + (f" ({len(group.runs)} runs)" if group.runs[1:] else ""), line)
        if not math.isfinite(one.losses[-1]):
            step, loss = one.last
            ax.add_line(mark_of("diverged", step, min(loss, top), color=style["color"])).set_clip_on(False)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("optimiser step")
    ax.set_ylabel("training loss (nats per token)")
    entries = sorted(seen.items(), key=lambda pair: pair[0])
    if any(not math.isfinite(one.losses[-1]) for one in runs):
        entries.append((FAILED["diverged"], mark_of("diverged")))
    look.legend(made, [line for _, line in entries], [name for name, _ in entries], 0.775, 0.985)
    many = f"{len(runs)} run{'s' if len(runs) != 1 else ''}; longer logs are averaged over equal spans"
    look.headings(made, "Training loss", [many])
    beyond = off_frame(((whose[one.run].label, loss) for one in runs for loss in one.losses), top)
    left_out = captions.without_results(missing or {})
    look.notes(made, [*captions.unless_named(groups), *left_out, *captions.tokens_per_step(groups), *beyond])
    return made


DRAW: dict[str, Callable[..., Figure]] = {"extrapolation": extrapolation, "ratio": ratio, "per_position": per_position}
