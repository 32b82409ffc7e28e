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
    w, visible = dense_weights(pairs)
    seen = visible.any(axis=-1)[:, None, :, None]
    o, extra = sum_values(w, pairs.k.tokens.values), value_terms(pairs, w)
    return jnp.where(seen, o if extra is None else o + extra, 0)


def dense_weights(pairs: TileInputs) -> tuple[jax.Array, jax.Array]:
    """Return attention weights [b, h, q, k], and whether a pair is visible, bool [b or 1, q, k].

    A sink keeps its part of the weight of a row.
    """
    visible = visible_pairs(pairs.mask, pairs.q.slots, pairs.k.slots)
    s = bound_scores(pairs, adjust_scores(pairs, mapped_products(pairs), visible))
    # A row that sees nothing has equal scores everywhere and so the mean of all values; it is to return zero.
    seen = visible.any(axis=-1)[:, None, :, None]
    s = jnp.where(visible[:, None], s, jnp.where(seen, INVISIBLE, 0))
    if (sink := sinks(pairs)) is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))], axis=-1)
    return jax.nn.softmax(s, axis=-1)[..., : visible.shape[-1]], visible
