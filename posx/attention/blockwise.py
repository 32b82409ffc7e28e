"""The blockwise executor: online softmax over tiles, memory linear in length, with its own backward pass.

    tables = by_distance at all distances, if positions are consecutive
    for each query block i:
        o, top, total = 0, -inf, 0                       # outputs, row maxima, row sums
        for each key block j that i may see:             # the diagonal one first
            skip j if its bias has fallen so far that no key can matter to float precision
            s = scores(tile i, j, strip of the tables)   # tiles.py: the formula
            s = -inf where the mask hides a pair         # only tiles on the diagonal, if in order
            new = max(top, row maxima of s)
            p = exp(s - new);  shrink = exp(top - new)
            o = o * shrink + p v + value terms
            total = total * shrink + row sums of p;  top = new
        outputs of i = o / total;  keep top and total of its rows

The backward pass (backward.py) recomputes s and p of each tile from the kept rows, through the same functions, so one
formula serves every encoding.

"In order" means that queries and keys are the same tokens, one after the other: tiles of the future are never visited,
and those of the past need no mask. Tiles beyond the encoding's reach share one row of the tables. Otherwise every tile
is masked, and one without a visible pair is passed over.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import sharding
from posx.attention.backward import backward
from posx.attention.blocks import (
    Plan,
    Tables,
    block_at,
    block_sizes,
    can_skip,
    count_blocks,
    joined,
    over_blocks,
    reads_params,
    skipper,
    split_into_blocks,
    strip_of,
    tabulate,
    walk,
)  # fmt: skip
from posx.attention.masks import Mask
from posx.attention.tiles import (
    INVISIBLE,
    Arrangement,
    Block,
    Pairs,
    Tokens,
    hidden,
    scores,
    value_terms,
    visible_pairs,
    weighted,
)
from posx.contract import ByDistance, Encoding, Params, distance_terms, wide_dtype

#: Keys from which on an encoding that fades skips tiles, on CPUs. At shorter lengths one head after the other costs
#: more than skipping saves, and it would leave larger machines idle.
SKIP_FROM = 1024


class Tiling(NamedTuple):
    """The tiles that are asked for.

    query_block, key_block: tokens in a tile; 0 for the default, see `block_sizes`. skip: whether far tiles that
    provably weigh nothing are skipped, head by head; None if the encoding `fades` and it pays. Only tiles in order
    under a causal mask are skipped, if `blocks.can_skip`.
    """

    query_block: int = 0
    key_block: int = 0
    skip: bool | None = None


def blockwise(
    encoding: Encoding, mask: Mask, params: Params, q: Block, k: Block,
    *, order: Arrangement = Arrangement(), tiling: Tiling = Tiling(),
) -> jax.Array:  # fmt: skip
    """Return what `dense` returns, tile by tile; lengths are padded to whole tiles."""
    (b, _, num_queries), (groups, num_keys) = q.tokens.mapped.shape[:3], k.tokens.mapped.shape[1:3]
    devices = sharding.block_devices(b, groups) if min(num_queries, num_keys) > 1 else 1
    terms = set(distance_terms(encoding, params, q.slots.pos.dtype))
    plan = _plan(encoding, terms, mask, q, k, order, tiling, devices)._replace(learned=bool(jax.tree.leaves(params)))
    strips = _strips(plan, terms, params, q, num_keys)
    tables = Tables(params if reads_params(encoding, strips) else {}, strips)
    q, k = split_into_blocks(q, plan.query_block), split_into_blocks(k, plan.key_block)
    attend = _by_key_head if plan.skip else _attend
    if devices > 1 and plan.query_blocks % (2 * devices) == 0:
        o = sharding.over_blocks(lambda keys, numbers, q: attend(plan, keys[0], q, keys[1], numbers), (tables, k), q)
    else:
        o = attend(plan, tables, q, k, None)
    return joined(o)[:, :, :num_queries]


def _plan(
    encoding: Encoding,
    terms: set[str],
    mask: Mask,
    q: Block,
    k: Block,
    order: Arrangement,
    tiling: Tiling,
    devices: int,
) -> Plan:
    """Return the tiles of a call. terms: those that `by_distance` returns."""
    (b, h, num_queries), (groups, num_keys) = q.tokens.mapped.shape[:3], k.tokens.mapped.shape[1:3]
    offset, skip, has_vectors = order.offset if order.in_order else None, tiling.skip, bool(terms - {"bias"})
    if skip is None:
        skip = encoding.fades and num_keys >= SKIP_FROM and jax.default_backend() == "cpu"
    tabulated = offset is not None or "bias" not in terms
    skip = skip and order.in_order and tabulated and can_skip(encoding, terms, mask, q.slots)
    rows = b * h // groups if skip else b * h
    sizes = block_sizes(num_queries, num_keys, rows, has_vectors, devices)
    query_block, key_block = tiling.query_block or sizes[0], tiling.key_block or sizes[1]
    if encoding.tiling != "any":
        key_block = num_keys
    in_order = order.in_order and (key_block % query_block == 0 or key_block >= num_keys)
    plan = Plan(
        encoding, mask, in_order, count_blocks(num_queries, query_block), query_block, key_block,
        offset if in_order else None, skip=skip and in_order and key_block < num_keys,
    )  # fmt: skip
    if plan.offset is None or not has_vectors or encoding.reach is None:
        return plan
    return plan._replace(reach=encoding.reach - plan.offset) if encoding.reach + key_block <= plan.farthest else plan


def _strips(plan: Plan, terms: set[str], params: Params, q: Block, num_keys: int) -> ByDistance | None:
    """Return the terms by distance at all distances that tiles meet, if these are consecutive."""
    if plan.offset is None or not terms:
        return None
    # Under a causal mask the last tile of a row reaches at most one key block beyond the diagonal.
    key_block = plan.key_block
    ahead = key_block if plan.mask.causal else count_blocks(num_keys, key_block) * key_block
    distances = np.arange(plan.farthest, plan.offset - ahead - 1, -1, dtype=np.int32)
    return tabulate(plan.encoding, params, distances, q.tokens.vectors if terms - {"bias"} else None)


def _by_key_head(plan: Plan, tables: Tables, q: Block, k: Block, numbers: Any) -> jax.Array:
    """Run `_attend` for one key head after the other, with the queries it serves: each head skips its own tiles."""
    (b, heads), groups = q.tokens.mapped.shape[1:3], k.tokens.mapped.shape[2]

    def split(x: jax.Array, axis: int) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :]), axis, 0)

    bias = None if tables.strips is None else tables.strips.bias
    if bias is not None:
        bias = split(jnp.broadcast_to(bias, (heads, bias.shape[1])), 0)
    of_heads = (_over_heads(tokens, heads) for tokens in (q.tokens, k.tokens))
    tokens = jax.tree.map(lambda x: split(x, 2), tuple(of_heads))

    def each(where: Any, heads: tuple[Any, tuple[Tokens, Tokens]]) -> jax.Array:
        q_slots, k_slots, numbers = where

        def one(head: tuple[Any, tuple[Tokens, Tokens]]) -> jax.Array:
            bias, (q, k) = head
            tables = Tables({}, None if bias is None else ByDistance(bias=bias))
            return _attend(plan, tables, Block(q, q_slots), Block(k, k_slots), numbers)

        return jax.lax.map(one, heads)

    axis = sharding.head_axis(b, groups)
    call = functools.partial(sharding.over_sequences, each, axis=axis) if axis else each
    o = jnp.moveaxis(call((q.slots, k.slots, numbers), (bias, tokens)), 0, 2)
    return o.reshape(*o.shape[:2], heads, *o.shape[4:])


def _over_heads(tokens: Tokens, heads: int) -> Tokens:
    """Return blocks of tokens with a token bias for each query head."""
    if (shared := tokens.token_bias) is None:
        return tokens
    return tokens._replace(token_bias=jnp.broadcast_to(shared, (*shared.shape[:2], heads, *shared.shape[3:])))


def _shift(top: jax.Array) -> jax.Array:
    """Return the shift of a row's scores before they are exponentiated: their maximum.

    It is 0 if the row has seen nothing, so that its weights are 0 and not NaN.
    """
    return jnp.where(top > INVISIBLE, top, 0)


def _forward(plan: Plan, tables: Tables, q: Block, k: Block, numbers: Any):
    """Return outputs [n, b, h, block, d], and of each row the sum of its weights and the shift, [n, b, h, block].

    The sum is 1 if the row sees nothing.
    """
    encoding, params = plan.encoding, tables.params
    first_tile = skipper(plan, tables.strips, k.tokens)

    def query_block(i: Any, q: Block):
        def visit(j: Any, carry: Any, masked: bool, far: bool = False) -> Any:
            o, top, total = carry
            pairs = Pairs(q, block_at(k, j), strip_of(plan, tables.strips, i, j, far))
            visible = visible_pairs(plan.mask, q.slots, pairs.k.slots)
            s = hidden(scores(encoding, params, pairs, visible), visible, masked)
            # Constant to derivatives: the shift cancels.
            new_top = jnp.maximum(top, jax.lax.stop_gradient(s.max(axis=-1)))
            shift = _shift(new_top)
            p = jnp.exp(s - shift[..., None])
            shrink = jnp.exp(top - shift)
            o = o * shrink[..., None] + weighted(p, pairs.k.tokens.values)
            extra = value_terms(encoding, params, p, pairs)
            return o if extra is None else o + extra, new_top, total * shrink + p.sum(axis=-1)

        rows, dtype = q.tokens.mapped.shape[:3], wide_dtype(q.tokens.mapped.dtype)
        nothing = (
            jnp.zeros((*rows, k.tokens.values.shape[-1]), dtype),
            jnp.full(rows, INVISIBLE, dtype),
            jnp.zeros(rows, dtype),
        )
        o, top, total = walk(plan, i, q.slots, k.slots, visit, nothing, lambda carry: first_tile(i, q, carry[1]))
        total = jnp.where(total > 0, total, 1)
        return o / total[..., None], total, _shift(top)

    return over_blocks(plan, lambda _, numbered: (_, query_block(*numbered)), None, numbers, q)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, tables: Tables, q: Block, k: Block, numbers: Any):
    return _forward(plan, tables, q, k, numbers)[0]


def _attend_forward(plan: Plan, tables: Tables, q: Block, k: Block, numbers: Any):
    o, total, shift = _forward(plan, tables, q, k, numbers)
    return o, (tables, q, k, numbers, o, total, shift)


_attend.defvjp(_attend_forward, backward)
