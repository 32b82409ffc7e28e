"""The facts that an encoding states about its hooks, as two tables: allowed values, and the fact of several encodings.

Facts about the method are part of what its author means. Promises tell executors what they may assume of the hooks:
`posx check` measures them, and names those that a class needs or could make. `posx.contract.encoding.Encoding`
documents all of them and has their defaults.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from posx.contract.fields import Range
from posx.contract.hooks import HOOKS, MAPS
from posx.errors import ConfigError


class About(NamedTuple):
    """Facts about a method that are not part of its definition.

    Attributes:
      paper: its source.
      beyond: its behaviour beyond the training length.
      lr_multiplier: its parameters learn at this multiple of the model's learning rate, unless a run sets
        `train.position_lr_multiplier`.
    """

    paper: str = ""
    beyond: str = ""
    lr_multiplier: float = 1.0


Values = Sequence[Any]
Parts = Mapping[str, Any]


class Fact(NamedTuple):
    """A statement about the hooks of an encoding."""

    allowed: Range
    join: Callable[[Values, Parts], Any]  # (the fact of each part, the parts by name) -> the fact of their composite


def fact(of: Callable[[Any], Any]) -> Any:
    """Make a fact that depends on fields: `of` computes it from the encoding."""
    return property(of)


TILINGS = ("any", "rows", "neighbours")
#: Hooks that may see earlier tokens beside each one, see `Encoding.history`.
LOOKING_BACK = tuple(name for name, hook in HOOKS.items() if hook.looks_back)


def _is_count(x: Any, least: int = 0) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _is_shift_invariant(values: Values, parts: Parts) -> bool:
    """Decide `shift_invariant`: a map after a rotary one sees rotated vectors, unless both rotate the same planes."""
    maps = ([part.planes for part in parts.values() if part.acts_on(hook)] for hook in MAPS)
    rotating = (set(itertools.dropwhile(lambda planes: not planes, each)) for each in maps)
    return all(len(planes) < 2 for planes in rotating) and all(values)


def _common_axes(values: Values, parts: Parts) -> int:
    """Decide `axes`: parts that read positions must agree. Raises ConfigError that names two that do not."""
    reading = {axes: part for axes, part in zip(values, parts.values(), strict=True) if axes}
    if len(reading) > 1:
        (few, one), (many, other) = sorted(reading.items(), key=lambda item: item[0])[:2]
        raise ConfigError(
            f"{one} reads positions with {few} {'axis' if few == 1 else 'axes'}, but {other} reads {many}. Give all "
            f"parts equal axes: axial(inner=..., num_axes={many}) makes {many} axes of an encoding with 1."
        )
    return max(values, default=0)


def _farthest(values: Values, parts: Parts) -> int | None:
    reaches = [reach for reach, part in zip(values, parts.values(), strict=True) if part.acts_on("by_distance")]
    return None if None in reaches else max(reaches, default=None)


def _once(texts: Values, between: str) -> str:
    return between.join(dict.fromkeys(filter(None, texts)))


_ANY = Fact(Range("True or False", lambda x: isinstance(x, bool)), lambda values, _: any(values))
_NAMES = Fact(
    Range(
        'a frozenset of names, such as frozenset({"table"})',
        lambda x: isinstance(x, Set) and all(isinstance(name, str) for name in x),
    ),
    lambda values, parts: frozenset(f"{n}.{name}" for n, names in zip(parts, values, strict=True) for name in names),
)


def _join_revisers(values: Values, parts: Parts) -> frozenset[str]:
    """Decide `revised_by`: keys are revised if no other part reads them, or changes products with them."""
    reading = [
        part for part in parts.values()
        if part.reads_raw_keys or any(map(part.acts_on, ("query", "key", "decay", "score")))
    ]  # fmt: skip
    return _NAMES.join(values, parts) if len(reading) == 1 else frozenset()


_AXES = Range("a whole number of axes, 0 if no position is read", _is_count)
_COUNT = Range("a whole number of tokens, at least 0, or None", lambda x: x is None or _is_count(x))

#: The facts about a method, by name.
METHOD_FACTS: dict[str, Fact] = {
    "axes": Fact(_AXES, _common_axes),
    "shift_invariant": Fact(_ANY.allowed, _is_shift_invariant),
    "causal_only": _ANY,
    "integer_positions": _ANY,
    "max_position": Fact(_COUNT, lambda values, _: min((x for x in values if x is not None), default=None)),
    "history": Fact(
        Range(
            f'tokens by hook, such as {{"key": 1}}; hooks that may look back: {", ".join(LOOKING_BACK)}',
            lambda x: isinstance(x, Mapping) and all(k in LOOKING_BACK and _is_count(x[k], 1) for k in x),
        ),
        lambda values, _: {hook: max(x.get(hook, 0) for x in values) for hook in sorted(set().union(*values))},
    ),
    "planes": Fact(Range("a text", lambda x: isinstance(x, str)), lambda values, _: _once(values, " and ")),
    "shared": _NAMES,
    "decayed": _NAMES,
    "about": Fact(
        Range(
            "posx.About(paper, beyond, lr_multiplier) with a positive lr_multiplier",
            lambda x: type(x) is About and isinstance(x.lr_multiplier, int | float) and x.lr_multiplier > 0,
        ),
        lambda values, _: About(_once([x.paper for x in values], ", "), _once([x.beyond for x in values], "; ")),
    ),
}
#: The promises to executors about the hooks, by name.
PROMISES: dict[str, Fact] = {
    "reads_raw_keys": _ANY,
    "tiling": Fact(
        Range(" or ".join(map(repr, TILINGS)), lambda x: isinstance(x, str) and x in TILINGS),
        lambda values, _: max(values, key=TILINGS.index),
    ),
    "revised_by": Fact(_NAMES.allowed, _join_revisers),
    "reach": Fact(_COUNT, _farthest),
    "fades": _ANY,
}
FACTS = METHOD_FACTS | PROMISES


def check_fact(where: str, fact: str, value: Any) -> None:
    """Raise ConfigError for a fact's value that is not allowed."""
    if not FACTS[fact].allowed.fits(value):
        raise ConfigError(f"{where}.{fact}={value!r} must be {FACTS[fact].allowed.text}")
