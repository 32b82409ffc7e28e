"""The text of a spec: every printed spec can be typed.

    rope    rope(base=500000)    rope + alibi    t5(max_distance=128)    my_module:MyEncoding(gain=3)
    dape(base=t5(max_distance=128)) + log_length    learned(beyond=clamp)    tupe(untied=(0, 3))

It is Python's grammar, read with `ast` and never evaluated: a name or a call with keywords, and + between the parts of
a chain. A word as a value is a text or the name of an encoding, depending on its field.
"""

from __future__ import annotations

import ast
import importlib
import keyword
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from posx.contract.classes import check_decorated
from posx.contract.fields import field_problems
from posx.errors import ConfigError, join_problems, nearest
from posx.parsing import typed_fields

T = TypeVar("T")

#: Replaces the colon of "my_module:MyEncoding" while Python reads the text: a letter that nobody types.
_COLON = "\u02d0"
_FIELD = re.compile(r"\s*[^\W\d]\w*\s*=(?!=)")
_OWN_CLASS = re.compile(r"(?<=\w):(?=[^\W\d])")


def parse(text: str) -> dict[str, Any] | list[Any]:
    """Return the mapping of `name` and fields that `text` spells, or a list of mappings for a chain.

    Raises ConfigError that points at the unreadable part. Names and fields are not looked up here.
    """
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # for unknown escapes
            tree = ast.parse(_OWN_CLASS.sub(_COLON, text.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if text.count("(") > text.count(")"):
            raise _unreadable(text, "its end", "a closing bracket is missing") from None
        place = (getattr(error, "offset", None) or 1) - 1
        raise _unreadable(text, text.strip()[place:] or "its end", "this is no encoding") from None
    return _encoding(tree, text)


def parse_field(text: str) -> dict[str, Any] | None:
    """Return {field: value} of a text such as "frequencies=yarn(factor=4)"; None if the text is a whole spec.

    Raises ConfigError.
    """
    if not _FIELD.match(text):
        return None
    spec = parse(f"field({text})")
    if not isinstance(spec, dict) or len(spec) != 2:
        raise _unreadable(text, text, "give one field, such as base=500000")
    return {name: value for name, value in spec.items() if name != "name"}


def _encoding(tree: ast.expr, text: str) -> dict[str, Any] | list[Any]:
    parts: list[Any] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        parts.insert(0, _read_call(tree.right, text))
        tree = tree.left
    first = _read_call(tree, text)
    return [first, *parts] if parts else first


def _read_call(tree: ast.expr, text: str) -> dict[str, Any]:
    if not isinstance(tree, ast.Call):
        return {"name": _name(tree, text)}
    if tree.args:
        raise _unreadable(text, _source(tree.args[0]), "give fields by name, such as base=500000")
    spec: dict[str, Any] = {"name": _name(tree.func, text)}
    for field in tree.keywords:
        if field.arg is None or field.arg in spec:
            raise _unreadable(text, field.arg or "**", "give each field once, by its name")
        spec[field.arg] = _value(field.value, text)
    return spec


def _name(tree: ast.expr, text: str) -> str:
    name = _source(tree)
    words = re.split("[.:]", name)
    if not isinstance(tree, ast.Name | ast.Attribute) or not all(map(str.isidentifier, words)) or name.count(":") > 1:
        raise _unreadable(text, name, "an encoding is a name, such as rope, or my_module:MyEncoding")
    return name


def _value(tree: ast.expr, text: str) -> Any:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        return tree.value.replace(_COLON, ":")
    if isinstance(tree, ast.Constant) and isinstance(tree.value, bool | int | float | None):
        return tree.value
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        number = _value(tree.operand, text)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(tree, ast.Tuple | ast.List):
        return tuple(_value(item, text) for item in tree.elts)
    if isinstance(tree, ast.Name) and _COLON not in tree.id:
        return tree.id
    if isinstance(tree, ast.Call | ast.Attribute | ast.BinOp | ast.Name):
        return _encoding(tree, text)
    raise _unreadable(text, _source(tree), "a value is a number, a word, a tuple or another encoding")


def _source(tree: ast.expr) -> str:
    return ast.unparse(tree).replace(_COLON, ":")


def _unreadable(text: str, word: str, why: str) -> ConfigError:
    shown, at = (f"{x[:60]}..." if len(x) > 63 else x for x in (text, word))
    return ConfigError(f"encoding {shown!r}, at {at!r}: {why}")


def own_class(name: str, base: type, place: str, what: str) -> Any:
    """Return the class that a user's "package.module:Class" names.

    Args:
      name: the text.
      base: what the class derives from.
      place: the module that a user imports `base` from.
      what: the kind of value in messages, as "encoding".

    Raises:
      ConfigError: it cannot be imported, or is no frozen dataclass that derives from `base`.
    """
    module_name, _, class_name = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except ConfigError as error:  # from the class itself, see `posx.contract.classes`
        raise ConfigError(f"{what} {name!r}: {error}") from None
    except (Exception, SystemExit) as error:  # importing runs the user's own code
        meant = f". Did you mean {module_name[:-3]}:{class_name}?" if module_name.endswith(".py") else ""
        if not meant and isinstance(error, ModuleNotFoundError) and error.name == module_name:
            meant = f". Run posx in the folder of {module_name}.py, or put that folder on PYTHONPATH."
        raise ConfigError(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}{meant}") from None
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(
            f"{what} {name!r} is not a frozen dataclass that derives from {place}.{base.__name__}. Write "
            "@dataclasses.dataclass(frozen=True) above it, and derive it."
        )
    check_decorated(cls)
    return cls


def parse_value(
    text: str,
    what: str,
    kinds: str,
    classes: Mapping[str, type[T]],
    examples: Mapping[str, str],
    base: type[T] | None = None,
) -> T:
    """Return the frozen value that a text names, as "offset(longest=300)" or "my_module:Mine(longest=300)".

    Args:
      text: the name of a class, with fields in parentheses.
      what: the kind of value in messages, as "position policy".
      kinds: the same, if there are several.
      classes: the dataclasses by name.
      examples: a text of each class, with the fields that have no default.
      base: what a user's own class derives from. None: there are no such classes.

    Raises:
      ConfigError: the name or a field is unknown, a field is missing, or it does not fit.
    """
    listed = f"The {kinds} are: {', '.join(examples.values())}."
    try:
        spec = parse(text)
    except ConfigError:  # it speaks of an encoding
        raise ConfigError(f"{what} {text!r} cannot be read. {listed}") from None
    name = spec.pop("name") if isinstance(spec, dict) else text
    if base is not None and isinstance(spec, dict) and ":" in name:
        cls = own_class(name, base, base.__module__, what)
    elif isinstance(spec, dict) and name in classes:
        cls = classes[name]
    else:
        raise ConfigError(f"{what} {name!r} is unknown. {nearest(name, list(classes))}{listed}")
    given = typed_fields(cls, spec, f"{what} {text!r}", "")
    needed = [field.name for field in fields(cls) if field.default is MISSING]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(
            f"{what} {text!r} has no {missing[0]}. Give {examples.get(name, f'{name}({missing[0]}=...)')}."
        )
    value = cls(**given)
    if problems := list(field_problems(value)):
        raise ConfigError(join_problems([f"{what} {text}: {problem}" for problem in problems]))
    return value


def unparse(spec: str | Mapping[str, Any] | Sequence[Any]) -> str:
    """Return the text that `parse` reads as `spec`: rope(base=500000)+alibi."""
    if isinstance(spec, str):
        return spec
    if isinstance(spec, Mapping):
        fields = [f"{name}={value_text(value)}" for name, value in spec.items() if name != "name"]
        return f"{spec['name']}({', '.join(fields)})" if fields else spec["name"]
    return "+".join(unparse(part) for part in spec)


def value_text(value: Any) -> str:
    """Return the text of a field's value. Raises ConfigError if it has none."""
    if isinstance(value, Mapping) or (isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value)):
        return unparse(value)
    if isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value):
        return value
    if isinstance(value, tuple | list):
        items = ", ".join(map(value_text, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{value}: a number in a spec must be finite")
    if isinstance(value, float) and value.is_integer() and 0 < abs(value) < 1e15:
        return repr(int(value))
    return repr(value)
