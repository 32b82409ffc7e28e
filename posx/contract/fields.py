"""Types of an encoding's fields: what a number counts, and the range that it must lie in.

num_heads: Heads | None = None
base: Annotated[float, above(1)] = 10000.0
form: Literal["log", "power"] = "log"
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple


class Range(NamedTuple):
    """The values that a field may have; `text` completes "must be ..."."""

    text: str
    holds: Callable[[Any], bool]

    def fits(self, value: Any) -> bool:
        try:
            return self.holds(value)
        except TypeError:  # a value of another type, such as a text
            return False


def _make_bound(words: str, holds: Callable[[Any, float], bool]) -> Callable[[float], Range]:
    def make_range(bound: float) -> Range:
        return Range(f"{words} {bound:{',' if isinstance(bound, int) else 'g'}}", lambda value: holds(value, bound))

    return make_range


at_least, above = _make_bound("at least", operator.ge), _make_bound("above", operator.gt)
at_most, below = _make_bound("at most", operator.le), _make_bound("below", operator.lt)


def even(least: int) -> Range:
    return Range(f"even and at least {least}", lambda value: value >= least and value % 2 == 0)


def odd() -> Range:
    return Range("odd and at least 1", lambda value: value >= 1 and value % 2 == 1)


#: A tuple of choices must name one.
NOT_EMPTY = object()

#: Types with a unit, which the catalogue prints after the value.
Tokens = Annotated[int, "tokens"]
Length = Annotated[int, "tokens", at_least(1)]
FloatTokens = Annotated[float, "tokens"]
Channels = Annotated[int, "channels"]
Heads = Annotated[int, "heads", at_least(1)]
TableRows = Annotated[int, "table rows", at_least(1)]
Buckets = Annotated[int, "buckets"]
HiddenUnits = Annotated[int, "hidden units", at_least(1)]
#: The base of a geometric series of frequencies.
Base = Annotated[float, above(1)]


def snake_case(cls: type | str) -> str:
    """Return the name of a class as the registry spells it: TransformerXL is transformer_xl."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls if isinstance(cls, str) else cls.__name__).lower()


@functools.cache
def type_hints(cls: Any) -> dict[str, Any]:
    """Return the types that a class declares, by name; {} if a name in them cannot be looked up."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError:  # a type of a function's own, or of type checkers alone
        return {}


def field_problems(value: Any) -> Iterator[str]:
    """Yield "name=value problem" of the fields that are out of the range or the choices that their types declare."""
    hints = type_hints(type(value))  # type: ignore[arg-type]
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if problem := "" if given is None else _problem(hints.get(field.name), given):
            yield f"{field.name}={given!r} {problem}"


def _problem(hint: Any, value: Any, required: bool = False) -> str:
    """Return why `value` does not fit the type `hint`, or nothing. Types themselves are not compared."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is Annotated:
        broken = (f"must be {said.text}" for said in inner[1:] if isinstance(said, Range) and not said.fits(value))
        return next(broken, "") or _problem(inner[0], value, NOT_EMPTY in inner)
    if kind is Literal:
        return "" if value in inner else f"is unknown; allowed: {', '.join(map(str, inner))}"
    if kind is tuple and isinstance(value, tuple):
        if typing.get_origin(inner[0]) is Literal:
            choices = typing.get_args(inner[0])
            fits = set(value) <= set(choices) and len(set(value)) == len(value) and (value or not required)
            return "" if fits else f"must name some of {', '.join(choices)}, and each only once"
        return next(filter(None, (_problem(inner[0], item) for item in value)), "")
    options = [option for option in inner if option is not type(None)] if type(None) in inner else []
    return _problem(options[0], value) if len(options) == 1 else ""
