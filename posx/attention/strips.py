"""Products with terms by distance, without an array [q, k, d].

At consecutive positions a tile of a queries and n keys has only a + n - 1 distances. Their vectors form a strip: one
product gives every query against every distance, and `skew` shifts row i by i places. At other positions the distances
of a tile are tabulated over their range, if that is no longer than the strip would be. Else they are taken query by
query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.attention.cpu import materialize, row_sums
from posx.contract import shifted_rows, table_rows, wide_dtype
from posx.machine.platforms import is_on_cpu


class Table(NamedTuple):
    """Vectors `factor` * rows [h or 1, n, d] at the distances 0 to n - 1, see `posx.contract.Tabulated`."""

    rows: jax.Array
    factor: float

    def __call__(self, distance: jax.Array) -> jax.Array:
        return table_rows(self.rows, distance).swapaxes(0, 1) * self.factor

    def products(self, vectors: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """Return <vectors_i, term at pos_i - pos_j> [b, h, q, k]. Numbers are read by distance, and not vectors."""
        (b, h, q, d), k = vectors.shape, k_pos.shape[1]
        x = (vectors * jnp.asarray(self.factor, vectors.dtype)).reshape(b, self.rows.shape[0], -1, d)
        by_distance = jnp.einsum("bgqd,gnd->bgqn", x, self.rows.astype(x.dtype)).reshape(b * h * q, -1)
        distance = jnp.broadcast_to((q_pos[:, :, None] - k_pos[:, None, :])[:, None], (b, h, q, k))
        return jax.vmap(functools.partial(table_rows, axis=0))(by_distance, distance.reshape(-1, k)).reshape(b, h, q, k)


class Made(NamedTuple):
    """The numbers [h or 1, q, k] of a tile's pairs, read before from where they are kept."""

    numbers: jax.Array


#: A term by distance of a tile. A strip has numbers [h or 1, a + n] or vectors [h or 1, a + n, d] over the distances
#: a-1, a-2, ..., or one entry that holds for all. If it is shorter, its first entry holds for all distances before it.
#: A function maps signed distances [n] to vectors [n, h or 1, d].
Term = jax.Array | Table | Callable[[jax.Array], jax.Array]


@jax.custom_vjp
def skew(x: jax.Array) -> jax.Array:
    """Return [..., a, n] of x [..., a, a + n] over distances a-1, a-2, ...: entry (i, j) is x[i, j - i + a - 1].

    The last column is never read. It is a slice of the flattened rows, which costs nothing beside the product before.
    """
    return shifted_rows(x)


@jax.custom_vjp
def unskew(w: jax.Array) -> jax.Array:
    """Apply the transpose of `skew` to w [..., a, n]: row i is a slice of w's row between zeros, from i + 1 on.

    On one CPU core a gather number by number took 2.6 times as long.
    """
    a, n = w.shape[-2:]
    if not is_on_cpu():  # the same as a shift of flattened rows, which needs no gather
        flat = jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, a - 1)]).reshape(*w.shape[:-2], -1)
        return jnp.pad(flat, [(0, 0)] * (w.ndim - 2) + [(a - 1, 1)]).reshape(*w.shape[:-1], a + n)
    padded = materialize(jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(a, a)]))
    slices = jax.vmap(functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=a + n))
    first = jnp.broadcast_to(jnp.arange(1, a + 1, dtype=jnp.int32), w.shape[:-1])
    return slices(padded.reshape(-1, n + 2 * a), first.reshape(-1)).reshape(*w.shape[:-1], a + n)


