"""The dense executor: one tile that spans everything. The oracle for all others, in float64 too."""

from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.masks import Mask
from posx.attention.tiles import (
    INVISIBLE,
    Slots,
    Tokens,
    adjusted,
    normalised,
    products,
    row_max,
    shift_of,
    value_terms,
    visible_pairs,
    weighted,
)  # fmt: skip
from posx.encodings.base import Encoding, Params


def dense(
    encoding: Encoding, mask: Mask, params: Params, q: Tokens, k: Tokens, q_slots: Slots, k_slots: Slots, **_: Any
) -> jax.Array:
    """Attention outputs [b, h, q, d] before the `output` hook; memory b * h * q * k."""
    visible = visible_pairs(mask, q_slots, k_slots)
    s = adjusted(encoding, params, None, products(q.mapped, k.mapped), q, k, q_slots, k_slots, visible)
    s = jnp.where(visible[:, None], s, INVISIBLE)
    w = jnp.exp(s - shift_of(row_max(s))[..., None])
    o = weighted(w, k.values)
    mixed = value_terms(encoding, params, None, w, q_slots, k_slots)
    return normalised(o if mixed is None else o + mixed, w.sum(axis=-1))[0]
