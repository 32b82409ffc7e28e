"""The key/value cache: fixed capacity, filled in arrival order, positions travel with the slots.

Empty slots, those of padding too, hold zeros, so that `attend` need not clear them at every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from posx.attention.arguments import without_empty
from posx.encodings.base import Features


class Layer(NamedTuple):
    """One layer's slots: k, v [b, s, g, d], features {name: [b, s, ...]}; and what later tokens need of earlier ones.

    carry: what `batch_features` gives to go on with, None at first. recent: raw vectors {hook: [b, n, h, d]} where
    query, key or value looks back.
    """

    k: jax.Array
    v: jax.Array
    features: Features
    carry: Any
    recent: dict[str, jax.Array]


class Cache(NamedTuple):
    """What all layers share: pos, idx [b, s] (idx -1 where empty), and how many slots are filled."""

    layers: tuple[Layer, ...]
    pos: jax.Array
    idx: jax.Array
    filled: jax.Array


def write(slots: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """`new` [b, t, ...] written into slots [b, s, ...] from slot `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis=1)


def advance(cache: Cache, pos: jax.Array, idx: jax.Array) -> Cache:
    """The cache with positions and arrival orders [b, t] of the next tokens; the caller sees to the capacity."""
    return cache._replace(
        pos=write(cache.pos, without_empty(pos, idx), cache.filled),
        idx=write(cache.idx, idx, cache.filled),
        filled=cache.filled + pos.shape[1],
    )
