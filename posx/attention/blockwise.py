"""The blockwise executor: online softmax over tiles, memory linear in length, with its own backward pass.

    tables = by_distance at all distances, if positions are consecutive
    for each query block i:
        o, top, total = 0, -inf, 0                       # outputs, row maxima, row sums; 0, z, 1 with a sink of logit z
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

"In order" means that queries and keys are the same tokens, one after the other. Tiles of the future are then never
visited, and tiles of the past need no mask. Tiles beyond the encoding's reach share one row of the tables. Otherwise
every tile is masked, and one without a visible pair is passed over.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from posx.attention import sharding
from posx.attention.accelerators import round_operands, sequence
from posx.attention.arguments import Slots
from posx.attention.backward import blockwise_backward
from posx.attention.cpu import row_maxima, row_sums
from posx.attention.decay import mapped_products
from posx.attention.plan import (
    Plan,
    Tiling,
    earlier_tiles,
    join_blocks,
    make_plan,
    skipper,
    split_into_blocks,
    tabulate,
    take_block,
    take_tile,
    visit_visible_tiles,
    whole_rows,
)  # fmt: skip
from posx.attention.tiles import (
    INVISIBLE,
    Block,
    SharedArrays,
    TileInputs,
    Tokens,
    adjust_scores,
    bound_scores,
    hide_pairs,
    map_batch,
    scores_in_turn,
    sum_values,
    value_terms,
    visible_pairs,
)
from posx.contract import ByDistance, defined_hooks, distance_terms, wide_dtype
from posx.machine.platforms import is_on_cpu

#: If tiles are whole rows, the queries form at most this many parts, each with the keys up to its own end. 2 parts
#: compute 3/4 of all pairs, 4 parts 5/8. Each part is compiled for itself. The second number is the fewest queries of a
#: part.
STEPS, ACCELERATOR_STEPS = (2, 256), (4, 512)


def blockwise(
    pairs: TileInputs, *, in_order: bool = False, offset: int | None = None, tiling: Tiling = Tiling()
) -> jax.Array:
    """Return what `dense` returns, tile by tile; lengths are padded to whole tiles.

    Args:
      pairs: a whole call.
      in_order: queries and keys are the same tokens, idx counts up from 0.
      offset: the first query's position less the first key's if both sides' positions count up by 1 and all is in
        order, else None.
      tiling: the tiles.
    """
    encoding, k, sizes = pairs.encoding, pairs.k.tokens, pairs.sizes
    (b, h), wide = pairs.q.tokens.mapped.shape[:2], wide_dtype(k.mapped.dtype)
    devices = sharding.block_devices(b, k.mapped.shape[1]) if min(sizes) > 1 else 1
    terms = set(distance_terms(encoding, pairs.tables.params, pairs.pos[0].dtype))
    # The type in which their gradients are summed.
    k = k._replace(mapped=k.mapped.astype(wide), values=k.values.astype(wide))
    pairs = pairs._replace(k=pairs.k._replace(tokens=k))
    (most, fewest), steps = STEPS if is_on_cpu() else ACCELERATOR_STEPS, 1
    if (in_rows := whole_rows(pairs, in_order, tiling, devices)) and in_order and pairs.mask.causal:
        steps = max(min(most, sizes[0] // fewest), 1)
    ends, outputs = [sizes[0] * n // steps for n in range(steps + 1)], list[jax.Array]()
    for first, last in itertools.pairwise(ends):
        part, start = pairs, None if offset is None else offset + first
        if steps > 1:
            part = _select_queries(pairs, first, last)
            outputs, tokens = sequence(outputs, part.q.tokens)
            part = part._replace(q=part.q._replace(tokens=tokens))
        plan = make_plan(part, terms, in_order, start, tiling, in_rows, devices)
        tables = tabulate(plan, part, terms)
        sides = split_into_blocks(part.q, plan.query_block), split_into_blocks(part.k, plan.key_block)
        attend = functools.partial(_attend, plan)
        if plan.skip:
            attend = functools.partial(_run_key_heads, plan)
        elif b > 1 and "score" in defined_hooks(encoding) and scores_in_turn(b * h * plan.query_block * plan.key_block):
            attend = functools.partial(_run_sequences, plan)
        if devices > 1 and plan.query_blocks % (2 * devices) == 0:
            o = sharding.map_blocks(attend, tables, *sides)
        else:
            o = attend(tables, *sides)
        outputs = [*outputs, join_blocks(o)[:, :, : last - first]]
    return outputs[0] if steps == 1 else jnp.concatenate(outputs, axis=2)


def _select_queries(pairs: TileInputs, first: int, last: int) -> TileInputs:
    """Return the pairs of queries `first` to `last` - 1 with the keys before `last`."""

    def part(side: Block, first: int) -> Block:
        def slice_axis(axis: int, tree: Any) -> Any:
            return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, first, last, axis=axis), tree)

        features, slots = slice_axis(1, (side.tokens.features, side.slots))
        return Block(slice_axis(2, side.tokens._replace(features=None))._replace(features=features), slots)

    return pairs._replace(q=part(pairs.q, first), k=part(pairs.k, 0))


def _run_sequences(plan: Plan, tables: SharedArrays, q: Block, k: Block) -> jax.Array:
    """Run `_attend` for one sequence after the other: `score` makes arrays that a core's cache cannot hold."""

    def one(*sides: tuple[Tokens, Slots]) -> jax.Array:
        (q_tokens, q_slots), (k_tokens, k_slots) = jax.tree.map(lambda x: x[:, None], sides)
        blocks = Block(q_tokens, q_slots, q.number), Block(k_tokens, k_slots, k.number)
        return _attend(plan, tables, *blocks)[:, 0]

    sides = jax.tree.map(lambda x: x.swapaxes(0, 1), (q[:2], k[:2]))
    return map_batch(one, *sides, in_turn=True).swapaxes(0, 1)


