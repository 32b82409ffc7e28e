"""The dense executor: one tile that spans everything. The oracle for all others, in float64 too."""

from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.masks import Mask
from posx.attention.tiles import (
    INVISIBLE,
    Block,
    Pairs,
    scores,
    value_terms,
    visible_pairs,
    weighted,
)
from posx.contract import Encoding, Params


def dense(encoding: Encoding, mask: Mask, params: Params, q: Block, k: Block, **_: Any) -> jax.Array:
    """Return attention outputs [b, h, q, d], in memory b * h * q * k."""
    pairs, visible = Pairs(q, k), visible_pairs(mask, q.slots, k.slots)
    s = scores(encoding, params, pairs, visible)
    # A row that sees nothing has equal scores everywhere and so the mean of all values; it is to return zero.
    seen = visible.any(axis=-1)[:, None, :, None]
    w = jax.nn.softmax(jnp.where(visible[:, None], s, jnp.where(seen, INVISIBLE, 0)), axis=-1)
    o = weighted(w, k.tokens.values)
    mixed = value_terms(encoding, params, w, pairs)
    return jnp.where(seen, o if mixed is None else o + mixed, 0)
