"""Learned vectors for clipped distances, added to keys and to values."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Params, Tile, normal
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Shaw(Encoding):
    """s_ij = q_i . (k_j + aK_m) / sqrt(d), o_i = sum_j w_ij (v_j + aV_m), m = clip(j - i, -k, k) + k.

    k = `max_distance` in tokens (default min(16, L/2)); aK, aV [2k + 1, d] ~ N(0, d^-1/2), shared by heads, one pair
    per layer; `values=False` leaves out aV. The paper's tables are two-sided: a causal model reads k + 1 rows.

    Reference: Shaw, Uszkoreit and Vaswani 2018, arXiv 1803.02155, equations 3 and 4.
    """

    max_distance: int | None = None
    values: bool = True

    integer_positions = True
    extrapolates = "to about 2 L: everything beyond k shares a vector"
    paper = "arXiv 1803.02155"

    def __post_init__(self) -> None:
        if self.max_distance is not None and self.max_distance < 0:
            raise ConfigError(f"shaw: max_distance={self.max_distance} must not be negative")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(max_distance=min(16, dims.train_len // 2))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        self.require_resolved()
        shape = (2 * self.max_distance + 1, dims.head_dim)
        keys_rng, values_rng = jax.random.split(rng)
        keys = {"keys": normal(keys_rng, shape, dims.head_dim**-0.5)}
        return keys | ({"values": normal(values_rng, shape, dims.head_dim**-0.5)} if self.values else {})

    def _rows(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        k = self.max_distance
        return jnp.clip(k_pos[None, :] - q_pos[:, None], -k, k) + k

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        per_row = jnp.einsum("qhd,nd->hqn", tile.q.astype(s.dtype), params["keys"].astype(s.dtype))
        index = jnp.broadcast_to(self._rows(tile.q_pos, tile.k_pos)[None], s.shape)
        return s + jnp.take_along_axis(per_row, index, axis=-1) / math.sqrt(tile.q.shape[-1])

    def mix(self, params: Params, w: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
        if not self.values:
            return None
        # The weights of one row are summed per distance first, so no [q, k, d] array is needed.
        rows = jax.nn.one_hot(self._rows(q_pos, k_pos), 2 * self.max_distance + 1, dtype=w.dtype)
        per_row = jnp.einsum("hqk,qkn->qhn", w, rows)
        return jnp.einsum("qhn,nd->qhd", per_row, params["values"].astype(w.dtype))
