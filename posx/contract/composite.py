"""Encodings made of others. Their hooks and facts are joined as the tables say, so none is written out here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from posx.contract.encoding import Encoding, require_encoding
from posx.contract.facts import FACTS, fact
from posx.contract.fields import Tokens
from posx.contract.hooks import HOOKS, MAPS, ByDistance, Params, Part, distance_terms
from posx.contract.value import Dims
from posx.errors import ConfigError


def select_part(name: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `tree`, parameters or features, that are named "name.x", as x."""
    return {key.removeprefix(f"{name}."): value for key, value in tree.items() if key.startswith(f"{name}.")}


def prefix_names(name: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Invert `select_part`."""
    return {f"{name}.{key}": value for key, value in tree.items()}


@dataclasses.dataclass(frozen=True, init=False)
class Composite(Encoding):
    """The parts of `named_parts` together: the base of a chain, and of an encoding that changes another one.

    A subclass may define a hook itself; `super()` then calls the hook of the parts. Parameters and features of part
    "n" are named "n.x".
    """

    @property
    def last_map(self) -> bool:
        """Whether `score` turns mapped vectors on: its own, or that of a part.

        In a chain, no later part may map queries or keys, and none may have a decay.
        """
        return any(isinstance(part, Composite) and part.last_map for part in self.named_parts().values())

    def named_parts(self) -> dict[str, Encoding]:
        """Return the parts by name: the encodings in fields, if a subclass does not say otherwise."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Encoding)}

    def with_parts(self, parts: dict[str, Encoding]) -> Composite:
        """Return the value with other parts, in the order of `named_parts`."""
        return dataclasses.replace(self, **parts)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        """Return the arrays of all parts."""
        parts, params = self.named_parts(), Params()
        for own, (name, part) in zip(jax.random.split(rng, len(parts)), parts.items(), strict=True):
            params |= prefix_names(name, part.init(own, dims))
        return params

    def tabulated(self, params: Params, length: int) -> tuple[Encoding, Params]:
        """Return the value with all parts tabulated."""
        parts = {}
        for name, part in self.named_parts().items():
            parts[name], own = part.tabulated(select_part(name, params), length)
            params = params | prefix_names(name, own)
        return self.with_parts(parts), params

    def acts_on(self, hook: str) -> bool:
        defined = getattr(type(self), hook) is not getattr(Composite, hook)
        return defined or any(part.acts_on(hook) for part in self.named_parts().values())


def _make_hook(hook: str) -> Callable[..., Any]:
    def call(name: str, part: Encoding, params: Params, *arguments: Any) -> Any:
        """Call a part's hook with the part's own parameters and features."""
        own = (
            select_part(name, params),
            *(_own(name, *given) for given in zip(HOOKS[hook].takes, arguments, strict=True)),
        )
        return getattr(part, hook)(*own)

    @functools.wraps(getattr(Encoding, hook))
    def run_parts(self: Composite, params: Params, *arguments: Any) -> Any:
        acting = [(name, part) for name, part in self.named_parts().items() if part.acts_on(hook)]
        if not acting:
            return getattr(super(Composite, self), hook)(params, *arguments)
        parts = [Part(name, part, functools.partial(call, name, part, params)) for name, part in acting]
        return HOOKS[hook].join(parts, *arguments)

    return run_parts


def _own(name: str, argument: str, value: Any) -> Any:
    if argument == "tile":
        return value._replace(
            q_features=select_part(name, value.q_features), k_features=select_part(name, value.k_features)
        )
    return select_part(name, value) if argument == "features" else value


def _make_fact(name: str) -> Any:
    def join_parts(self: Composite) -> Any:
        parts = self.named_parts()
        return FACTS[name].join([getattr(part, name) for part in parts.values()], parts)

    return fact(join_parts)


for _name in HOOKS:
    setattr(Composite, _name, _make_hook(_name))
for _name in FACTS:
    setattr(Composite, _name, _make_fact(_name))


@dataclasses.dataclass(frozen=True)
class Chain(Composite):
    """Several encodings at once: maps compose in order, factors multiply, biases and terms by distance add.

    Maps of outputs compose in reverse order, so that each part can undo its map of values.

    `score` sees raw q and k in `tile.q`, `tile.k` and the vectors mapped by all parts in `tile.mapped_q`. A map that
    looks back sees vectors before any map, so it must be the first map. No part may map vectors after one that rotates
    planes and changes their width, as PoPE does. A `last_map`, as Self-Extend, must be the last.
    """

    parts: tuple[Encoding, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("a chain needs at least one encoding.")
        for n, part in enumerate(self.parts):
            require_encoding(part, f"Chain: parts[{n}]")
        for hook in MAPS:
            maps = [part for part in self.parts if part.acts_on(hook)]
            if late := [part for part in maps[1:] if part.history.get(hook)]:
                raise ConfigError(
                    f"{late[0]} reads earlier vectors before any map, so it must come before {maps[0]} in a chain"
                    + (", which also reads them: use only one of them" if maps[0].history.get(hook) else "")
                )
        parts = list(walk_chain(self))
        for n, part in enumerate(parts):
            if not (isinstance(part, Composite) and part.last_map):
                continue
            if later := [other for other in parts[n + 1 :] if other.acts_on("query") or other.acts_on("key")]:
                raise ConfigError(f"{part} changes the scores of vectors that it rotates. Put it after {later[0]}.")
            if fading := [other for other in parts if other.acts_on("decay")]:
                raise ConfigError(
                    f"{part} changes scores, but knows no decay, as {fading[0]} has. Leave one of them out."
                )

    def named_parts(self) -> dict[str, Encoding]:
        return {str(n): part for n, part in enumerate(self.parts)}

    def with_parts(self, parts: dict[str, Encoding]) -> Composite:
        return Chain(tuple(parts.values()))


def walk_chain(encoding: Encoding) -> Iterator[Encoding]:
    """Yield the parts of a chain, of chains in it too, or the encoding itself."""
    if isinstance(encoding, Chain):
        for part in encoding.parts:
            yield from walk_chain(part)
    else:
        yield encoding


@dataclasses.dataclass(frozen=True)
class Tabulated(Composite):
    """An encoding that reads `by_distance` from arrays over the distances 0 to length - 1, for decoding.

    Every decoded token reads every distance. To project Transformer-XL's waves or DeBERTa's table each time would cost
    more than the rest of the step. The arrays depend on the parameters that they are stored with, so this is not for
    training. A negative distance reads the row of distance 0, a distance beyond the arrays is NaN.
    """

    base: Encoding
    length: Tokens = 1

    integer_positions = True
    causal_only = True
    max_position = fact(lambda self: min(n for n in (self.base.max_position, self.length - 1) if n is not None))

    @functools.partial(jax.jit, static_argnums=0)
    def tables(self, params: Params) -> Params:
        """Return one layer's params and the arrays by distance, each [h or 1, n, ...]."""
        terms = self.base.by_distance(params, jnp.arange(self.length, dtype=jnp.int32))._asdict()
        arrays = _swap_heads({name: x for name, x in terms.items() if x is not None})
        return prefix_names("base", params) | prefix_names("by_distance", arrays)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return self.tables(self.base.init(rng, dims))

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        rows = {name: table_rows(table, distance) for name, table in select_part("by_distance", params).items()}
        return ByDistance(**_swap_heads(rows))


def _swap_heads(terms: Params) -> Params:
    """Exchange the first two axes of vectors: hooks return [n, h or 1, d], products read [h or 1, n, d]."""
    return {name: x if name in ("bias", "scaled") else x.swapaxes(0, 1) for name, x in terms.items()}


def table_rows(table: jax.Array, distance: jax.Array, axis: int = 1) -> jax.Array:
    """Return the rows of a table at distances [n], along `axis`: NaN beyond it, the row of 0 for negative ones."""
    return jnp.take(table, jnp.maximum(distance.astype(jnp.int32), 0), axis=axis, mode="fill", fill_value=jnp.nan)


def tabulate_terms(encoding: Encoding, params: Params, length: int) -> tuple[Encoding, Params]:
    """Return `Encoding.tabulated`, with arrays in place of all terms by distance, unless the bias is the only one."""
    encoding, params = encoding.tabulated(params, length)
    if not distance_terms(encoding, params).keys() - {"bias"}:
        return encoding, params
    table = Tabulated(encoding, length)
    return table, table.tables(params)
