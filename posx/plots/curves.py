"""Figures from stored rows: perplexity and R_k against length, loss against position, training loss.

Every function returns an unsaved figure; lengths and positions in tokens, loss in nats per token.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from posx.plots import look, positions, rows
from posx.plots.rows import Curve, Panel, Point, Row

FAILURE_MARKS = {"undefined": "o", "nonfinite": "*", "oom": "x"}
FAILURE_NAMES = {"undefined": "undefined", "nonfinite": "not finite", "oom": "out of memory"}
PROTOCOLS = {
    "nonoverlapping": "non-overlapping windows",
    "sliding": "sliding window",
    rows.PER_POSITION: "loss per position",
}
_RIGHT = 0.80  # of the figure's width; the legend stands right of it
_LANE = 0.037  # of the axes' height
_RUNAWAY = 1e30  # above every axis; matplotlib's own arithmetic overflows somewhere beyond


def labels(curves: Sequence[Curve], most: int | None = None) -> list[str]:
    """A curve's name, what tells it from its namesakes, and its number of seeds where that is not everybody's."""
    everybody = most if most is not None else max((curve.seeds[1] for curve in curves), default=0)
    found = []
    for curve in curves:
        name = look.shown(look.look(curve.encoding).name, 26)
        if curve.detail:
            name += "\n" + look.shown(curve.detail, 30)
        few, many = curve.seeds
        if many and (few, many) != (everybody, everybody):
            name += f" (n = {few})" if few == many else f" (n = {few} to {many})"
        found.append(name if many else f"{name} (no value)")
    return found


def facts(panel_rows: Sequence[Row], train_len: int, protocol: str) -> list[str]:
    """Subtitle lines: the protocol and what was scored; the training length, seeds and text."""
    strides = sorted({row["stride"] for row in panel_rows if isinstance(row.get("stride"), int)})
    first = PROTOCOLS.get(protocol, look.shown(protocol))
    if protocol == rows.PER_POSITION:
        first += f", windows of {_range(sorted({row['eval_len'] for row in panel_rows}))} tokens"
    if protocol == "sliding" and strides:
        first += f", stride {_range(strides)}"
    targets = sorted({row["num_targets"] for row in panel_rows if isinstance(row.get("num_targets"), int)})
    if targets:
        first += f" · {_range(targets)} targets scored per " + ("run" if protocol == rows.PER_POSITION else "length")
    seeds = rows.seed_count(panel_rows)
    second = f"trained at L = {train_len} · {seeds} seed{'s' if seeds != 1 else ''}"
    if seeds > 1:
        second += " (line: mean, band: lowest to highest)"
    for key, word in (("tokenizer", "tokenizer"), ("data_digest", "text")):
        names = sorted({str(row[key]) for row in panel_rows if row.get(key)})
        if names:
            second += f" · {word} " + ", ".join(
                look.shown(name, 12 if key == "data_digest" else 24) for name in names[:3]
            )
    return [first[0].upper() + first[1:], second[0].upper() + second[1:]]


def mixture(panel_rows: Sequence[Row]) -> str:
    """A warning where numbers of different texts or tokenizers stand side by side, else an empty string."""
    for key, word in (("data_digest", "corpora"), ("tokenizer", "tokenizers")):
        if len({str(row[key]) for row in panel_rows if row.get(key)}) > 1:
            return f"different {word}: not comparable"
    return ""


def _range(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def draw_curve(ax: Axes, curve: Curve, markers: bool = True) -> None:
    """The mean with its gaps, and a band from the lowest to the highest run where there are several."""
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


def _failure_notes(curves: Sequence[Curve], unit: str) -> list[str]:
    """One line per encoding and kind of failure: where, and for how many runs where some succeeded."""
    lines = []
    for curve in curves:
        for kind in rows.FAILED:
            points = [point for point in curve.points if kind in point.failures]
            if not points:
                continue
            places = [look.length_name(point.x) + _share(point, kind) for point in points]
            if len(places) > 6:
                places = [*places[:3], f"… {places[-1]} ({len(places)} places)"]
            name = look.shown(look.look(curve.encoding).name, 26) + (
                f" {look.shown(curve.detail, 26)}" if curve.detail else ""
            )
            lines.append(f"{name}: {FAILURE_NAMES[kind]} at {unit}{', '.join(places)}")
    return lines if len(lines) <= 8 else [*lines[:7], f"and {len(lines) - 7} more failures (see the table)"]


def _share(point: Point, kind: str) -> str:
    """ " (1 of 3 runs)" where only some runs failed."""
    runs = len(point.values) + len(point.failures)
    failed = point.failures.count(kind)
    return f" ({failed} of {runs} runs)" if failed < runs else ""


def draw_legend(made: Figure, curves: Sequence[Curve], names: Sequence[str], x: float, markers: bool) -> None:
    """Curves in the order of their right ends, then the failure marks in use."""
    handles, texts = [], list(names)
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
            texts.append(FAILURE_NAMES[kind])
    look.legend(made, handles, texts, x, 0.985)


def _pair(made: Figure) -> tuple[Axes, Axes]:
    left, right = made.subplots(
        1, 2, gridspec_kw={"left": look.MARGIN, "right": _RIGHT, "top": 0.98, "bottom": 0.13, "wspace": 0.24}
    )
    return left, right


def _nothing(ax: Axes, text: str) -> None:
    ax.yaxis.set_major_locator(NullLocator())
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="#777777")


def _means(curves: Sequence[Curve]) -> list[float]:
    return [
        value for curve in curves for point in curve.points for value in (point.low, point.high) if math.isfinite(value)
    ]


def _finish(
    made: Figure,
    title: str,
    panel: Panel,
    curves: Sequence[Curve],
    *,
    missing: Sequence[str],
    lanes: int = 0,
    unit: str = "",
    extra: Sequence[str] = (),
    right: float = _RIGHT,
    markers: bool = True,
) -> None:
    """Headings, legend and notes around the axes; `lanes` above the axes are left free for failure marks."""
    look.headings(made, title, facts(panel.rows, panel.train_len, panel.protocol), mixture(panel.rows), _LANE * lanes)
    draw_legend(made, curves, labels(curves, rows.seed_count(panel.rows)), right + 0.015, markers)
    lines = [*_failure_notes(curves, unit), *extra]
    if missing:
        named = ", ".join(look.shown(name, 24) for name in missing[:4])
        lines.append(f"No results yet: {named}" + (f" and {len(missing) - 4} more runs" if len(missing) > 4 else ""))
    look.notes(made, lines)


def extrapolation(panel: Panel, missing: Sequence[str] = ()) -> Figure:
    """Perplexity against evaluation length: the full range, and a close view of [0.9, 1.5] times the best at L."""
    curves = rows.perplexity_curves(panel)
    made = look.figure(11.5, 4.6)
    full, close = _pair(made)
    lengths = sorted({row["eval_len"] for row in panel.rows} | {panel.train_len})
    values = _means(curves)
    for ax in (full, close):
        for curve in curves:
            draw_curve(ax, curve)
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
    else:
        _nothing(full, "no finite perplexity")
        _nothing(close, "no finite perplexity")
    lanes = _mark_failures(full, curves)
    _finish(made, "Perplexity at and beyond the training length", panel, curves, missing=missing, lanes=lanes)
    return made


def ratio(panel: Panel, missing: Sequence[str] = ()) -> Figure:
    """R_k = ppl(kL) / ppl(L) against k, log-log: 1 is no loss from a text k times longer than in training."""
    curves = rows.ratio_curves(panel)
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
        for curve in rows.perplexity_curves(panel)
        if not any(p.x == panel.train_len and p.values for p in curve.points)
    ]
    lines = [f"{look.shown(look.look(curve.encoding).name)}: no value at L, so no ratio" for curve in unbased[:6]]
    _finish(
        made,
        "Perplexity relative to the training length, R_k = ppl(kL) / ppl(L)",
        panel,
        curves,
        missing=missing,
        lanes=lanes,
        unit="k = ",
        extra=lines,
        right=0.76,
    )
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
    _finish(made, "Loss along the window", panel, local, missing=missing, markers=False)
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
