"""What every executor works on: one layer's tokens, heads first, and the formula of `encodings.base` for one tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.attention import cut, relative
from posx.attention.masks import Mask
from posx.attention.products import mapped_products, over_batch, repeat_heads
from posx.encodings.base import BIASES, Encoding, Features, Params, Relative, Tile, acting, wide_dtype
from posx.machine.compiler import apart

#: The score of an invisible pair: below every finite one, however low a bias may push those.
INVISIBLE = -math.inf

#: Scores of all sequences together from which on they go through `score` one by one on a CPU core: a MiB of float32.
LARGE = 2**18


class Tokens(NamedTuple):
    """Floats that carry gradients, for the query side or the key side. What no hook reads is None."""

    #: [b, h, q, d'] after `query`, times factor / sqrt(d), or [b, g, k, d'] after `key`; [.., n, d'] of n regimes.
    mapped: jax.Array
    values: Any  # [b, g, k, d] after the `value` hook; None on the query side
    vectors: Any  # [b, h, q, d] or [b, g, k, d] as projected, for `relative` and `score`
    unscaled: Any  # as mapped, queries after `query` alone, for `score`
    factor: Any  # [b or 1, h or 1, q, 1] the temperature, for `relative` and `score`; None where there is none
    potential: Any  # [b or 1, h or 1, t, n], in parts; None where there is none
    features: Features  # {name: [b, t, ...]}


class Slots(NamedTuple):
    """Where and when the tokens of one side stand; a first axis of 1 is shared by all sequences."""

    pos: jax.Array  # [b or 1, t] what encodings read
    idx: jax.Array  # [b or 1, t] arrival order, -1 for an empty slot
    segment: jax.Array | None  # [b or 1, t] document number


class Block(NamedTuple):
    """Tokens of one side, and where they stand."""

    tokens: Tokens
    slots: Slots


class Order(NamedTuple):
    """What the host knows of where tokens stand.

    in_order: queries and keys are the same tokens, idx counts up from 0. offset: where both sides' positions are
    consecutive, the first query's less the first key's; else None.
    """

    in_order: bool = False
    offset: int | None = None


class Strips(NamedTuple):
    """`curve` and `relative` over a run of distances, falling by one from row to row; one row stands for all."""

    curve: Any  # [h, n] or None
    relative: Relative  # vectors [h or 1, n, d] or None, bias [h or 1, n] or None


class Pairs(NamedTuple):
    """One rectangle of queries against keys.

    `strips` holds its distances where they are consecutive; None evaluates the hooks at the positions.
    """

    q: Block
    k: Block
    strips: Strips | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.q.slots.idx.shape[1], self.k.slots.idx.shape[1]

    @property
    def pos(self) -> tuple[jax.Array, jax.Array]:
        return self.q.slots.pos, self.k.slots.pos


def visible_pairs(mask: Mask, q: Slots, k: Slots) -> jax.Array:
    """bool [b or 1, q, k]: the mask by arrival order, and only within one segment."""
    seen = over_batch(mask.visible, q.idx, k.idx)
    if q.segment is not None and k.segment is not None:
        seen &= q.segment[:, :, None] == k.segment[:, None, :]
    return seen


def hidden(s: jax.Array, visible: jax.Array, masked: bool) -> jax.Array:
    """Scores [b, h, q, k] of a tile, without its invisible pairs where it is masked."""
    return jnp.where(visible[:, None], s, INVISIBLE) if masked else s


def weighted(w: jax.Array, v: jax.Array) -> jax.Array:
    """sum_j w_ij v_j, at least float32: w [b, h, q, k], v [b, g, k, d] -> [b, h, q, d]."""
    b, h, q, k = w.shape
    w = w.reshape(b, v.shape[1], -1, k).astype(v.dtype)
    o = jnp.einsum("bgqk,bgkd->bgqd", w, v, preferred_element_type=wide_dtype(v.dtype))
    return o.reshape(b, h, q, -1)


def finite(term: jax.Array | None) -> jax.Array | None:
    """A term of scores, with a very low number for -inf: it hides a pair wherever the query sees another one."""
    return None if term is None else jnp.maximum(term, jnp.finfo(term.dtype).min / 2)


def scores(encoding: Encoding, params: Params, pairs: Pairs, visible: jax.Array) -> jax.Array:
    """Scores [b, h, q, k] of a tile: products of mapped vectors, and all that position adds. visible [b or 1, q, k] is
    not applied yet."""
    s = mapped_products(encoding, params, pairs.pos, pairs.q.tokens.mapped, pairs.k.tokens.mapped)
    return adjusted(encoding, params, s, pairs, visible)


def adjusted(encoding: Encoding, params: Params, s: jax.Array, pairs: Pairs, visible: jax.Array) -> jax.Array:
    """Scores [b, h, q, k] from products s: all that position adds. visible [b or 1, q, k] is not applied yet."""
    for term in _score_terms(encoding, params, pairs):
        term = term.astype(s.dtype)
        shared = term.shape[0] == 1 and term.shape[1:] == s.shape[1:]
        s = relative.plus_shared(s, term) if shared else s + term
    return _content_scores(encoding, params, s, pairs, visible) if encoding.acts_on("score") else s


def _score_terms(encoding: Encoding, params: Params, pairs: Pairs) -> list[jax.Array]:
    """Bias and relative vectors, each [b or 1, h or 1, q, k]."""
    terms: list[jax.Array | None] = []
    if pairs.strips is not None and pairs.strips.curve is not None:
        terms.append(relative.toeplitz(pairs.strips.curve, *pairs.size)[None])
    else:
        terms.append(score_bias(encoding, params, *pairs.pos))
    if encoding.acts_on("potential"):
        q, k = pairs.q.tokens.potential, pairs.k.tokens.potential
        terms.append((q[..., :, None, :] - k[..., None, :, :]).sum(axis=-1))
    if encoding.acts_on("relative"):
        terms += _relative_scores(encoding, params, pairs)
    return [term for term in terms if term is not None]


def score_bias(encoding: Encoding, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
    """The `bias` hook over a batch: finite [b or 1, h or 1, q, k], or None."""
    if not acting(encoding, BIASES):
        return None
    return finite(over_batch(lambda *pos: encoding.bias(params, *pos), q_pos, k_pos))


def _relative_scores(encoding: Encoding, params: Params, pairs: Pairs) -> list[jax.Array]:
    """factor_i / sqrt(d) times <q_i, a_r>, <k_j, b_r> and e_r: [b, h, q, k], the last [b or 1, h or 1, q, k].

    The root is in the vectors by distance, of which there are the fewest.
    """
    q, k, terms = pairs.q.tokens, pairs.k.tokens, []
    dtype = wide_dtype(q.mapped.dtype)
    given = _by_distance(encoding, params, pairs, dtype)
    if given.has.query is not None:
        terms.append(given.with_queries(times(q.vectors.astype(dtype), q.factor)))
    if given.has.key is not None:
        seen = given.with_keys(repeat_heads(k.vectors.astype(dtype), q.mapped.shape[1]))
        terms.append(times(seen.swapaxes(2, 3), q.factor))
    if given.has.bias is not None:
        terms.append(times(given.of_pairs(), q.factor))
    return terms


def value_terms(encoding: Encoding, params: Params, w: jax.Array, pairs: Pairs) -> jax.Array | None:
    """What position adds to the outputs for weights w [b, h, q, k], linear in them: [b, h, q, d] or None."""
    terms = []
    if encoding.acts_on("mix"):
        mixed = over_batch(lambda w, *pos: encoding.mix(params, w, *pos), w, *pairs.pos)
        if mixed is not None:
            terms.append(mixed.swapaxes(1, 2))
    if encoding.acts_on("relative"):
        given = _by_distance(encoding, params, pairs, w.dtype)
        if given.has.value is not None:
            terms.append(given.weighted_by(w))
    return sum(terms[1:], terms[0]).astype(w.dtype) if terms else None


class _FromStrips(NamedTuple):
    """What `relative` gives for a rectangle of consecutive distances."""

    has: Relative
    size: tuple[int, int]
    dtype: Any

    def with_queries(self, vectors: jax.Array) -> jax.Array:
        return relative.strip_products(vectors, self.has.query.astype(self.dtype), self.size[1])

    def with_keys(self, vectors: jax.Array) -> jax.Array:
        return relative.strip_products(vectors, relative.mirrored(self.has.key.astype(self.dtype)), self.size[0])

    def of_pairs(self) -> jax.Array:
        return relative.toeplitz(self.has.bias.astype(self.dtype), *self.size)[None]

    def weighted_by(self, w: jax.Array) -> jax.Array:
        return relative.strip_sums(w, self.has.value.astype(self.dtype))


class _FromPositions(NamedTuple):
    """The same at any positions. `has` is shapes alone, and nothing is computed for it."""

    has: Relative
    pos: tuple[jax.Array, jax.Array]
    rows: Callable[[str], relative.Rows]
    dtype: Any

    def with_queries(self, vectors: jax.Array) -> jax.Array:
        return relative.pair_products(vectors, self.rows("query"), *self.pos)

    def with_keys(self, vectors: jax.Array) -> jax.Array:
        rows = self.rows("key")
        return relative.pair_products(vectors, lambda distance: rows(-distance), *reversed(self.pos))

    def of_pairs(self) -> jax.Array:
        (q_pos, k_pos), rows = self.pos, self.rows("bias")
        ones = jnp.ones((max(q_pos.shape[0], k_pos.shape[0]), self.has.bias.shape[1], q_pos.shape[1], 1), self.dtype)
        return relative.pair_products(ones, lambda distance: rows(distance)[..., None], q_pos, k_pos)

    def weighted_by(self, w: jax.Array) -> jax.Array:
        return relative.pair_sums(w, self.rows("value"), *self.pos)


def _by_distance(encoding: Encoding, params: Params, pairs: Pairs, dtype: Any) -> _FromStrips | _FromPositions:
    if pairs.strips is not None:
        return _FromStrips(pairs.strips.relative, pairs.size, dtype)
    queries = pairs.q.tokens.vectors

    def rows(name: str) -> relative.Rows:
        return lambda distance: getattr(by_distance(encoding, params, distance, queries), name).astype(dtype)

    has = jax.eval_shape(encoding.relative, params, jax.ShapeDtypeStruct((1,), pairs.q.slots.pos.dtype))
    return _FromPositions(has, pairs.pos, rows, dtype)


def by_distance(encoding: Encoding, params: Params, distance: jax.Array, queries: jax.Array) -> Relative:
    """The `relative` hook at distances [n], what it adds to scores divided by the root of the queries' [..., d]."""
    found, root = encoding.relative(params, distance), math.sqrt(queries.shape[-1])
    found = found._replace(bias=finite(found.bias))
    return apart(Relative(*(x if x is None or x is found.value else x / root for x in found)))


