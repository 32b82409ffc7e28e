"""The dense executor: one tile that spans everything. The oracle for all others, in float64 too."""

from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.decay import mapped_products
from posx.attention.tiles import (
    INVISIBLE,
    TileInputs,
    adjust_scores,
    bound_scores,
    sinks,
    sum_values,
    value_terms,
    visible_pairs,
)


def dense(pairs: TileInputs, **_: Any) -> jax.Array:
    """Return attention outputs [b, h, q, d], in memory b * h * q * k."""
    visible = visible_pairs(pairs.mask, pairs.q.slots, pairs.k.slots)
    s = bound_scores(pairs, adjust_scores(pairs, mapped_products(pairs), visible))
    # A row that sees nothing has equal scores everywhere and so the mean of all values; it is to return zero.
    seen = visible.any(axis=-1)[:, None, :, None]
    s = jnp.where(visible[:, None], s, jnp.where(seen, INVISIBLE, 0))
    if (sink := sinks(pairs)) is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))], axis=-1)
    w = jax.nn.softmax(s, axis=-1)[..., : visible.shape[-1]]
    o, extra = sum_values(w, pairs.k.tokens.values), value_terms(pairs, w)
    return jnp.where(seen, o if extra is None else o + extra, 0)
