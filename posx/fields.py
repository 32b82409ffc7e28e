"""Values from outside (a command line, a config file, JSON) to the types that a dataclass's fields declare."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from posx.errors import ConfigError, nearest


def typed_fields(cls: type, given: Mapping[str, Any], what: str, where: str) -> dict[str, Any]:
    """`given` with every value of its field's type. Raises ConfigError naming an unknown key and the nearest known.

    `what` names the class in messages, `where` is the path that stands before the field. A field that may be None is
    open; "auto" leaves it so.
    """
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    values = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{what} has no field {key!r}; {nearest(key, known)}fields: {', '.join(known) or 'none'}")
        options = typing.get_args(hints[key])
        if type(None) not in options or value not in (None, "auto"):
            wanted = next((t for t in options if t is not type(None)), None) if type(None) in options else hints[key]
            values[key] = typed(value, wanted, f"{where}{key}")
    return values


def typed(value: Any, wanted: Any, where: str) -> Any:
    """`value` as `wanted`: bool, int, float, str, or a tuple of one of them; text is read as a number where one is due.

    Raises ConfigError for any other type and for numbers that are not finite.
    """
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}={value!r} must be a tuple")
        return tuple(typed(item, typing.get_args(wanted)[0], where) for item in value)
    if not isinstance(wanted, type) or wanted not in (bool, int, float, str):
        return value  # a nested value, such as an encoding inside another, is checked by its own class
    if wanted in (int, float) and isinstance(value, str):
        try:
            value = wanted(value)
        except ValueError:
            raise ConfigError(f"{where}={value!r} must be of type {wanted.__name__}") from None
    if wanted is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf
    if isinstance(value, int) and abs(value) >= 2**48:  # no size, count or step; some would be looped over
        raise ConfigError(f"{where}: {str(value)[:20]}... is beyond all range")
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"{where}={value!r} must be of type {wanted.__name__}")
    if wanted is float and not math.isfinite(value):
        raise ConfigError(f"{where}={value} must be a finite number")
    return value
