"""The first term of the formula, products of mapped vectors, and `decay`, which multiplies each by powers.

Powers are relative to a position near both tokens, so that they neither vanish nor overflow. That is the last query of
a tile. In a kernel that does not know `decay`, it is the middle of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.tiles import Block, SharedArrays, TileInputs, products, repeat_heads
from posx.contract import Encoding, Params, as_float, at_least_float32, defined_hooks, wide_dtype

#: The largest exponents, in nats, that are safe for both sides of a product together: in float32 and bfloat16, and in
#: float16.
SAFE, SAFE_HALF = 40.0, 8.0


def mapped_products(pairs: TileInputs) -> jax.Array:
    """Return the first term of the formula, sum_c q~_ic k~_jc exp(-decay_c (i - j)), [b, h, q, k]."""
    q, k = pairs.q.tokens.mapped, pairs.k.tokens.mapped
    if "decay" not in defined_hooks(pairs.encoding):
        return products(q, k)
    return _decay_products(_rate(pairs.encoding, pairs.tables.params), *pairs.pos, q, k)


def _rate(encoding: Encoding, params: Params) -> jax.Array:
    """Return the value of `decay`, [h or 1, d']."""
    rate: Any = encoding.decay(params)
    return at_least_float32(rate)


def _decay_products(rate: jax.Array, q_pos: jax.Array, k_pos: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    """Return sum_c q_ic k_jc exp(-rate_c (i - j)), rate [h or 1, d'].

    Powers are relative to the last query's position. Powers of earlier keys are below 1 and may vanish, as they should.
    Powers of queries grow over one block alone. If a block is so wide that they would overflow, the sum is taken pair
    by pair.
    """
    k, last = _repeat_keys(rate, q, k), q_pos.max(axis=1, keepdims=True)
    behind_q, behind_k = as_float(last - q_pos), as_float(last - k_pos)
    widest = jnp.abs(rate).max() * jnp.maximum(behind_q.max(), -behind_k.min())

    def block_products() -> jax.Array:
        return products(*_decayed_vectors(rate, last, q_pos, k_pos, q, k))

    def pair_products() -> jax.Array:
        """Take one channel after the other, to avoid an array [q, k, d']."""
        distance, wide = as_float(q_pos[:, :, None] - k_pos[:, None, :])[:, None], wide_dtype(q.dtype)

        def add(total: jax.Array, channel: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            rate, q, k = channel
            fall = jnp.exp(jnp.minimum(-rate[None, :, None, None] * distance, SAFE)).astype(wide)
            return total + q[..., :, None].astype(wide) * k[..., None, :].astype(wide) * fall, None

        each = (jnp.moveaxis(x, -1, 0) for x in (rate, q, repeat_heads(k, q.shape[1])))
        nothing = jnp.zeros((*q.shape[:3], k.shape[2]), wide)
        return jax.lax.scan(add, nothing, tuple(each))[0]

    if q.shape[2] == 1 and q.dtype != jnp.float16:  # decoding: powers are relative to the query itself
        return block_products()
    return jax.lax.cond(_is_safe(widest, q), block_products, pair_products)


def _is_safe(widest: jax.Array, vectors: jax.Array) -> jax.Array:
    """Return whether powers of up to exp(widest) are finite on both sides of a product of such vectors."""
    return widest < (SAFE_HALF if vectors.dtype == jnp.float16 else SAFE)


def _repeat_keys(rate: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    """Return keys for each query head, if heads decay each at its own rate."""
    return repeat_heads(k, q.shape[1]) if rate.shape[0] > 1 else k


def _decayed_vectors(
    rate: jax.Array, anchor: jax.Array, q_pos: jax.Array, k_pos: jax.Array, q: jax.Array, k: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return q and k times their powers of the decay, relative to the position `anchor` [b or 1, 1]."""

    def times_power(x: jax.Array, behind: jax.Array) -> jax.Array:
        power = jnp.exp(jnp.minimum(rate[None, :, None] * as_float(behind)[:, None, :, None], SAFE))
        return (at_least_float32(x) * power).astype(x.dtype)

    return times_power(q, anchor - q_pos), times_power(k, k_pos - anchor)


def run_in_one_block(
    pairs: TileInputs, run: Callable[[TileInputs], jax.Array], otherwise: Callable[[TileInputs], jax.Array]
) -> jax.Array:
    """Return run(pairs), for a kernel that does not know `decay`: its powers are in the vectors of the whole call.

    They are relative to the middle. If they would overflow, return otherwise(pairs).
    """
    encoding, mask = pairs[:2]
    if "decay" not in defined_hooks(encoding):
        return run(pairs)

    def run_decayed(tables: SharedArrays, q: Block, k: Block) -> jax.Array:
        rate, (q_pos, k_pos) = _rate(encoding, tables.params), (q.slots.pos, k.slots.pos)
        keys, middle = _repeat_keys(rate, q.tokens.mapped, k.tokens.mapped), (k_pos[:, :1] + k_pos[:, -1:]) // 2
        mapped = _decayed_vectors(rate, middle, q_pos, k_pos, q.tokens.mapped, keys)
        q, k = (x._replace(tokens=x.tokens._replace(mapped=y)) for x, y in zip((q, k), mapped, strict=True))
        return at_least_float32(run(TileInputs(encoding, mask, tables, q, k)))

    rate, (q_pos, k_pos) = jnp.abs(_rate(encoding, pairs.tables.params)).max(), pairs.pos
    widest = rate * as_float(jnp.maximum(q_pos.max(), k_pos.max()) - jnp.minimum(q_pos.min(), k_pos.min()) + 1) / 2
    safe = _is_safe(widest, pairs.q.tokens.mapped)
    return jax.lax.cond(safe, run_decayed, lambda *parts: otherwise(TileInputs(encoding, mask, *parts)), *pairs[2:])
