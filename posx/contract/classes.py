"""Checks of a class as soon as it is defined: what looks like a hook or a fact must be one.

A misspelt hook would never be called. A hook with another signature would fail deep in a trace. A misspelt fact would
be ignored. The class would then train as another encoding than the one that its author meant. Hooks, facts and
signatures are read off `Encoding`, so nothing is listed twice.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from types import FunctionType
from typing import Any, NamedTuple

from posx.contract.facts import FACTS, About, check_fact
from posx.contract.hooks import HOOKS
from posx.errors import ConfigError, nearest

#: How alike two names must be (difflib's ratio) for one to be taken for the other.
LIKE = 0.8


class _Contract(NamedTuple):
    """The members of a contract, read off its class once.

    Attributes:
      methods: the parameters of its public methods, by name.
      facts: the defaults of its facts, by name.
    """

    methods: dict[str, tuple[str, ...]]
    facts: dict[str, Any]


@functools.cache
def _read_contract(contract: type) -> _Contract:
    bodies = {name: thing for cls in reversed(contract.__mro__[:-1]) for name, thing in _members(cls).items()}
    methods = {name: _parameters(thing) for name, thing in bodies.items() if name not in FACTS}
    return _Contract(methods, {fact: bodies[fact] for fact in FACTS})


def check_class(cls: type, contract: type) -> None:
    """Raise ConfigError if a member that `cls` or a mixin adds to `contract` is not as the contract says."""
    lineage, known = [part for part in cls.__mro__ if part is not object], _read_contract(contract)
    place = lineage.index(contract)
    for part in set(lineage[place + 1 :]) - set(contract.__mro__):
        if hidden := next((name for name in _members(part) if name in known.methods or name in known.facts), None):
            raise ConfigError(
                f"{cls.__name__}: {part.__name__}.{hidden} is hidden by {contract.__name__}, which comes before it. "
                f"Write class {cls.__name__}({part.__name__}, ..., {contract.__name__})."
            )
    for part in lineage[:place]:
        if part is not cls and issubclass(part, contract):
            continue  # checked when it was defined
        fields = inspect.get_annotations(part)
        for name in fields:
            if (name in known.methods or name in known.facts) and name not in vars(part):
                raise ConfigError(f"{part.__name__}.{name} belongs to every encoding. Give the field another name.")
        for name, member in _members(part).items():
            where = f"{part.__name__}.{name}"
            if name in known.methods:
                _check_method(where, name, member, known.methods[name])
            elif name not in known.facts:
                _check_unknown(where, name, member, name in fields, known)
            elif _is_function(member):
                raise ConfigError(f"{where} is a fact, not a method. Write @property above it, or {name} = ...")
            elif not _is_property(member):
                check_fact(part.__name__, name, member)


def check_decorated(cls: type) -> None:
    """Raise ConfigError if `cls` is no @dataclasses.dataclass(frozen=True) itself: all its values would be equal."""
    own, decorator = vars(cls), "@dataclasses.dataclass(frozen=True)"
    if "__dataclass_fields__" not in own:
        raise ConfigError(f"{cls.__name__} is no dataclass. Write {decorator} above class {cls.__name__}.")
    if "__eq__" not in own or own.get("__hash__") is None:
        raise ConfigError(
            f"{cls.__name__} must be compared and hashed by its fields. Write {decorator} above it, without eq=False."
        )


def _members(cls: type) -> dict[str, Any]:
    """Return the public names in the body of `cls`, without slots, which are fields."""
    return {n: thing for n, thing in vars(cls).items() if n[0] != "_" and not inspect.ismemberdescriptor(thing)}


def _is_function(thing: Any) -> bool:
    wrapped = isinstance(thing, staticmethod | classmethod | functools.partialmethod)
    return wrapped or (callable(thing) and not inspect.isclass(thing))


def _is_property(thing: Any) -> bool:
    return isinstance(thing, property | functools.cached_property)


def _signature(thing: Any) -> inspect.Signature:
    """Return the signature of a call on a value, without self."""
    return inspect.signature(thing.__get__(object()) if hasattr(thing, "__get__") else thing)


def _parameters(thing: Any) -> tuple[str, ...]:
    """Return the names of the parameters that a caller must give."""
    required = (p for p in _signature(thing).parameters.values() if p.default is p.empty)
    return tuple(p.name for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def _check_method(where: str, name: str, member: Any, wanted: tuple[str, ...]) -> None:
    """Check a member that replaces a method with the parameters `wanted` of the contract."""
    if isinstance(member, FunctionType):
        code = member.__code__
        if code.co_varnames[1 : code.co_argcount] == wanted and not code.co_kwonlyargcount:
            return  # most of all members, without the cost of a signature
    shown = f"{name}({', '.join(wanted)})"
    if not _is_function(member):
        raise ConfigError(f"{where} must be a method {shown}, not {member!r}. Give a field another name.")
    signature = _signature(member)
    called = f"{where}({', '.join(signature.parameters)}) is called as {shown}"
    try:
        taken = signature.bind(*wanted).arguments
    except TypeError:
        raise ConfigError(f"{called}: it must take these parameters") from None
    for place, value in taken.items():
        if place in wanted and value in wanted and place != value:
            raise ConfigError(f"{called}: {place} would receive {value}")


def _check_unknown(where: str, name: str, member: Any, is_field: bool, known: _Contract) -> None:
    """Refuse a helper or a field that looks like a hook or a fact of the contract."""
    facts, methods = known.facts, known.methods
    if _is_function(member):
        try:
            wanted = _parameters(member)
        except (TypeError, ValueError):  # a callable without a signature, such as a ufunc
            return
        like = _like(name, methods)
        if (wanted and like) or (len(wanted) > 1 and wanted[0] == "params"):
            same = next((method for method, names in methods.items() if names == wanted and not like), None)
            raise ConfigError(
                f"{where}({', '.join(wanted)}) is no hook, so nothing would call it. "
                f"{f'Did you mean {same!r}? ' if same else nearest(name, list(methods))}The hooks are: "
                f"{', '.join(HOOKS)}. The name of a helper starts with _."
            )
    elif not _is_property(member):  # a value can be meant as a fact of its type; a field never as names or a count
        facts = {
            fact: default
            for fact, default in facts.items()
            if (not is_field if default in (None, frozenset()) else type(member) is type(default))
        }
    if name in About._fields and not is_field:
        raise ConfigError(f"{where} is no fact of an encoding. Write about = posx.About({name}={member!r}).")
    if _like(name.lower(), facts):
        raise ConfigError(
            f"{where} is no fact of an encoding. {nearest(name, list(facts))}The facts are: {', '.join(FACTS)}."
        )


def _like(name: str, known: dict[str, Any]) -> bool:
    return bool(difflib.get_close_matches(name, list(known), n=1, cutoff=LIKE))
