"""What a class must be to count as an encoding, checked as soon as it is made.

A misspelt hook would never be called, a hook of another signature would fail deep in a trace, a misspelt fact would be
believed to hold: all of them train as something else than what was written. Hooks, facts and their signatures are read
off the contract itself, `Encoding`, so nothing is listed here twice.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Collection, Mapping, Set
from typing import Any

from posx.errors import ConfigError, nearest

#: How alike two names must be (difflib's ratio) to be taken for one: "biass" and "bias" are, "values" and "tables" not.
HOOK_LIKE, FACT_LIKE = 0.8, 0.85
#: Facts of text that have a fixed set of values.
ALLOWED = {"tiling": ("any", "rows")}
#: Hooks that may see some tokens before each one, see `Encoding.history`.
BACKWARD = ("features", "query", "key", "value")


def check_class(cls: type, contract: type) -> None:
    """Raises ConfigError where what `cls` adds to `contract`, itself or by a mixin, is not what the contract calls."""
    lineage = [part for part in cls.__mro__ if part is not object]
    hidden = lineage[lineage.index(contract) + 1 :]
    for part in hidden:
        for name in _members(part):
            if name in vars(contract):
                raise ConfigError(
                    f"{cls.__name__}: {part.__name__}.{name} is hidden by {contract.__name__}, which comes "
                    f"before it; write class {cls.__name__}({part.__name__}, ..., {contract.__name__})"
                )
    for part in lineage[: lineage.index(contract)]:
        for name in inspect.get_annotations(part):
            if name in vars(contract) and name not in vars(part) and not name.startswith("_"):
                raise ConfigError(f"{part.__name__}.{name} belongs to every encoding; a field needs another name")
        for name, member in _members(part).items():
            where = f"{part.__name__}.{name}"
            if name in vars(contract):
                _check_known(where, name, member, vars(contract)[name])
            else:
                _check_unknown(where, name, member, part, contract)
    given = vars(contract)
    both = all(getattr(cls, hook) is not given[hook] for hook in ("bias", "curve"))
    if both and getattr(cls, "acts_on") is given["acts_on"]:  # noqa: B009
        raise ConfigError(
            f"{cls.__name__} has both bias and curve: bias follows from curve, and executors read one or the "
            "other; keep curve if it depends on distance alone, else bias"
        )


def check_decorated(cls: type) -> None:
    """Raises ConfigError where `cls` lacks its own @dataclasses.dataclass(frozen=True): values would all be equal."""
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


def check_fact(where: str, name: str, value: Any, given: Any) -> None:
    """Raises ConfigError for a fact's value out of its domain; `given` is what stands in the contract."""
    if isinstance(given, bool):
        fits, wanted = isinstance(value, bool), "True or False"
    elif isinstance(given, str):
        allowed = ALLOWED.get(name)
        fits = isinstance(value, str) and (allowed is None or value in allowed)
        wanted = " or ".join(repr(text) for text in allowed) if allowed else "a text"
    elif isinstance(given, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        wanted = "a positive number"
    elif name == "history":
        fits = isinstance(value, Mapping) and all(
            hook in BACKWARD and isinstance(n, int) and not isinstance(n, bool) and n > 0 for hook, n in value.items()
        )
        wanted = f'tokens by hook, such as {{"key": 1}}; hooks that may look back: {", ".join(BACKWARD)}'
    elif name in ("shared", "decayed"):
        fits = isinstance(value, Set) and all(isinstance(item, str) for item in value)
        wanted = 'a frozenset of parameter names, such as frozenset({"table"})'
    else:
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits, wanted = value is None or (whole and value >= 0), "a whole number of tokens, at least 0, or None"
    if not fits:
        raise ConfigError(f"{where}={value!r} must be {wanted}")


def check_names(where: str, given: tuple[str, ...], known: Collection[str], least: int = 1) -> None:
    """Raise ConfigError unless a field's tuple `given` names at least `least` of `known`, each of them once."""
    if set(given) - set(known) or len(set(given)) < max(least, len(given)):
        some = "one or more" if least else "none or more"
        raise ConfigError(f"{where}={given} must name {some} of {', '.join(known)}, and each only once")


def facts(contract: type) -> dict[str, Any]:
    """What the contract states about a class, {name: default or property}; `sites` follows from the hooks."""
    return {name: thing for name, thing in _members(contract).items() if not _is_function(thing) and name != "sites"}


@functools.cache
def hooks_listed(contract: type) -> dict[str, tuple[str, ...]]:
    """The contract's methods and the names of their parameters."""
    return {name: _parameters(thing) for name, thing in _members(contract).items() if _is_function(thing)}


def _members(cls: type) -> dict[str, Any]:
    """Public names in the body of `cls`; slots, which dataclass(slots=True) makes, are fields and no members."""
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
    """As it is called on a value: without self."""
    return inspect.signature(thing.__get__(object()) if hasattr(thing, "__get__") else thing)


def _parameters(thing: Any) -> tuple[str, ...]:
    """Names of the parameters that a caller has to give."""
    required = (p for p in _signature(thing).parameters.values() if p.default is p.empty)
    return tuple(p.name for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def _check_known(where: str, name: str, member: Any, given: Any) -> None:
    """`member` stands in the place of `given`, a method or a fact of the contract."""
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
    try:
        taken = signature.bind(*wanted).arguments
    except TypeError:
        raise ConfigError(
            f"{where}({', '.join(signature.parameters)}) is called as {shown}: it must take these parameters"
        ) from None
    swapped = [place for place, value in taken.items() if place in wanted and value in wanted and place != value]
    if swapped:
        raise ConfigError(
            f"{where}({', '.join(signature.parameters)}) is called as {shown}: {swapped[0]} would be given "
            f"{taken[swapped[0]]}"
        )


def _check_unknown(where: str, name: str, member: Any, part: type, contract: type) -> None:
    """`member` is none of the contract's: a helper or a field, unless it looks like something that was meant for it."""
    methods = hooks_listed(contract)
    if _is_function(member):
        try:
            wanted = _parameters(member)
        except (TypeError, ValueError):  # a callable without a signature, such as a ufunc
            return
        looks_called = len(wanted) > 1 and wanted[0] == "params"
        if (wanted and _like(name, methods, HOOK_LIKE)) or looks_called:
            raise ConfigError(
                f"{where}({', '.join(wanted)}) is no hook, so nothing would call it; {_meant(name, wanted, methods)}"
                f"hooks: {', '.join(hook for hook, names in methods.items() if names[:1] == ('params',))}; "
                "the name of a helper starts with _"
            )
        if _like(name, facts(contract), FACT_LIKE):
            raise ConfigError(f"{where} is no fact of an encoding; {nearest(name, list(facts(contract)))}")
        return
    near = {
        n: thing
        for n, thing in facts(contract).items()
        if _same_kind(member, thing, name in inspect.get_annotations(part))
    }
    if _like(name, near, FACT_LIKE):
        raise ConfigError(
            f"{where} is no fact of an encoding; {nearest(name, list(near))}known: {', '.join(facts(contract))}"
        )


def _same_kind(member: Any, given: Any, is_field: bool) -> bool:
    """Whether a name's value could have been meant as this fact: a field never as one that properties give."""
    if _is_property(member):
        return True
    if isinstance(given, property):
        return not is_field
    return type(member) is type(given)


def _like(name: str, known: Any, cutoff: float) -> bool:
    return bool(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff))


def _meant(name: str, wanted: tuple[str, ...], methods: dict[str, tuple[str, ...]]) -> str:
    """The nearest hook: by name, or else the one that takes the same parameters."""
    if _like(name, methods, HOOK_LIKE):
        return nearest(name, list(methods))
    same = [hook for hook, names in methods.items() if names == wanted]
    return f"did you mean {same[0]!r}? " if same else nearest(name, list(methods))
