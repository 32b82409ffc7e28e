"""Colours, markers and dashes: a registry name keeps its colour everywhere, and no two curves are drawn alike."""

import collections
import colorsys
import dataclasses
import hashlib
import re
from collections.abc import Collection
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
    dashes = [first.dashes, *(one for one in _DASHES if one != first.dashes)]
    markers = [first.marker, *(one for one in _MARKERS if one != first.marker)]
    lines, points = ({(getattr(one, kind), one.dashes) for one in taken} for kind in ("color", "marker"))
    for turn in range(rank, rank + _SHADES * len(dashes)):
        level, number = (turn, turn // _SHADES) if keep_dashes else (turn // len(dashes), turn)
        color, line = _shade(first.color, level % _SHADES), dashes[number % len(dashes)]
        free = (markers[(rank + step) % len(markers)] for step in range(len(markers)))
        marker = next((one for one in free if (one, line) not in points), None)
        if marker and (color, line) not in lines:
            return dataclasses.replace(first, color=color, dashes=line, marker=marker)
    return first


def _colors(families: Collection[str]) -> dict[str, str]:
    """Return a colour per name: a registry name's own, else that of the hash or the next spare one that is free."""
    found: dict[str, str] = {}
    for name in sorted(families):
        color = look(name).color
        if name not in LOOKS:
            start = _SPARE_COLORS.index(color)
            turned = (*_SPARE_COLORS[start:], *_SPARE_COLORS[:start])
            color = next((one for one in turned if one not in found.values()), color)
        found[name] = color
    return found


def _shade(color: str, level: int) -> str:
    """Return a darker or lighter shade of the same hue, for variants beyond the number of dashes."""
    if level == 0:
        return color
    hue, light, saturation = colorsys.rgb_to_hls(*(int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)))
    light = min(max(light + (0.18, -0.18, 0.3, -0.3)[level - 1], 0.08), 0.82)
    return "#" + "".join(f"{round(255 * part):02X}" for part in colorsys.hls_to_rgb(hue, light, saturation))
