"""Figures from stored rows: perplexity and R_k against length, loss against position, training loss.

Figures are returned unsaved. Lengths and positions are in tokens, losses in nats per token.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

from posx.evaluation.answers import Answers
from posx.evaluation.protocols import PerPosition
from posx.lab.plots import baselines, captions, look, points, strokes
from posx.lab.plots.groups import Curve, Panel, Point, common_names, curves_of_runs, firsts, settings_by_length
from posx.lab.plots.heat import distance_map, has_distances, triangle
from posx.lab.plots.palette import Look
from posx.lab.results.columns import FAILED, finite_perplexity, plain_rows

_EVEN = [1, 2, 2.5, 5, 10]  # steps between ticks
# Across training lengths: darker with the length. Counts of markers and dashes differ, so that many lengths differ.
_SHADES = ("#A79FE0", "#6F60C4", "#44329A", "#1B1050")
_MARKERS = ("o", "s", "^", "D", "v")
_DASHES: tuple[Any, ...] = ("-", (0.0, (5.0, 2.0)), (0.0, (1.5, 1.5)))


def _bits_axis(ax: Axes, panel: Panel) -> None:
    """Draw an axis of bits per byte, if all rows have equal bytes a token and nearly no separators among targets."""
    rows = panel.rows[finite_perplexity(panel.rows).notna()]
    scored = plain_rows(rows[points.BLOCKS])
    known = rows.bpb.notna().all() and all(
        row["num_bytes"] and row["num_targets"] and points.nearly_all_text(row) for row in scored
    )
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


def extrapolation(panel: Panel) -> Figure:
    """Draw perplexity against evaluation length, in full and in a close view of [0.9, 1.5] times the best at L."""
    curves, windows = baselines.split_windows(points.perplexity_curves(panel))
    trained, level = baselines.longer_perplexities(panel), baselines.no_context([panel])
    several = sum(any(point.values for point in curve.points) for curve in curves) > 1  # else one view shows all
    made = look.figure(12.5 if several else 8.6, 4.6)
    full, *closer = strokes.make_axes(made, 2 if several else 1, wspace=0.38)
    lengths = sorted({*panel.rows.eval_len, panel.train_len})
    for ax in (full, *closer):
        for curve in curves:
            strokes.draw_curve(ax, curve, bars=ax is full)  # they would hide what the close view is for
        baselines.draw_windows(ax, windows)
        baselines.draw_retrained(ax, curves, trained)
        look.train_line(ax, panel.train_len)
        look.length_axis(ax, lengths, panel.train_len)
        ax.set_xlabel("evaluation length (tokens)")
    quantity = captions.perplexity_name(panel.protocol)
    full.set_ylabel(f"{quantity} per token ({'all, ' if several else ''}log scale)")
    outside, values = list[str](), strokes.drawn_values(curves)
    top = look.log_axis(full, baselines.frame_values(values, windows, trained, level))
    if not values:
        strokes.show_nothing(full, f"no finite {quantity}")
    for close in closer:
        close.set_ylabel(f"{quantity} per token (near the best at L, linear)")
        outside = _close_view(close, curves, panel.train_len, [*trained.values()])
    for ax in (full, *closer) if values else ():
        _bits_axis(ax, panel)
        baselines.draw_no_context(ax, level)
    lanes = strokes.mark_failures(full, curves)
    same = "" if captions.mixture(panel.rows) else ", the same text for all curves"
    spreads = captions.spreads(curves, f"95 % interval over text{' (left)' if several else ''}{same}")
    beyond = [f"Outside the right panel: {captions.join_names(outside)}"] if outside else []
    title = f"{quantity.capitalize()} at and beyond the training length"
    more = [*beyond, *strokes.frame_notice([*curves, *windows], top, baselines.hidden_markers(trained, top))]
    more += [*baselines.no_context_note([panel], full), *baselines.longer_notes(panel)]
    strokes.write_words(made, title, [panel], [*curves, *windows], spreads, lanes, more=more)
    entries = baselines.handles(windows, baselines.visible((full, *closer), trained))
    strokes.draw_legend(made, panel, curves, 0.80 + 0.045 if several else 0.83, entries)
    return made


def _close_view(ax: Axes, curves: Sequence[Curve], train_len: int, trained: Sequence[Mapping[Any, float]]) -> list[str]:
    """Show the values near the best at L. Return the labels of curves that have no value there.

    trained: values of models that were trained at longer lengths.
    """
    drawn = {curve.label: [point for point in curve.points if point.values] for curve in curves}
    everything, values = [point for own in drawn.values() for point in own], strokes.drawn_values(curves)
    values += [value for own in trained for value in own.values() if values]
    best = min([point.mean for point in everything if point.x == train_len] or values)
    low, high = min(0.9 * best, 0.98 * max(min(values), 0.5 * best)), 1.5 * best
    ax.set_ylim(low, high)
    ax.yaxis.set_major_locator(MaxNLocator(7, steps=_EVEN))
    return [name for name, own in drawn.items() if own and not any(low <= point.mean <= high for point in own)]


def ratio(panel: Panel) -> Figure:
    """Draw R_k = ppl(kL) / ppl(L) against k, log-log. At R_k = 1, windows k times as long lose nothing."""
    curves, windows = baselines.split_windows(points.ratio_curves(panel))
    whole, _ = baselines.split_windows(points.perplexity_curves(panel))
    at_train = {one.label: point.mean for one in whole for point in one.points if point.x == panel.train_len}
    trained = baselines.as_ratios(baselines.longer_perplexities(panel), at_train, panel.train_len)
    made = look.figure(8.6, 4.8)
    (ax,) = strokes.make_axes(made, 1)
    for curve in curves:
        strokes.draw_curve(ax, curve)
    baselines.draw_windows(ax, windows)
    baselines.draw_retrained(ax, curves, trained)
    factors = sorted({point.x for curve in curves for point in curve.points}) or [1.0]
    look.length_axis(ax, factors, 1.0, "\N{MULTIPLICATION SIGN}")
    ax.set_xlabel(f"evaluation length / training length (L = {panel.train_len})")
    quantity = captions.perplexity_name(panel.protocol)
    ax.set_ylabel(f"{quantity} relative to that at L")
    values, top = strokes.drawn_values(curves), math.inf
    if values:
        ax.axhline(1.0, color="#888888", linewidth=1.0, dashes=(4, 3), zorder=1)
        top = look.log_axis(ax, [*baselines.frame_values(values, windows, trained, None), 0.95, 1.1])
    else:
        strokes.show_nothing(ax, f"no run has a finite {quantity} at L")
    lanes = strokes.mark_failures(ax, curves)
    unbased = [one for one in whole if not any(point.x == panel.train_len and point.values for point in one.points)]
    lines = [f"{look.one_line(curve.label)}: no value at L, so no ratio" for curve in unbased[:6]]
    title = f"{quantity.capitalize()} relative to the training length, R_k = ppl(kL) / ppl(L)"
    spreads = captions.spreads(curves, "95 % interval of the ratio over text")
    leaving = strokes.frame_notice([*curves, *windows], top, baselines.hidden_markers(trained, top))
    more = [*lines, *leaving, *baselines.longer_notes(panel)]
    strokes.write_words(made, title, [panel], [*curves, *windows], spreads, lanes, "k = ", more)
    strokes.draw_legend(made, panel, curves, 0.76, baselines.handles(windows, baselines.visible([ax], trained)))
    return made


def per_position(panel: Panel) -> Figure:
    """Draw the mean loss in each stored bin of positions, and the perplexity of all targets up to there."""
    made = look.figure(11.5, 4.6)
    left, right = strokes.make_axes(made, 2)
    (binned, windows), (running, running_windows) = (
        baselines.split_windows(points.average_bins(panel, of))
        for of in (points.local_loss, points.cumulative_perplexity)
    )
    last = max(point.x for curve in running for point in curve.points)
    inside = [x for n in range(-24, 25) if 1 < (x := panel.train_len * 2.0**n) < last]
    for ax, curves, thin in ((left, binned, windows), (right, running, running_windows)):
        for turn, curve in enumerate(curves):
            strokes.draw_curve(ax, curve, turn=turn)
        baselines.draw_windows(ax, thin)
        look.train_line(ax, panel.train_len)
        look.length_axis(ax, [1.0, *inside, last], panel.train_len)
        ax.set_xlabel("position of the target in its window (tokens)")
    left.set_ylabel("loss in the bin (nats per token)")
    right.set_ylabel("perplexity of all targets up to here")
    beyond = strokes.frame_notice(running, look.log_axis(right, strokes.drawn_values(running)))
    strokes.write_words(made, "Loss along the window", [panel], binned, captions.spreads(binned), more=beyond)
    strokes.draw_legend(made, panel, binned, 0.80, baselines.handles(windows))
    return made


def answers(panel: Panel) -> Figure:
    """Draw the share of a task's items whose whole answer is right, or of its hidden tokens, against length."""
    curves, windows = baselines.split_windows(points.answer_curves(panel))
    made = look.figure(8.6, 4.6)
    (ax,) = strokes.make_axes(made, 1)
    for curve in curves:
        strokes.draw_curve(ax, curve)
    baselines.draw_windows(ax, windows)
    look.train_line(ax, panel.train_len)
    look.length_axis(ax, sorted({*panel.rows.eval_len, panel.train_len}), panel.train_len)
    ax.set_xlabel("evaluation length (tokens)")
    ax.set_ylabel("hidden tokens that are right" if points.hides_tokens(panel) else "items with the right answer")
    ax.set_ylim(-0.02, 1.02)
    lanes = strokes.mark_failures(ax, curves)
    title = "Right answers at and beyond the training length"
    spreads = captions.spreads(curves, "95 % interval over items")
    strokes.write_words(made, title, [panel], [*curves, *windows], spreads, lanes)
    strokes.draw_legend(made, panel, curves, 0.76, baselines.handles(windows))
    return made


