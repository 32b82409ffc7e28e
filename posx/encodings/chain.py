"""Several encodings at once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from posx.encodings.base import (
    BY_DISTANCE,
    FALLING,
    Dims,
    Encoding,
    Features,
    Mapped,
    Params,
    Relative,
    Tile,
    acting,
    require_encoding,
)
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Chain(Encoding):
    """The parts in order: token maps compose (outputs in reverse), temperatures multiply (and act on all products),
    biases, mixes and relative vectors add, scores fold left. Parameters and features of part n are named "n.name".

    In a chain, `score` sees raw q and k in `tile.q`, `tile.k` and the vectors mapped by all parts in `tile.mapped_q`.
    A map that looks back sees vectors as they were before any map, so no other part may map them before it. No part
    may map them after one that turns planes and changes their width, as PoPE does. One part may have regimes: what
    stands before it maps vectors once, what stands after it each of its maps.
    """

    parts: tuple[Encoding, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("a chain needs at least one encoding")
        for n, part in enumerate(self.parts):
            require_encoding(part, f"Chain: parts[{n}]")
        if len(several := [part for part in self.parts if part.acts_on("regime")]) > 1:
            raise ConfigError(
                f"{several[0]} and {several[1]} both have regimes of their own: a chain may have one such"
            )
        for hook in ("query", "key", "value"):
            acting = [part for part in self.parts if part.acts_on(hook)]
            if late := [part for part in acting[1:] if part.history.get(hook)]:
                raise ConfigError(
                    f"{late[0]} looks back at vectors before any map, so it must come before {acting[0]} in a chain"
                    + (", which does so too: one of them is enough" if acting[0].history.get(hook) else "")
                )

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        """A map that comes after one that turns vectors by position sees how far that has turned them, unless both turn
        the same planes."""
        maps = [part.planes for part in self.parts if part.acts_on("query") or part.acts_on("key")]
        turned = list(itertools.dropwhile(lambda planes: not planes, maps))
        return len(set(turned)) < 2 and all(part.shift_invariant for part in self.parts)

    @property
    def planes(self) -> str:  # type: ignore[override]
        return " and ".join(dict.fromkeys(part.planes for part in self.parts if part.planes))

    @property
    def extrapolates(self) -> str:  # type: ignore[override]
        return "; ".join(dict.fromkeys(part.extrapolates for part in self.parts if part.extrapolates))

    @property
    def paper(self) -> str:  # type: ignore[override]
        return ", ".join(dict.fromkeys(part.paper for part in self.parts if part.paper))

    @property
    def prefix_consistent(self) -> bool:  # type: ignore[override]
        return all(part.prefix_consistent for part in self.parts)

    @property
    def tiling(self) -> str:  # type: ignore[override]
        return "rows" if any(part.tiling == "rows" for part in self.parts) else "any"

    @property
    def reads_neighbours(self) -> bool:  # type: ignore[override]
        return any(part.reads_neighbours for part in self.parts)

    @property
    def caches_mapped_keys(self) -> bool:  # type: ignore[override]
        return all(part.caches_mapped_keys for part in self.parts)

    @property
    def fades(self) -> bool:  # type: ignore[override]
        return bool(acting(self, FALLING)) and any(part.fades for part in self.parts)

    @property
    def integer_positions(self) -> bool:  # type: ignore[override]
        return any(part.integer_positions for part in self.parts)

    @property
    def history(self) -> Mapping[str, int]:  # type: ignore[override]
        hooks = sorted({hook for part in self.parts for hook in part.history})
        return {hook: max(part.history.get(hook, 0) for part in self.parts) for hook in hooks}

    @property
    def causal_only(self) -> bool:  # type: ignore[override]
        return any(part.causal_only for part in self.parts)

    @property
    def shared(self) -> frozenset[str]:
        return frozenset(f"{n}.{name}" for n, part in enumerate(self.parts) for name in part.shared)

    @property
    def decayed(self) -> frozenset[str]:
        return frozenset(f"{n}.{name}" for n, part in enumerate(self.parts) for name in part.decayed)

    @property
    def max_position(self) -> int | None:
        return min((part.max_position for part in self.parts if part.max_position is not None), default=None)

    @property
    def reach(self) -> int | None:
        by_distance = [part.reach for part in self.parts if acting(part, BY_DISTANCE)]
        return None if None in by_distance else max(by_distance, default=None)

    def acts_on(self, hook: str) -> bool:
        if hook == "curve":  # parts with a curve are served through `bias`
            return all(part.acts_on("curve") or not part.acts_on("bias") for part in self.parts) and any(
                part.acts_on("curve") for part in self.parts
            )
        return any(part.acts_on(hook) or (hook == "bias" and part.acts_on("curve")) for part in self.parts)

    def require_resolved(self) -> None:
        for part in self.parts:
            part.require_resolved()

    def resolve(self, dims: Dims) -> Self:
        return dataclasses.replace(self, parts=tuple(part.resolve(dims) for part in self.parts))

    def at_length(self, length: int) -> Self:
        return dataclasses.replace(self, parts=tuple(part.at_length(length) for part in self.parts))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        rngs = jax.random.split(rng, len(self.parts))
        return {
            f"{n}.{name}": value
            for n, part in enumerate(self.parts)
            for name, value in part.init(rngs[n], dims).items()
        }

    def _each(self, hook: str, *trees: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """The parts that act at `hook`, and what of each tree is theirs. A part such as DAPE answers a hook that it
        does not act on with a term that it adds elsewhere."""
        for n, part in enumerate(self.parts):
            if part.acts_on(hook) or (hook == "bias" and part.acts_on("curve")):
                yield part, *(_own(n, tree) for tree in trees)

    def embed(self, params: Params, x: jax.Array, pos: jax.Array) -> jax.Array:
        for part, own in self._each("embed", params):
            x = part.embed(own, x, pos)
        return x

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        found: Features = {}
        carries = [None] * len(self.parts) if carry is None else list(carry)
        longest = self.history.get("features", 0)
        for n, part in enumerate(self.parts):
            if not part.acts_on("features"):
                continue
            back = part.history.get("features", 0)
            seen = x[:, : 1 + back] if back else x[:, 0] if longest else x
            values, carries[n] = part.features(_own(n, params), seen, pos, carries[n])
            found |= {f"{n}.{name}": value for name, value in values.items()}
        return found, tuple(carries)

    def _mapped(self, hook: str, params: Params, vectors: Any, pos: jax.Array, features: Features) -> Any:
        steps, last = list(self._each(hook, params, features)), None
        for part, own, own_features in reversed(steps) if hook == "output" else steps:
            if last is not None:
                raise ConfigError(
                    f"{part} maps the channels of a head, and {last} makes other channels of them: put {part} before "
                    "it in the chain, or leave one of them out"
                )
            one, width = functools.partial(getattr(part, hook), own, pos=pos, features=own_features), _width(vectors)
            vectors = tuple(map(one, vectors)) if isinstance(vectors, tuple) else one(vectors)
            if hook in ("query", "key") and _width(vectors) != width:
                self._check_decay(part, width, _width(vectors))
                last = part if part.planes else None
        return vectors

    def _check_decay(self, part: Encoding, width: int, wider: int) -> None:
        """Raises ConfigError if products of some channels would fall with distance, and `part` gives other channels."""
        if decaying := [other for other in self.parts if other.acts_on("decay")]:
            raise ConfigError(
                f"{decaying[0]} lets the products of {width} channels fall with distance, but {part} gives {wider} "
                "channels: leave one of them out of the chain"
            )

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> Mapped:
        return self._mapped("query", params, vectors, pos, features)

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> Mapped:
        return self._mapped("key", params, vectors, pos, features)

    def regime(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        return next((part.regime(own, q_pos, k_pos) for part, own in self._each("regime", params)), None)

    def decay(self, params: Params) -> jax.Array | None:
        return _sum(part.decay(own) for part, own in self._each("decay", params))

    def value(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._mapped("value", params, vectors, pos, features)

    def output(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._mapped("output", params, vectors, pos, features)

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
        product = None
        for part, own, own_features in self._each("temperature", params, features):
            value = part.temperature(own, pos, own_features)
            if product is not None and value.ndim != product.ndim:
                value, product = jnp.atleast_2d(value), jnp.atleast_2d(product)
            product = value if product is None else product * value
        return product

    def potential(self, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
        each = self._each("potential", params, features)
        given = [part.potential(own, pos, own_features) for part, own, own_features in each]
        heads = max((parts.shape[1] for parts in given), default=1)
        given = [jnp.broadcast_to(parts, (parts.shape[0], heads, parts.shape[2])) for parts in given]
        return jnp.concatenate(given, axis=-1) if given else None

    def curve(self, params: Params, distance: jax.Array) -> jax.Array | None:
        return _sum(part.curve(own, distance) for part, own in self._each("curve", params))

    def bias(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        return _sum(part.bias(own, q_pos, k_pos) for part, own in self._each("bias", params))

    def relative(self, params: Params, distance: jax.Array) -> Relative:
        parts = [part.relative(own, distance) for part, own in self._each("relative", params)]
        return Relative(*(_sum(vectors) for vectors in zip(*parts, strict=True)))

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        for part, own, q_features, k_features in self._each("score", params, tile.q_features, tile.k_features):
            s = part.score(own, s, tile._replace(q_features=q_features, k_features=k_features))
        return s

    def mix(self, params: Params, w: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        return _sum(part.mix(own, w, q_pos, k_pos) for part, own in self._each("mix", params))


def _width(vectors: Any) -> int:
    """Channels of vectors [t, h, d'], or of each of a tuple of them."""
    return (vectors[0] if isinstance(vectors, tuple) else vectors).shape[-1]


def _own(n: int, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the entries named "n.name", parameters or features, without that prefix."""
    return {name.removeprefix(f"{n}."): value for name, value in tree.items() if name.startswith(f"{n}.")}


def _sum(terms) -> jax.Array | None:
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0]) if given else None
