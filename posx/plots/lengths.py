"""One figure across training lengths: what a longer training window changes, encoding by encoding."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from posx.plots import captions, look
from posx.plots.curves import draw_curve, extent, headings, highs, line_style, off_frame
from posx.plots.groups import Panel, labels, settings_by_length
from posx.plots.palette import Look
from posx.plots.points import Curve, perplexity_curves

_COLUMNS = 4
# Darker with the length; markers and dashes too, of other counts, so that many lengths differ in one of them.
_SHADES = ("#A79FE0", "#6F60C4", "#44329A", "#1B1050")
_MARKERS = ("o", "s", "^", "D", "v")
_DASHES: tuple[Any, ...] = ("-", (0.0, (5.0, 2.0)), (0.0, (1.5, 1.5)))


def across(panels: Sequence[Panel], missing: Mapping[str, str] | None = None) -> Figure:
    """Draw perplexity against evaluation length on shared axes: a panel per encoding, a curve per training length."""
    runs = [group.runs for panel in panels for group in panel.groups]
    by_length = settings_by_length([own[0] for own in runs])
    on_axes = ("train.length", *by_length)
    names = iter(labels(runs, on_axes))
    looks = {
        panel.train_len: Look(*(kinds[number % len(kinds)] for kinds in (_SHADES, _MARKERS, _DASHES)))
        for number, panel in enumerate(panels)
    }
    drawn: dict[str, list[tuple[int, Curve]]] = {}
    for panel in panels:
        own = {group.label: next(names) for group in panel.groups}
        for curve in perplexity_curves(panel):
            curve = dataclasses.replace(curve, look=looks[panel.train_len])
            drawn.setdefault(own[curve.label], []).append((panel.train_len, curve))
    columns = min(_COLUMNS, len(drawn))
    down = math.ceil(len(drawn) / columns)
    titles = {name: look.wrapped(name, 30) for name in drawn}
    above = 0.2 * max(title.count("\n") for title in titles.values())  # of the titles, in inches, beyond one line
    made = look.figure(2.2 + 2.6 * columns, 0.7 + (2.3 + above) * down)
    width, height = made.get_size_inches()
    grid = {"left": 0.9 / width, "right": 1 - 1.2 / width, "top": 1 - (0.3 + above) / height, "bottom": 0.6 / height}
    spaces = {"hspace": (0.5 + above) / 1.8, "wspace": 0.1}
    axes = made.subplots(down, columns, sharex=True, sharey=True, squeeze=False, gridspec_kw=grid | spaces).ravel()
    for ax, name in zip(axes, sorted(drawn), strict=False):
        for length, curve in drawn[name]:
            draw_curve(ax, curve, bars=False)
            ax.axvline(length, color=curve.look.color, linestyle=curve.look.dashes, linewidth=1.0, zorder=1)
        ax.set_title(titles[name])
    for number, spare in enumerate(axes[len(drawn) :], len(drawn)):
        spare.set_visible(False)
        axes[number - columns].tick_params(labelbottom=True)
    lengths = sorted({row["eval_len"] for panel in panels for row in panel.rows} | set(looks))
    look.length_axis(axes[0], lengths, min(looks))
    named = [
        dataclasses.replace(curve, label=f"{name}, L = {length}") for name in drawn for length, curve in drawn[name]
    ]
    top = look.log_axis(axes[0], extent(named))
    made.supxlabel("evaluation length (tokens)", size=10, y=0.12 / height, va="bottom")
    made.supylabel("perplexity per token (log scale)", size=10, x=0.3 / width)
    handles = [Line2D([], [], **line_style(style)) for style in looks.values()]
    ends = {length: [f"{name.rpartition('.')[2]}={of[length]}" for name, of in by_length.items()] for length in looks}
    lines = ["\n  ".join([f"L = {length}", *ends[length]]) for length in looks]
    look.legend(made, handles, lines, 1 - 1.1 / width, 1 - 0.3 / height)
    headings(made, "Perplexity across training lengths (each marked by its vertical line)", panels, named)
    look.notes(made, [*captions.notes(panels, named, missing, on_axes=on_axes), *off_frame(highs(named), top)])
    return made
