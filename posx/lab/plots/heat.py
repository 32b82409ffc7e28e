"""Heat maps against evaluation length: perplexity by training length, and right answers by distance to their source."""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from posx.lab.plots import baselines, captions, look, points, strokes
from posx.lab.plots.groups import Curve, Panel, Point
from posx.lab.results.columns import FAILED

_CELL = (0.47, 0.38)  # of the triangle, in inches


def has_distances(panel: Panel) -> bool:
    """Tell whether a row of the panel has shares of right answers by distance."""
    return any(_is_known(curve) for curve in panel.curves)


def distance_map(panel: Panel) -> Figure:
    """Draw the share of right tokens against evaluation length and distance, a map for each curve.

    Seeds are counted together. Distances above the dashed line of a map are longer than any in its items of L tokens.
    If these were not measured, they are those of L tokens or more.
    """
    curves = sorted((curve for curve in panel.curves if _is_known(curve)), key=lambda curve: curve.label)
    lengths = sorted({*panel.rows.eval_len})
    maps = [bin_shares(curve, lengths) for curve in curves]
    known = [np.flatnonzero(np.isfinite(shares).any(axis=1)) for shares in maps]
    first, last = min(bins[0] for bins in known), max(bins[-1] for bins in known)
    at_train = [n for n, length in enumerate(lengths) if length == panel.train_len]
    trained = [np.flatnonzero(np.isfinite(shares[:, at_train]).any(axis=1)) for shares in maps]
    made, axes = look.small_multiples([curve.label for curve in curves])
    for ax, shares, bins in zip(axes, maps, trained, strict=True):
        image = ax.imshow(
            shares, cmap="cividis", vmin=0, vmax=1, origin="lower", aspect="auto", interpolation="nearest"
        )
        level = bins[-1] if len(bins) else math.log2(panel.train_len)
        ax.axhline(0.5 + level, color="#B00020", linewidth=1.0, dashes=(4, 3))
        ax.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(first - 0.5, last + 0.5))
        ax.set_xticks(range(len(lengths)), [look.length_name(length) for length in lengths], rotation=45)
        ax.set_yticks(drawn := range(first, last + 1), [_bin_name(n) for n in drawn])
        ax.grid(False)
    _name_axes(made, "distance (tokens)")
    _bar(made, image)
    title = "Right tokens of answers by distance to their source"
    what = _line_meaning(panel.train_len, [len(bins) > 0 for bins in trained])
    # A column without a measurement looks as one without items: the notes name it.
    strokes.write_words(made, title, [panel], points.answer_curves(panel), [f"Above the dashed line: {what}"])
    return made


def _line_meaning(train_len: int, measured: Sequence[bool]) -> str:
    """Return the meaning of distances above the dashed lines. measured: whether each map has items of L tokens."""
    if not any(measured):
        return f"distances of L = {train_len} tokens or more"
    others = "" if all(measured) else f", or of {train_len} tokens or more in maps without such items"
    return f"distances that no item of L = {train_len} tokens has{others}"


