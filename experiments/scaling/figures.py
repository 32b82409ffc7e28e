"""The figures of the study of sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from experiments.anchors import Anchor
from experiments.scaling.cells import LEADERBOARD, Cell, align, score, single_seeds
from experiments.scaling.published import stated
from experiments.tables import WINDOWS, Run, row_tables
from posx.lab.plots import look, palette
from posx.lab.plots.curves import extrapolation
from posx.lab.plots.groups import Panel
from posx.lab.plots.heat import triangle

REFERENCE = "rope"
#: The parts of the triangle of training length by evaluation length.
TRIANGLE = (LEADERBOARD, "128x128", "128x256")
#: The parts of the curves: those of one training length, the same under windows of it, and a longer training length.
CURVES = ("128x128", "128x128-window-size=128", "128x256")
#: The cells of the figure with their names there, in groups. Lines join the cells of a group.
FIGURE = {
    "width,\ndesign": {"64, L = 64": "64", "128, L = 64": "128"},
    "width,\n1,200 steps": {"64, steps": "64", "128, L = 64": "128", "256, steps": "256\nn = 1"},
    "width,\nL = 256": {"64, L = 256, steps": "64", "128, L = 256": "128"},
    "L at\nwidth 64": {"64, L = 64": "64", "64, L = 128": "128", "64, L = 256": "256"},
    "L at\nwidth 128": {"128, L = 64": "64", "128, L = 128": "128", "128, L = 256": "256"},
    "text at\nwidth 64": {"64, stdlib": "code", "64, L = 64": "novels", "64, bpe": "BPE"},
}


def draw_triangle(runs: Sequence[Run], path: Path) -> None:
    """Draw perplexity by training length and evaluation length, a map for each encoding, of the parts `TRIANGLE`."""
    with look.style():
        triangle(panels(runs, TRIANGLE)).savefig(path, dpi=110, bbox_inches="tight")


def draw_curves(runs: Sequence[Run], path: Path) -> None:
    """Draw perplexity against evaluation length with its baselines, of the parts `CURVES` and seeds of the second."""
    seeds = {run["seed"] for run in runs if run["part"] == CURVES[1]}
    first, *_ = panels([run for run in runs if run["seed"] in seeds], CURVES)
    with look.style():
        extrapolation(first).savefig(path, dpi=110, bbox_inches="tight")


def panels(runs: Sequence[Run], parts: Collection[str]) -> list[Panel]:
    """Return the panels of parts in non-overlapping windows, from the shortest training length on."""
    made = row_tables([run for run in runs if run["part"] in parts])
    own = (one.panel for one in made if one.panel and one.panel.protocol == WINDOWS)
    found = {one.train_len: one for one in own}  # the table of all lengths repeats one
    return [found[length] for length in sorted(found)]


def figure(cells: Sequence[Cell], anchors: Sequence[Anchor], path: Path) -> None:
    """Draw perplexity at L over RoPE's, and R_4, of each cell, and published R_4 over those of `LEADERBOARD`.

    cells: those of `FIGURE`. Points are seeds, lines join the means of a group.
    """
    import matplotlib.pyplot as plt

    here = next(one for one in cells if one.part == LEADERBOARD)
    looks = {name: made for (name, _), made in palette.looks([(name, "") for name in here.encodings]).items()}
    with look.style():
        drawn, (at, beyond, papers) = plt.subplots(
            1, 3, figsize=(18, 5.2), layout="constrained", width_ratios=(1.5, 1.5, 0.7)
        )
        at.set(ylabel="perplexity / RoPE's", title="At L")
        draw_cells(at, cells, 1, looks)
        beyond.set(ylabel="R_4 = PPL(4 L) / PPL(L)", title="Beyond L")
        draw_cells(beyond, cells, 4, looks)
        draw_published(papers, here, anchors, looks)
        drawn.legend(*at.get_legend_handles_labels(), loc="outside right center", fontsize=8)
        drawn.savefig(path, dpi=120)


def draw_cells(axis: Axes, cells: Sequence[Cell], factor: int, looks: Mapping[str, palette.Look]) -> None:
    """Draw a column for each cell of `FIGURE`: perplexity at L over RoPE's if `factor` is 1, and R_k beyond L."""
    found = {one.name: one for one in cells}
    ticks, right = dict[float, str](), -1.5
    for title, group in FIGURE.items():
        places = [right + 1.5 + number for number in range(len(group))]
        ticks |= zip(places, group.values(), strict=True)
        right = places[-1]
        middle = sum(places) / len(places)
        axis.annotate(title, (middle, -0.16), xycoords=("data", "axes fraction"), ha="center", fontsize=8)
        joined = align(*(found[name] for name in group))
        for place, name in enumerate(joined[0].encodings):
            rows = [single_seeds(one, factor)[:, [place, one.encodings.index(REFERENCE)]] for one in joined]
            each = [np.exp(row[:, 0] - (row[:, 1] if factor == 1 else 0)) for row in rows]
            style = looks[name]
            means = [values.mean() for values in each]
            line = axis.plot(places, means, linestyle=style.dashes, marker=style.marker, color=style.color)
            line[0].set_label(name if not places[0] else None)
            for at, values in zip(places, each, strict=True):
                axis.plot([at] * len(values), values, "o", markersize=1.8, color=style.color)
    axis.set_xticks(list(ticks), ticks.values(), size=7)
    look.log_axis(axis, [float(value) for line in axis.lines for value in line.get_ydata()])


def draw_published(axis: Axes, here: Cell, anchors: Sequence[Anchor], looks: Mapping[str, palette.Look]) -> None:
    """Draw published R_4 over that of the same encoding in a cell."""
    ours = dict(zip(here.encodings, np.exp(score(here.values, 4)), strict=True))
    for anchor in anchors:
        for name in anchor.perplexity:
            if name in ours and math.isfinite(value := stated(anchor, name, 4)):
                axis.plot(ours[name], value, looks[name].marker, color=looks[name].color)
    look.log_axis(axis, [float(value) for line in axis.lines for value in line.get_ydata()])
    axis.axline((1, 1), (2, 2), color="grey", linewidth=0.7)
    axis.set_xscale("log")
    axis.set_xticks([1, 2, 3, 5], ["1", "2", "3", "5"])
    axis.set_xticks([], minor=True)
    axis.set(
        xlabel="R_4 here, width 128, L = 64",
        ylabel="published R_4, 44 M to 1.3 B",
        title="Published models (line: equal)",
    )
