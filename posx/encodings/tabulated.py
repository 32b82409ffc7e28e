"""An encoding whose vectors by distance are computed once, for decoding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Params, Relative, Tokens, as_float
from posx.encodings.chain import Chain


@dataclasses.dataclass(frozen=True)
class Tabulated(Chain):
    """A chain that reads `relative` and `curve` from arrays over the distances 0 to length - 1 (tokens).

    Each decoded token meets every distance again: projecting Transformer-XL's waves or DeBERTa's table anew would cost
    more than all the rest of its step. The arrays depend on the parameters they lie beside, so this is for models in
    use, not in training. A negative distance reads that of 0, one beyond the arrays gives NaN.
    """

    length: Tokens = 1

    integer_positions = True  # type: ignore[assignment]
    causal_only = True  # type: ignore[assignment]

    @property
    def max_position(self) -> int | None:
        return min(last for last in (super().max_position, self.length - 1) if last is not None)

    def tabulate(self, params: Params) -> Params:
        """The arrays to add to one layer's `params`."""
        distance = jnp.arange(self.length, dtype=jnp.int32)
        vectors = super().relative(params, distance)._asdict()
        curve = super().curve(params, as_float(distance)) if self.acts_on("curve") else None
        return {f"by_distance.{name}": x for name, x in (vectors | {"curve": curve}).items() if x is not None}

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        params = super().init(rng, dims)
        return params | self.tabulate(params)

    def relative(self, params: Params, distance: jax.Array) -> Relative:
        tables = (params.get(f"by_distance.{name}") for name in Relative._fields)
        return Relative(*(None if table is None else _rows(table, distance) for table in tables))

    def curve(self, params: Params, distance: jax.Array) -> jax.Array | None:
        return jnp.moveaxis(_rows(params["by_distance.curve"].T, distance), -1, 0)

    def bias(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        bias = Encoding.bias if self.acts_on("curve") else Chain.bias  # the former reads `curve`
        return bias(self, params, q_pos, k_pos)


def _rows(table: jax.Array, distance: jax.Array) -> jax.Array:
    """Rows of a table at distances of any shape."""
    index = jnp.maximum(distance.astype(jnp.int32), 0)
    return table.at[index].get(mode="fill", fill_value=jnp.nan)
