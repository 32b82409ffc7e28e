"""The trained fields that stay when a spec changes a trained encoding."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from posx.contract import Chain, Encoding, Value, walk_values
from posx.contract.fields import snake_case
from posx.encodings.frequencies import FrequencyRule
from posx.errors import ConfigError


def inherit_fields(cls: type[Value], old: Value, given: Collection[str]) -> dict[str, Any]:
    """Return {field: value} that a value of class `cls` takes over from the trained value `old`.

    The same class takes over every field, also if that value is inside `old`, as RoPE is inside xPos or a chain.
    Another class takes over trained values that its fields can hold: a remap the whole RoPE, `resonance` the whole
    rule. Another frequency rule takes over `original_len`, which is a fact of the model and not of the rule.

    Args:
      cls: the class of the new value.
      old: the trained value.
      given: the fields that the spec names.

    Raises:
      ConfigError: several trained values fit.
    """
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    same = [value for value in walk_values(old) if type(value) is cls]
    if len(same) == 1:
        return {name: getattr(same[0], name) for name in fields}
    if same and fields - {*given}:
        raise ConfigError(
            f"{snake_case(cls)}: the run was trained with {len(same)} of these. Name all parts of the chain in their "
            "order, or every field."
        )
    taken: dict[str, Any] = {}
    if issubclass(cls, FrequencyRule) and "original_len" in fields:
        lengths = {value.original_len for value in walk_values(old) if hasattr(value, "original_len")}
        taken |= {"original_len": lengths.pop()} if len(lengths) == 1 else {}
    for name, hint in typing.get_type_hints(cls).items():
        kinds = () if typing.get_origin(hint) is tuple else (hint, *typing.get_args(hint))
        for kind in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Value)):
            fits = [value for value in walk_values(old) if isinstance(value, kind)]
            several = len(fits) > 1 and fits[0] != old
            if several and name not in given:
                raise ConfigError(f"{snake_case(cls)}: the run was trained with {len(fits)} {name}s. Name {name}=...")
            taken |= {name: old if several else fits[0]} if fits else {}
    return taken


def check_change(new: Encoding, old: Encoding, spec: Any) -> None:
    """Raise ConfigError if an encoding put on a trained one would change what its spec does not name.

    Args:
      new: the encoding that the spec made of `old`.
      old: the trained encoding.
      spec: the spec, as `posx.encodings.grammar.parse` returns it.
    """
    name, kinds = snake_case(type(new)), {type(value) for value in walk_values(new)}
    if isinstance(old, Chain) and not isinstance(new, Chain):
        left: list[type] = [type(value) for value in walk_values(new) if isinstance(value, Encoding)]
        lost = []
        for part in old.parts:
            if held := [type(value) for value in walk_values(part) if type(value) in left]:
                left.remove(held[0])
            else:
                lost.append(snake_case(type(part)))
        if lost and len(lost) < len(old.parts):
            raise ConfigError(
                f"{name} alone would drop {' and '.join(lost)}. Write {'+'.join([name, *lost])} to keep the chain, "
                f"{name}+nope to drop the rest, or only the field that changes, such as base=10000."
            )
    replaced = [value for value in walk_values(old) if type(value) not in kinds]
    trained_values = set(walk_values(old))
    for made, given in _new_encodings(new, spec):
        if not given and made in trained_values:
            continue
        hints = typing.get_type_hints(type(made), include_extras=True)
        for value in replaced:
            theirs = typing.get_type_hints(type(value), include_extras=True)
            for field in dataclasses.fields(value):
                trained, now = getattr(value, field.name), getattr(made, field.name, None)
                same = theirs.get(field.name) == hints.get(field.name) and field.name not in given
                if same and trained != now:
                    name = snake_case(type(made))
                    raise ConfigError(
                        f"{name} would have {field.name}={now}, but the run was trained with {field.name}={trained} in "
                        f"{snake_case(type(value))}. Name it: {name}({field.name}=...)."
                    )


def _new_encodings(value: Any, spec: Any) -> Iterator[tuple[Encoding, Collection[str]]]:
    """Yield the encodings in a value that a spec has made, at any depth, and the fields that it names in each."""
    if isinstance(value, Chain | tuple):
        parts = value.parts if isinstance(value, Chain) else value
        for part, inner in zip(parts, spec if isinstance(spec, list | tuple) else [None] * len(parts), strict=False):
            yield from _new_encodings(part, inner)
    elif isinstance(value, Encoding):
        fields = {key: inner for key, inner in spec.items() if key != "name"} if isinstance(spec, Mapping) else {}
        yield value, fields.keys()
        for field in dataclasses.fields(value):
            yield from _new_encodings(getattr(value, field.name), fields.get(field.name))
