"""Contextual positions: distances counted in gates instead of tokens."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Params, TableRows, Tile, at_least_float32, wide_dtype
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Cope(Encoding):
    """s_ij += q_i . e[p_ij] / sqrt(d), p_ij = min(P - 1, sum_t g_it) for t = j..i, g_it = sigmoid(q_i . k_t / sqrt(d)).

    Between whole positions q_i . e is interpolated linearly. Only keys that i sees count; j and i themselves do.
    P = `num_positions` (default: training length, at most 64); e [P, d] starts at zero, is shared by the heads, and by
    the layers unless `per_layer`. In a chain the gates stay those of q and k as projected: what a key counts for is its
    content, not where it stands, as in the release's "cope+rel".

    Reference: Golovneva et al. 2024, arXiv 2405.18719, section 4; q . e divided as in the release (RAM, "cope").
    Differs: the listing in the paper's appendix, x-transformers and DAPE's copy do not divide q . e by sqrt(d)
    (`scaled=False`, the release's "cope-nodiv"), and x-transformers takes gates from all that is added to the scores.
    Gates from separate keys or from values are left out. In a chain a temperature acts on q . e as on q . k where both
    are divided by sqrt(d).
    """

    num_positions: TableRows | None = None
    scaled: bool = True
    per_layer: bool = True

    tiling = "rows"
    causal_only = True
    lr_multiplier = 3.0  # 0.01 nats a byte better than 1, see experiments/leaderboard
    extrapolates = "partly: all beyond P - 1 gates shares a position; rises from 2 L in our small study"
    paper = "arXiv 2405.18719"

    def __post_init__(self) -> None:
        if self.num_positions is not None and self.num_positions < 2:
            raise ConfigError(f"cope: num_positions={self.num_positions} must be at least 2")

    @property
    def shared(self) -> frozenset[str]:
        return frozenset() if self.per_layer else frozenset({"table"})

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(num_positions=max(2, min(dims.train_len, 64)))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        self.require_resolved()
        return {"table": jnp.zeros((self.num_positions, dims.head_dim), jnp.float32)}

    def _positions(self, tile: Tile) -> jax.Array:
        """p [h, q, k]: gates summed from each key to the last one seen."""
        dtype, root = wide_dtype(tile.q.dtype), math.sqrt(tile.q.shape[-1])
        products = jnp.einsum("qhd,khd->hqk", tile.q, tile.k, preferred_element_type=dtype)
        gates = jnp.where(tile.visible[None], jax.nn.sigmoid(products / root), 0)
        return jnp.minimum(jax.lax.cumsum(gates, axis=2, reverse=True), self.num_positions - 1)

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        self.require_resolved()
        p = self._positions(tile)
        logits = jnp.einsum("qhd,pd->hqp", at_least_float32(tile.q), params["table"])
        low = jax.lax.stop_gradient(p).astype(jnp.int32)  # the gradient flows through the fraction alone
        high = jnp.minimum(low + 1, self.num_positions - 1)
        z_low, z_high = (jnp.take_along_axis(logits, index, axis=2) for index in (low, high))
        z = z_low + (p - low.astype(p.dtype)) * (z_high - z_low)
        return s + (tile.temperature * z / math.sqrt(tile.q.shape[-1]) if self.scaled else z)
