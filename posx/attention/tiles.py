"""The formula for one tile, a rectangle of queries against keys: what every executor evaluates.

The stages in order: `mapped_products`, then `adjusted` adds the terms by distance, the biases and `score`; `hidden`
masks; after the softmax, `weighted` and `value_terms` make outputs.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.attention import sharding, strips
from posx.attention.arguments import Slots
from posx.attention.cpu import plus_shared
from posx.attention.masks import Mask
from posx.attention.products import mapped_products, over_batch, repeat_heads
from posx.contract import ByDistance, Encoding, Features, Params, Tile, bias_by_distance, distance_terms, wide_dtype
from posx.machine.guard import barrier

#: The score of an invisible pair: below every finite one, however low a bias may push those.
INVISIBLE = -math.inf

#: Scores of all sequences together from which on they go through `score` one by one on a CPU core: a MiB of float32.
LARGE = 2**18


class Tokens(NamedTuple):
    """Floats that carry gradients, of the query side or the key side. An array that no hook reads is None."""

    #: [b, h, q, d'] after `query`, times factor / sqrt(d), or [b, g, k, d'] after `key`.
    mapped: jax.Array
    values: Any  # [b, g, k, d]; None on the query side
    vectors: Any  # [b, h, q, d] or [b, g, k, d] as projected, for `by_distance` and `score`
    unscaled: Any  # [b, h, q, d'] after `query` alone, for `score`
    factor: Any  # [b or 1, h or 1, q, 1] of `logit_scale`, for `by_distance` and `score`; None for 1
    token_bias: Any  # [b or 1, h or 1, t, n], as n summands
    features: Features  # {name: [b, t, ...]}


class Block(NamedTuple):
    """Tokens of one side and their slots, arrays with a first axis of b, or of 1 if all sequences share them."""

    tokens: Tokens
    slots: Slots


class Arrangement(NamedTuple):
    """The order of tokens, as far as it is known before tracing.

    in_order: queries and keys are the same tokens, idx counts up from 0. offset: the first query's position less the
    first key's if both sides' positions count up by 1, else None.
    """

    in_order: bool = False
    offset: int | None = None


class Pairs(NamedTuple):
    """One rectangle of queries against keys.

    strips: the terms by distance of its consecutive distances, as `strips.tabulate` makes them; None evaluates the hook
    at the positions.
    """

    q: Block
    k: Block
    strips: ByDistance | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.q.slots.idx.shape[1], self.k.slots.idx.shape[1]

    @property
    def pos(self) -> tuple[jax.Array, jax.Array]:
        return self.q.slots.pos, self.k.slots.pos


def visible_pairs(mask: Mask, q: Slots, k: Slots) -> jax.Array:
    """Return bool [b or 1, q, k]: the mask by arrival order, and only within one document."""
    seen = over_batch(mask.visible, q.idx, k.idx)
    if q.segment is not None and k.segment is not None:
        seen &= q.segment[:, :, None] == k.segment[:, None, :]
    return seen


def hidden(s: jax.Array, visible: jax.Array, masked: bool) -> jax.Array:
    """Return scores [b, h, q, k] of a tile without its invisible pairs, if it is masked."""
    return jnp.where(visible[:, None], s, INVISIBLE) if masked else s


def weighted(w: jax.Array, v: jax.Array) -> jax.Array:
    """Return sum_j w_ij v_j, at least float32: w [b, h, q, k], v [b, g, k, d] -> [b, h, q, d]."""
    b, h, q, k = w.shape
    w = w.reshape(b, v.shape[1], -1, k).astype(v.dtype)
    o = jnp.einsum("bgqk,bgkd->bgqd", w, v, preferred_element_type=wide_dtype(v.dtype))
    return o.reshape(b, h, q, -1)


def finite(term: jax.Array | None) -> jax.Array | None:
    """Return a term of scores with a very low number for -inf: it masks a pair if the query sees another one."""
    return None if term is None else jnp.maximum(term, jnp.finfo(term.dtype).min / 2)


def scores(encoding: Encoding, params: Params, pairs: Pairs, visible: jax.Array) -> jax.Array:
    """Return scores [b, h, q, k] of a tile. visible [b or 1, q, k] is not applied yet."""
    s = mapped_products(encoding, params, pairs.pos, pairs.q.tokens.mapped, pairs.k.tokens.mapped)
    return adjusted(encoding, params, s, pairs, visible)


def adjusted(encoding: Encoding, params: Params, s: jax.Array, pairs: Pairs, visible: jax.Array) -> jax.Array:
    """Return scores [b, h, q, k] from products s of mapped vectors. visible [b or 1, q, k] is not applied yet."""
    s = with_terms(encoding, params, s, pairs)
    return _content_scores(encoding, params, s, pairs, visible) if encoding.acts_on("score") else s


def with_terms(encoding: Encoding, params: Params, s: jax.Array, pairs: Pairs) -> jax.Array:
    """Return products s [b, h, q, k] plus the biases and the terms by distance: all that `score` is given."""
    for term in _score_terms(encoding, params, pairs):
        term = term.astype(s.dtype)
        shared = term.shape[0] == 1 and term.shape[1:] == s.shape[1:]
        s = plus_shared(s, term) if shared else s + term
    return s


def _score_terms(encoding: Encoding, params: Params, pairs: Pairs) -> list[jax.Array]:
    """Return the biases and the terms by distance, each [b or 1, h or 1, q, k]."""
    terms: list[jax.Array | None] = []
    if pairs.strips is None:
        terms.append(_bias_by_distance(encoding, params, *pairs.pos))
    elif pairs.strips.bias is not None:
        terms.append(strips.toeplitz(pairs.strips.bias, *pairs.size)[None])
    terms.append(_bias(encoding, params, *pairs.pos))
    if encoding.acts_on("token_bias"):
        q, k = pairs.q.tokens.token_bias, pairs.k.tokens.token_bias
        terms.append((q[..., :, None, :] - k[..., None, :, :]).sum(axis=-1))
    return [term for term in (*terms, *_scaled_scores(encoding, params, pairs)) if term is not None]


def _bias_by_distance(encoding: Encoding, params: Params, *pos: jax.Array) -> jax.Array | None:
    """Return the bias of `by_distance` over a batch, finite [b or 1, h or 1, q, k], or None."""
    return finite(over_batch(lambda *pos: bias_by_distance(encoding, params, *pos), *pos))


def _bias(encoding: Encoding, params: Params, *pos: jax.Array) -> jax.Array | None:
    """Return the hook `bias` over a batch, finite [b or 1, h or 1, q, k], or None if it does not act."""
    return finite(over_batch(lambda *pos: encoding.bias(params, *pos), *pos)) if encoding.acts_on("bias") else None


def content_free_bias(encoding: Encoding, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array | None:
    """Return the sum of both biases that depend on positions alone, finite [b or 1, h or 1, q, k], or None."""
    by_distance, bias = _bias_by_distance(encoding, params, q_pos, k_pos), _bias(encoding, params, q_pos, k_pos)
    return bias if by_distance is None else by_distance if bias is None else by_distance + bias


def _scaled_scores(encoding: Encoding, params: Params, pairs: Pairs) -> list[jax.Array]:
    """Return factor_i / sqrt(d) times <q_i, query_r>, <k_j, key_r> and scaled_r: [b, h, q, k], or [b or 1, h or 1, ..].

    The root is in the terms by distance, of which there are the fewest.
    """
    q, k, (a, n), found = pairs.q.tokens, pairs.k.tokens, pairs.size, []
    dtype, rows = wide_dtype(q.mapped.dtype), _rows(encoding, params, pairs)
    if "query" in rows:
        vectors = times(q.vectors.astype(dtype), q.factor)
        if pairs.strips is None:
            found.append(strips.pair_products(vectors, rows["query"], *pairs.pos))
        else:
            found.append(strips.strip_products(vectors, pairs.strips.query.astype(dtype), n))
    if "key" in rows:
        vectors = repeat_heads(k.vectors.astype(dtype), q.mapped.shape[1])
        if pairs.strips is None:
            seen = strips.pair_products(vectors, lambda r: rows["key"](-r), *reversed(pairs.pos))
        else:
            seen = strips.strip_products(vectors, strips.mirrored(pairs.strips.key.astype(dtype)), a)
        found.append(times(seen.swapaxes(2, 3), q.factor))
    if "scaled" in rows:
        if pairs.strips is None:
            heads, (q_pos, k_pos) = rows["scaled"](jnp.zeros(1, pairs.pos[0].dtype)).shape[1], pairs.pos
            ones = jnp.ones((max(q_pos.shape[0], k_pos.shape[0]), heads, q_pos.shape[1], 1), dtype)
            term = strips.pair_products(ones, rows["scaled"], q_pos, k_pos)
        else:
            term = strips.toeplitz(pairs.strips.scaled.astype(dtype), a, n)[None]
        found.append(times(term, q.factor))
    return found


def value_terms(encoding: Encoding, params: Params, w: jax.Array, pairs: Pairs) -> jax.Array | None:
    """Return sum_j w_ij value_r for weights w [b, h, q, k], linear in them: [b, h, q, d], or None."""
    rows = _rows(encoding, params, pairs)
    if "value" not in rows:
        return None
    if pairs.strips is None:
        return strips.pair_sums(w, lambda r: rows["value"](r).astype(w.dtype), *pairs.pos)
    return strips.strip_sums(w, pairs.strips.value.astype(w.dtype))


def _rows(encoding: Encoding, params: Params, pairs: Pairs) -> dict[str, strips.Rows]:
    """Return the terms inside the scale as functions of distances [n] to rows [n, h or 1, d or 1], by name.

    If the terms are in strips, only their names count.
    """
    if pairs.strips is not None:
        return {name: None for name, strip in pairs.strips._asdict().items() if strip is not None}  # type: ignore[misc]
    dtype, queries = wide_dtype(pairs.q.tokens.mapped.dtype), pairs.q.tokens.vectors

    def rows(name: str, distance: jax.Array) -> jax.Array:
        found = getattr(scaled_terms(encoding, params, distance, queries), name)
        return (found.T[..., None] if name == "scaled" else found).astype(dtype)

    terms = distance_terms(encoding, params, pairs.pos[0].dtype)
    return {name: functools.partial(rows, name) for name in terms if name != "bias"}


def scaled_terms(encoding: Encoding, params: Params, distance: jax.Array, queries: jax.Array) -> ByDistance:
    """Return `by_distance` at distances [n] without its bias; all that adds to scores is divided by sqrt(d).

    queries: vectors [..., d] as projected.
    """
    found, root = encoding.by_distance(params, distance), math.sqrt(queries.shape[-1])
    found = found._replace(bias=None, scaled=finite(found.scaled))
    return barrier(ByDistance(*(x if x is None or x is found.value else x / root for x in found)))


def _content_scores(encoding: Encoding, params: Params, s: jax.Array, pairs: Pairs, seen: jax.Array) -> jax.Array:
    """Return the `score` hook over a batch: s [b, h, q, k], seen [b or 1, q, k]."""
    q, k, num_heads = pairs.q.tokens, pairs.k.tokens, s.shape[1]

    def one(s: jax.Array, tile: Tile) -> jax.Array | None:
        q, k, mapped_q, mapped_k = (x.swapaxes(0, 1) for x in (tile.q, tile.k, tile.mapped_q, tile.mapped_k))
        return finite(encoding.score(params, s, tile._replace(q=q, k=k, mapped_q=mapped_q, mapped_k=mapped_k)))

    k_vectors, mapped_k = (repeat_heads(x, num_heads) for x in (k.vectors, k.mapped))
    factor = jnp.ones((1, 1, 1, 1), s.dtype) if q.factor is None else q.factor
    tile = Tile(q.vectors, k_vectors, q.unscaled, mapped_k, q.features, k.features, *pairs.pos, factor, seen)
    in_turn = sharding.is_one_core() and s.shape[0] > 1 and s.size >= LARGE  # all at once would leave the core's cache
    return over_batch(one, s, tile, in_turn=in_turn)


def times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor
