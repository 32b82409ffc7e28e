"""Checks of a class as soon as it is defined: what looks like a hook or a fact must be one.

A misspelt hook would never be called, a hook of another signature would fail deep in a trace, a misspelt fact would be
believed: such a class trains as something else than what was written. Hooks, facts and signatures are read off
`Encoding`, so nothing is listed twice.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping, Set
from typing import Any

from posx.errors import ConfigError, nearest

#: How alike two names must be (difflib's ratio) for one to be taken for the other: of methods, and of values.
METHOD_LIKE, VALUE_LIKE = 0.8, 0.85
#: Facts of text that have a fixed set of values.
ALLOWED = {"tiling": ("any", "rows", "neighbours")}
#: Hooks that may see earlier tokens beside each one, see `Encoding.history`.
LOOKING_BACK = ("features", "key")


def check_class(cls: type, contract: type) -> None:
    """Raise ConfigError if what `cls` adds to `contract`, itself or by a mixin, is not what the contract calls."""
    lineage = [part for part in cls.__mro__ if part is not object]
    place = lineage.index(contract)
    for part in lineage[place + 1 :]:
        if hidden := next((name for name in _members(part) if name in vars(contract)), None):
            raise ConfigError(
                f"{cls.__name__}: {part.__name__}.{hidden} is hidden by {contract.__name__}, which comes "
                f"before it; write class {cls.__name__}({part.__name__}, ..., {contract.__name__})"
            )
    for part in lineage[:place]:
        for name in inspect.get_annotations(part):
            if name in vars(contract) and name not in vars(part) and not name.startswith("_"):
                raise ConfigError(f"{part.__name__}.{name} belongs to every encoding; a field needs another name")
        for name, member in _members(part).items():
            if name in vars(contract):
                _check_known(f"{part.__name__}.{name}", name, member, vars(contract)[name])
            else:
                _check_unknown(f"{part.__name__}.{name}", name, member, name in inspect.get_annotations(part), contract)


def check_decorated(cls: type) -> None:
    """Raise ConfigError if `cls` lacks its own @dataclasses.dataclass(frozen=True): values would all be equal."""
    own = vars(cls)
    if "__dataclass_fields__" not in own:
        raise ConfigError(
            f"{cls.__name__} is no dataclass: write @dataclasses.dataclass(frozen=True) above class {cls.__name__}"
        )
    if "__eq__" not in own or own.get("__hash__") is None:
        raise ConfigError(
            f"{cls.__name__} must be compared and hashed by its fields: write @dataclasses.dataclass(frozen=True) "
            "above it, without eq=False"
        )


def check_fact(where: str, name: str, value: Any, default: Any) -> None:
    """Raise ConfigError for a fact's value out of its domain; `default` is the contract's, None for a property."""
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "True or False"
    elif isinstance(default, str):
        allowed = ALLOWED.get(name)
        fits = isinstance(value, str) and (allowed is None or value in allowed)
        wanted = " or ".join(map(repr, allowed)) if allowed else "a text"
    elif name == "about":
        fits = type(value) is type(default) and isinstance(value.lr_multiplier, int | float) and value.lr_multiplier > 0
        wanted = "posx.About(paper, beyond, lr_multiplier) with a positive lr_multiplier"
    elif name == "history":
        fits = isinstance(value, Mapping) and all(
            hook in LOOKING_BACK and isinstance(n, int) and not isinstance(n, bool) and n > 0
            for hook, n in value.items()
        )
        wanted = f'tokens by hook, such as {{"key": 1}}; hooks that may look back: {", ".join(LOOKING_BACK)}'
    elif name in ("shared", "decayed"):
        fits = isinstance(value, Set) and all(isinstance(item, str) for item in value)
        wanted = 'a frozenset of parameter names, such as frozenset({"table"})'
    else:
        fits = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
        wanted = "a whole number of tokens, at least 0, or None"
    if not fits:
        raise ConfigError(f"{where}={value!r} must be {wanted}")


def facts(contract: type) -> dict[str, Any]:
    """Return the facts that the contract states about a class, {name: default or property}."""
    return {name: thing for name, thing in _members(contract).items() if not _is_function(thing)}


@functools.cache
def methods(contract: type) -> dict[str, tuple[str, ...]]:
    """Return the contract's methods and the names of their parameters."""
    return {name: _parameters(thing) for name, thing in _members(contract).items() if _is_function(thing)}


