"""Products of mapped queries and keys, which may fall with distance."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from posx.contract import Encoding, Params, as_float, at_least_float32, wide_dtype

#: The largest exponents, in nats, that are safe for both sides of a product together: in float32 and bfloat16, and in
#: float16.
SAFE, SAFE_HALF = 40.0, 8.0


def products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Return <q_i, k_j> [b, h, q, k], at least float32, of q [b, h, q, d] and k [b, g, k, d]."""
    b, h, _, d = q.shape
    s = jnp.einsum("bgqd,bgkd->bgqk", q.reshape(b, k.shape[1], -1, d), k, preferred_element_type=wide_dtype(q.dtype))
    return s.reshape(b, h, -1, k.shape[2])


def repeat_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """Return [b, h, k, d] of [b, g, k, d]: each key/value head serves h/g query heads."""
    return x if x.shape[1] == num_heads else jnp.repeat(x, num_heads // x.shape[1], axis=1)


def over_batch(function, *arrays, in_turn: bool = False):
    """Map `function` of one sequence over first axes, which are b, or 1 for what all sequences share.

    in_turn: in a loop, whose derivative recomputes each sequence's intermediate arrays.
    """
    leaves, tree = jax.tree.flatten(arrays)
    size = max(x.shape[0] for x in leaves)
    own = [x for x in leaves if x.shape[0] == size]

    def one(own):
        each = iter(own)
        return function(*jax.tree.unflatten(tree, [next(each) if x.shape[0] == size else x[0] for x in leaves]))

    return jax.lax.map(jax.checkpoint(one, prevent_cse=False), own) if in_turn else jax.vmap(one)(own)


def mapped_products(
    encoding: Encoding, params: Params, where: tuple[jax.Array, jax.Array], q: jax.Array, k: jax.Array
) -> jax.Array:
    """Return the first term of the formula, sum_c q~_ic k~_jc exp(-decay_c (i - j)), [b, h, q, k].

    q [b, h, q, d'] and k [b, g, k, d'] are mapped, at positions `where`, each [b or 1, t].
    """
    rate = encoding.decay(params) if encoding.acts_on("decay") else None
    return products(q, k) if rate is None else _decayed(at_least_float32(rate), where, q, k)


def _decayed(rate: jax.Array, where: tuple[jax.Array, jax.Array], q: jax.Array, k: jax.Array) -> jax.Array:
    """Return sum_c q_ic k_jc exp(-rate_c (i - j)), rate [h or 1, d'].

    Powers are relative to the last query's position. Powers of earlier keys are below 1 and may vanish, as they should.
    Powers of queries grow over one block alone. If a block is so wide that they would overflow, the sum is taken pair
    by pair.
    """
    q_pos, k_pos = where
    if rate.shape[0] > 1:
        k = repeat_heads(k, q.shape[1])
    last = q_pos.max(axis=1, keepdims=True)
    behind_q, behind_k = as_float(last - q_pos), as_float(last - k_pos)
    widest = jnp.abs(rate).max() * jnp.maximum(behind_q.max(), -behind_k.min())

    def power(behind: jax.Array) -> jax.Array:
        """Return exp(rate * behind) [b or 1, h or 1, t, d']."""
        return jnp.exp(jnp.minimum(rate[None, :, None] * behind[:, None, :, None], SAFE))

    def of_block() -> jax.Array:
        by_q, by_k = at_least_float32(q) * power(behind_q), at_least_float32(k) * power(-behind_k)
        return products(by_q.astype(q.dtype), by_k.astype(k.dtype))

    def of_pairs() -> jax.Array:
        """Take one channel after the other, to avoid an array [q, k, d']."""
        distance, wide = as_float(q_pos[:, :, None] - k_pos[:, None, :])[:, None], wide_dtype(q.dtype)

        def add(total: jax.Array, channel: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            rate, q, k = channel
            fall = jnp.exp(jnp.minimum(-rate[None, :, None, None] * distance, SAFE)).astype(wide)
            return total + q[..., :, None].astype(wide) * k[..., None, :].astype(wide) * fall, None

        each = (jnp.moveaxis(x, -1, 0) for x in (rate, q, repeat_heads(k, q.shape[1])))
        nothing = jnp.zeros((*q.shape[:3], k.shape[2]), wide)
        return jax.lax.scan(add, nothing, tuple(each))[0]

    return jax.lax.cond(widest < (SAFE_HALF if q.dtype == jnp.float16 else SAFE), of_block, of_pairs)
