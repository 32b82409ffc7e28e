"""The fields that a spec put on a trained encoding leaves as they were trained."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any

from posx.contract import Chain, Encoding, Value, values_in
from posx.contract.fields import snake_case
from posx.encodings.frequencies import FrequencyRule
from posx.errors import ConfigError


def inherited(cls: type[Value], old: Value) -> dict[str, Any]:
    """Return {field: value} that a value of class `cls` takes over from the trained value `old`.

    The same class takes over every field, also if that value is inside `old`, as RoPE is inside xPos or a chain.
    Another encoding takes over trained values that its fields can hold: a remap the whole RoPE. Another frequency rule
    takes over `original_len`, which is a fact of the model and not of the rule.
    """
    same = [value for value in values_in(old) if type(value) is cls]
    if len(same) == 1:
        return {field.name: getattr(same[0], field.name) for field in dataclasses.fields(same[0]) if field.init}
    if issubclass(cls, FrequencyRule):
        name = "original_len"
        return {name: getattr(old, name)} if hasattr(old, name) and name in cls.__dataclass_fields__ else {}
    taken: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if isinstance(hint, type) and issubclass(hint, Value):
            fits = [value for value in values_in(old) if isinstance(value, hint)]
            if len(fits) > 1 and fits[0] != old:
                raise ConfigError(f"{snake_case(cls)}: the run was trained with {len(fits)} {name}s. Name {name}=...")
            taken |= {name: fits[0]} if fits else {}
    return taken


def check_change(new: Encoding, old: Encoding, given: Iterable[str]) -> None:
    """Raise ConfigError if an encoding put on a trained one would change what its spec does not name.

    Args:
      new: the encoding that the spec made of `old`.
      old: the trained encoding.
      given: the fields that the spec names.
    """
    name, kinds = snake_case(type(new)), {type(value) for value in values_in(new)}
    if isinstance(old, Chain) and not isinstance(new, Chain):
        lost = [snake_case(type(part)) for part in old.parts if not kinds & {type(value) for value in values_in(part)}]
        if lost and len(lost) < len(old.parts):
            raise ConfigError(
                f"{name} alone would drop {' and '.join(lost)}. Write {'+'.join([name, *lost])} to keep the chain, "
                f"{name}+nope to drop the rest, or only the field that changes, such as base=10000."
            )
    hints = typing.get_type_hints(type(new), include_extras=True)
    for value in values_in(old):
        theirs = typing.get_type_hints(type(value), include_extras=True)
        for field in dataclasses.fields(value):
            trained, now = getattr(value, field.name), getattr(new, field.name, None)
            same = theirs.get(field.name) == hints.get(field.name) and type(value) not in kinds
            if same and field.name not in given and trained != now:
                raise ConfigError(
                    f"{name} would have {field.name}={now}, but the run was trained with {field.name}={trained} in "
                    f"{snake_case(type(value))}. Name it: {name}({field.name}=...)."
                )
