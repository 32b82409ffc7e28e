"""Terms by distance beside the kernel (flash.py), for encodings whose vectors are constant from a small distance on.

The near keys of query i are its last n, its own included. The kernel attends to all keys before them, the far keys. It
adds no term by distance but the bias. It returns outputs o_i and, of each row, the highest score top_i and the sum
total_i of exp(score - top_i). The other terms are the same for all far keys of a query. Together these keys therefore
enter the softmax as one, *:

    s_i*  = top_i + log(total_i) + factor_i (<q_i, query_far> + scaled_far) / sqrt(d)
    w_i   = softmax(s_ij for near keys j, s_i*, sink)
    out_i = sum_j w_ij (v_j + value_(i-j)) + w_i* (o_i + value_far)

The scores s_ij are those of tiles.py. A tile has n queries and the 2 n keys up to the last of them. All tiles are
evaluated at a time: t tokens have 2 n t scores a head. Gradients are those of JAX.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.masks import Mask
from posx.attention.plan import Plan, join_blocks, split_into_blocks, tabulate
from posx.attention.tiles import (
    LOWEST,
    Block,
    SharedArrays,
    TileInputs,
    Tokens,
    adjust_scores,
    distance_products,
    finite_term,
    hide_pairs,
    products,
    sum_values,
    value_terms,
    visible_pairs,
)
from posx.contract import Encoding, Params, distance_terms

#: The most near keys of a query, and the fewest queries of a tile. Scores of near keys take 2 n / T of those of all
#: pairs, but each is written and read several times.
NEAREST, SMALLEST = 64, 16


def near_refusal(encoding: Encoding, params: Params, mask: Mask, offset: int) -> str | None:
    """Return why terms by distance cannot be added to the far keys of a query together, None if they can."""
    if not (terms := _terms(encoding, params)):
        return None
    given = f"{type(encoding).__name__} acts on {', '.join(f'by_distance.{name}' for name in terms)}"
    if "key" in terms:
        return f"{given}, and the kernel does not support by_distance.key"
    if encoding.reach is None or near_keys(encoding, params, offset) > NEAREST:
        return f"{given}, which the kernel needs to be constant from {NEAREST} tokens on, but reach={encoding.reach}"
    return None if mask.causal else f"{given}, which the kernel supports under causal masks only"


def _terms(encoding: Encoding, params: Params) -> list[str]:
    return [name for name in distance_terms(encoding, params) if name != "bias"]


def near_keys(encoding: Encoding, params: Params, offset: int) -> int:
    """Return the number of near keys of each query, 0 if there are no terms by distance but the bias.

    offset: the first query's position less the first key's.
    """
    return max((encoding.reach or 0) - offset, 1) if _terms(encoding, params) else 0


def with_near(pairs: TileInputs, offset: int, near: int, o: jax.Array, top: jax.Array, total: jax.Array) -> jax.Array:
    """Return outputs [b, h, q, d] over all keys.

    Args:
      pairs: the whole call, in order; offset, near: see `near_keys`.
      o, top, total: outputs [b, h, q, d] over far keys, and what `flash.forward` returns of each row, [b, h, q].
    """
    size = max(SMALLEST, 1 << (near - 1).bit_length())
    plan = Plan(
        pairs.encoding, pairs.mask, in_order=True, query_blocks=1, key_blocks=1, query_block=size, key_block=2 * size,
        offset=size + offset, reach=None, skip=False, learned=False,
    )  # fmt: skip
    tables = tabulate(plan, pairs, {"bias", *_terms(pairs.encoding, pairs.tables.params)})
    q, k = (split_into_blocks(side, size) for side in (pairs.q, pairs.k))
    far = Tokens(top[..., None], o, factor=jnp.log(total)[..., None])
    far = split_into_blocks(Block(far, pairs.q.slots), size).tokens
    k = _with_previous(k._replace(tokens=Tokens(k.tokens.mapped, k.tokens.values, token_bias=k.tokens.token_bias)))
    tile = functools.partial(_tile, pairs._replace(tables=tables), near)
    return join_blocks(jax.vmap(tile)(q, k, far))[:, :, : pairs.sizes[0]]


def _with_previous(k: Block) -> Block:
    """Return blocks of keys [n, ...] with those of the block before in front of them, empty slots before the first."""

    def both(x: jax.Array, axis: int, empty: int) -> jax.Array:
        before = jnp.concatenate([jnp.full_like(x[:1], empty), x[:-1]])
        return jnp.concatenate([before, x], axis=axis)

    tokens = jax.tree.map(functools.partial(both, axis=3, empty=0), k.tokens)
    return Block(tokens, jax.tree.map(functools.partial(both, axis=2, empty=-1), k.slots))


def _tile(call: TileInputs, near: int, q: Block, k: Block, far: Tokens) -> jax.Array:
    """Return outputs [b, h, q, d] of a tile of queries against 2 q keys and the one far key of each.

    Args:
      call: the whole, whose tables are those of a tile.
      near, q, k: as in `with_near`.
      far: of each row the highest score as mapped and log(total) as factor [b, h, q, 1], and outputs as values
        [b, h, q, d].
    """
    encoding, mask, tables, *_ = call
    pairs = TileInputs(encoding, mask, tables, q, k)
    visible = visible_pairs(mask, q.slots, k.slots) & (q.slots.idx[:, :, None] - k.slots.idx[:, None] < near)
    s = products(q.tokens.mapped, k.tokens.mapped)
    s = hide_pairs(adjust_scores(pairs, s, visible), visible, masked=True)
    one = k._replace(slots=jax.tree.map(lambda x: x[:, :1], k.slots))  # terms by distance read no more of keys
    beyond = pairs._replace(tables=_far(tables), k=one)
    s_far = finite_term(sum(distance_products(beyond), start=far.mapped))
    entries = [s, jnp.where(far.mapped < LOWEST, far.mapped, s_far)]  # a row without far keys has a lower one
    if tables.sink is not None:
        entries += [jnp.broadcast_to(tables.sink[None, :, None, None], far.mapped.shape)]
    tops = (x.max(axis=-1, keepdims=True) for x in entries)
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))  # it cancels
    p, p_far, *sink = (jnp.exp(x - top) for x in entries)
    p_far = p_far * jnp.exp(far.factor)  # log(total) would be rounded away beside a large score
    total = sum(sink, start=p.sum(axis=-1, keepdims=True) + p_far)
    w, w_far = p / total, p_far / total
    extra = (value_terms(pairs, w), value_terms(beyond, w_far))
    return sum((x for x in extra if x is not None), start=sum_values(w, k.tokens.values) + w_far * far.values)


def _far(tables: SharedArrays) -> SharedArrays:
    """Return the terms by distance of far keys: strips fall, so that their first entry is that of the farthest."""
    strips: Any = tables.strips
    return SharedArrays({}, jax.tree.map(lambda x: x[:, :1], strips._replace(bias=None)))
