"""One look for every figure: colours, markers and names of encodings, safe text, ticks, and files with stable bytes."""

import contextlib
import dataclasses
import hashlib
import io
import math
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator


@dataclasses.dataclass(frozen=True)
class Look:
    """How one encoding is drawn, everywhere."""

    name: str
    color: str
    marker: str
    dashes: Any = "-"  # a matplotlib line style


_DASHED, _DOTTED, _DASHDOT = (0.0, (5.0, 2.0)), (0.0, (1.5, 1.5)), (0.0, (6.0, 1.5, 1.5, 1.5))
# Okabe-Ito for the five of the headline figure, solid; Okabe-Ito and Tol's muted set for the others, broken.
LOOKS = {
    "nope": Look("NoPE", "#222222", "D"),
    "sinusoidal": Look("Sinusoidal", "#D55E00", "o"),
    "learned": Look("Learned", "#E69F00", "X", _DASHED),
    "shaw": Look("Shaw", "#56B4E9", "<", _DASHED),
    "transformer_xl": Look("Transformer-XL", "#882255", "h", _DASHED),
    "t5": Look("T5 bias", "#009E73", "^"),
    "tupe": Look("TUPE", "#8A8A1F", "P", _DASHDOT),
    "deberta": Look("DeBERTa", "#332288", ">", _DASHDOT),
    "rope": Look("RoPE", "#CC79A7", "s"),
    "alibi": Look("ALiBi", "#0072B2", "v"),
}
_SPARE_COLORS = ("#44AA99", "#AA4499", "#117733", "#CC6677", "#7A5C1E", "#5E81B5", "#A50026")
_SPARE_MARKERS = ("p", "d", "H", "*", "8", "s", "o", "^")
_SPARE_DASHES = (_DASHED, _DOTTED, _DASHDOT, (0.0, (3.0, 1.0, 1.0, 1.0, 1.0, 1.0)))
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "posx",
    "svg.fonttype": "path",
    "savefig.facecolor": "white",
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 10.0,
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


def look(encoding: str, variant: int = 0) -> Look:
    """The look of a registry name, or one fixed by its hash; variants of a name keep its colour, not its dashes."""
    found = LOOKS.get(encoding)
    if found is None:
        digest = hashlib.sha256(encoding.encode("utf-8", "surrogatepass")).digest()
        pick = [digest[0] % len(_SPARE_COLORS), digest[1] % len(_SPARE_MARKERS), digest[2] % len(_SPARE_DASHES)]
        own = re.fullmatch(r"[\w.]+:(\w+)", encoding)  # a user's "module:Class"
        name = own.group(1) if own else encoding
        found = Look(name, _SPARE_COLORS[pick[0]], _SPARE_MARKERS[pick[1]], _SPARE_DASHES[pick[2]])
    if variant:
        dashes, markers = ("-", *_SPARE_DASHES), (found.marker, *_SPARE_MARKERS)
        found = dataclasses.replace(found, dashes=dashes[variant % len(dashes)], marker=markers[variant % len(markers)])
    return found


