"""The dense executor: one tile that spans everything. The oracle for all others, in float64 too."""

import jax

from posx.attention.masks import Mask
from posx.attention.tiles import Slots, Tokens, tile_scores, tile_values
from posx.encodings.base import Encoding, Params


def dense(
    encoding: Encoding, mask: Mask, params: Params, q: Tokens, k: Tokens, q_slots: Slots, k_slots: Slots
) -> jax.Array:
    """Attention outputs [q, h, d] of one sequence, before the `output` hook; memory h * q * k."""
    s, visible = tile_scores(encoding, mask, params, q, k, q_slots, k_slots)
    # A row that sees nothing has equal scores everywhere; its weights are zero, not uniform.
    w = jax.nn.softmax(s, axis=-1) * visible.any(axis=-1).astype(s.dtype)[None, :, None]
    return tile_values(encoding, params, w, k.values, q_slots, k_slots)
