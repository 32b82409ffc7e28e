"""CoPE: contextual positions, distances counted in gates instead of tokens."""

import dataclasses
import math
from typing import Annotated, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Params, Tile, at_least_float32, fact, wide_dtype
from posx.contract.fields import at_least
from posx.encodings.along_keys import interpolate, sums_from_each


@dataclasses.dataclass(frozen=True)
class Cope(Encoding):
    """s_ij += q_i . e[p_ij] / sqrt(d), p_ij = min(P - 1, sum_t g_it) for t = j..i, g_it = sigmoid(q_i . k_t / sqrt(d)).

    Between whole positions, q_i . e is interpolated linearly. Only keys that i sees count, and j and i are among them.
    P = `num_positions`, by default the training length, at most 64. e [P, d] starts at zero. The heads share it, and
    the layers too unless `per_layer`. In a chain the gates are those of q and k as projected, as in the release's
    "cope+rel". The content of a key decides how much it counts, not its position.

    Reference: Golovneva et al. 2024, arXiv 2405.18719, section 4; q . e divided as in the release (RAM, "cope").
    Differs: the listing in the paper's appendix, x-transformers and DAPE's copy do not divide q . e by sqrt(d)
    (`scaled=False`, the release's "cope-nodiv"). x-transformers takes gates from the scores with all that is added.
    Gates from separate keys or from values are left out. In a chain a logit scale multiplies q . e as it does q . k, if
    both are divided by sqrt(d).
    """

    num_positions: Annotated[int, "table rows", at_least(2)] | None = None
    scaled: bool = True
    per_layer: bool = True

    tiling = "rows"
    reads_raw_keys = True
    axes = 0  # no position is read
    causal_only = True
    shared = fact(lambda self: frozenset() if self.per_layer else frozenset({"table"}))
    about = About(
        "arXiv 2405.18719",
        "partly: all beyond P - 1 gates shares a position; rises from 2 L in our small study",
        lr_multiplier=3.0,  # 0.01 nats a byte better than 1, see experiments/leaderboard
    )

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(num_positions=max(2, min(dims.train_len, 64)))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return {"table": jnp.zeros((self.num_positions, dims.head_dim), jnp.float32)}

    def _positions(self, tile: Tile) -> jax.Array:
        """Return p [h, q, k]: gates summed from each key to the last visible key."""
        dtype, root = wide_dtype(tile.q.dtype), math.sqrt(tile.q.shape[-1])
        q, k = tile.q.swapaxes(0, 1), tile.k.swapaxes(0, 1)  # heads first, as a cache has them: nothing is copied
        products = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=dtype)
        gates = jnp.where(tile.visible[None], jax.nn.sigmoid(products / root), 0)
        return jnp.minimum(sums_from_each(gates), self.num_positions - 1)

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        logits = jnp.einsum("qhd,pd->hqp", at_least_float32(tile.q), params["table"])
        z = interpolate(logits, self._positions(tile))
        return s + (tile.logit_scale * z / math.sqrt(tile.q.shape[-1]) if self.scaled else z)