def _run_key_heads(plan: Plan, tables: SharedArrays, q: Block, k: Block) -> jax.Array:
    """Run `_attend` for one key head after the other, with the queries it serves: each head skips its own tiles."""
    (b, heads), groups = q.tokens.mapped.shape[1:3], k.tokens.mapped.shape[2]

    def split(x: jax.Array, axis: int = 2, shared: bool = False) -> jax.Array:
        """Split heads into those of each key head, in front; shared: there may be one for all of them."""
        x = jnp.broadcast_to(x, (*x.shape[:axis], heads, *x.shape[axis + 1 :])) if shared else x
        return jnp.moveaxis(x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :]), axis, 0)

    def head_tokens(tokens: Tokens) -> Tokens:
        token_bias = jax.tree.map(functools.partial(split, shared=True), tokens.token_bias)
        return jax.tree.map(split, tokens._replace(token_bias=None))._replace(token_bias=token_bias)

    def each(slots: Any, heads: Any) -> jax.Array:
        def one(head: Any) -> jax.Array:
            bias, sink, *both = head
            strips = None if bias is None else ByDistance(bias=bias)
            return _attend(
                plan, SharedArrays({}, strips, sink), *(Block(x, *y) for x, y in zip(both, slots, strict=True))
            )

        return jax.lax.map(one, heads)

    bias = None if tables.strips is None else split(tables.strips.bias, 0, shared=True)
    sink = None if tables.sink is None else split(tables.sink, 0)
    slots, axis = (q[1:], k[1:]), sharding.head_axis(b, groups)
    call = functools.partial(sharding.map_sequences, each, axis=axis) if axis else each
    o = jnp.moveaxis(call(slots, (bias, sink, head_tokens(q.tokens), head_tokens(k.tokens))), 0, 2)
    return o.reshape(*o.shape[:2], heads, *o.shape[4:])


def _shift(top: jax.Array) -> jax.Array:
    """Return the shift of a row's scores before they are exponentiated: their maximum.

    It is 0 if the row has seen nothing, so that its weights are 0 and not NaN.
    """
    return jnp.where(top > INVISIBLE, top, 0)


def _forward(plan: Plan, tables: SharedArrays, q: Block, k: Block, saves: bool = False):
    """Return outputs [n, b, h, block, d]; if it `saves`, also what `blockwise_backward` reads.

    These are the inputs, and of each row [n, b, h, block] the sum of its weights and the shift. The sum includes the
    row's sink. It is 1 if there is none and the row sees nothing.
    """
    given, dtype = k.tokens, q.tokens.mapped.dtype
    k = k._replace(tokens=given._replace(mapped=given.mapped.astype(dtype), values=given.values.astype(dtype)))
    first_tile = skipper(plan, tables.strips, k.tokens)

    def query_block(_: None, q: Block):
        def visit(j: Any, carry: Any, masked: bool, far: bool = False) -> Any:
            o, top, total = carry
            tile = take_tile(plan, tables, q, k, j, far)
            visible = visible_pairs(plan.mask, q.slots, tile.k.slots)
            s = hide_pairs(bound_scores(tile, adjust_scores(tile, mapped_products(tile), visible)), visible, masked)
            # Constant to derivatives: the shift cancels.
            new_top = jnp.maximum(top, jax.lax.stop_gradient(row_maxima(s)))
            shift = _shift(new_top)
            p = jnp.exp(s - shift[..., None])
            shrink = jnp.exp(top - shift)
            w = round_operands(p, dtype)
            o = o * shrink[..., None] + sum_values(w, tile.k.tokens.values)
            extra = value_terms(tile, w)
            return o if extra is None else o + extra, new_top, total * shrink + row_sums(p)

        rows, wide = q.tokens.mapped.shape[:3], wide_dtype(dtype)
        o = jnp.zeros((*rows, k.tokens.values.shape[-1]), wide)
        carry = o, jnp.full(rows, INVISIBLE, wide), jnp.zeros(rows, wide)
        if tables.sink is not None:
            carry = o, jnp.broadcast_to(tables.sink[None, :, None], rows), jnp.ones(rows, wide)
        if plan.diagonal:
            last = q.number * plan.query_block // plan.key_block
            carry = visit(last, carry, masked=True)
            for first, end, far in earlier_tiles(plan, q.number, last, first_tile and first_tile(q, carry[1])):
                carry = jax.lax.fori_loop(first, end, functools.partial(visit, masked=False, far=far), carry)
        else:
            carry = visit_visible_tiles(plan, q, k.slots, visit, carry)
        o, top, total = carry
        total = jnp.where(total > 0, total, 1)
        return None, (o / total[..., None], total, _shift(top))

    if plan.query_blocks > 1:
        o, total, shift = jax.lax.scan(query_block, None, q)[1]
    else:
        o, total, shift = jax.tree.map(lambda x: x[None], query_block(None, take_block(q, 0)._replace(number=0))[1])
    # Arrays without a block keep the types of the keys that were given.
    return (o, (tables, q, k, o, total, shift, jax.tree.map(lambda x: x[:0], given))) if saves else o


_attend = jax.custom_vjp(_forward, nondiff_argnums=(0, 4))
_attend.defvjp(
    lambda plan, tables, q, k, _: _forward(plan, tables, q, k, saves=True),
    lambda plan, _, saved, o_grad: blockwise_backward(plan, saved, o_grad),
)