def shown(text: str, width: int = 34) -> str:
    """Any text as one short printable line: what has no glyph shows as its escape, a long one loses its middle."""
    short = text if len(text) <= 4 * width else text[: 2 * width] + text[-2 * width :]
    glyphs = _glyphs()
    line = (
        "(no name)"
        if not text
        else "".join(c if c.isprintable() and ord(c) in glyphs else ascii(c)[1:-1] for c in short)
    )
    return line if len(line) <= width else line[: width * 2 // 3] + "…" + line[-(width - width * 2 // 3 - 1) :]


def _glyphs() -> Collection[int]:
    return font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()


@contextlib.contextmanager
def style() -> Iterator[None]:
    """posx's settings over matplotlib's own defaults (never the user's), all restored on the way out."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def figure(width: float, height: float) -> Figure:
    """An empty Agg figure, in inches, known to no global state."""
    made = Figure(figsize=(width, height))
    FigureCanvasAgg(made)
    return made


def save(made: Figure, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Writes `folder/name.png` and `.svg` whole or not at all; equal input gives equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in ("png", "svg"):
        buffer, path = io.BytesIO(), folder / f"{name}.{kind}"
        metadata = {"Date": None} if kind == "svg" else {}
        made.savefig(buffer, format=kind, dpi=150, metadata=metadata, bbox_inches="tight", pad_inches=0.15)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(buffer.getvalue())
        partial.replace(path)
        paths.append(path)
    return paths


def headings(made: Figure, title: str, subtitle: Sequence[str], warning: str = "", lift: float = 0.0) -> None:
    """Title, grey lines under it, and a red warning line, stacked upwards from `lift` (of the height) over the axes."""
    line, lift = 0.21 / made.get_figheight(), lift + 0.06 / made.get_figheight()
    stack = [(text, 9.5, "#555555", "normal") for text in reversed(subtitle)] + [(title, 13.0, "#111111", "bold")]
    if warning:
        stack.insert(0, (warning, 10.0, "#B00020", "bold"))
    for level, (text, size, color, weight) in enumerate(stack):
        made.text(
            MARGIN,
            1.0 + lift + line * level + (0.04 / made.get_figheight() if size > 12 else 0),
            text,
            size=size,
            color=color,
            weight=weight,
            va="bottom",
        )


def notes(made: Figure, lines: Sequence[str]) -> None:
    """Small grey lines under the axes."""
    line = 0.19 / made.get_figheight()
    for level, text in enumerate(lines):
        made.text(MARGIN, 0.005 - line * level, text, size=8.5, color="#555555", va="top")


def legend(made: Figure, handles: Sequence[Line2D], labels: Sequence[str], x: float, y: float) -> None:
    """A legend outside the axes, its top left corner at (x, y) of the figure, that shows every label literally."""
    if not handles:
        return
    box = made.legend(
        list(handles),
        ["-"] * len(handles),
        loc="upper left",
        bbox_to_anchor=(x, y),
        borderaxespad=0.0,
        handlelength=3.2,
        labelspacing=0.55,
    )
    for text, label in zip(box.get_texts(), labels, strict=True):  # a label that starts with _ is left out
        text.set_text(label)


def length_name(length: float) -> str:
    """64 -> "64", 16384 -> "16k" (k = 1024 tokens), 1.25 -> "1.25"."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if length >= 10 * unit and length % unit == 0:
            return f"{int(length) // unit}{name}"
    return f"{length:.4g}" if length < 1000 else f"{length:.0f}"


def length_axis(ax: Axes, lengths: Sequence[float], anchor: float, suffix: str = "") -> None:
    """A log2 abscissa with labels at real lengths: `anchor` first, then its doublings, then whatever still fits."""
    low, high = math.log2(min(lengths)), math.log2(max(lengths))
    pad = max(0.3, 0.04 * (high - low))
    ax.set_xscale("log", base=2)
    ax.set_xlim(2 ** (low - pad), 2 ** (high + pad))
    apart, kept = max(high - low, 1.0) / 8.5, list[float]()
    for value in sorted(
        lengths, key=lambda value: ((math.log2(value / anchor)) % 1 != 0, abs(math.log2(value / anchor)))
    ):
        if all(abs(math.log2(value / other)) >= apart for other in kept):
            kept.append(value)
    kept.sort()
    ax.xaxis.set_major_locator(FixedLocator(kept))
    ax.xaxis.set_major_formatter(FixedFormatter([length_name(value) + suffix for value in kept]))
    ax.xaxis.set_minor_locator(NullLocator())


def log_axis(ax: Axes, values: Sequence[float]) -> None:
    """A log ordinate over `values` with plain labels; runaway values (10^4 times the least) leave through the top."""
    low, high = min(values), min(max(values), 1e4 * min(values))
    pad = max((high / low) ** 0.05, 1.02)
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
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_major_formatter(FixedFormatter([f"{tick:,.0f}" if tick >= 1000 else f"{tick:.3g}" for tick in ticks]))
    ax.yaxis.set_minor_locator(NullLocator())


def train_line(ax: Axes, at: float) -> None:
    """A vertical line at the training length, named at its top inside the axes."""
    ax.axvline(at, color="#888888", linewidth=1.0, dashes=(4, 3), zorder=1)
    ax.annotate(
        f"L = {at:g}",
        (at, 1.0),
        xycoords=ax.get_xaxis_transform(),
        xytext=(-3, -2),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="top",
        size=9,
        color="#555555",
        zorder=4,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0},
    )


def spread(values: Sequence[float], gap: float) -> list[float]:
    """The same heights in the same order, moved apart until no two are closer than `gap` (for labels at line ends)."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    groups: list[list[int]] = []  # neighbours that touch, each laid out around its members' mean
    for index in order:
        groups.append([index])
        while (
            len(groups) > 1
            and _middle(groups[-1], values) - _middle(groups[-2], values)
            < gap * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    placed = list(values)
    for group in groups:
        for place, index in enumerate(group):
            placed[index] = _middle(group, values) + gap * (place - (len(group) - 1) / 2)
    return placed


def _middle(group: Sequence[int], values: Sequence[float]) -> float:
    return sum(values[index] for index in group) / len(group)
