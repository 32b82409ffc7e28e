"""The dense executor: one tile that spans everything. The oracle for all others, in float64 too."""

from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.tiles import INVISIBLE, Pairs, adjusted, mapped_products, value_terms, visible_pairs, weighted


def dense(pairs: Pairs, **_: Any) -> jax.Array:
    """Return attention outputs [b, h, q, d], in memory b * h * q * k."""
    visible = visible_pairs(pairs.mask, pairs.q.slots, pairs.k.slots)
    s = adjusted(pairs, mapped_products(pairs), visible)
    # A row that sees nothing has equal scores everywhere and so the mean of all values; it is to return zero.
    seen = visible.any(axis=-1)[:, None, :, None]
    w = jax.nn.softmax(jnp.where(visible[:, None], s, jnp.where(seen, INVISIBLE, 0)), axis=-1)
    o, extra = weighted(w, pairs.k.tokens.values), value_terms(pairs, w)
    return jnp.where(seen, o if extra is None else o + extra, 0)
