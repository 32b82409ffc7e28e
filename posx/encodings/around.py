"""An encoding built around another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax

from posx.encodings.base import (
    BIASES,
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


def of_base(tree: dict[str, Any]) -> dict[str, Any]:
    """What is named "base.name", parameters or features, by name."""
    return {name.removeprefix("base."): value for name, value in tree.items() if name.startswith("base.")}


@dataclasses.dataclass(frozen=True)
class Around(Encoding):
    """What its `base` does at every place of the formula, for encodings that change one or two of them.

    Facts are the base's, but for those of its curve where the curve is changed. Parameters and features of the base are
    named "base.name".
    """

    base: Encoding

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        return self.base.shift_invariant

    @property
    def prefix_consistent(self) -> bool:  # type: ignore[override]
        return self.base.prefix_consistent

    @property
    def tiling(self) -> str:  # type: ignore[override]
        return self.base.tiling

    @property
    def reads_neighbours(self) -> bool:  # type: ignore[override]
        return self.base.reads_neighbours

    @property
    def caches_mapped_keys(self) -> bool:  # type: ignore[override]
        return self.base.caches_mapped_keys

    @property
    def fades(self) -> bool:  # type: ignore[override]
        return any(map(self.acts_on, FALLING)) and self.base.fades

    @property
    def integer_positions(self) -> bool:  # type: ignore[override]
        return self.base.integer_positions

    @property
    def history(self) -> Mapping[str, int]:  # type: ignore[override]
        return self.base.history

    @property
    def causal_only(self) -> bool:  # type: ignore[override]
        return self.base.causal_only

    @property
    def planes(self) -> str:  # type: ignore[override]
        return self.base.planes

    @property
    def shared(self) -> frozenset[str]:
        return frozenset(f"base.{name}" for name in self.base.shared)

    @property
    def decayed(self) -> frozenset[str]:
        return frozenset(f"base.{name}" for name in self.base.decayed)

    @property
    def max_position(self) -> int | None:
        return self.base.max_position

    @property
    def reach(self) -> int | None:
        return self.base.reach if acting(self, BY_DISTANCE) else None

    def _defines(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(Around, hook)

    def acts_on(self, hook: str) -> bool:
        if hook in BIASES and any(map(self._defines, BIASES)):  # a bias of its own replaces the curve of the base
            return self._defines(hook)
        return self._defines(hook) or self.base.acts_on(hook)

    def require_resolved(self) -> None:
        super().require_resolved()
        require_encoding(self.base, f"{type(self).__name__}: base")
        self.base.require_resolved()

    def resolve(self, dims: Dims) -> Self:
        return dataclasses.replace(self, base=self.base.resolve(dims))

    def at_length(self, length: int) -> Self:
        return dataclasses.replace(self, base=self.base.at_length(length))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return {f"base.{name}": array for name, array in self.base.init(rng, dims).items()}

    def embed(self, params: Params, x: jax.Array, pos: jax.Array) -> jax.Array:
        return self.base.embed(of_base(params), x, pos)

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        found, carry = self.base.features(of_base(params), x, pos, carry)
        return {f"base.{name}": array for name, array in found.items()}, carry

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> Mapped:
        return self.base.query(of_base(params), vectors, pos, of_base(features))

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> Mapped:
        return self.base.key(of_base(params), vectors, pos, of_base(features))

    def regime(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        return self.base.regime(of_base(params), q_pos, k_pos)

    def value(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self.base.value(of_base(params), vectors, pos, of_base(features))

    def output(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self.base.output(of_base(params), vectors, pos, of_base(features))

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
        return self.base.temperature(of_base(params), pos, of_base(features))

    def decay(self, params: Params) -> jax.Array | None:
        return self.base.decay(of_base(params))

    def potential(self, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
        return self.base.potential(of_base(params), pos, of_base(features))

    def curve(self, params: Params, distance: jax.Array) -> jax.Array | None:
        return self.base.curve(of_base(params), distance)

    def bias(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        if self._defines("curve"):
            return super().bias(params, q_pos, k_pos)  # follows from that curve
        return self.base.bias(of_base(params), q_pos, k_pos)

    def relative(self, params: Params, distance: jax.Array) -> Relative:
        return self.base.relative(of_base(params), distance)

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        q_features, k_features = of_base(tile.q_features), of_base(tile.k_features)
        return self.base.score(of_base(params), s, tile._replace(q_features=q_features, k_features=k_features))

    def mix(self, params: Params, w: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        return self.base.mix(of_base(params), w, q_pos, k_pos)
