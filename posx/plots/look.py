"""One look for every figure: colours, safe text, ticks, headings and legends, and files with stable bytes.

A registry name keeps its colour everywhere, and no two curves are drawn alike.
"""

import collections
import colorsys
import contextlib
import dataclasses
import hashlib
import io
import math
import pathlib
import re
import statistics
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.colors
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from posx.files.atomic import write_bytes

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "posx",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "lines.linewidth": 1.8,
    "lines.markersize": 5.2,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "text.parse_math": False,
}
MARGIN = 0.07  # of the figure's width, left of the axes


def shown(text: str, width: int = 160) -> str:
    """Return a text as one printable line of at most `width` characters, another line for another text.

    Characters without a glyph show as their escapes. The middle of a long text is replaced by a digest of all of it.
    """
    short = text if len(text) <= 4 * width else text[: 2 * width] + text[-2 * width :]
    glyphs = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    line = "".join(c if c.isprintable() and ord(c) in glyphs else ascii(c)[1:-1] for c in short) or "(no name)"
    if len(line) <= width:
        return line
    middle = f"…{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:6]}…"
    first = (width - len(middle)) * 2 // 3
    return line[:first] + middle + line[first + len(middle) - width :]


def wrapped(text: str, width: int = 38) -> str:
    """Return `text` as `shown`, over some lines, broken where one of its parts ends, or within one too long."""
    broken = [""]
    pieces = re.split(r"(?<=[,+(])(?=[ \w])", shown(text))
    for part in [part for piece in pieces for part in textwrap.wrap(piece, width, drop_whitespace=False) or [piece]]:
        fits = len(broken[-1]) + len(part) <= width
        broken = [*broken[:-1], broken[-1] + part] if fits or not broken[-1] else [*broken, "  " + part.strip()]
    return "\n".join(broken)


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Set posx's style over matplotlib's own defaults, never the user's, and restore all settings at the end."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def figure(width: float, height: float) -> Figure:
    """Return an empty Agg figure of this size in inches, unknown to pyplot."""
    made = Figure(figsize=(width, height))
    FigureCanvasAgg(made)
    return made


def save(made: Figure, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Write `folder/name.png` and `.svg` whole or not at all. Equal input gives equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path, metadata in zip(paths, ({}, {"Date": None}), strict=True):
        buffer = io.BytesIO()
        made.savefig(buffer, format=path.suffix[1:], dpi=150, metadata=metadata, bbox_inches="tight", pad_inches=0.15)
        write_bytes(path, buffer.getvalue())
    return paths


def headings(made: Figure, title: str, subtitle: Sequence[str], warning: str = "", lift: float = 0.0) -> None:
    """Draw a title over grey lines and a red warning, stacked upwards from `lift` (of the height) over the axes."""
    line, lift = 0.21 / made.get_figheight(), lift + 0.06 / made.get_figheight()
    stack = [(text, 9.5, "#555555", "normal") for text in reversed(subtitle)] + [(title, 13.0, "#111111", "bold")]
    if warning:
        stack.insert(0, (warning, 10.0, "#B00020", "bold"))
    for level, (text, size, color, weight) in enumerate(stack):
        y = 1.0 + lift + line * level + (0.04 / made.get_figheight() if size > 12 else 0)
        made.text(MARGIN, y, text, size=size, color=color, weight=weight, va="bottom")


def notes(made: Figure, lines: Sequence[str]) -> None:
    """Draw small grey lines under the axes, broken at the figure's width."""
    line, width = 0.19 / made.get_figheight(), int(13 * made.get_figwidth() * (1 - 2 * MARGIN))
    broken = [part for text in lines for part in textwrap.wrap(text, width, subsequent_indent="   ") or [text]]
    for level, text in enumerate(broken):
        made.text(MARGIN, 0.005 - line * level, text, size=8.5, color="#555555", va="top")


def legend(made: Figure, handles: Sequence[Line2D], labels: Sequence[str], x: float, y: float) -> None:
    """Draw a legend with its top left corner at (x, y) of the figure. It shows every label literally."""
    if not handles:
        return
    rows = sum(1 + label.count("\n") for label in labels)
    columns = max(1, math.ceil(rows * 0.215 / made.get_figheight()))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (x, y), "borderaxespad": 0.0, "ncols": columns}
    box = made.legend(list(handles), ["-"] * len(handles), handlelength=3.2, labelspacing=0.55, **place)
    for text, label in zip(box.get_texts(), labels, strict=True):  # a label that starts with _ is left out
        text.set_text(label)


