"""Published ratios R_k behind the curves of a figure: small grey marks on thin lines, named at their ends."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from posx.lab.plots import look
from posx.lab.plots.groups import Curve

#: The line under a figure with published ratios.
NOTE = "Grey: published ratios, with the mark of their encoding, of other models, texts and tokenizers"
_GREY = "#8A8A8A"
_NAME = 0.028  # of the axes' height, a line of text
_ROOM = 0.14  # of the axes' width


class Published(NamedTuple):
    """The ratios R_k that a source states for an encoding.

    Attributes:
      encoding: as the label of a curve names it.
      name: of the source, for example "Press 2022".
      ratios: {k: R_k} for k > 1; R_1 = 1 is drawn too.
    """

    encoding: str
    name: str
    ratios: Mapping[float, float]


def select_lines(published: Iterable[Published], curves: Sequence[Curve]) -> list[tuple[Curve, Published, list[float]]]:
    """Return (curve, published, its k) of the encodings that have a curve, up to the last k of all curves."""
    own = {curve.label: curve for curve in curves}
    last = max((point.x for curve in curves for point in curve.points), default=1.0)
    kept = [
        (own[one.encoding], one, sorted(k for k in one.ratios if k <= last)) for one in published if one.encoding in own
    ]
    return [(curve, one, factors) for curve, one, factors in kept if factors]


def draw_published(ax: Axes, lines: Sequence[tuple[Curve, Published, list[float]]]) -> None:
    """Draw what `select_lines` returns into axes with logarithmic scales and their limits.

    A line has the marker and the dashes of its encoding's curve. Names at about the same k are moved apart.
    """
    low, high = map(math.log, ax.get_ylim())
    ends: dict[int, list[tuple[float, float, str, str]]] = {}
    for curve, one, factors in lines:
        values = [one.ratios[k] for k in factors]
        style: dict[str, Any] = {"color": _GREY, "linewidth": 0.7, "markersize": 3.2, "zorder": 1.5}
        ax.plot([1, *factors], [1, *values], marker=curve.look.marker, linestyle=curve.look.dashes, **style)
        end = (math.log(values[-1]) - low) / (high - low), factors[-1], one.name, curve.look.color
        ends.setdefault(round(math.log2(factors[-1])), []).append(end)
    for near in map(sorted, ends.values()):
        heights = look.spread([height for height, *_ in near], _NAME)
        for (_, k, name, color), height in zip(near, heights, strict=True):
            place: dict[str, Any] = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
            text: dict[str, Any] = {"size": 6.5, "color": color, "va": "center", "zorder": 4}
            text["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 0.3}
            ax.annotate(name, (k, height), xytext=(5, 0), **place, **text)
    if ends:  # room for the names at the last k
        left, right = ax.get_xlim()
        ax.set_xlim(left, right * (right / left) ** _ROOM)
