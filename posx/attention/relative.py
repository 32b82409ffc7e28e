"""Terms by distance: what `curve` and `relative` add to a tile, without an array [q, k, d].

Where positions are consecutive, a tile of a queries and n keys meets only a + n - 1 distances: their vectors form a
strip, one product gives every query against every distance, and `skew` shifts row i by i places. Anywhere else the
distances of a tile are tabulated over their range if that is no longer than the strip would be, and else taken query by
query.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

#: Signed distances i - j [n] to vectors [n, h, d] or [n, 1, d].
Rows = Callable[[jax.Array], jax.Array]


@jax.custom_vjp
def skew(x: jax.Array) -> jax.Array:
    """x [..., a, a + n] over distances a-1, a-2, ... -> [..., a, n]: entry (i, j) is x[i, j - i + a - 1].

    The last column is never read. A slice of the flattened rows, which costs nothing beside the product before it.
    """
    *batch, a, width = x.shape
    flat = x.reshape(*batch, a * width)[..., a - 1 : a - 1 + a * (width - 1)]
    return flat.reshape(*batch, a, width - 1)[..., : width - a]


@jax.custom_vjp
def unskew(w: jax.Array) -> jax.Array:
    """Transpose of `skew`: w [..., a, n] -> [..., a, a + n], zero outside. A gather; padding took thrice as long."""
    a, n = w.shape[-2:]
    column = np.arange(a + n)[None, :] - (a - 1) + np.arange(a)[:, None]
    index = jnp.asarray(np.clip(column, 0, n - 1), jnp.int32)
    found = jnp.take_along_axis(w, jnp.broadcast_to(index, (*w.shape[:-1], a + n)), axis=-1, mode="clip")
    return jnp.where((column >= 0) & (column < n), found, 0)


skew.defvjp(lambda x: (skew(x), None), lambda _, grad: (unskew(grad),))
unskew.defvjp(lambda w: (unskew(w), None), lambda _, grad: (skew(grad),))


def sum_rows(x: jax.Array) -> jax.Array:
    """Sum over the second last axis, [..., a, n] -> [..., n], as a product: XLA's CPU backend takes sums over any axis
    but the last twenty times slower."""
    ones = jnp.ones((*x.shape[:-2], 1, x.shape[-2]), x.dtype)
    return (ones @ x)[..., 0, :]


def sum_sequences(x: jax.Array) -> jax.Array:
    """Sum over the first axis, [b, ...] -> [1, ...]."""
    return sum_rows(x.reshape(x.shape[0], -1)).reshape(1, *x.shape[1:])


@jax.custom_vjp
def plus_shared(s: jax.Array, term: jax.Array) -> jax.Array:
    """s [b, h, q, k] plus a term that all sequences share, [1, h, q, k]."""
    return s + term


plus_shared.defvjp(lambda s, term: (s + term, None), lambda _, grad: (grad, sum_sequences(grad)))


def _for_each(strip: jax.Array, num_sequences: int) -> jax.Array:
    return jnp.broadcast_to(strip[None], (num_sequences, *strip.shape))


@jax.custom_vjp
def _toeplitz(strip: jax.Array, like: jax.Array) -> jax.Array:
    a, n = like.shape
    index = jnp.arange(n)[None, :] - jnp.arange(a)[:, None] + a - 1
    return jnp.take(strip, index, axis=-1, mode="clip")


def _diagonal_sums(x: jax.Array) -> jax.Array:
    """x [h, a, n] -> [h, a + n]: what `unskew` would sum over rows, by adding rows in pairs, then pairs of pairs."""
    (a, n), shift = x.shape[-2:], 1
    rows = 1 << (a - 1).bit_length()
    x = jnp.pad(x, [(0, 0), (rows - a, 0), (0, 0)])
    while x.shape[-2] > 1:
        right, left = ((0, 0), (0, 0), (shift, 0)), ((0, 0), (0, 0), (0, shift))
        x, shift = jnp.pad(x[:, 0::2], right) + jnp.pad(x[:, 1::2], left), 2 * shift
    return jnp.pad(x[:, 0, : a + n - 1], ((0, 0), (0, 1)))


def toeplitz(strip: jax.Array, a: int, n: int) -> jax.Array:
    """strip [h, a + n] over distances a-1, a-2, ... -> [h, a, n]; its gradient is sums over diagonals."""
    # Behind the barrier it is formed once, not again for every sequence.
    return jax.lax.optimization_barrier(_toeplitz(strip, jnp.zeros((a, n), bool)))


_toeplitz.defvjp(lambda strip, like: (_toeplitz(strip, like), None), lambda _, grad: (_diagonal_sums(grad), None))


@jax.custom_vjp
def strip_products(vectors: jax.Array, strip: jax.Array) -> jax.Array:
    """<vectors_i, strip_c>: vectors [b, h, t, d], strip [h, w, d] or [1, w, d] -> [b, h, t, w]."""
    if strip.shape[0] == 1:
        return jnp.einsum("bhtd,wd->bhtw", vectors, strip[0])
    return jnp.einsum("bhtd,bhwd->bhtw", vectors, _for_each(strip, vectors.shape[0]))


@jax.custom_vjp
def strip_sums(weights: jax.Array, strip: jax.Array) -> jax.Array:
    """sum_c weights_ic strip_c: weights [b, h, t, w], strip [h, w, d] or [1, w, d] -> [b, h, t, d]."""
    if strip.shape[0] == 1:
        return jnp.einsum("bhtw,wd->bhtd", weights, strip[0])
    return jnp.einsum("bhtw,bhwd->bhtd", weights, _for_each(strip, weights.shape[0]))


def _strip_gradient(vectors: jax.Array, weights: jax.Array, shared: bool) -> jax.Array:
    """sum over b and t of weights_ic vectors_i: [h, w, d], summed over heads as well if they share the strip.

    The small side is turned, behind a barrier, so that the product contracts the minor axis of its left side.
    """
    if shared:
        turned = jax.lax.optimization_barrier(vectors.reshape(-1, vectors.shape[-1]).T)
        return jax.lax.optimization_barrier(turned @ weights.reshape(-1, weights.shape[-1])).T[None]
    turned = jax.lax.optimization_barrier(vectors.mT)
    return jax.lax.optimization_barrier(sum_sequences(jnp.einsum("bhdt,bhtw->bhdw", turned, weights))[0]).mT


strip_products.defvjp(
    lambda vectors, strip: (strip_products(vectors, strip), (vectors, strip)),
    lambda saved, grad: (strip_sums(grad, saved[1]), _strip_gradient(saved[0], grad, saved[1].shape[0] == 1)),
)
strip_sums.defvjp(
    lambda weights, strip: (strip_sums(weights, strip), (weights, strip)),
    lambda saved, grad: (strip_products(grad, saved[1]), _strip_gradient(grad, saved[0], saved[1].shape[0] == 1)),
)


def mirrored(strip: jax.Array) -> jax.Array:
    """The strip [h, w, d] of the same pairs seen from the keys: reversed, its unread row still last."""
    return jnp.concatenate([jnp.flip(strip[:, :-1], axis=1), strip[:, -1:]], axis=1)


def pair_products(vectors: jax.Array, rows: Rows, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """<vectors_i, rows(pos_i - pos_j)> [b, h, q, k] at any positions: vectors [b, h, q, d], pos [b or 1, t]."""

    def by_query(vectors: jax.Array) -> jax.Array:
        def one(query: tuple[jax.Array, jax.Array]) -> jax.Array:
            vector, pos = query
            found = _broadcast_rows(jax.vmap(rows)(pos[:, None] - k_pos), vector.shape)
            return jnp.einsum("bhd,bhkd->bhk", vector, found)

        return _map_queries(one, (jnp.moveaxis(vectors, 2, 0), q_pos.T))

    def by_range(vectors: jax.Array) -> jax.Array:
        distances = lowest[:, None] + jnp.arange(length, dtype=lowest.dtype)[None, :]
        found = _broadcast_rows(jax.vmap(rows)(distances), vectors.shape)
        index = q_pos[:, None, :, None] - k_pos[:, None, None, :] - lowest[:, None, None, None]
        products = jnp.einsum("bhqd,bhnd->bhqn", vectors, found)
        return jnp.take_along_axis(products, jnp.broadcast_to(index, (*vectors.shape[:3], index.shape[3])), axis=3)

    length = q_pos.shape[1] + k_pos.shape[1]
    if vectors.shape[2] == 1 or not jnp.issubdtype(q_pos.dtype, jnp.integer):
        return by_query(vectors)
    lowest = q_pos.min(axis=1) - k_pos.max(axis=1)
    fits = (q_pos.max(axis=1) - k_pos.min(axis=1) - lowest < length).all()
    return jax.lax.cond(fits, by_range, by_query, vectors)


def pair_sums(weights: jax.Array, rows: Rows, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """sum_j weights_ij rows(pos_i - pos_j) [b, h, q, d] at any positions: weights [b, h, q, k], pos [b or 1, t]."""

    def one(query: tuple[jax.Array, jax.Array]) -> jax.Array:
        weight, pos = query
        found = _broadcast_rows(jax.vmap(rows)(pos[:, None] - k_pos), weight.shape)
        return jnp.einsum("bhk,bhkd->bhd", weight, found)

    return _map_queries(one, (jnp.moveaxis(weights, 2, 0), q_pos.T))


def _broadcast_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """rows [b or 1, n, h or 1, d] as [b, h, n, d]."""
    return jnp.broadcast_to(rows.swapaxes(1, 2), (*shape[:2], rows.shape[1], rows.shape[3]))


def _map_queries(one: Callable, queries: tuple[jax.Array, ...]) -> jax.Array:
    """one() of each query, stacked as axis 2."""
    if queries[0].shape[0] == 1:
        return one(jax.tree.map(lambda x: x[0], queries))[:, :, None]
    return jnp.moveaxis(jax.lax.map(one, queries), 0, 2)