def length_name(length: float) -> str:
    """Return a short name: 64 -> "64", 16384 -> "16k" (k = 1024 tokens), 1.25 -> "1.25"."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if length >= 10 * unit and length % unit == 0:
            return f"{int(length) // unit}{name}"
    return f"{length:.4g}" if length < 1000 else f"{length:.0f}"


def length_axis(ax: Axes, lengths: Sequence[float], anchor: float, suffix: str = "") -> None:
    """Make a log2 abscissa with labels at real lengths: `anchor`, then its doublings, then all that still fit."""
    low, high = math.log2(min(lengths)), math.log2(max(lengths))
    pad = max(0.3, 0.04 * (high - low))
    ax.set_xscale("log", base=2)
    ax.set_xlim(2 ** (low - pad), 2 ** (high + pad))
    inch = (high - low + 2 * pad) * matplotlib.rcParams["figure.dpi"] / ax.bbox.width  # in octaves
    names, kept = {value: length_name(value) + suffix for value in lengths}, list[float]()
    octaves = {value: math.log2(value / anchor) for value in lengths}
    for value in sorted(lengths, key=lambda value: (octaves[value] % 1 != 0, abs(octaves[value]))):
        # Half of both labels, whose characters are about 0.09 inches wide, and a gap.
        apart = {other: inch * (0.045 * len(names[value] + names[other]) + 0.15) for other in kept}
        if all(abs(math.log2(value / other)) >= apart[other] for other in kept):
            kept.append(value)
    _ticks(ax.xaxis, {value: names[value] for value in sorted(kept)})


def _ticks(axis: Axis, names: Mapping[float, str]) -> None:
    axis.set_major_locator(FixedLocator(list(names)))
    axis.set_major_formatter(FixedFormatter(list(names.values())))
    axis.set_minor_locator(NullLocator())


def log_axis(ax: Axes, values: Sequence[float]) -> float:
    """Make a log ordinate with plain labels. Return its top: values above 10^4 times the median may leave it."""
    if not values:
        return math.inf
    low, high = min(values), min(max(values), 1e4 * statistics.median(values))
    pad = min(max((high / low) ** 0.05, 1.02), 10.0)
    low, high = low / pad, high * pad
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    ticks: list[float] = []
    for ladder in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in ladder if low <= step * 10.0**power <= high]
        if len(ticks) >= 4:
            break
    if len(ticks) < 4:  # less than half a decade: even steps read better
        ticks = [float(tick) for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high]
    while len(ticks) > 9:
        ticks = ticks[::2]
    _ticks(ax.yaxis, {tick: f"{tick:,.10g}" for tick in ticks})
    return high


def train_line(ax: Axes, at: float) -> None:
    """Draw a vertical line at the training length, named at its top inside the axes."""
    ax.axvline(at, color="#888888", linewidth=1.0, dashes=(4, 3), zorder=1)
    place: dict[str, Any] = {"xycoords": ax.get_xaxis_transform(), "xytext": (-3, -2), "textcoords": "offset points"}
    text: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "top", "size": 9, "color": "#555555", "zorder": 4}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
    ax.annotate(f"L = {at:g}", (at, 1.0), bbox=box, **place, **text)


@dataclasses.dataclass(frozen=True)
class Look:
    """How one curve is drawn."""

    color: str
    marker: str
    dashes: Any = "-"  # a matplotlib line style


_DASHED, _DOTTED, _DASHDOT = (0.0, (5.0, 2.0)), (0.0, (1.5, 1.5)), (0.0, (6.0, 1.5, 1.5, 1.5))
_DASHES = (
    "-", _DASHED, _DOTTED, _DASHDOT, (0.0, (3.0, 1.0, 1.0, 1.0, 1.0, 1.0)), (0.0, (9.0, 2.5)), (0.0, (3.0, 3.0)),
    (0.0, (9.0, 1.5, 3.0, 1.5)),
)  # fmt: skip
_MARKERS = ("d", "p", "X", "^", "v", "P", "o", "s", "<", ">", "D", "H", "*", "h", "8")
# Okabe-Ito for the five of the headline figure, solid; Okabe-Ito and Tol's muted set for the others, broken.
LOOKS = {
    "nope": Look("#222222", "D"),
    "sinusoidal": Look("#D55E00", "o"),
    "learned": Look("#E69F00", "X", _DASHED),
    "shaw": Look("#56B4E9", "<", _DASHED),
    "transformer_xl": Look("#882255", "h", _DASHED),
    "t5": Look("#009E73", "^"),
    "tupe": Look("#8A8A1F", "P", _DASHDOT),
    "deberta": Look("#332288", ">", _DASHDOT),
    "rope": Look("#CC79A7", "s"),
    "alibi": Look("#0072B2", "v"),
}
_SHADES = 5  # of one colour
#: The distance of two colours that nobody takes for each other, and the matrices of Oklab.
_APART = 0.16
_CONES = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
_OKLAB = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
_SPARE_COLORS = ("#44AA99", "#AA4499", "#117733", "#CC6677", "#7A5C1E", "#5E81B5", "#A50026")


def look(encoding: str) -> Look:
    """Return the look of a registry name, or for another text one fixed by its hash."""
    if encoding in LOOKS:
        return LOOKS[encoding]
    first, second, third, *_ = hashlib.sha256(encoding.encode("utf-8", "surrogatepass")).digest()
    return Look(_SPARE_COLORS[first % len(_SPARE_COLORS)], _MARKERS[second % 8], _DASHES[1 + third % 4])


def family(text: str) -> str:
    """Return an encoding's text without its fields, for which a colour stands. Chains and hybrids are families too."""
    text = text[:500]
    while (bare := re.sub(r"\([^()]*\)", "", text)) != text:
        text = bare
    return text


