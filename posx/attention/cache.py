"""The key/value cache: a fixed number of slots, filled in arrival order, with the position of each.

Empty slots and slots of padding hold zeros, so that `attend` does not have to clear them at every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.arguments import without_empty
from posx.contract import Features
from posx.errors import ConfigError


class Layer(NamedTuple):
    """The slots of one layer, k, v [b * g, s, d] and features {name: [b, s, ...]}, and its state for later tokens.

    Every token reads all keys and values. In this shape they are operands of its products, and XLA copies nothing.

    carry: the carry that `batch_features` returned last, None at the start. recent: the raw keys [b, n, g, d] of the
    last tokens if `key` looks back, else None.
    """

    k: Any
    v: Any
    features: Features
    carry: Any
    recent: Any


class Cache(NamedTuple):
    """The slots of all layers, their pos and idx [b, s] (idx -1 for an empty slot), and the number of filled slots.

    An empty cache holds NumPy arrays, for which JAX compiles nothing.
    """

    layers: tuple[Layer, ...]
    pos: Any
    idx: Any
    filled: Any

    @property
    def capacity(self) -> int:
        """The number of slots, filled or not."""
        return self.idx.shape[1]

    def check_room(self, count: int) -> None:
        """Raise ConfigError if `count` more tokens are known not to fit. A traced `filled` counts as 0."""
        filled = 0 if isinstance(self.filled, jax.core.Tracer) else int(self.filled)
        if filled + count > self.capacity:
            raise ConfigError(
                f"{count} more tokens do not fit into the cache: {filled} of its {self.capacity} slots are filled. "
                f"Make it with empty_cache(batch_size, capacity) for at least {filled + count} slots."
            )

    def check_orders(self, idx: jax.Array) -> None:
        """Raise ConfigError if orders [b, t] are known not to continue those in the cache, with padding first."""
        if isinstance(idx, jax.core.Tracer) or isinstance(self.idx, jax.core.Tracer):
            return
        rows = np.concatenate([np.asarray(self.idx)[:, : int(self.filled)], np.asarray(idx)], axis=1)
        if ((np.diff(rows, axis=1) <= 0) & (rows[:, :-1] >= 0)).any():
            raise ConfigError(
                "idx must grow from token to token of a row, over all calls, and be -1 only before its first token. "
                "Continue each row from the last idx in the cache, and pad prompts on the left."
            )

    def or_nan(self, x: jax.Array) -> jax.Array:
        """Return x, or NaN if more tokens were written than fit: JAX overwrites the last slots without an error."""
        return jnp.where(self.filled <= self.capacity, x, jnp.asarray(jnp.nan, x.dtype))


def write(slots: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Write `new` [b, t, ...] into slots [b, s, ...], from slot `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis=1)


def heads_first(x: jax.Array) -> jax.Array:
    """Return [b * g, t, d] of x [b, t, g, d]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def tokens_first(x: jax.Array, batch_size: int) -> jax.Array:
    """Invert `heads_first`."""
    return x.reshape(batch_size, -1, *x.shape[1:]).swapaxes(1, 2)


def advance(cache: Cache, pos: jax.Array, idx: jax.Array) -> Cache:
    """Return the cache with positions and arrival orders [b, t] of the next tokens.

    Raises ConfigError if the cache has too few free slots, or if the orders are known not to continue those in it.
    """
    cache.check_room(pos.shape[1])
    cache.check_orders(idx)
    return cache._replace(
        pos=write(cache.pos, without_empty(pos, idx), cache.filled),
        idx=write(cache.idx, idx, cache.filled),
        filled=cache.filled + pos.shape[1],
    )