skew.defvjp(lambda x: (skew(x), None), lambda _, grad: (unskew(grad),))
unskew.defvjp(lambda w: (unskew(w), None), lambda _, grad: (skew(grad),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _toeplitz(strip: jax.Array, a: int) -> jax.Array:
    return skew(jnp.broadcast_to(strip[:, None], (strip.shape[0], a, strip.shape[1])))


def _diagonal_sums(x: jax.Array) -> jax.Array:
    """Sum x [h, a, n] along diagonals to [h, a + n], on CPUs by adding rows in pairs, then pairs of pairs."""
    (a, n), shift = x.shape[-2:], 1
    if not is_on_cpu():  # rows that are one longer move by one each when they are cut anew
        flat = jnp.pad(jnp.flip(x, axis=-2), ((0, 0), (0, 0), (0, a))).reshape(-1, a * (n + a))
        return jnp.pad(flat[:, : a * (n + a - 1)].reshape(-1, a, n + a - 1).sum(axis=1), ((0, 0), (0, 1)))
    rows = 1 << (a - 1).bit_length()
    x = jnp.pad(x, [(0, 0), (rows - a, 0), (0, 0)])
    while x.shape[-2] > 1:
        right, left = ((0, 0), (0, 0), (shift, 0)), ((0, 0), (0, 0), (0, shift))
        x, shift = jnp.pad(x[:, 0::2], right) + jnp.pad(x[:, 1::2], left), 2 * shift
    return jnp.pad(x[:, 0, : a + n - 1], ((0, 0), (0, 1)))


_toeplitz.defvjp(lambda strip, a: (_toeplitz(strip, a), None), lambda a, _, grad: (_diagonal_sums(grad),))


def toeplitz(strip: jax.Array, a: int) -> jax.Array:
    """Return [h, a, n] of a strip [h, a + n]; its gradient is sums over diagonals. One entry gives [h, 1, 1]."""
    return strip[:, :, None] if strip.shape[1] == 1 else materialize(_toeplitz(strip, a))


def prepend_far(far: jax.Array, near: jax.Array, count: int, axis: int = -1) -> jax.Array:
    """Return `near` after `count` columns, or rows, of `far`. It is a choice between arrays, which fuses."""
    axis %= near.ndim
    padded = jnp.pad(near, [(count if n == axis else 0, 0) for n in range(near.ndim)])
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, padded.shape, axis) < count, far, padded)


def far_columns(strip: jax.Array, a: int, n: int) -> int:
    """Return the number of keys of a tile [a, n], the first ones, for which the first entry of the strip holds."""
    return 0 if strip.shape[1] == 1 else n + a - strip.shape[1]