def _content_scores(encoding: Encoding, params: Params, s: jax.Array, pairs: Pairs, seen: jax.Array) -> jax.Array:
    """The `score` hook over a batch: s [b, h, q, k], seen [b or 1, q, k]."""
    q, k, num_heads = pairs.q.tokens, pairs.k.tokens, s.shape[1]

    def one(s: jax.Array, tile: Tile) -> jax.Array | None:
        q, k, mapped_q, mapped_k = (x.swapaxes(0, 1) for x in (tile.q, tile.k, tile.mapped_q, tile.mapped_k))
        return finite(encoding.score(params, s, tile._replace(q=q, k=k, mapped_q=mapped_q, mapped_k=mapped_k)))

    k_vectors, mapped_k = (repeat_heads(x, num_heads) for x in (k.vectors, k.mapped))
    temperature = jnp.ones((1, 1, 1, 1), s.dtype) if q.factor is None else q.factor
    tile = Tile(q.vectors, k_vectors, q.unscaled, mapped_k, q.features, k.features, *pairs.pos, temperature, seen)
    return over_batch(one, s, tile, in_turn=_is_large(s))


def _is_large(s: jax.Array) -> bool:
    """Whether what `score` makes of all sequences at once would leave a core's cache, and one by one does not."""
    return cut.is_one_core() and s.shape[0] > 1 and s.size >= LARGE


def times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor
