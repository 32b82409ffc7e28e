"""The formula for one tile, a rectangle of queries against keys: what every executor evaluates.

The stages in order: `mapped_products` (decay.py); `with_terms` adds the biases and the terms by distance;
`adjust_scores` also applies `score`; `hide_pairs` masks. `sinks` adds an entry to each softmax. After it, `sum_values`
and `value_terms` make outputs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import sharding, strips
from posx.attention.arguments import Slots
from posx.attention.cpu import plus_shared
from posx.attention.masks import Mask
from posx.contract import (
    ByDistance,
    Encoding,
    Params,
    Tabulated,
    Tile,
    bias_by_distance,
    defined_hooks,
    distance_terms,
    wide_dtype,
)
from posx.machine.guard import barrier
from posx.machine.platforms import is_on_cpu

#: The score of an invisible pair: below every finite one, however low a bias may push those.
INVISIBLE = -math.inf
#: The lowest score of a visible pair, above JAX's of an invisible one, -0.7 of the largest float32. As a power of two
#: it has an exact product with log2(e), and twice the number is still finite.
LOWEST = -(2.0**126)
#: Scores of all sequences together from which on they go through `score` one by one on a CPU core: a MiB of float32.
LARGE = 2**18


class Tokens(NamedTuple):
    """Floats that carry gradients, of the query side or the key side. An array that no hook reads is None."""

    #: [b, h, q, d'] after `query`, times factor / sqrt(d), or [b, g, k, d'] after `key`.
    mapped: jax.Array
    values: Any = None  # [b, g, k, d]; None on the query side
    vectors: Any = None  # [b, h, q, d] or [b, g, k, d] as projected, for `by_distance` and `score`
    unscaled: Any = None  # [b, h, q, d'] after `query` alone, for `score`
    factor: Any = None  # [b or 1, h or 1, q, 1] of `logit_scale`, for `by_distance` and `score`; None for 1
    token_bias: Any = None  # [b or 1, h or 1, t, n], as n summands
    features: Any = None  # {name: [b, t, ...]}, for `score`


class Block(NamedTuple):
    """Tokens of one side and their slots, arrays with a first axis of b, or of 1 if all sequences share them."""

    tokens: Tokens
    slots: Slots
    number: Any = None  # of this block among all, if there are several
    fixed: Any = None  # numbers of tokens, [b or 1, h or 1, t] each, that a score in a kernel reads, without gradients


class SharedArrays(NamedTuple):
    """Arrays that all queries and keys share.

    Attributes:
      params: {} if no hook reads them in a tile.
      strips: the terms by distance at the consecutive distances of the pairs, as `plan.tabulate` makes them. None
        evaluates the hook at the positions.
      sink: what `sinks` returns for all tiles of a row together; None in a tile.
    """

    params: Params
    strips: ByDistance | None = None
    sink: Any = None


class TileInputs(NamedTuple):
    """One rectangle of queries against keys: a whole call, or a tile of it."""

    encoding: Encoding
    mask: Mask
    tables: SharedArrays
    q: Block
    k: Block

    @property
    def pos(self) -> tuple[jax.Array, jax.Array]:
        return self.q.slots.pos, self.k.slots.pos

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.q.slots.idx.shape[1], self.k.slots.idx.shape[1]


def map_batch(function: Callable[..., Any], *arrays: Any, in_turn: bool = False) -> Any:
    """Map `function` of one sequence over first axes, which are b, or 1 for what all sequences share.

    in_turn: in a loop.
    """
    leaves, tree = jax.tree.flatten(arrays)
    if (size := max(map(len, leaves))) == 1:  # a condition then stays one, which `vmap` evaluates both ways
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(operator.itemgetter(0), arrays)))
    own = [x for x in leaves if x.shape[0] == size]

    def one(own: list[jax.Array]) -> Any:
        each = iter(own)
        return function(*jax.tree.unflatten(tree, [next(each) if x.shape[0] == size else x[0] for x in leaves]))

    return jax.lax.map(one, own) if in_turn else jax.vmap(one)(own)


def visible_pairs(mask: Mask, q: Slots, k: Slots) -> jax.Array:
    """Return bool [b or 1, q, k]: the mask by arrival order, and only within one document."""
    seen = map_batch(mask.visible, q.idx, k.idx)
    if q.segment is not None and k.segment is not None:
        seen &= q.segment[:, :, None] == k.segment[:, None, :]
    return seen


def hide_pairs(s: jax.Array, visible: jax.Array, masked: bool) -> jax.Array:
    """Return scores [b, h, q, k] of a tile without its invisible pairs, if it is masked."""
    return jnp.where(visible[:, None], s, INVISIBLE) if masked else s


def products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Return <q_i, k_j> [b, h, q, k], at least float32, of q [b, h, q, d] and k [b, g, k, d]."""
    b, h, _, d = q.shape
    s = jnp.einsum("bgqd,bgkd->bgqk", q.reshape(b, k.shape[1], -1, d), k, preferred_element_type=wide_dtype(q.dtype))
    return s.reshape(b, h, -1, k.shape[2])