def length_curves(panels: Sequence[Panel]) -> Figure:
    """Draw perplexity against evaluation length on shared axes: a panel per encoding, a curve per training length."""
    names, by_length = common_names(panels), settings_by_length(firsts([c.runs for p in panels for c in p.curves]))
    looks = {
        panel.train_len: Look(*(kinds[number % len(kinds)] for kinds in (_SHADES, _MARKERS, _DASHES)))
        for number, panel in enumerate(panels)
    }
    drawn: dict[str, list[Curve]] = {}
    for panel in panels:
        for curve in points.perplexity_curves(panel):
            name = names[panel.train_len, curve.label]
            label, look_of_length = f"{name}, L = {panel.train_len}", looks[panel.train_len]
            drawn.setdefault(name, []).append(dataclasses.replace(curve, label=label, look=look_of_length))
    curves, windows = baselines.split_windows(curve for own in drawn.values() for curve in own)
    level = baselines.no_context(panels)
    made, axes = look.small_multiples(sorted(drawn), height=1.8)
    width, height = made.get_size_inches()
    for ax, name in zip(axes, sorted(drawn), strict=True):
        own, thin = baselines.split_windows(drawn[name])
        for curve in own:
            strokes.draw_curve(ax, curve, bars=False)
            style = {"color": curve.look.color, "linestyle": curve.look.dashes, "linewidth": 1.0}
            ax.axvline(curve.runs.train_len.iloc[0], **style, zorder=1)
        baselines.draw_windows(ax, thin)
    lengths = sorted({*captions.panel_rows(panels).eval_len, *looks})
    look.length_axis(axes[0], lengths, min(looks))
    top = look.log_axis(axes[0], baselines.frame_values(strokes.drawn_values(curves), windows, {}, level))
    for ax in axes:
        baselines.draw_no_context(ax, level, named=ax is axes[0])
    entries = list[tuple[Line2D, str]]()
    for length, look_of_length in looks.items():
        ends = [f"{name.rpartition('.')[2]}={of[length]}" for name, of in by_length.items()]
        entries.append((Line2D([], [], **strokes.line_style(look_of_length)), "\n  ".join([f"L = {length}", *ends])))
    made.supxlabel("evaluation length (tokens)", size=10, y=0.12 / height, va="bottom")
    quantity = captions.perplexity_name(panels[0].protocol)
    made.supylabel(f"{quantity} per token (log scale)", size=10, x=0.3 / width)
    look.legend(made, [*entries, *baselines.handles(windows)], 1 - 1.1 / width, 1 - 0.3 / height)
    title = f"{quantity.capitalize()} across training lengths (each marked by its vertical line)"
    notes = [*strokes.frame_notice([*curves, *windows], top), *baselines.no_context_note(panels, axes[0])]
    strokes.write_words(made, title, panels, [*curves, *windows], captions.spreads(curves), more=notes)
    return made


