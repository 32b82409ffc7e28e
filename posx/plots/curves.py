"""Figures from stored rows: perplexity and R_k against length, loss against position, training loss.

Every function returns an unsaved figure; lengths and positions in tokens, loss in nats per token.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

from posx.plots import captions, look, positions, rows
from posx.plots.points import Curve, perplexity_curves, ratio_curves
from posx.plots.rows import Panel

FAILURE_MARKS = {"undefined": "o", "nonfinite": "*", "oom": "x"}
_RIGHT = 0.80  # of the figure's width; the legend stands right of it
_LANE = 0.037  # of the axes' height
_RUNAWAY = 1e30  # above every axis; matplotlib's own arithmetic overflows somewhere beyond


def draw_curve(ax: Axes, curve: Curve, markers: bool = True, bars: bool = True) -> None:
    """The mean with its gaps, bars for its intervals, and a band from the lowest to the highest run of several."""
    style = look.look(curve.encoding, curve.variant)
    x = np.array([point.x for point in curve.points])
    mean = np.minimum([point.mean for point in curve.points], _RUNAWAY)
    ax.plot(
        x,
        mean,
        color=style.color,
        linestyle=style.dashes,
        marker=style.marker if markers else "",
        markeredgecolor="white",
        markeredgewidth=0.5,
        zorder=3,
    )
    several = np.array([len(point.values) > 1 for point in curve.points])
    if several.any():
        low, high = (np.minimum([getattr(point, end) for point in curve.points], _RUNAWAY) for end in ("low", "high"))
        ax.fill_between(x, low, high, where=several.tolist(), color=style.color, alpha=0.22, linewidth=0, zorder=2)
    if ends := [(point.x, *point.interval) for point in curve.points if bars and point.interval]:
        places, low, high = np.minimum(np.array(ends).T, _RUNAWAY)
        ax.vlines(places, low, high, color=style.color, linewidth=1.2, zorder=2.5)


def _mark_failures(ax: Axes, curves: Sequence[Curve]) -> int:
    """A lane above the axes for every encoding that failed somewhere; returns the number of lanes."""
    lanes = [curve for curve in curves if any(point.failures for point in curve.points)]
    for level, curve in enumerate(lanes):
        for point in curve.points:
            for kind in sorted(set(point.failures)):
                ax.plot(
                    [point.x],
                    [1.03 + _LANE * level],
                    transform=ax.get_xaxis_transform(),
                    clip_on=False,
                    linestyle="",
                    marker=FAILURE_MARKS[kind],
                    markersize=5.5,
                    markerfacecolor="none",
                    markeredgecolor=look.look(curve.encoding, curve.variant).color,
                )
    return len(lanes)


def draw_legend(made: Figure, panel: Panel, curves: Sequence[Curve], right: float, markers: bool = True) -> None:
    """Right of the axes, curves in the order of their right ends, then the failure marks in use."""
    handles, texts = [], captions.labels(curves, rows.seed_count(panel.rows))
    for curve in curves:
        style = look.look(curve.encoding, curve.variant)
        handles.append(
            Line2D(
                [],
                [],
                color=style.color,
                linestyle=style.dashes,
                marker=style.marker if markers else "",
                markeredgecolor="white",
                markeredgewidth=0.5,
            )
        )
    for kind, mark in FAILURE_MARKS.items():
        if any(kind in point.failures for curve in curves for point in curve.points):
            handles.append(Line2D([], [], color="#555555", linestyle="", marker=mark, markerfacecolor="none"))
            texts.append(captions.FAILURE_NAMES[kind])
    look.legend(made, handles, texts, right + 0.015, 0.985)


def _pair(made: Figure, wspace: float = 0.24) -> tuple[Axes, Axes]:
    left, right = made.subplots(
        1, 2, gridspec_kw={"left": look.MARGIN, "right": _RIGHT, "top": 0.98, "bottom": 0.13, "wspace": wspace}
    )
    return left, right


def _nothing(ax: Axes, text: str) -> None:
    ax.yaxis.set_major_locator(NullLocator())
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="#777777")


def _means(curves: Sequence[Curve]) -> list[float]:
    return [
        value
        for curve in curves
        for point in curve.points
        for value in (point.low, point.high, *(point.interval or ()))
        if math.isfinite(value)
    ]


def _headings(
    made: Figure, title: str, panel: Panel, curves: Sequence[Curve], interval: str = "", lanes: int = 0
) -> None:
    """Title, what was measured and what the bars are, with `lanes` left free above the axes for failure marks."""
    lines = [
        *captions.facts(panel.rows, panel.train_len, panel.protocol),
        *captions.spreads(curves, panel.rows, interval),
    ]
    look.headings(made, title, lines, captions.mixture(panel.rows), _LANE * lanes)


def _bits_axis(ax: Axes, panel: Panel) -> None:
    """Bits per byte on the right of perplexity per token, where all rows have as many bytes a token."""
    sizes = {row["num_bytes"] / row["num_targets"] for row in panel.rows if row.get("num_bytes")}
    if len(sizes) != 1 or any(not row.get("num_bytes") for row in panel.rows):
        return
    factor = math.log(2) * sizes.pop()
    right = ax.secondary_yaxis(
        "right", functions=(lambda ppl: np.log(np.maximum(ppl, 1e-9)) / factor, lambda bits: np.exp(factor * bits))
    )
    right.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    right.yaxis.set_minor_locator(NullLocator())
    right.set_ylabel("bits per byte")


def extrapolation(panel: Panel, missing: Sequence[str] = ()) -> Figure:
    """Perplexity against evaluation length: the full range, and a close view of [0.9, 1.5] times the best at L."""
    curves = perplexity_curves(panel)
    made = look.figure(12.5, 4.6)
    full, close = _pair(made, wspace=0.38)
    lengths = sorted({row["eval_len"] for row in panel.rows} | {panel.train_len})
    values = _means(curves)
    for ax in (full, close):
        for curve in curves:
            draw_curve(ax, curve, bars=ax is full)  # they would hide what the close view is for
        look.train_line(ax, panel.train_len)
        look.length_axis(ax, lengths, panel.train_len)
        ax.set_xlabel("evaluation length (tokens)")
    full.set_ylabel("perplexity per token (all, log scale)")
    close.set_ylabel("perplexity per token (near the best at L, linear)")
    if values:
        look.log_axis(full, values)
        at_train = [
            point.mean for curve in curves for point in curve.points if point.x == panel.train_len and point.values
        ]
        best = min(at_train or values)
        close.set_ylim(min(0.9 * best, 0.98 * max(min(values), 0.5 * best)), 1.5 * best)
        close.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
        for ax in (full, close):
            _bits_axis(ax, panel)
    else:
        _nothing(full, "no finite perplexity")
        _nothing(close, "no finite perplexity")
    lanes = _mark_failures(full, curves)
    interval = "95 % interval over text (left), the same text for all curves"
    _headings(made, "Perplexity at and beyond the training length", panel, curves, interval, lanes)
    draw_legend(made, panel, curves, _RIGHT + 0.045)
    look.notes(made, captions.notes(curves, missing))
    return made


def ratio(panel: Panel, missing: Sequence[str] = ()) -> Figure:
    """R_k = ppl(kL) / ppl(L) against k, log-log: 1 is no loss from a text k times longer than in training."""
    curves = ratio_curves(panel)
    made = look.figure(8.6, 4.8)
    ax = made.subplots(gridspec_kw={"left": look.MARGIN + 0.02, "right": 0.76, "top": 0.98, "bottom": 0.12})
    for curve in curves:
        draw_curve(ax, curve)
    ax.axhline(1.0, color="#888888", linewidth=1.0, dashes=(4, 3), zorder=1)
    factors = [point.x for curve in curves[:1] for point in curve.points] or [1.0]
    look.length_axis(ax, factors, 1.0, "\N{MULTIPLICATION SIGN}")
    ax.set_xlabel(f"evaluation length / training length (L = {panel.train_len})")
    ax.set_ylabel("perplexity relative to that at L")
    values = _means(curves)
    if values:
        look.log_axis(ax, [*values, 0.95, 1.1])
    else:
        _nothing(ax, "no run has a finite perplexity at L")
    lanes = _mark_failures(ax, curves)
    unbased = [
        curve
        for curve in perplexity_curves(panel)
        if not any(p.x == panel.train_len and p.values for p in curve.points)
    ]
    lines = [f"{look.shown(look.look(curve.encoding).name)}: no value at L, so no ratio" for curve in unbased[:6]]
    title = "Perplexity relative to the training length, R_k = ppl(kL) / ppl(L)"
    _headings(made, title, panel, curves, "95 % interval of the ratio over text", lanes)
    draw_legend(made, panel, curves, 0.76)
    look.notes(made, [*captions.notes(curves, missing, "k = "), *lines])
    return made


def per_position(panel: Panel, missing: Sequence[str] = ()) -> Figure:
    """Mean loss of the targets in each stored bin of positions, and the perplexity of all targets up to there."""
    made = look.figure(11.5, 4.6)
    left, right = _pair(made)
    local, running = positions.loss_curves(panel), positions.cumulative_curves(panel)
    for ax, curves in ((left, local), (right, running)):
        for curve in curves:
            draw_curve(ax, curve, markers=False)
        places = [point.x for curve in curves for point in curve.points]
        look.train_line(ax, panel.train_len)
        doublings = [panel.train_len * 2.0**n for n in range(-24, 25)]
        look.length_axis(
            ax, [min(places), *[x for x in doublings if min(places) < x < max(places)], max(places)], panel.train_len
        )
        ax.set_xlabel("position of the target in its window (tokens)")
    left.set_ylabel("loss in the bin (nats per token)")
    right.set_ylabel("perplexity of all targets up to here")
    if values := _means(running):
        look.log_axis(right, values)
    _headings(made, "Loss along the window", panel, local)
    draw_legend(made, panel, local, _RIGHT, markers=False)
    look.notes(made, captions.notes(local, missing))
    return made


def training(runs: Sequence[positions.TrainingRun]) -> Figure:
    """Training loss in nats per token against optimiser step, one thin line per run."""
    made = look.figure(8.6, 4.4)
    ax = made.subplots(gridspec_kw={"left": look.MARGIN + 0.02, "right": 0.76, "top": 0.98, "bottom": 0.13})
    seen: dict[str, Line2D] = {}
    counts: dict[str, int] = {}
    for run in sorted(runs, key=lambda run: (-run.losses[-1], run.name)):
        style = look.look(run.encoding)
        (line,) = ax.plot(run.steps, run.losses, color=style.color, linestyle=style.dashes, linewidth=1.3, alpha=0.9)
        seen.setdefault(run.encoding, line)
        counts[run.encoding] = counts.get(run.encoding, 0) + 1
    finite = [loss for run in runs for loss in run.losses if math.isfinite(loss)]
    if finite:
        look.log_axis(ax, finite)
    ax.set_xlabel("optimiser step")
    ax.set_ylabel("training loss (nats per token)")
    names = [
        look.shown(look.look(name).name, 26) + (f" ({counts[name]} runs)" if counts[name] > 1 else "") for name in seen
    ]
    look.legend(made, list(seen.values()), names, 0.775, 0.985)
    look.headings(
        made,
        "Training loss",
        [f"{len(runs)} run{'s' if len(runs) != 1 else ''}; longer logs are averaged over equal spans"],
    )
    return made


DRAW: dict[str, Callable[..., Figure]] = {"extrapolation": extrapolation, "ratio": ratio, "per_position": per_position}
