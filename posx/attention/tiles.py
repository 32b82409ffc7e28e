"""The formula for one tile, a rectangle of queries against keys: what every executor evaluates.

The stages in order: `mapped_products`; `with_terms` adds the biases and the terms by distance; `adjusted` also applies
`score`; `hidden` masks. `sinks` adds an entry to each softmax. After it, `weighted` and `value_terms` make outputs.
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
    as_float,
    at_least_float32,
    bias_by_distance,
    distance_terms,
    wide_dtype,
)
from posx.machine.guard import barrier
from posx.machine.platforms import on_cpu

#: The score of an invisible pair: below every finite one, however low a bias may push those.
INVISIBLE = -math.inf
#: Scores of all sequences together from which on they go through `score` one by one on a CPU core: a MiB of float32.
LARGE = 2**18
#: The largest exponents, in nats, that are safe for both sides of a product together: in float32 and bfloat16, and in
#: float16.
SAFE, SAFE_HALF = 40.0, 8.0


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


def summed_wide(k: Tokens) -> Tokens:
    """Return keys with mapped keys and values as they enter a custom gradient: at least float32, so that sums are."""
    return k._replace(mapped=at_least_float32(k.mapped), values=at_least_float32(k.values))


class Block(NamedTuple):
    """Tokens of one side and their slots, arrays with a first axis of b, or of 1 if all sequences share them."""

    tokens: Tokens
    slots: Slots
    number: Any = None  # of this block among all, if there are several


class Tables(NamedTuple):
    """Arrays that all queries and keys share.

    params: {} if no hook reads them in a tile. strips: the terms by distance at the consecutive distances of the pairs,
    as `blocks.tabulate` makes them; None evaluates the hook at the positions. sink: what `sinks` returns for all tiles
    of a row together; None in a tile.
    """

    params: Params
    strips: ByDistance | None = None
    sink: Any = None


class Pairs(NamedTuple):
    """One rectangle of queries against keys: a whole call, or a tile of it."""

    encoding: Encoding
    mask: Mask
    tables: Tables
    q: Block
    k: Block

    @property
    def pos(self) -> tuple[jax.Array, jax.Array]:
        return self.q.slots.pos, self.k.slots.pos

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.q.slots.idx.shape[1], self.k.slots.idx.shape[1]


def over_batch(function: Callable[..., Any], *arrays: Any, in_turn: bool = False) -> Any:
    """Map `function` of one sequence over first axes, which are b, or 1 for what all sequences share.

    in_turn: in a loop.
    """
    leaves, tree = jax.tree.flatten(arrays)
    size = max(x.shape[0] for x in leaves)
    own = [x for x in leaves if x.shape[0] == size]

    def one(own: list[jax.Array]) -> Any:
        each = iter(own)
        return function(*jax.tree.unflatten(tree, [next(each) if x.shape[0] == size else x[0] for x in leaves]))

    if size == 1:  # a condition then stays one, which `vmap` evaluates both ways
        return jax.tree.map(lambda x: x[None], one([x[0] for x in own]))
    return jax.lax.map(one, own) if in_turn else jax.vmap(one)(own)


def visible_pairs(mask: Mask, q: Slots, k: Slots) -> jax.Array:
    """Return bool [b or 1, q, k]: the mask by arrival order, and only within one document."""
    seen = over_batch(mask.visible, q.idx, k.idx)
    if q.segment is not None and k.segment is not None:
        seen &= q.segment[:, :, None] == k.segment[:, None, :]
    return seen


def hidden(s: jax.Array, visible: jax.Array, masked: bool) -> jax.Array:
    """Return scores [b, h, q, k] of a tile without its invisible pairs, if it is masked."""
    return jnp.where(visible[:, None], s, INVISIBLE) if masked else s


def products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Return <q_i, k_j> [b, h, q, k], at least float32, of q [b, h, q, d] and k [b, g, k, d]."""
    b, h, _, d = q.shape
    s = jnp.einsum("bgqd,bgkd->bgqk", q.reshape(b, k.shape[1], -1, d), k, preferred_element_type=wide_dtype(q.dtype))
    return s.reshape(b, h, -1, k.shape[2])