def objectives(runs: pd.DataFrame) -> pd.Series:
    """Return the training objective of each run."""
    return runs.settings.map(lambda settings: settings.get("train.objective", "next_token"))


def training(runs: pd.DataFrame, losses: Mapping[str, points.Losses], missing: Mapping[str, str]) -> Figure:
    """Draw training loss in nats per token against optimiser step, one thin line per run.

    Args:
      runs: the columns of runs.
      losses: {run: its (step, loss)}.
      missing: {path of a run without results: why}. A run that is drawn is not named.
    """
    made = look.figure(8.6, 4.4)
    (ax,) = strokes.make_axes(made, 1)
    curves = [
        dataclasses.replace(curve, points=tuple(Point(x, (y,)) for run in curve.runs.run for x, y in losses[run]))
        for curve in curves_of_runs(runs)
    ]
    whose = {run: curve for curve in curves for run in curve.runs.run}
    seen: dict[str, Line2D] = {}
    finite = {run: [pair for pair in own if math.isfinite(pair[1])] or [own[-1]] for run, own in losses.items()}
    top = look.log_axis(ax, [loss for own in finite.values() for _, loss in own if loss > 0])
    for turn, run in enumerate(sorted(losses, key=lambda run: (-finite[run][-1][1], run))):
        curve, (steps, values) = whose[run], zip(*losses[run], strict=True)
        style = strokes.line_style(curve.look) | {"markevery": strokes.spread_markers(turn) if len(steps) > 1 else None}
        (line,) = ax.plot(steps, values, **style, linewidth=1.3, alpha=0.9)
        seen.setdefault(look.wrap(curve.label) + (f" ({len(curve.runs)} runs)" if len(curve.runs) > 1 else ""), line)
        if not math.isfinite(values[-1]):
            step, loss = finite[run][-1]
            ax.add_line(strokes.failure_mark("diverged", step, min(loss, top), color=style["color"])).set_clip_on(False)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("optimiser step")
    is_masked = (objectives(runs) == "masked").all()
    ax.set_ylabel(f"training loss (nats per {'masked ' if is_masked else ''}token)")
    entries = sorted(seen.items(), key=lambda pair: pair[0])
    if any(not math.isfinite(own[-1][1]) for own in losses.values()):
        entries.append((FAILED["diverged"], strokes.failure_mark("diverged")))
    look.legend(made, [(line, name) for name, line in entries], 0.775, 0.985)
    many = f"{len(runs)} run{'s' if len(runs) != 1 else ''}; longer logs are averaged over equal spans"
    title = "Training loss of masked tokens" if is_masked else "Training loss"
    look.headings(made, title, [many], captions.training_mixture(runs))
    missing = {path: why for path, why in missing.items() if path not in losses}
    lines = [
        *captions.shared_settings_line(curves),
        *captions.without_results(missing),
        *captions.tokens_per_step(curves),
    ]
    look.draw_notes(made, [*lines, *strokes.frame_notice(curves, top)])
    return made


