"""One sequence and its tiles: the record every executor works on, and the scores of one tile."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.attention.masks import Mask
from posx.encodings.base import Encoding, Features, Params, Tile, at_least_float32, wide_dtype

#: The score of an invisible pair: finite, so that rows which see nothing stay free of NaN, also in the gradient.
INVISIBLE = -1e30


class Tokens(NamedTuple):
    """Floats that carry gradients, for the query side or the key side of one sequence."""

    vectors: jax.Array  # q [q, h, d] or k [k, g, d], as projected
    mapped: jax.Array  # after the `query` or `key` hook
    values: Any  # [k, g, d] after the `value` hook; None on the query side
    features: Features


class Slots(NamedTuple):
    """Where and when the tokens of one side stand."""

    pos: Any  # [t] what encodings read
    idx: jax.Array  # [t] arrival order, -1 for an empty slot
    segment: jax.Array | None  # [t] document number


def visible_pairs(mask: Mask, q: Slots, k: Slots) -> jax.Array:
    """bool [q, k]: the mask by arrival order, and only within one segment."""
    seen = mask.visible(q.idx, k.idx)
    if q.segment is not None and k.segment is not None:
        seen &= q.segment[:, None] == k.segment[None, :]
    return seen


def repeat_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """[k, g, d] -> [k, h, d]: each key/value head serves h/g query heads."""
    return x if x.shape[1] == num_heads else jnp.repeat(x, num_heads // x.shape[1], axis=1)


def tile_scores(
    encoding: Encoding, mask: Mask, params: Params, q: Tokens, k: Tokens, q_slots: Slots, k_slots: Slots
) -> tuple[jax.Array, jax.Array]:
    """Masked scores [h, q, k], at least float32, and the visible pairs [q, k]: the formula of `encodings.base`."""
    num_heads, head_dim = q.vectors.shape[1:]
    mapped_k = repeat_heads(k.mapped, num_heads)
    dtype = wide_dtype(q.vectors.dtype)
    s = jnp.einsum("qhd,khd->hqk", q.mapped, mapped_k, preferred_element_type=dtype) / math.sqrt(head_dim)
    visible = visible_pairs(mask, q_slots, k_slots)
    if encoding.acts_on("temperature"):
        temperature = encoding.temperature(params, q_slots.pos)
        if temperature is not None:
            s = s * jnp.atleast_2d(temperature.astype(dtype))[:, :, None]
    if encoding.acts_on("bias") or encoding.acts_on("curve"):
        bias = encoding.bias(params, q_slots.pos, k_slots.pos)
        if bias is not None:
            if bias.shape[0] not in (1, num_heads):
                raise ValueError(f"{encoding} gives a bias for {bias.shape[0]} heads, but there are {num_heads}")
            s = s + bias.astype(dtype)
    if encoding.acts_on("score"):
        raw_k = repeat_heads(k.vectors, num_heads)
        tile = Tile(
            q.vectors, raw_k, q.mapped, mapped_k, q.features, k.features, q_slots.pos, k_slots.pos, visible
        )  # fmt: skip
        s = encoding.score(params, s, tile)
    return jnp.where(visible[None], s, INVISIBLE), visible


def tile_values(
    encoding: Encoding, params: Params, w: jax.Array, values: jax.Array, q_slots: Slots, k_slots: Slots
) -> jax.Array:
    """sum_j w_ij v~_j + mix(w)_i, [q, h, d], at least float32, for weights w [h, q, k] of one tile."""
    values = repeat_heads(values, w.shape[0])
    o = jnp.einsum("hqk,khd->qhd", w.astype(values.dtype), values, preferred_element_type=w.dtype)
    if encoding.acts_on("mix"):
        mixed = encoding.mix(params, w, q_slots.pos, k_slots.pos)
        o = o if mixed is None else o + at_least_float32(mixed)
    return o