def weighted(w: jax.Array, v: jax.Array) -> jax.Array:
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


def finite(term: jax.Array | None) -> jax.Array | None:
    """Return a term of scores with a very low number for -inf: it masks a pair if the query sees another one."""
    return None if term is None else jnp.maximum(term, jnp.finfo(term.dtype).min / 2)


def mapped_products(pairs: Pairs) -> jax.Array:
    """Return the first term of the formula, sum_c q~_ic k~_jc exp(-decay_c (i - j)), [b, h, q, k]."""
    q, k = pairs.q.tokens.mapped, pairs.k.tokens.mapped
    if not pairs.encoding.acts_on("decay"):
        return products(q, k)
    return _decayed(_rate(pairs.encoding, pairs.tables.params), *pairs.pos, q, k)


def _rate(encoding: Encoding, params: Params) -> jax.Array:
    """Return the value of `decay`, [h or 1, d']."""
    rate: Any = encoding.decay(params)
    return at_least_float32(rate)


def _decayed(rate: jax.Array, q_pos: jax.Array, k_pos: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    """Return sum_c q_ic k_jc exp(-rate_c (i - j)), rate [h or 1, d'].

    Powers are relative to the last query's position. Powers of earlier keys are below 1 and may vanish, as they should.
    Powers of queries grow over one block alone. If a block is so wide that they would overflow, the sum is taken pair
    by pair.
    """
    k, last = _for_rates(rate, q, k), q_pos.max(axis=1, keepdims=True)
    behind_q, behind_k = as_float(last - q_pos), as_float(last - k_pos)
    widest = jnp.abs(rate).max() * jnp.maximum(behind_q.max(), -behind_k.min())

    def of_block() -> jax.Array:
        return products(*_decayed_vectors(rate, last, q_pos, k_pos, q, k))

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

    if q.shape[2] == 1 and q.dtype != jnp.float16:  # decoding: powers are relative to the query itself
        return of_block()
    return jax.lax.cond(widest < (SAFE_HALF if q.dtype == jnp.float16 else SAFE), of_block, of_pairs)


def _for_rates(rate: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
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


def in_one_block(pairs: Pairs, run: Callable[[Pairs], jax.Array], otherwise: Callable[[Pairs], jax.Array]) -> jax.Array:
    """Return run(pairs), for a kernel that does not know `decay`: its powers are in the vectors of the whole call.

    They are relative to the middle. If they would overflow, return otherwise(pairs).
    """
    encoding, mask = pairs[:2]
    if not encoding.acts_on("decay"):
        return run(pairs)

    def decayed(tables: Tables, q: Block, k: Block) -> jax.Array:
        rate, (q_pos, k_pos) = _rate(encoding, tables.params), (q.slots.pos, k.slots.pos)
        keys, middle = _for_rates(rate, q.tokens.mapped, k.tokens.mapped), (k_pos[:, :1] + k_pos[:, -1:]) // 2
        mapped = _decayed_vectors(rate, middle, q_pos, k_pos, q.tokens.mapped, keys)
        q, k = (x._replace(tokens=x.tokens._replace(mapped=y)) for x, y in zip((q, k), mapped, strict=True))
        return at_least_float32(run(Pairs(encoding, mask, tables, q, k)))

    rate, (q_pos, k_pos) = jnp.abs(_rate(encoding, pairs.tables.params)).max(), pairs.pos
    widest = rate * as_float(jnp.maximum(q_pos.max(), k_pos.max()) - jnp.minimum(q_pos.min(), k_pos.min()) + 1) / 2
    safe = widest < (SAFE_HALF if pairs.q.tokens.mapped.dtype == jnp.float16 else SAFE)
    return jax.lax.cond(safe, decayed, lambda *parts: otherwise(Pairs(encoding, mask, *parts)), *pairs[2:])


def with_terms(pairs: Pairs, s: jax.Array) -> jax.Array:
    """Return products s [b, h, q, k] plus the biases and the terms by distance: all that `score` is given."""
    for term in list(_added(pairs)):
        term = term.astype(s.dtype)
        shared = term.shape[0] == 1 and term.shape[1:] == s.shape[1:]
        s = plus_shared(s, term) if shared else s + term
    return s


def _added(pairs: Pairs) -> Iterator[jax.Array]:
    """Yield the biases, then factor_i / sqrt(d) times <q_i, query_r>, <k_j, key_r> and scaled_r.

    Each is [b or 1, h or 1, q, k]. The root is in the terms by distance, of which there are the fewest.
    """
    q, k, (params, table, _) = pairs.q.tokens, pairs.k.tokens, pairs.tables
    yield from _position_biases(pairs.encoding, params, *pairs.pos, table)
    if pairs.encoding.acts_on("token_bias"):
        yield between(q.token_bias, k.token_bias)
    terms, dtype = _terms(pairs), wide_dtype(q.mapped.dtype)
    if "query" in terms:
        yield strips.products(times(q.vectors.astype(dtype), q.factor), terms["query"], *pairs.pos)
    if "key" in terms:
        vectors = repeat_heads(k.vectors.astype(dtype), q.mapped.shape[1])
        seen = strips.products_of_keys(vectors, terms["key"], *pairs.pos)
        yield times(seen.swapaxes(2, 3), q.factor)
    if "scaled" in terms:
        yield times(strips.numbers(terms["scaled"], *pairs.pos), q.factor)


def between(by_q: Any, by_k: Any) -> jax.Array:
    """Return u_i - u_j [b or 1, h or 1, q, k] of token biases [b or 1, h or 1, t, n], or of a tuple of n arrays."""
    if isinstance(by_q, tuple):
        return sum(a[..., :, None] - b[..., None, :] for a, b in zip(by_q, by_k, strict=True))  # type: ignore[return-value]
    return (by_q[..., :, None, :] - by_k[..., None, :, :]).sum(axis=-1)


def _position_biases(
    encoding: Encoding, params: Params, q_pos: jax.Array, k_pos: jax.Array, table: ByDistance | None = None
) -> list[jax.Array]:
    """Return the bias of `by_distance`, out of its strip if there is one, and `bias`: [b or 1, h or 1, q, k] each."""

    def of_pairs(hook: Callable[..., Any]) -> jax.Array | None:
        return finite(over_batch(functools.partial(hook, params), q_pos, k_pos))

    if table is None:
        found = [of_pairs(functools.partial(bias_by_distance, encoding))]
    else:
        found = [None if table.bias is None else strips.numbers(table.bias, q_pos, k_pos)]
    found += [of_pairs(encoding.bias)] if encoding.acts_on("bias") else []
    return [x for x in found if x is not None]


def bias_strip(encoding: Encoding, params: Params, distances: np.ndarray) -> jax.Array | None:
    """Return the finite bias at known distances [n], [h or 1, n], or None."""
    return finite(encoding.by_distance(params, jnp.asarray(distances, jnp.int32)).bias)


def content_free_bias(
    encoding: Encoding, params: Params, q_pos: jax.Array, k_pos: jax.Array, table: ByDistance | None = None
) -> jax.Array | None:
    """Return the sum of both biases that depend on positions alone, finite [b or 1, h or 1, q, k], or None.

    table: the strip of the bias by distance, None to evaluate it at the positions.
    """
    found = _position_biases(encoding, params, q_pos, k_pos, table)
    return functools.reduce(operator.add, found) if found else None


def value_terms(pairs: Pairs, w: jax.Array) -> jax.Array | None:
    """Return sum_j w_ij value_r for weights w [b, h, q, k], linear in them: [b, h, q, d], or None."""
    terms = _terms(pairs)
    return strips.sums(w, terms["value"], *pairs.pos) if "value" in terms else None


def _terms(pairs: Pairs) -> dict[str, strips.Term]:
    """Return the terms of `by_distance` by name, but for its bias, at least float32."""
    encoding, (params, table, _), q = pairs.encoding, pairs.tables, pairs.q.tokens
    dtype = wide_dtype(q.mapped.dtype)
    if table is not None:
        types = dict.fromkeys(("query", "key", "value"), q.mapped.dtype) | {"scaled": dtype}
        return {name: x.astype(types[name]) for name, x in table._asdict().items() if x is not None and name in types}

    def rows(name: str, distance: jax.Array) -> jax.Array:
        found = getattr(scaled_terms(encoding, params, distance, q.vectors), name)
        return (found.T[..., None] if name == "scaled" else found).astype(dtype)

    names = distance_terms(encoding, params, pairs.pos[0].dtype)
    terms: dict[str, strips.Term] = {name: functools.partial(rows, name) for name in names if name != "bias"}
    if isinstance(encoding, Tabulated) and "query" in terms:
        terms["query"] = strips.Table(params["by_distance.query"], 1 / math.sqrt(q.vectors.shape[-1]))
    return terms


def scaled_terms(encoding: Encoding, params: Params, distance: jax.Array, queries: jax.Array) -> ByDistance:
    """Return `by_distance` at distances [n] without its bias; all that adds to scores is divided by sqrt(d).

    queries: vectors [..., d] as projected.
    """
    found, root = encoding.by_distance(params, distance), math.sqrt(queries.shape[-1])
    found = found._replace(bias=None, scaled=finite(found.scaled))
    return barrier(ByDistance(*(x if x is None or x is found.value else x / root for x in found)))


def sinks(pairs: Pairs) -> jax.Array | None:
    """Return the logits of the sinks [h], at least float32, or None."""
    found, mapped = pairs.encoding.sink(pairs.tables.params), pairs.q.tokens.mapped
    return None if found is None else jnp.broadcast_to(found.astype(wide_dtype(mapped.dtype)), mapped.shape[1:2])


def adjusted(pairs: Pairs, s: jax.Array, visible: jax.Array) -> jax.Array:
    """Return scores [b, h, q, k] from products s of mapped vectors. visible [b or 1, q, k] is not applied yet."""
    s, q, k, num_heads = with_terms(pairs, s), pairs.q.tokens, pairs.k.tokens, s.shape[1]
    if not pairs.encoding.acts_on("score"):
        return s

    def one(s: jax.Array, tile: Tile) -> jax.Array | None:
        tile = Tile._make((*(x.swapaxes(0, 1) for x in tile[:4]), *tile[4:]))
        found = pairs.encoding.score(pairs.tables.params, s, tile)
        return finite(found) if on_cpu() else found

    k_vectors, mapped_k = (repeat_heads(x, num_heads) for x in (k.vectors, k.mapped))
    factor = jnp.ones((1, 1, 1, 1), s.dtype) if q.factor is None else q.factor
    tile = Tile(q.vectors, k_vectors, q.unscaled, mapped_k, q.features, k.features, *pairs.pos, factor, visible)
    return over_batch(one, s, tile, in_turn=s.shape[0] > 1 and scores_in_turn(s.size))


def bounded(pairs: Pairs, s: jax.Array) -> jax.Array:
    """Return scores that `score` made, finite. It is not in `adjusted`, as its gradient would read them once more."""
    return s if on_cpu() or not pairs.encoding.acts_on("score") else finite(s)  # type: ignore[return-value]


def scores_in_turn(pairs: int) -> bool:
    """Return whether sequences go through `score` one by one: so many scores would leave the core's cache."""
    return sharding.is_one_core() and pairs >= LARGE
