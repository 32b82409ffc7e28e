"""One look for every figure: safe text, ticks, headings and legends, and files with stable bytes."""

import contextlib
import hashlib
import io
import math
import pathlib
import re
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from posx.lab.files.atomic import write_bytes

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
_LADDERS: tuple[tuple[float, ...], ...] = (  # the ticks of a decade
    (1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8),
)  # fmt: skip
_BARE = 0.2  # of an axis, the most before its first tick or after its last
_COLUMNS = 4  # of small axes in a figure
MARGIN = 0.07  # of the figure's width, left of the axes


def one_line(text: str, width: int = 160) -> str:
    """Return a text as one printable line of at most `width` characters. Different texts give different lines.

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


def wrap(text: str, width: int = 38) -> str:
    """Return `text` as `one_line`, over several lines, broken at the ends of its parts or within a long part."""
    broken = [""]
    pieces = re.split(r"(?<=[,+(])(?=[ \w])", one_line(text))
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


def small_multiples(titles: Sequence[str], width: float = 2.4, height: float = 1.9) -> tuple[Figure, list[Axes]]:
    """Return a figure with axes of `width` x `height` inches under each title. All share both scales.

    There is room for names at the left and below, and for a legend or a colour bar of 1.2 inches at the right.
    """
    titles = [wrap(title, 26) for title in titles]
    columns = min(_COLUMNS, len(titles))
    down = math.ceil(len(titles) / columns)
    gap = 0.5 + 0.2 * max(title.count("\n") for title in titles)  # over axes, for the lines of a title
    across = (1 + 0.1 * (columns - 1) / columns) * width * columns
    made = figure(2.2 + across, 0.4 + (height + gap) * down)
    whole_width, whole_height = made.get_size_inches()
    grid = {"left": 1.0 / whole_width, "right": 1 - 1.2 / whole_width, "bottom": 0.6 / whole_height}
    grid |= {"top": 1 - (gap - 0.2) / whole_height, "hspace": gap / height, "wspace": 0.1}
    axes = list(made.subplots(down, columns, sharex=True, sharey=True, squeeze=False, gridspec_kw=grid).ravel())
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title)
    for number, spare in enumerate(axes[len(titles) :], len(titles)):
        spare.set_visible(False)
        axes[number - columns].tick_params(labelbottom=True)
    return made, axes[: len(titles)]


def save_figure(made: Figure, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
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


def draw_notes(made: Figure, lines: Sequence[str]) -> None:
    """Draw small grey lines under the axes, broken at the figure's width."""
    line, width = 0.19 / made.get_figheight(), int(13 * made.get_figwidth() * (1 - 2 * MARGIN))
    broken = [part for text in lines for part in textwrap.wrap(text, width, subsequent_indent="   ") or [text]]
    for level, text in enumerate(broken):
        made.text(MARGIN, 0.005 - line * level, text, size=8.5, color="#555555", va="top")


def legend(made: Figure, entries: Sequence[tuple[Line2D, str]], x: float, y: float) -> None:
    """Draw a legend with its top left corner at (x, y) of the figure. It shows every label literally."""
    if not entries:
        return
    rows = sum(1 + label.count("\n") for _, label in entries)
    columns = max(1, math.ceil(rows * 0.215 / made.get_figheight()))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (x, y), "borderaxespad": 0.0, "ncols": columns}
    handles = [handle for handle, _ in entries]
    box = made.legend(handles, ["-"] * len(handles), handlelength=3.2, labelspacing=0.55, **place)
    for text, (_, label) in zip(box.get_texts(), entries, strict=True):  # a label that starts with _ is left out
        text.set_text(label)


def plain_number(number: float) -> str:
    """Return a length, or a multiple of one, without an exponent: 1048576, 1.33333."""
    return f"{number:.0f}" if number == round(number) else f"{number:.6g}"


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
    ticks = log_ticks(low, high)
    _ticks(ax.yaxis, {tick: f"{tick:,.10g}" for tick in ticks})
    return high


def log_ticks(low: float, high: float) -> list[float]:
    """Return 4 to 9 ticks that reach both ends of a log axis, evenly spaced on less than half a decade."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [[step * 10.0**power for power in powers for step in ladder] for ladder in _LADDERS]
    every.append(list(map(float, MaxNLocator(6).tick_values(low, high))))
    choices = [[tick for tick in ticks if low <= tick <= high] for ticks in every]
    while max(map(len, choices)) > 9:
        choices = [ticks[::2] if len(ticks) > 9 else ticks for ticks in choices]
    choices = [ticks for ticks in choices if len(ticks) >= 4] or choices

    def bare(ticks: Sequence[float]) -> float:
        return math.log(max(ticks[0] / low, high / ticks[-1])) / math.log(high / low)

    return next((ticks for ticks in choices if bare(ticks) <= _BARE), min(choices, key=bare))


def train_line(ax: Axes, at: float) -> None:
    """Draw a vertical line at the training length, named at its top inside the axes."""
    ax.axvline(at, color="#888888", linewidth=1.0, dashes=(4, 3), zorder=1)
    place: dict[str, Any] = {"xycoords": ax.get_xaxis_transform(), "xytext": (-3, -2), "textcoords": "offset points"}
    text: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "top", "size": 9, "color": "#555555", "zorder": 4}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
    ax.annotate(f"L = {plain_number(at)}", (at, 1.0), bbox=box, **place, **text)


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Return the heights of labels, in the same order, moved apart until no two are closer than `gap`."""

    def middle(group: Sequence[int]) -> float:
        return sum(values[index] for index in group) / len(group)

    groups: list[list[int]] = []  # neighbours that touch, each laid out around its members' mean
    for index in sorted(range(len(values)), key=lambda index: values[index]):
        group = [index]
        while groups and middle(group) - middle(groups[-1]) < gap * (len(group) + len(groups[-1])) / 2:
            group = groups.pop() + group
        groups.append(group)
    placed = list(values)
    for group in groups:
        for place, index in enumerate(group):
            placed[index] = middle(group) + gap * (place - (len(group) - 1) / 2)
    return placed
