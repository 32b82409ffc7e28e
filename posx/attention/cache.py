"""The key/value cache: a fixed number of slots, filled in arrival order, with the position of each.

Empty slots and slots of padding hold zeros, so that `attend` does not have to clear them at every step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.arguments import Slots, without_empty
from posx.attention.attend import batch_features, token_map
from posx.attention.history import with_previous_tokens
from posx.attention.tiles import map_batch
from posx.contract import (
    Dims,
    Encoding,
    Features,
    Params,
    abstract_params,
    defined_hooks,
    position_shape,
    wide_dtype,
)
from posx.errors import ConfigError


class Layer(NamedTuple):
    """The cache of one layer: s slots, and the state that later tokens need.

    Every token reads all keys and values. In this shape they are operands of its products, and XLA copies nothing.

    Attributes:
      k: [b * g, s, d'], after `key`, or as projected if the encoding reads raw keys.
      v: [b * g, s, d], after `value`.
      features: {name: [b, s, ...]}.
      carry: the carry that `batch_features` returned last, None at the start.
      recent: {map that looks back: [b, n, heads, d]}, the vectors of the last tokens as projected.
    """

    k: Any
    v: Any
    features: Features
    carry: Any
    recent: dict[str, Any]


class Cache(NamedTuple):
    """The slots of all layers.

    An empty cache holds NumPy arrays, for which JAX compiles nothing.

    Attributes:
      layers: the cache of each layer.
      pos: [b, s], or [b, s, n] if positions have n axes.
      idx: [b, s], -1 for an empty slot.
      filled: the number of filled slots.
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

    def check_orders(self, idx: Any) -> None:
        """Raise ConfigError if orders [b, t] are known not to continue those in the cache, with padding first."""
        if (rows := self.idx.shape[0]) != len(idx):
            raise ConfigError(f"tokens have {len(idx)} rows, but the cache has {rows}. Make it with as many rows.")
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


def write_slots(slots: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Write `new` [b, t, ...] into slots [b, s, ...], from slot `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis=1)


def heads_first(x: jax.Array) -> jax.Array:
    """Return [b * g, t, d] of x [b, t, g, d]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def tokens_first(x: jax.Array, batch_size: int) -> jax.Array:
    """Invert `heads_first`."""
    return x.reshape(batch_size, -1, *x.shape[1:]).swapaxes(1, 2)


def advance(cache: Cache, pos: jax.Array, idx: jax.Array) -> Cache:
    """Return the cache with the positions [b, t] or [b, t, n] and the arrival orders [b, t] of the next tokens.

    Raises ConfigError if the cache has too few free slots, or if the orders are known not to continue those in it.
    """
    cache.check_room(pos.shape[1])
    cache.check_orders(idx)
    return cache._replace(
        pos=write_slots(cache.pos, without_empty(pos, idx), cache.filled),
        idx=write_slots(cache.idx, idx, cache.filled),
        filled=cache.filled + pos.shape[1],
    )


def remember(
    encoding: Encoding,
    params: Params,
    layer: Layer,
    cache: Cache,
    slots: Slots,
    x: jax.Array,
    projected: dict[str, jax.Array],
) -> tuple[Layer, jax.Array, Features]:
    """Return the layer's slots with the last tokens of `cache` written in, and the queries and features of these.

    If the encoding revises keys, a single token does so before it reads them: its query has nothing left to do. The
    tokens of a chunk read them as they are, and revise them afterwards.

    Args:
      encoding, params: of the layer.
      layer: its slots before.
      cache: what `advance` returned for the new tokens.
      slots: the positions and orders of the new tokens [b, t].
      x: the layer's input [b, t, m].
      projected: queries, keys and values [b, t, heads, d] as projected, by the hook that maps them.

    Returns:
      The slots, the queries as `attend` takes them, and their features.
    """
    (pos, idx, _), carry = slots, layer.carry
    start = cache.filled - pos.shape[1]
    features: Features = {}
    if "features" in defined_hooks(encoding):
        features, carry = batch_features(encoding, params, x, slots, carry)
    seen: dict[str, jax.Array] = {}
    recent: dict[str, jax.Array] = {}
    for hook, vectors in projected.items():
        seen[hook], last = with_previous_tokens(encoding, hook, vectors, idx, None, layer.recent.get(hook))
        recent |= {} if last is None else {hook: last}
    k = projected["key"]
    if not encoding.reads_raw_keys:
        k = token_map(encoding, "key", params, seen["key"], pos, features)
    v = token_map(encoding, "value", params, seen["value"], pos, features)
    k, v, features = without_empty((k, v, features), idx)
    kept = {name: new for name, new in features.items() if name not in encoding.revised_by}
    stored = {name: write_slots(layer.features[name], new, start) for name, new in kept.items()}
    if revises_first := encoding.revised_by and pos.shape[1] == 1:
        layer = revise_keys(encoding, params, layer, features, cache, slots)
    keys, values = (write_slots(old, heads_first(new), start) for old, new in ((layer.k, k), (layer.v, v)))
    return Layer(keys, values, stored, carry, recent), seen["query"], kept if revises_first else features


def revise_keys(
    encoding: Encoding, params: Params, layer: Layer, features: Features, cache: Cache, slots: Slots
) -> Layer:
    """Return the layer with its keys revised by the new tokens at `slots`, as later tokens will see them."""
    later = slots.idx[:, None, :] > cache.idx[:, :, None]
    keys = map_batch(functools.partial(encoding.revise, params), tokens_first(layer.k, len(later)), features, later)
    return layer._replace(k=heads_first(keys))


@functools.lru_cache(maxsize=256)  # JAX keeps a trace of every function whose shapes are asked for
def empty_layer(encoding: Encoding, dims: Dims, dtype: str, tokens: tuple[int, int]) -> Layer:
    """Return the shapes and types of a layer's slots, for tokens = (batch size, capacity)."""
    params = abstract_params(encoding, dims)
    pos = jax.ShapeDtypeStruct((*tokens, *position_shape(encoding)), jnp.int32)
    x = jax.ShapeDtypeStruct((*tokens, dims.model_dim), jnp.float32)
    features = jax.eval_shape(functools.partial(batch_features, encoding), params, x, pos)[0]
    heads = {"query": dims.num_heads, "key": dims.kv_heads, "value": dims.kv_heads}
    k = v = jax.ShapeDtypeStruct((*tokens, dims.kv_heads, dims.head_dim), dtype)

    def map_token(params: Params, k: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return token_map(encoding, "key", params, with_previous_tokens(encoding, "key", k, None)[0], pos, features)

    if not encoding.reads_raw_keys:
        k = jax.eval_shape(map_token, params, k, pos, features)
    if encoding.revised_by:  # each token rounds the keys anew
        k = jax.ShapeDtypeStruct(k.shape, wide_dtype(dtype))
    features = {name: x for name, x in features.items() if name not in encoding.revised_by}
    k, v = (jax.eval_shape(heads_first, x) for x in (k, v))
    back = {hook: encoding.history[hook] for hook in heads if hook in encoding.history}
    recent = {hook: jax.ShapeDtypeStruct((tokens[0], n, heads[hook], dims.head_dim), dtype) for hook, n in back.items()}
    return Layer(k, v, features, None, recent)
