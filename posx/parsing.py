"""Convert values from a command line, a config file or JSON to the types that the fields of a dataclass declare."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from types import NoneType
from typing import Any

from posx.errors import ConfigError, nearest

#: The name of a value of each type in messages.
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}

#: Texts that leave a field open, if it may be None.
_OPEN = ("auto", "none", "None")
#: The types of the fields of a class: a sweep of 1,000 runs asks for them 14,000 times.
_hints = functools.cache(typing.get_type_hints)

_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def typed_fields(cls: type, given: Mapping[str, Any], owner: str, prefix: str) -> dict[str, Any]:
    """Return `given` with every value of its field's type. A field that may be None is left out for "auto" and "none".

    Args:
      cls: the dataclass.
      given: {field: value}.
      owner: the name of the class in messages.
      prefix: the path before the field in messages.

    Raises:
      ConfigError: a key is unknown, or a value has another type.
    """
    hints, known, values = _hints(cls), [field.name for field in dataclasses.fields(cls) if field.init], {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{owner} has no field {key!r}. {nearest(key, known)}The fields are: {', '.join(known) or 'none'}."
            )
        options = [kind for kind in typing.get_args(hints[key]) if kind is not NoneType]
        may_be_open = len(options) < len(typing.get_args(hints[key]))
        if not (may_be_open and (value is None or (isinstance(value, str) and value in _OPEN))):
            values[key] = to_type(value, options[0] if may_be_open else hints[key], f"{prefix}{key}")
    return values


def to_type(value: Any, wanted: Any, name: str, whole: Any = None) -> Any:
    """Return `value` as `wanted`: bool, int, float, str, or a tuple of one of them.

    Text is read as a number, or as items with commas between them, if one is wanted. Equal values come out equal,
    however they were written: 200.0 is the whole number 200, and -0.0 is 0.0.

    Args:
      value: the given value.
      wanted: a type, as `typing.get_type_hints` returns it.
      name: the name of the setting in messages.
      whole: the value that `value` is an item of, if it is one.

    Raises:
      ConfigError: the value has another type, or is a number that is not finite.
    """
    if typing.get_origin(wanted) is tuple:
        items = split_items(value) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{name}={value!r}: not a tuple. Write ({value!r},) for one value.")
        whole = value if whole is None else whole
        return tuple(to_type(item, typing.get_args(wanted)[0], name, whole) for item in items)
    if typing.get_origin(wanted) is typing.Literal:  # its class says which of them are allowed
        wanted = type(typing.get_args(wanted)[0])
    if not isinstance(wanted, type) or wanted not in KINDS:
        return value  # a nested value, such as an encoding inside another, is checked by its own class
    result = _read(value, wanted) if isinstance(value, str) else value
    if wanted is int and isinstance(result, float) and result.is_integer():
        result = int(result)
    if wanted is float and isinstance(result, int) and not isinstance(result, bool):
        result = float(result) if abs(result) < 1e300 else math.inf
    problem = ""
    if not isinstance(result, wanted) or (wanted is int and isinstance(result, bool)):
        problem = f"not {KINDS[wanted]}"
    elif wanted is int and abs(result) >= 2**48:  # no size, count or step; some would be looped over
        problem = "beyond all range"
    elif wanted is float and not math.isfinite(result):
        problem = "not a finite number"
    if problem:
        item = "" if whole is None else f"{str(value)[:60]} is "
        raise ConfigError(f"{name}={str(value if whole is None else whole)[:60]}: {item}{problem}")
    return result + 0.0 if wanted is float else result  # -0.0 is 0.0


def _read(text: str, wanted: type) -> Any:
    """Return the value of type `wanted` that `text` spells; `text` itself if it spells none."""
    if wanted is bool:
        return _BOOLS.get(text.strip().lower(), text)
    for kind in (int, float) if wanted in (int, float) else ():
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def split_items(text: str) -> list[str]:
    """Return the texts between the commas of `text`, without brackets around all of it and quotes around each."""
    text = text.strip()
    return [strip_quotes(item) for item in split(strip_brackets(text) or strip_quotes(text))]


def strip_brackets(text: str) -> str:
    """Return the text within the one pair of brackets around all of `text`, or "" if it has none.

    "()" gives ",", which holds no item.
    """
    whole = text[:1] + text[-1:] in ("()", "[]") and len(split(text)) == 1
    return (text[1:-1].strip() or ",") if whole else ""


def strip_quotes(text: str) -> str:
    """Return `text` without the spaces around it, and without the quotes around all that is left."""
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] in "'\"" and text.find(text[0], 1) == len(text) - 1 else text


def split(text: str) -> list[str]:
    """Return the texts between the commas of `text`, except commas in brackets or quotes: "a, b(c=1, d=2)" is two.

    A quote opens at the start of a text or of a value in brackets: the one in "it's" is a letter.
    """
    items, start, depth, quote, before = [], 0, 0, "", ","
    for place, letter in enumerate(text):
        if quote or (letter in "'\"" and before in "([{,=:"):
            quote = "" if letter == quote else quote or letter
        elif letter == "," and not depth:
            items.append(text[start:place])
            start = place + 1
        else:
            depth += (letter in "([{") - (letter in ")]}")
        before = before if letter == " " else letter
    return [item.strip() for item in (*items, text[start:]) if item.strip()]
