"""Encodings made of others. Their hooks and facts are joined as the table says, so none is written out here."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from posx.contract.encoding import About, Dims, Encoding, require_encoding
from posx.contract.fields import Tokens
from posx.contract.hooks import HOOKS, ByDistance, Params, Part
from posx.errors import ConfigError


def inside(name: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `tree`, parameters or features, that are named "name.x", as x."""
    return {key.removeprefix(f"{name}."): value for key, value in tree.items() if key.startswith(f"{name}.")}


def prefixed(name: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Invert `inside`."""
    return {f"{name}.{key}": value for key, value in tree.items()}


@dataclasses.dataclass(frozen=True, init=False)
class Composite(Encoding):
    """The parts of `named_parts` together: the base of a chain, and of an encoding that changes another one.

    A subclass may define a hook itself; `super()` then calls the hook of the parts. Parameters and features of part
    "n" are named "n.x".
    """

    def named_parts(self) -> dict[str, Encoding]:
        raise NotImplementedError

    def _defines(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(Composite, hook)

    def acts_on(self, hook: str) -> bool:
        return self._defines(hook) or any(part.acts_on(hook) for part in self.named_parts().values())

    def _parts_at(self, hook: str, params: Params) -> list[Part]:
        """Return the parts that act on a hook, each with the call that gives it what is its own."""
        return [
            Part(name, part, functools.partial(_call_own, name, getattr(part, hook), HOOKS[hook].takes, params))
            for name, part in self.named_parts().items()
            if part.acts_on(hook)
        ]


def _call_own(name: str, method: Callable[..., Any], takes: tuple[str, ...], params: Params, *arguments: Any) -> Any:
    """Call a part's hook with the part's own parameters and features."""

    def own(argument: str, value: Any) -> Any:
        if argument == "features":
            return inside(name, value)
        if argument == "tile":
            return value._replace(q_features=inside(name, value.q_features), k_features=inside(name, value.k_features))
        return value

    return method(inside(name, params), *map(own, takes, arguments))


def _joined_hook(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Encoding, name))
    def hook(self: Composite, params: Params, *arguments: Any) -> Any:
        acting = self._parts_at(name, params)
        return (
            HOOKS[name].join(acting, *arguments)
            if acting
            else getattr(super(Composite, self), name)(params, *arguments)
        )

    return hook


def _all_alike(parts: dict[str, Encoding]) -> bool:
    """Decide `shift_invariant`: a map after a rotary one sees rotated vectors, unless both rotate the same planes."""
    maps = [part.planes for part in parts.values() if part.acts_on("query") or part.acts_on("key")]
    rotating = list(itertools.dropwhile(lambda planes: not planes, maps))
    return len(set(rotating)) < 2 and all(part.shift_invariant for part in parts.values())


def _any(fact: str) -> Callable[[dict[str, Encoding]], bool]:
    return lambda parts: any(getattr(part, fact) for part in parts.values())


def _names(fact: str) -> Callable[[dict[str, Encoding]], frozenset[str]]:
    return lambda parts: frozenset(f"{n}.{name}" for n, part in parts.items() for name in getattr(part, fact))


def _strictest(parts: dict[str, Encoding]) -> str:
    return max((part.tiling for part in parts.values()), key=("any", "rows", "neighbours").index)


def _longest(parts: dict[str, Encoding]) -> Mapping[str, int]:
    hooks = sorted({hook for part in parts.values() for hook in part.history})
    return {hook: max(part.history.get(hook, 0) for part in parts.values()) for hook in hooks}


def _least(parts: dict[str, Encoding]) -> int | None:
    return min((last for part in parts.values() if (last := part.max_position) is not None), default=None)


def _farthest(parts: dict[str, Encoding]) -> int | None:
    reaches = [part.reach for part in parts.values() if part.acts_on("by_distance")]
    return None if None in reaches else max(reaches, default=None)  # type: ignore[type-var]


def _once(texts: Iterable[str], between: str) -> str:
    return between.join(dict.fromkeys(filter(None, texts)))


def _about(parts: dict[str, Encoding]) -> About:
    all_about = [part.about for part in parts.values()]
    return About(_once((a.paper for a in all_about), ", "), _once((a.beyond for a in all_about), "; "))


#: How the facts of a composite follow from those of its parts, by name.
FACTS: dict[str, Callable[[dict[str, Encoding]], Any]] = {
    "shift_invariant": _all_alike,
    "causal_only": _any("causal_only"),
    "integer_positions": _any("integer_positions"),
    "reads_raw_keys": _any("reads_raw_keys"),
    "fades": _any("fades"),
    "tiling": _strictest,
    "history": _longest,
    "planes": lambda parts: _once((part.planes for part in parts.values()), " and "),
    "about": _about,
    "shared": _names("shared"),
    "decayed": _names("decayed"),
    "max_position": _least,
    "reach": _farthest,
}


def _joined_fact(name: str) -> property:
    return property(lambda self: FACTS[name](self.named_parts()))


for _name in HOOKS:
    setattr(Composite, _name, _joined_hook(_name))
for _name in FACTS:
    setattr(Composite, _name, _joined_fact(_name))


@dataclasses.dataclass(frozen=True)
class Chain(Composite):
    """Several encodings at once: maps compose in order, factors multiply, biases and terms by distance add.

    `score` sees raw q and k in `tile.q`, `tile.k` and the vectors mapped by all parts in `tile.mapped_q`. A map that
    looks back sees vectors before any map, so it must be the first map. No part may map vectors after one that rotates
    planes and changes their width, as PoPE does.
    """

    parts: tuple[Encoding, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("a chain needs at least one encoding")
        for n, part in enumerate(self.parts):
            require_encoding(part, f"Chain: parts[{n}]")
        maps = [part for part in self.parts if part.acts_on("key")]
        if late := [part for part in maps[1:] if part.history.get("key")]:
            raise ConfigError(
                f"{late[0]} looks back at vectors before any map, so it must come before {maps[0]} in a chain"
                + (", which does so too: one of them is enough" if maps[0].history.get("key") else "")
            )

    def named_parts(self) -> dict[str, Encoding]:
        return {str(n): part for n, part in enumerate(self.parts)}

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        params: Params = {}
        for own, (name, part) in zip(jax.random.split(rng, len(self.parts)), self.named_parts().items(), strict=True):
            params |= prefixed(name, part.init(own, dims))
        return params


@dataclasses.dataclass(frozen=True)
class Tabulated(Composite):
    """An encoding that reads `by_distance` from arrays over the distances 0 to length - 1, for decoding.

    Each decoded token meets every distance again: projecting Transformer-XL's waves or DeBERTa's table anew would cost
    more than the rest of its step. The arrays depend on the parameters they are stored with, so this is not for
    training. A negative distance reads the row of 0, one beyond the arrays is NaN.
    """

    base: Encoding
    length: Tokens = 1

    integer_positions = True  # type: ignore[assignment]
    causal_only = True  # type: ignore[assignment]

    def named_parts(self) -> dict[str, Encoding]:
        return {"base": self.base}

    @property
    def max_position(self) -> int | None:
        return min(last for last in (self.base.max_position, self.length - 1) if last is not None)

    def tables(self, params: Params) -> Params:
        """Return one layer's params with the arrays by distance."""
        terms = self.base.by_distance(params, jnp.arange(self.length, dtype=jnp.int32))._asdict()
        return prefixed("base", params) | {f"by_distance.{n}": x for n, x in terms.items() if x is not None}

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return self.tables(self.base.init(rng, dims))

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        rows = jnp.maximum(distance.astype(jnp.int32), 0)

        def read(name: str) -> jax.Array | None:
            table, axis = params.get(f"by_distance.{name}"), 1 if name in ("bias", "scaled") else 0
            return None if table is None else jnp.take(table, rows, axis=axis, mode="fill", fill_value=jnp.nan)

        return ByDistance(*map(read, ByDistance._fields))
