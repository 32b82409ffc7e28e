"""What mapped queries and keys give when they meet: products, of the regime of each pair, that fall with distance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posx.encodings.base import Encoding, Params, as_float, at_least_float32, wide_dtype

#: Nats: exponents up to here are safe, as those of both sides of a product together, in float32 and bfloat16; and in
#: float16.
SAFE, SAFE_HALF = 40.0, 8.0


def products(q: jax.Array, k: jax.Array) -> jax.Array:
    """<q_i, k_j>, at least float32: q [b, h, q, d], k [b, g, k, d] -> [b, h, q, k]; a key head serves h/g queries."""
    b, h, _, d = q.shape
    s = jnp.einsum("bgqd,bgkd->bgqk", q.reshape(b, k.shape[1], -1, d), k, preferred_element_type=wide_dtype(q.dtype))
    return s.reshape(b, h, -1, k.shape[2])


def repeat_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """[b, g, k, d] -> [b, h, k, d]: each key/value head serves h/g query heads."""
    return x if x.shape[1] == num_heads else jnp.repeat(x, num_heads // x.shape[1], axis=1)


def over_batch(function, *arrays, in_turn: bool = False):
    """`function` of one sequence mapped over the first axes, which are b or 1; 1 everywhere gives 1.

    in_turn: in a loop, whose derivative forms each sequence's intermediate arrays again.
    """
    leaves, tree = jax.tree.flatten(arrays)
    size = max(x.shape[0] for x in leaves)
    own = [x for x in leaves if x.shape[0] == size]

    def one(own):
        each = iter(own)
        return function(*jax.tree.unflatten(tree, [next(each) if x.shape[0] == size else x[0] for x in leaves]))

    return jax.lax.map(jax.checkpoint(one, prevent_cse=False), own) if in_turn else jax.vmap(one)(own)


def is_plain(encoding: Encoding) -> bool:
    """Whether mapped vectors meet in nothing but products."""
    return not (encoding.acts_on("regime") or encoding.acts_on("decay"))


def mapped_products(
    encoding: Encoding, params: Params, where: tuple[jax.Array, jax.Array], q: jax.Array, k: jax.Array
) -> jax.Array:
    """<q~_i, k~_j>, [b, h, q, k], of mapped q [b, h, q, d'] and k [b, g, k, d'] at the positions `where`, [b or 1, t].

    Of n regimes (q and k [.., n, d']) each pair has its own; where one holds throughout, it costs one product.
    """
    meet: Callable[[jax.Array, jax.Array], jax.Array] = products
    rate = encoding.decay(params) if encoding.acts_on("decay") else None
    if rate is not None:
        meet = functools.partial(_decayed, at_least_float32(rate), where)
    if not encoding.acts_on("regime"):
        return meet(q, k)
    regime = over_batch(lambda *pos: encoding.regime(params, *pos), *where)[:, None]
    first, count = regime.ravel()[0], q.shape[3]

    def of(n: Any) -> jax.Array:
        return meet(*(jax.lax.dynamic_index_in_dim(x, n, axis=3, keepdims=False) for x in (q, k)))

    def of_each() -> jax.Array:
        of_pairs = jnp.broadcast_to(regime, (*q.shape[:2], *regime.shape[2:]))
        return jax.lax.select_n(of_pairs, *map(of, range(count)))

    return jax.lax.cond((regime == first).all(), lambda: of(first), of_each)


def _decayed(rate: jax.Array, where: tuple[jax.Array, jax.Array], q: jax.Array, k: jax.Array) -> jax.Array:
    """sum_c q_ic k_jc exp(-rate_c (i - j)), rate [h or 1, d'].

    Powers are taken from the last query's position: those of earlier keys are below 1 and may vanish, as they should,
    those of queries grow over one block alone. Where a block is so wide that they would overflow, pair by pair.
    """
    q_pos, k_pos = where
    if rate.shape[0] > 1:
        k = repeat_heads(k, q.shape[1])
    last = q_pos.max(axis=1, keepdims=True)
    behind_q, behind_k = as_float(last - q_pos), as_float(last - k_pos)
    widest = jnp.abs(rate).max() * jnp.maximum(behind_q.max(), -behind_k.min())

    def power(behind: jax.Array) -> jax.Array:
        """exp(rate * behind): [b or 1, h or 1, t, d']."""
        return jnp.exp(jnp.minimum(rate[None, :, None] * behind[:, None, :, None], SAFE))

    def of_block() -> jax.Array:
        by_q, by_k = at_least_float32(q) * power(behind_q), at_least_float32(k) * power(-behind_k)
        return products(by_q.astype(q.dtype), by_k.astype(k.dtype))

    def of_pairs() -> jax.Array:
        """One channel after the other, or there would be [q, k, d'] numbers."""
        distance, wide = as_float(q_pos[:, :, None] - k_pos[:, None, :])[:, None], wide_dtype(q.dtype)

        def add(total: jax.Array, channel: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            rate, q, k = channel
            fall = jnp.exp(jnp.minimum(-rate[None, :, None, None] * distance, SAFE)).astype(wide)
            return total + q[..., :, None].astype(wide) * k[..., None, :].astype(wide) * fall, None

        each = (jnp.moveaxis(x, -1, 0) for x in (rate, q, repeat_heads(k, q.shape[1])))
        nothing = jnp.zeros((*q.shape[:3], k.shape[2]), wide)
        return jax.lax.scan(add, nothing, tuple(each))[0]

    return jax.lax.cond(widest < (SAFE_HALF if q.dtype == jnp.float16 else SAFE), of_block, of_pairs)
