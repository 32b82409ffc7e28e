"""The palette of figures and reports: a colour, a marker and dashes for each curve.

A registry name keeps its colour everywhere, and no two curves are drawn alike.
"""

import collections
import colorsys
import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any


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
_SPARE_COLORS = ("#44AA99", "#AA4499", "#117733", "#CC6677", "#7A5C1E", "#5E81B5", "#A50026")
_MORE_COLORS = ("#6A3FCF", "#8FB339", "#00CED1", "#FF6F91", "#64748B", "#B8860B", "#1E3A8A", "#D946EF")
_MOST_COLORS = 12  # that are told apart in one figure
_FAR = 0.2  # in Oklab: lines this far apart are not taken for each other
_OF_LIGHTNESS = 0.6  # hue tells thin lines apart better
#: From linear red, green and blue to the cube of the cones' answers, and from their roots to lightness and opponents.
_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_OPPONENTS = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def look(encoding: str) -> Look:
    """Return the look of a registry name, or for another text one fixed by its hash."""
    if encoding in LOOKS:
        return LOOKS[encoding]
    first, second, third, *_ = hashlib.sha256(encoding.encode("utf-8", "surrogatepass")).digest()
    return Look(_SPARE_COLORS[first % len(_SPARE_COLORS)], _MARKERS[second % 8], _DASHES[1 + third % 4])


def family(text: str) -> str:
    """Return an encoding's text without its fields. The family, of a chain or hybrid too, has one colour."""
    text = text[:500]
    while (bare := re.sub(r"\([^()]*\)", "", text)) != text:
        text = bare
    return text


def looks(curves: Collection[tuple[str, Any]]) -> dict[tuple[str, Any], Look]:
    """Return a look for each (text of the encoding, its other settings), all of which may be in one figure.

    The colour stands for the encoding, or for its name if there are more than _MOST_COLORS encodings. If the other
    settings differ, the dashes stand for them, solid for the most frequent. So do the colours if there is one encoding.
    If no other settings differ, variants of a name differ in their dashes. Plain names come first, as `look` has them.
    No two looks share colour and dashes, or marker and dashes, so that they differ without colours too.
    """
    order = sorted(set(curves), key=lambda curve: (curve[0] not in LOOKS, curve))
    counts = collections.Counter(other for _, other in order)
    values = sorted(counts, key=lambda other: (-counts[other], other))
    variants: dict[str, list[str]] = {}
    for text, _ in order:
        own = variants.setdefault(family(text), [family(text)])
        own += [] if text in own else [text]
    subjects = _subjects(order, values)
    colors, shaded = _colors(subjects.values()), len(set(subjects.values())) < len({text for text, _ in order})
    chosen: dict[tuple[str, Any], Look] = {}
    # A plain name has its own dashes only if all plain names are given theirs before any variant takes them.
    ranks = [(variants[family(text)].index(text), (text, other)) for text, other in order]
    for rank, (text, other) in sorted(ranks, key=lambda pair: pair[0]):
        first = dataclasses.replace(look(family(text)), color=colors[subjects[text, other]])
        if len(values) > 1:
            first = dataclasses.replace(first, dashes=_DASHES[values.index(other) % len(_DASHES)])
        rank = rank if shaded or len(values) == 1 else 0
        chosen[text, other] = _free(first, rank, set(chosen.values()), keep_dashes=len(values) > 1)
    return {curve: chosen[curve] for curve in order}


def _subjects(curves: Sequence[tuple[str, Any]], values: Sequence[Any]) -> dict[tuple[str, Any], str]:
    """Return the text that the colour of each curve stands for. values: the other settings, the most frequent first."""
    texts = {text for text, _ in curves}
    if len(texts) == 1 and len(values) <= _MOST_COLORS:
        return {(text, other): text if other == values[0] else f"{text} {other}" for text, other in curves}
    return {(text, other): text if len(texts) <= _MOST_COLORS else family(text) for text, other in curves}


def _free(first: Look, rank: int, taken: Collection[Look], keep_dashes: bool) -> Look:
    """Return `first` in the `rank`-th dashes, or shade, and marker; the next ones if another look has these."""
    shades = [_shade(first.color, level) for level in range(_SHADES)]
    dashes = [first.dashes, *(one for one in _DASHES if one != first.dashes)]
    markers = [first.marker, *(one for one in _MARKERS if one != first.marker)]
    lines = [(color, line) for color in shades for line in dashes]
    if keep_dashes:
        lines = [(color, line) for line in dashes for color in shades]
    for color, line in _rotate_values(lines, rank):
        seen = {one.marker for one in taken if one.dashes == line}
        marker = next((one for one in _rotate_values(markers, rank) if one not in seen), None)
        if marker and all((one.color, one.dashes) != (color, line) for one in taken):
            return Look(color, marker, line)
    return first


def _rotate_values(values: Sequence[Any], start: int) -> Sequence[Any]:
    """Return the values from number `start` on, round to the one before it."""
    start %= len(values)
    return [*values[start:], *values[:start]]


def _colors(families: Iterable[str]) -> dict[str, str]:
    """Return a colour per name: a registry name's own, else that of the hash if it is far from all others in use.

    If it is not, the spare colour is taken that is furthest from all others in use.
    """
    names = sorted(set(families))
    colors = {name: LOOKS[name].color for name in names if name in LOOKS}
    for name in [name for name in names if name not in colors]:
        taken = list(map(_oklab, colors.values()))

        def gap(color: str, taken: Sequence[Sequence[float]] = taken) -> float:
            return min((math.dist(_oklab(color), one) for one in taken), default=math.inf)

        own = look(name).color
        colors[name] = own if gap(own) >= _FAR else max((own, *_SPARE_COLORS, *_MORE_COLORS), key=gap)
    return colors


def _parts(color: str) -> tuple[float, ...]:
    """Return red, green and blue of "#RRGGBB", each 0 to 1."""
    return tuple(int(color[n : n + 2], 16) / 255 for n in (1, 3, 5))


def _hex(parts: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * part):02X}" for part in parts)


@functools.cache
def _oklab(color: str) -> tuple[float, ...]:
    """Return a colour in Oklab (bottosson.github.io/posts/oklab), where distances are as they look on thin lines."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in _parts(color)]
    cones = [math.cbrt(sum(map(math.prod, zip(row, linear, strict=True)))) for row in _CONES]
    light, *opponents = (sum(map(math.prod, zip(row, cones, strict=True))) for row in _OPPONENTS)
    return (_OF_LIGHTNESS * light, *opponents)


def _shade(color: str, level: int) -> str:
    """Return a darker or lighter shade of the same hue, for variants beyond the number of dashes."""
    if level == 0:
        return color
    hue, light, saturation = colorsys.rgb_to_hls(*_parts(color))
    light = min(max(light + (0.18, -0.18, 0.3, -0.3)[level - 1], 0.08), 0.82)
    return _hex(colorsys.hls_to_rgb(hue, light, saturation))