def sum_values(w: jax.Array, v: jax.Array) -> jax.Array:
    """Return sum_j w_ij v_j, at least float32: w [b, h, q, k], v [b, g, k, d] -> [b, h, q, d]."""
    b, h, q, k = w.shape
    w = w.reshape(b, v.shape[1], -1, k).astype(v.dtype)
    o = jnp.einsum("bgqk,bgkd->bgqd", w, v, preferred_element_type=wide_dtype(v.dtype))
    return o.reshape(b, h, q, -1)


def repeat_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """Return [b, h, k, d] of [b, g, k, d]: each key/value head serves h/g query heads."""
    return x if x.shape[1] == num_heads else jnp.repeat(x, num_heads // x.shape[1], axis=1)


def times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor


def finite_term(term: Any) -> Any:
    """Return a term of scores, or None, with a very low number for -inf: it masks a pair if the query sees another one.

    A sum of such terms is made finite again: a pair that is masked twice is as low as one that is masked once.
    """
    if term is None:
        return None
    lowest = max(LOWEST, float(jnp.finfo(term.dtype).min) / 2)  # the second for float16
    return jnp.where(term < lowest, lowest, term)  # not a maximum, which loses a NaN in Triton


def with_terms(pairs: TileInputs, s: jax.Array) -> jax.Array:
    """Return products s [b, h, q, k] plus the biases and the terms by distance: all that `score` is given."""
    (params, table, _), by_token = pairs.tables, list[jax.Array]()
    biases = _position_biases(pairs.encoding, params, *pairs.pos, table)
    if "token_bias" in defined_hooks(pairs.encoding):
        by_token = [bias_difference(pairs.q.tokens.token_bias, pairs.k.tokens.token_bias)]
    by_distance = list(distance_products(pairs))
    for term in [*biases, *by_token, *by_distance]:  # each [b or 1, h or 1, q, k]
        term = term.astype(s.dtype)
        shared = term.shape[0] == 1 and term.shape[1:] == s.shape[1:]
        s = plus_shared(s, term) if shared else s + term
    return finite_term(s) if len(biases) + bool(by_distance) > 1 else s


def distance_products(pairs: TileInputs) -> Iterator[jax.Array]:
    """Yield factor_i / sqrt(d) times <q_i, query_r>, <k_j, key_r> and scaled_r, each [b or 1, h or 1, q, k].

    The root is in the terms by distance, of which there are the fewest.
    """
    if not (terms := _terms(pairs)):
        return
    q, k, dtype = pairs.q.tokens, pairs.k.tokens, wide_dtype(pairs.q.tokens.mapped.dtype)
    if "query" in terms:
        yield strips.term_products(times(q.vectors.astype(dtype), q.factor), terms["query"], *pairs.pos)
    if "key" in terms:
        vectors = repeat_heads(k.vectors.astype(dtype), q.mapped.shape[1])
        seen = strips.products_of_keys(vectors, terms["key"], *pairs.pos)
        yield times(seen.swapaxes(2, 3), q.factor)
    if "scaled" in terms:
        yield times(strips.term_numbers(terms["scaled"], *pairs.pos), q.factor)


def bias_difference(by_q: Any, by_k: Any) -> jax.Array:
    """Return u_i - u_j [b or 1, h or 1, q, k] of token biases [b or 1, h or 1, t, n], or of a tuple of n arrays."""
    if isinstance(by_q, tuple):
        return sum(a[..., :, None] - b[..., None, :] for a, b in zip(by_q, by_k, strict=True))  # type: ignore[return-value]
    return (by_q[..., :, None, :] - by_k[..., None, :, :]).sum(axis=-1)


def _position_biases(
    encoding: Encoding, params: Params, q_pos: jax.Array, k_pos: jax.Array, table: ByDistance | None = None
) -> list[jax.Array]:
    """Return the bias of `by_distance`, out of its strip if there is one, and `bias`: [b or 1, h or 1, q, k] each."""

    def pair_bias(hook: Callable[..., Any]) -> jax.Array | None:
        return finite_term(map_batch(functools.partial(hook, params), q_pos, k_pos))

    if table is None:
        biases = [pair_bias(functools.partial(bias_by_distance, encoding))]
    else:
        biases = [None if table.bias is None else strips.term_numbers(table.bias, q_pos, k_pos)]
    biases += [pair_bias(encoding.bias)] if "bias" in defined_hooks(encoding) else []
    return [x for x in biases if x is not None]


def bias_strip(encoding: Encoding, params: Params, distances: np.ndarray) -> jax.Array | None:
    """Return the finite bias at known distances [n], [h or 1, n], or None."""
    return finite_term(encoding.by_distance(params, jnp.asarray(distances, jnp.int32)).bias)


def content_free_bias(
    encoding: Encoding, params: Params, q_pos: jax.Array, k_pos: jax.Array, table: ByDistance | None = None
) -> jax.Array | None:
    """Return the sum of both biases that depend on positions alone, finite [b or 1, h or 1, q, k], or None.

    table: the strip of the bias by distance, None to evaluate it at the positions.
    """
    biases = _position_biases(encoding, params, q_pos, k_pos, table)
    return finite_term(operator.add(*biases)) if len(biases) > 1 else next(iter(biases), None)


def value_terms(pairs: TileInputs, w: jax.Array) -> jax.Array | None:
    """Return sum_j w_ij value_r for weights w [b, h, q, k], linear in them: [b, h, q, d], or None."""
    terms = _terms(pairs)
    return strips.term_sums(w, terms["value"], *pairs.pos) if "value" in terms else None


def _terms(pairs: TileInputs) -> dict[str, strips.Term]:
    """Return the terms of `by_distance` by name, but for its bias, at least float32: {} if no hook reads vectors."""
    if pairs.q.tokens.vectors is None:
        return {}
    encoding, (params, table, _), q = pairs.encoding, pairs.tables, pairs.q.tokens
    dtype = wide_dtype(q.mapped.dtype)
    if table is not None:
        types = dict.fromkeys(("query", "key", "value"), q.mapped.dtype) | {"scaled": dtype}
        return {name: x.astype(types[name]) for name, x in table._asdict().items() if x is not None and name in types}

    def rows(name: str, distance: jax.Array) -> jax.Array:
        term = getattr(scaled_terms(encoding, params, distance, q.vectors), name)
        return (term.T[..., None] if name == "scaled" else term).astype(dtype)

    names = distance_terms(encoding, params, pairs.pos[0].dtype)
    terms: dict[str, strips.Term] = {name: functools.partial(rows, name) for name in names if name != "bias"}
    if isinstance(encoding, Tabulated) and "query" in terms:
        terms["query"] = strips.Table(params["by_distance.query"], 1 / math.sqrt(q.vectors.shape[-1]))
    return terms


def scaled_terms(encoding: Encoding, params: Params, distance: jax.Array, queries: jax.Array) -> ByDistance:
    """Return `by_distance` at distances [n] without its bias; all that adds to scores is divided by sqrt(d).

    queries: vectors [..., d] as projected.
    """
    terms, root = encoding.by_distance(params, distance), math.sqrt(queries.shape[-1])
    terms = terms._replace(bias=None, scaled=finite_term(terms.scaled))
    return barrier(ByDistance(*(x if x is None or x is terms.value else x / root for x in terms)))


def sinks(pairs: TileInputs) -> jax.Array | None:
    """Return the logits of the sinks [h], at least float32, or None."""
    logits, mapped = pairs.encoding.sink(pairs.tables.params), pairs.q.tokens.mapped
    return None if logits is None else jnp.broadcast_to(logits.astype(wide_dtype(mapped.dtype)), mapped.shape[1:2])


def adjust_scores(pairs: TileInputs, s: jax.Array, visible: jax.Array) -> jax.Array:
    """Return scores [b, h, q, k] from products s of mapped vectors. visible [b or 1, q, k] is not applied yet."""
    s = with_terms(pairs, s)
    if "score" not in defined_hooks(pairs.encoding):
        return s

    def one(s: jax.Array, tile: Tile) -> jax.Array | None:
        scores = pairs.encoding.score(pairs.tables.params, s, score_tile(tile))
        return finite_term(scores) if is_on_cpu() else scores

    return map_batch(one, s, make_tile(pairs, visible), in_turn=s.shape[0] > 1 and scores_in_turn(s.size))


def make_tile(pairs: TileInputs, visible: jax.Array | None = None) -> Tile:
    """Return the arrays that `score` reads beside s, [b or 1, ...] each, vectors heads first."""
    q, k = pairs.q.tokens, pairs.k.tokens
    k_vectors, mapped_k = (repeat_heads(x, q.mapped.shape[1]) for x in (k.vectors, k.mapped))
    factor: Any = jnp.ones((1, 1, 1, 1), wide_dtype(q.mapped.dtype)) if q.factor is None else q.factor
    return Tile(q.vectors, k_vectors, q.unscaled, mapped_k, q.features, k.features, *pairs.pos, factor, visible)  # type: ignore[arg-type]


def score_tile(tile: Tile) -> Tile:
    """Return the tile of one sequence as `score` is given it."""
    return Tile._make((*(x.swapaxes(0, 1) for x in tile[:4]), *tile[4:]))


def bound_scores(pairs: TileInputs, s: jax.Array) -> jax.Array:
    """Return scores that `score` made, finite. In `adjust_scores` its gradient would read them once more."""
    return s if "score" not in defined_hooks(pairs.encoding) or is_on_cpu() else finite_term(s)


def scores_in_turn(pairs: int) -> bool:
    """Return whether sequences go through `score` one by one: so many scores would leave the core's cache."""
    return pairs >= LARGE and is_on_cpu() and sharding.is_one_core()