def _members(cls: type) -> dict[str, Any]:
    """Return the public names in the body of `cls`, without slots, which are fields."""
    return {
        name: thing
        for name, thing in vars(cls).items()
        if not name.startswith("_") and not inspect.ismemberdescriptor(thing)
    }


def _is_function(thing: Any) -> bool:
    if isinstance(thing, staticmethod | classmethod | functools.partialmethod):
        return True
    return callable(thing) and not inspect.isclass(thing)


def _is_property(thing: Any) -> bool:
    return isinstance(thing, property | functools.cached_property)


def _signature(thing: Any) -> inspect.Signature:
    """Return the signature of a call on a value, without self."""
    return inspect.signature(thing.__get__(object()) if hasattr(thing, "__get__") else thing)


def _parameters(thing: Any) -> tuple[str, ...]:
    """Return the names of the parameters that a caller must give."""
    required = (p for p in _signature(thing).parameters.values() if p.default is p.empty)
    return tuple(p.name for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def _check_known(where: str, name: str, member: Any, given: Any) -> None:
    """Check a member that replaces `given`, a method or a fact of the contract."""
    if not _is_function(given):
        if _is_function(member):
            raise ConfigError(f"{where} is a fact, not a method: write @property above it, or {name} = ...")
        if not _is_property(member):
            check_fact(where, name, member, None if isinstance(given, property) else given)
        return
    wanted = _parameters(given)
    shown = f"{name}({', '.join(wanted)})"
    if not _is_function(member):
        raise ConfigError(f"{where} must be a method {shown}, not {member!r}; a field needs another name")
    signature = _signature(member)
    called = f"{where}({', '.join(signature.parameters)}) is called as {shown}"
    try:
        taken = signature.bind(*wanted).arguments
    except TypeError:
        raise ConfigError(f"{called}: it must take these parameters") from None
    for place, value in taken.items():
        if place in wanted and value in wanted and place != value:
            raise ConfigError(f"{called}: {place} would be given {value}")


def _check_unknown(where: str, name: str, member: Any, is_field: bool, contract: type) -> None:
    """Refuse a helper or a field that looks like a hook or a fact of the contract."""
    known_facts, known = facts(contract), methods(contract)
    if _is_function(member):
        try:
            wanted = _parameters(member)
        except (TypeError, ValueError):  # a callable without a signature, such as a ufunc
            return
        if (wanted and _like(name, known, METHOD_LIKE)) or (len(wanted) > 1 and wanted[0] == "params"):
            same = [hook for hook, names in known.items() if names == wanted and not _like(name, known, METHOD_LIKE)]
            meant = f"did you mean {same[0]!r}? " if same else nearest(name, list(known))
            hooks = ", ".join(hook for hook, names in known.items() if names[:1] == ("params",))
            raise ConfigError(
                f"{where}({', '.join(wanted)}) is no hook, so nothing would call it; {meant}hooks: {hooks}; "
                "the name of a helper starts with _"
            )
    elif not _is_property(member):  # a value can be meant as a fact of its type; a field never as a property
        known_facts = {
            n: default
            for n, default in known_facts.items()
            if (not is_field if isinstance(default, property) else type(member) is type(default))
        }
    if _like(name, known_facts, VALUE_LIKE):
        raise ConfigError(
            f"{where} is no fact of an encoding; {nearest(name, list(known_facts))}known: {', '.join(facts(contract))}"
        )


def _like(name: str, known: Any, cutoff: float) -> bool:
    return bool(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff))