class _Fold:
    """The rows of a tile in groups, so that a tall tile is not multiplied with distances far from its own.

    A group of s rows and n columns costs (s + n) / n of a product of pairs. All sequences, and all heads that share the
    strip, are rows of one product for each group: [strips, groups, rows, ...].
    """

    def __init__(self, shape: tuple[int, ...], strips: int, n: int):
        (self.b, self.h, self.a, _), self.strips, self.n = shape, strips, n
        size = n // 2 if n % 2 == 0 else n
        self.size = size if self.a > n and self.a % size == 0 else self.a
        #: The first row of each group in the strip: later rows have larger distances, and a strip falls.
        self.firsts = range(self.a - self.size, -1, -self.size)

    def _split(self, x: jax.Array) -> jax.Array:
        """Return [strips, groups, b, heads, size, w] of [b, h, a, w]."""
        x = x.reshape(self.b, self.strips, -1, len(self.firsts), self.size, x.shape[-1])
        return x.transpose(1, 3, 0, 2, 4, 5)

    def rows(self, x: jax.Array) -> jax.Array:
        return self._split(x).reshape(self.strips, len(self.firsts), -1, x.shape[-1])

    def shift_weights(self, weights: jax.Array) -> jax.Array:
        """Return weights over pairs as rows over distances."""
        return unskew(self._split(weights)).reshape(self.strips, len(self.firsts), -1, self.size + self.n)

    def unsplit(self, x: jax.Array, by_distance: bool = False) -> jax.Array:
        """Return rows as [b, h, a, w], over pairs if they are over distances."""
        x = x.reshape(self.strips, len(self.firsts), self.b, -1, self.size, x.shape[-1])
        x = skew(x) if by_distance else x
        return x.transpose(2, 0, 3, 1, 4, 5).reshape(self.b, self.h, self.a, x.shape[-1])

    def windows(self, strip: jax.Array) -> jax.Array:
        """Return [strips, groups, size + n, d] of a strip [strips, a + n, d]."""
        return jnp.stack([strip[:, first : first + self.size + self.n] for first in self.firsts], axis=1)

    def unwindows(self, x: jax.Array) -> jax.Array:
        """Apply the transpose of `windows`."""
        around = ((first, self.a - self.size - first) for first in self.firsts)
        padded = [jnp.pad(x[:, g], ((0, 0), pad, (0, 0))) for g, pad in enumerate(around)]
        return sum(padded[1:], padded[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def strip_products(vectors: jax.Array, strip: jax.Array, n: int) -> jax.Array:
    """Return <vectors_i, strip at distance (i, j)> [b, h, a, n] of vectors [b, h, a, d]."""
    if strip.shape[1] == 1:
        heads, wide = _repeat_heads(strip, vectors.shape[1]), wide_dtype(strip.dtype)
        same = jnp.einsum("bhad,hd->bha", vectors, heads, preferred_element_type=wide)
        return jnp.broadcast_to(same[..., None], (*same.shape, n))
    fold = _Fold(vectors.shape, strip.shape[0], n)
    products = jnp.matmul(fold.rows(vectors), fold.windows(strip).mT, preferred_element_type=wide_dtype(strip.dtype))
    return fold.unsplit(products, by_distance=True)


@jax.custom_vjp
def strip_sums(weights: jax.Array, strip: jax.Array) -> jax.Array:
    """Return sum_j weights_ij strip at distance (i, j) [b, h, a, d] of weights [b, h, a, n]."""
    return _sums(strip, *_shift_weights(weights, strip))


def _repeat_heads(strip: jax.Array, num_heads: int) -> jax.Array:
    return jnp.broadcast_to(strip[:, 0], (num_heads, strip.shape[2]))


def _shift_weights(weights: jax.Array, strip: jax.Array) -> tuple[_Fold | None, jax.Array]:
    """Return the weights by distance, summed over all distances for a strip of one row."""
    if strip.shape[1] == 1:
        return None, row_sums(weights)
    fold = _Fold(weights.shape, strip.shape[0], weights.shape[-1])
    return fold, materialize(fold.shift_weights(weights.astype(strip.dtype)))


def _sums(strip: jax.Array, fold: _Fold | None, shifted: jax.Array) -> jax.Array:
    if fold is None:
        return shifted[..., None] * _repeat_heads(strip, shifted.shape[1])[None, :, None].astype(shifted.dtype)
    return fold.unsplit(jnp.matmul(shifted, fold.windows(strip), preferred_element_type=wide_dtype(strip.dtype)))


def _strip_gradient(vectors: jax.Array, shared: bool, fold: _Fold | None, shifted: jax.Array) -> jax.Array:
    """Return the gradient of a strip: vectors_i times the weight at each distance, over all that share it."""
    if fold is None:
        by_head = jnp.einsum("bhad,bha->hd", vectors.astype(shifted.dtype), shifted)
        return (by_head.sum(axis=0, keepdims=True) if shared else by_head)[:, None]
    if not is_on_cpu():
        operands = shifted, fold.rows(vectors)
        return fold.unwindows(
            jnp.einsum("sgrn,sgrd->sgnd", *operands, preferred_element_type=wide_dtype(shifted.dtype))
        )
    # The small side is transposed, so that the product contracts the minor axis of its left side.
    transposed = materialize(fold.rows(vectors).mT)
    return fold.unwindows(materialize(transposed @ shifted).mT)


def _products_backward(n: int, saved: tuple[jax.Array, jax.Array], grad: jax.Array):
    vectors, strip = saved
    shifted = _shift_weights(grad, strip)
    by_strip = _strip_gradient(vectors, strip.shape[0] == 1, *shifted)
    return _sums(strip, *shifted).astype(vectors.dtype), by_strip.astype(strip.dtype)


def _sums_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array):
    weights, strip = saved
    by_strip = _strip_gradient(grad, strip.shape[0] == 1, *_shift_weights(weights, strip))
    return strip_products(grad, strip, weights.shape[-1]).astype(weights.dtype), by_strip.astype(strip.dtype)


strip_products.defvjp(lambda *given: (strip_products(*given), given[:2]), _products_backward)
strip_sums.defvjp(lambda *given: (strip_sums(*given), given), _sums_backward)


def term_products(vectors: jax.Array, term: Term, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Return <vectors_i, term at pos_i - pos_j> [b, h, q, k] of vectors [b, h, q, d] and pos [b or 1, t]."""
    if not callable(term):
        vectors, far = vectors.astype(term.dtype), far_columns(term, q_pos.shape[1], k_pos.shape[1])
        near = strip_products(vectors, term, k_pos.shape[1] - far)
        return prepend_far(strip_products(vectors, term[:, :1], 1), near, far) if far else near
    if isinstance(term, Table):
        return term.products(vectors, q_pos, k_pos)

    def range_products(vectors: jax.Array) -> jax.Array:
        distances = lowest[:, None] + jnp.arange(length, dtype=lowest.dtype)[None, :]
        rows = _broadcast_rows(jax.vmap(term)(distances), vectors.shape)
        index = q_pos[:, None, :, None] - k_pos[:, None, None, :] - lowest[:, None, None, None]
        by_distance = jnp.einsum("bhqd,bhnd->bhqn", vectors, rows)
        return jnp.take_along_axis(by_distance, jnp.broadcast_to(index, (*vectors.shape[:3], index.shape[3])), axis=3)

    if k_pos.shape[1] == 1:  # one distance for each vector: decoding, seen from the keys
        rows = _broadcast_rows(jax.vmap(term)(q_pos - k_pos), vectors.shape)
        return row_sums(vectors * rows)[..., None]
    by_query, length = (
        functools.partial(_query_products, "bhd", "bhk", term, q_pos, k_pos),
        q_pos.shape[1] + k_pos.shape[1],
    )
    if vectors.shape[2] == 1 or not jnp.issubdtype(q_pos.dtype, jnp.integer):
        return by_query(vectors)
    lowest = q_pos.min(axis=1) - k_pos.max(axis=1)
    fits = (q_pos.max(axis=1) - k_pos.min(axis=1) - lowest < length).all()
    return jax.lax.cond(fits, range_products, by_query, vectors)


def term_sums(weights: jax.Array, term: Term, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Return sum_j weights_ij term at pos_i - pos_j [b, h, q, d] of weights [b, h, q, k] and pos [b or 1, t]."""
    if callable(term):
        return _query_products("bhk", "bhd", term, q_pos, k_pos, weights)
    far = far_columns(term, q_pos.shape[1], k_pos.shape[1])
    near = strip_sums(weights[..., far:], term)
    return near + strip_sums(weights[..., :far], term[:, :1]) if far else near


def term_numbers(term: Term | Made, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Return the numbers of a term at pos_i - pos_j, [b or 1, h or 1, q, k], pos [b or 1, t]."""
    if isinstance(term, Made):
        return term.numbers[None]
    if not callable(term):
        near, far = toeplitz(term, q_pos.shape[1]), far_columns(term, q_pos.shape[1], k_pos.shape[1])
        return (prepend_far(term[:, :1, None], near, far) if far else near)[None]
    one, b = term(jnp.zeros(1, q_pos.dtype)), max(q_pos.shape[0], k_pos.shape[0])
    with jax.default_matmul_precision("highest"):  # accelerators would round numbers as they round vectors
        return term_products(jnp.ones((b, one.shape[1], q_pos.shape[1], 1), one.dtype), term, q_pos, k_pos)


def products_of_keys(vectors: jax.Array, term: Term, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Return <vectors_j, term at pos_i - pos_j> [b, h, k, q] of vectors [b, h, k, d]: a strip is reversed."""
    if callable(term):
        return term_products(vectors, lambda distance: term(-distance), k_pos, q_pos)
    far, vectors, back = far_columns(term, q_pos.shape[1], k_pos.shape[1]), vectors.astype(term.dtype), term
    if term.shape[1] > 1:  # its unread row is still last
        back = jnp.concatenate([jnp.flip(term[:, :-1], axis=1), term[:, -1:]], axis=1)
    near = term_products(vectors[:, :, far:] if far else vectors, back, k_pos[:, far:] if far else k_pos, q_pos)
    return prepend_far(strip_products(vectors, term[:, :1], 1), near, far, axis=2) if far else near


def _broadcast_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return rows [b or 1, n, h or 1, d] as [b, h, n, d]."""
    return jnp.broadcast_to(rows.swapaxes(1, 2), (*shape[:2], rows.shape[1], rows.shape[3]))


def _query_products(
    given: str, gives: str, term: Any, q_pos: jax.Array, k_pos: jax.Array, arrays: jax.Array
) -> jax.Array:
    """Return products of arrays with a term, query by query: [b, h, q, d] -> [b, h, q, k], or back.

    given, gives: the axes of one query, "bhd" and "bhk", or the reverse.
    """

    def one(query: tuple[jax.Array, jax.Array]) -> jax.Array:
        (x, pos), letters = query, "bhkd"
        rows = jax.vmap(term)(pos[:, None] - k_pos)
        if rows.shape[2] == 1:  # heads that share rows need one product together
            letters, rows = "bkd", jnp.broadcast_to(rows[:, :, 0], (x.shape[0], rows.shape[1], rows.shape[3]))
        else:
            rows = _broadcast_rows(rows, x.shape)
        return jnp.einsum(f"{given},{letters}->{gives}", x, rows)

    queries = jnp.moveaxis(arrays, 2, 0), q_pos.T
    if arrays.shape[2] == 1:
        return one((queries[0][0], queries[1][0]))[:, :, None]
    return jnp.moveaxis(jax.lax.map(one, queries), 0, 2)