def looks(curves: Collection[tuple[str, Any]]) -> dict[tuple[str, Any], Look]:
    """Return a look for each (text of the encoding, its other settings), all of which may be in one figure.

    The colour stands for the name of the encoding. If the other settings differ, the dashes stand for them, solid for
    the most frequent; else variants of a name differ in their dashes. Plain names come first, as `look` has them. No
    two looks share colour and dashes, or marker and dashes, so that they differ without colours too.
    """
    order = sorted(set(curves), key=lambda curve: (curve[0] not in LOOKS, curve))
    counts = collections.Counter(other for _, other in order)
    values = sorted(counts, key=lambda other: (-counts[other], other))
    variants: dict[str, list[str]] = {}
    for text, _ in order:
        own = variants.setdefault(family(text), [family(text)])
        own += [] if text in own else [text]
    colors = _colors(variants)
    found: dict[tuple[str, Any], Look] = {}
    # A plain name has its own dashes only if all plain names are given theirs before any variant takes them.
    ranks = [(variants[family(text)].index(text), (text, other)) for text, other in order]
    for rank, (text, other) in sorted(ranks, key=lambda pair: pair[0]):
        first = dataclasses.replace(look(family(text)), color=colors[family(text)])
        if len(values) > 1:
            first = dataclasses.replace(first, dashes=_DASHES[values.index(other) % len(_DASHES)])
        found[text, other] = _free(first, rank, set(found.values()), keep_dashes=len(values) > 1)
    return {curve: found[curve] for curve in order}


def _free(first: Look, rank: int, taken: Collection[Look], keep_dashes: bool) -> Look:
    """Return `first` in the `rank`-th dashes, or shade, and marker; the next ones if another look has these."""
    shades = [_shade(first.color, level) for level in range(_SHADES)]
    dashes = [first.dashes, *(one for one in _DASHES if one != first.dashes)]
    markers = [first.marker, *(one for one in _MARKERS if one != first.marker)]
    lines = [(color, line) for color in shades for line in dashes]
    if keep_dashes:
        lines = [(color, line) for line in dashes for color in shades]
    for color, line in _turned(lines, rank):
        seen = {one.marker for one in taken if one.dashes == line}
        marker = next((one for one in _turned(markers, rank) if one not in seen), None)
        if marker and all((one.color, one.dashes) != (color, line) for one in taken):
            return Look(color, marker, line)
    return first


def _turned(values: Sequence[Any], start: int) -> Sequence[Any]:
    """Return the values from number `start` on, round to the one before it."""
    start %= len(values)
    return [*values[start:], *values[:start]]


def _colors(families: Collection[str]) -> dict[str, str]:
    """Return a colour per name: a registry name's own, else that of the hash if it is free and apart from the others.

    If it is not, the spare colour that is farthest from those in use.
    """
    found = {name: look(name).color for name in sorted(families) if name in LOOKS}
    for name in sorted(set(families) - found.keys()):
        spare = _turned(_SPARE_COLORS, _SPARE_COLORS.index(look(name).color))
        gaps = {color: min((_apart(color, one) for one in found.values()), default=1.0) for color in spare}
        found[name] = spare[0] if gaps[spare[0]] >= _APART else max(spare, key=gaps.__getitem__)
    return found


def _apart(color: str, other: str) -> float:
    """Return how different two colours look: their distance in Oklab.

    Source: Ottosson 2020, "A perceptual color space for image processing".
    """
    first, second = (np.cbrt(_CONES @ np.array(matplotlib.colors.to_rgb(one)) ** 2.2) for one in (color, other))
    return float(np.linalg.norm(_OKLAB @ (first - second)))


def _shade(color: str, level: int) -> str:
    """Return a darker or lighter shade of the same hue, for variants beyond the number of dashes."""
    if level == 0:
        return color
    hue, light, saturation = colorsys.rgb_to_hls(*(int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)))
    light = min(max(light + (0.18, -0.18, 0.3, -0.3)[level - 1], 0.08), 0.82)
    return "#" + "".join(f"{round(255 * part):02X}" for part in colorsys.hls_to_rgb(hue, light, saturation))