#: The figures of a panel by name.
DRAW: dict[str, Callable[[Panel], Figure]] = {
    draw.__name__: draw for draw in (extrapolation, ratio, per_position, answers, distance_map)
}

#: The figures of all training lengths of a rule, by the kind that they are asked for with and the end of their name.
ACROSS: dict[str, tuple[str, Callable[[Sequence[Panel]], Figure]]] = {
    extrapolation.__name__: ("-lengths", length_curves),
    triangle.__name__: ("", triangle),
}

#: The figures of one protocol alone. All other protocols share all other figures.
FIGURES_OF = {PerPosition.name: ("per_position",), Answers.name: ("answers", "distance_map")}

#: The runs that a figure is drawn from.
NEEDS = {
    extrapolation.__name__: f"a text, by another protocol than {PerPosition.name}",
    ratio.__name__: f"a text, in windows longer than L, by another protocol than {PerPosition.name}",
    per_position.__name__: f"a text, by the protocol {PerPosition.name}",
    answers.__name__: "a task",
    distance_map.__name__: "a task whose answers are read from one place each",
    triangle.__name__: "a text, of at least two training lengths under one protocol and stride",
}


def draws(kind: str, panel: Panel) -> bool:
    """Tell whether the rows of a panel have a figure of this kind."""
    own = {name for names in FIGURES_OF.values() for name in names}
    if kind == distance_map.__name__ and not has_distances(panel):
        return False
    if kind == ratio.__name__ and panel.rows.eval_len.max() <= panel.train_len:  # all ratios would be 1
        return False
    return kind in FIGURES_OF.get(panel.protocol, (DRAW.keys() | ACROSS.keys()) - own)
