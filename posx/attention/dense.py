"""The dense executor: one tile that spans everything. The oracle for all others, in float64 too."""

import jax
import jax.numpy as jnp

from posx.attention.masks import Mask
from posx.attention.tiles import Slots, Tokens, tile_scores, tile_values
from posx.encodings.base import Encoding, Params


def dense(
    encoding: Encoding, mask: Mask, params: Params, q: Tokens, k: Tokens, q_slots: Slots, k_slots: Slots
) -> jax.Array:
    """Attention outputs [q, h, d] of one sequence, before the `output` hook; memory h * q * k."""
    s, visible = tile_scores(encoding, mask, params, q, k, q_slots, k_slots)
    o = tile_values(encoding, params, jax.nn.softmax(s, axis=-1), k.values, q_slots, k_slots)
    # A row that sees nothing has equal scores everywhere and so the mean of all values; it is to return zero.
    return jnp.where(visible.any(axis=-1)[:, None, None], o, 0)
