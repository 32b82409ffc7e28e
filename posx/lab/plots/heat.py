"""Heat maps of right answers: evaluation length against the distance to the token that an answer is read from."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from posx.lab.plots import captions, look
from posx.lab.plots.groups import Curve, Panel

_COLUMNS = 4  # of the figure across encodings


def has_distances(panel: Panel) -> bool:
    """Tell whether a row of the panel has shares of right answers by distance."""
    return any(_is_known(curve) for curve in panel.curves)


def distance_map(panel: Panel) -> Figure:
    """Draw the share of right tokens against evaluation length and distance, a map for each curve.

    Seeds are counted together. Distances above the dashed line are longer than the windows of training.
    """
    curves = sorted((curve for curve in panel.curves if _is_known(curve)), key=lambda curve: curve.label)
    lengths = sorted({*panel.rows.eval_len})
    maps = [bin_shares(curve, lengths) for curve in curves]
    known = [np.flatnonzero(np.isfinite(shares).any(axis=1)) for shares in maps]
    first, last = min(bins[0] for bins in known), max(bins[-1] for bins in known)
    columns = min(_COLUMNS, len(curves))
    down, titles = math.ceil(len(curves) / columns), [look.wrap(curve.label, 26) for curve in curves]
    above = 0.2 * max(title.count("\n") for title in titles)  # of the titles, in inches, beyond one line
    made = look.figure(2.4 + 2.4 * columns, 0.8 + (2.4 + above) * down)
    width, height = made.get_size_inches()
    grid = {"left": 1.0 / width, "right": 1 - 1.2 / width, "top": 1 - (0.3 + above) / height, "bottom": 0.6 / height}
    spaces = {"hspace": (0.5 + above) / 1.9, "wspace": 0.1}
    axes = made.subplots(down, columns, sharex=True, sharey=True, squeeze=False, gridspec_kw=grid | spaces).ravel()
    for ax, shares, title in zip(axes, maps, titles, strict=False):
        image = ax.imshow(
            shares, cmap="cividis", vmin=0, vmax=1, origin="lower", aspect="auto", interpolation="nearest"
        )
        ax.axhline(0.5 + math.log2(panel.train_len), color="#B00020", linewidth=1.0, dashes=(4, 3))
        ax.set(title=title, xlim=(-0.5, len(lengths) - 0.5), ylim=(first - 0.5, last + 0.5))
        ax.set_xticks(range(len(lengths)), [look.length_name(length) for length in lengths], rotation=45)
        ax.set_yticks(bins := range(first, last + 1), [_bin_name(n) for n in bins])
        ax.grid(False)
    for number, spare in enumerate(axes[len(curves) :], len(curves)):
        spare.set_visible(False)
        axes[number - columns].tick_params(labelbottom=True)
    bar = made.colorbar(image, cax=made.add_axes((1 - 1.0 / width, 0.6 / height, 0.15 / width, 1 - 1.0 / height)))
    bar.outline.set_visible(False)
    made.supxlabel("evaluation length (tokens)", size=10, y=0.05 / height, va="bottom")
    made.supylabel("distance (tokens)", size=10, x=0.2 / width)
    lines = [*captions.subtitle([panel]), f"Above the dashed line: distances of more than L = {panel.train_len} tokens"]
    look.headings(made, "Right tokens of answers by distance to their source", lines, captions.mixture(panel.rows))
    look.draw_notes(made, captions.notes([panel], []))
    return made


def bin_shares(curve: Curve, lengths: Sequence[int]) -> np.ndarray:
    """Return the share of right tokens [bin of distances, length] over the runs of a curve, NaN for an empty bin."""
    rows = curve.rows[curve.rows.distance_edges.astype(bool)]
    bins = max(map(len, rows.distance_targets))
    right, count = np.zeros((2, bins, len(lengths)))
    for length, shares, targets in zip(rows.eval_len, rows.distance_accuracy, rows.distance_targets, strict=True):
        at, known = lengths.index(length), np.array(targets)
        count[: len(known), at] += known
        right[: len(known), at] += known * np.array([share or 0.0 for share in shares])
    return np.divide(right, count, out=np.full_like(right, np.nan), where=count > 0)


def _is_known(curve: Curve) -> bool:
    return bool(curve.rows.distance_edges.astype(bool).any())


def _bin_name(number: int) -> str:
    """Return the distances of a bin: 0, 1, 2-3, 4-7 and so on."""
    first, last = (0, 0) if number == 0 else (2 ** (number - 1), 2**number - 1)
    return f"{first}" if first == last else f"{look.length_name(first)}-{look.length_name(last)}"