def triangle(panels: Sequence[Panel]) -> Figure:
    """Draw perplexity against training length and evaluation length, a map for each encoding.

    Seeds are averaged. Colours end at the perplexity without context, if the rows have it. The colour bar then says so.
    """
    drawn = {key: curve for key, curve in points.triangle_curves(panels).items() if not curve.window_of}
    trained, names = [panel.train_len for panel in panels], sorted({name for name, _ in drawn})
    lengths = [round(point.x) for point in next(iter(drawn.values())).points]
    empty = tuple(Point(length, ()) for length in lengths)
    known = [point.mean for curve in drawn.values() for point in curve.points if point.values]
    low, high = min(known, default=1.0), max(known, default=1.0)
    level = baselines.no_context(panels)
    top = max(1.01 * low, min(high, level or 10 * low))
    made, axes = look.small_multiples(names, _CELL[0] * len(lengths), _CELL[1] * len(trained))
    for ax, name in zip(axes, names, strict=True):
        own = [drawn[name, length].points if (name, length) in drawn else empty for length in trained]
        values = [[point.mean for point in cells] for cells in own]
        image = ax.imshow(values, cmap="cividis_r", norm=LogNorm(low, top), aspect="auto", interpolation="nearest")
        for at in itertools.product(range(len(trained)), range(len(lengths))):
            _write_cell(ax, at, own[at[0]][at[1]], image)
            if trained[at[0]] == lengths[at[1]]:
                ax.add_patch(Rectangle((at[1] - 0.46, at[0] - 0.44), 0.92, 0.88, fill=False, color="#111111"))
        ax.set_xticks(range(len(lengths)), [look.length_name(length) for length in lengths])
        ax.set_yticks(range(len(trained)), [look.length_name(length) for length in trained])
        ax.grid(False)
    _name_axes(made, "training length (tokens)")
    ticks = look.log_ticks(low, top)
    bar = _bar(made, image, "max" if high > top else "neither")
    bar.set_ticks(ticks, labels=[f"{tick:,.10g}" for tick in ticks], minor=False)
    title = f"{captions.perplexity_name(panels[0].protocol).capitalize()} by training length and evaluation length"
    fact = "Boxed: windows of the training length. A column compares models on windows of one length"
    # A cell without a value says why. A mean of the seeds that have one does not say which others failed.
    means = [
        dataclasses.replace(one, label=f"{name}, L = {length}", points=tuple(p for p in one.points if p.values))
        for (name, length), one in drawn.items()
    ]
    strokes.write_words(made, title, panels, means, [fact], more=baselines.no_context_note(panels))
    return made


def _write_cell(ax: Axes, at: tuple[int, int], point: Point, image: AxesImage) -> None:
    """Write the value into the cell of a row and a column, or why it has none."""
    row, column = at
    style: dict[str, Any] = {"ha": "center", "va": "center"}
    if point.values:
        ((red, green, blue, _),) = image.to_rgba(np.array([point.mean]))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        text = f"{point.mean:.2f}" if point.mean < 10 else f"{point.mean:.1f}" if point.mean < 100 else ""
        ax.text(column, row, text or f"{point.mean:.3g}", size=8, color="white" if is_dark else "#111111", **style)
    else:
        why = " and ".join(sorted({FAILED[kind] for kind in point.failures})) or "not measured"
        ax.text(column, row, textwrap.fill(why, 9), size=6, color="#777777", linespacing=1.0, **style)


def _name_axes(made: Figure, left: str) -> None:
    width, height = made.get_size_inches()
    made.supxlabel("evaluation length (tokens)", size=10, y=0.05 / height, va="bottom")
    made.supylabel(left, size=10, x=0.2 / width)


def _bar(made: Figure, image: AxesImage, extend: str = "neither") -> Colorbar:
    """Draw the colour bar of a figure of small maps. extend: "max" if values are above its end."""
    width, height = made.get_size_inches()
    place = made.add_axes((1 - 1.0 / width, 0.6 / height, 0.15 / width, 1 - 1.0 / height))
    bar = made.colorbar(image, cax=place, extend=extend)
    bar.outline.set_visible(False)
    bar.minorticks_off()
    return bar


def bin_shares(curve: Curve, lengths: Sequence[int]) -> np.ndarray:
    """Return the share of right tokens [bin of distances, length] over the runs of a curve, NaN for an empty bin."""
    rows = curve.rows[curve.rows.distance_accuracy.notna()]
    bins = max(map(len, rows.distance_targets))
    right, count = np.zeros((2, bins, len(lengths)))
    for length, shares, targets in zip(rows.eval_len, rows.distance_accuracy, rows.distance_targets, strict=True):
        at, known = lengths.index(length), np.array(targets)
        count[: len(known), at] += known
        right[: len(known), at] += known * np.array([share or 0.0 for share in shares])
    return np.divide(right, count, out=np.full_like(right, np.nan), where=count > 0)


def _is_known(curve: Curve) -> bool:
    return bool(curve.rows.distance_accuracy.notna().any())


def _bin_name(number: int) -> str:
    """Return the distances of a bin: 0, 1, 2-3, 4-7 and so on."""
    first, last = (0, 0) if number == 0 else (2 ** (number - 1), 2**number - 1)
    return f"{first}" if first == last else f"{look.length_name(first)}-{look.length_name(last)}"
