"""The backward pass of the blockwise executor: each tile once more, from the kept maxima and sums of its rows.

Scores and weights of a tile are recomputed. The gradients of its matrix products are written out by hand. The gradients
of all terms that position adds come from `jax.vjp` of the same functions of a tile.

Gradients are summed over tiles in at least float32. On CPUs those of mapped keys and values are transposed,
[.., d, block], so that every product contracts the minor axis of its left side.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.accelerators import round_operands
from posx.attention.cpu import group_by_key_head, materialize, sums_over_queries, transpose_on_cpu
from posx.attention.decay import mapped_products
from posx.attention.plan import Plan, earlier_tiles, first_row, skipper, take_block, take_tile, visit_visible_tiles
from posx.attention.tiles import (
    Block,
    SharedArrays,
    TileInputs,
    Tokens,
    adjust_scores,
    bound_scores,
    hide_pairs,
    products,
    sum_values,
    value_terms,
    visible_pairs,
)
from posx.contract import at_least_float32, defined_hooks, wide_dtype
from posx.machine.platforms import is_on_cpu


def blockwise_backward(plan: Plan, saved: Any, o_grad: jax.Array):
    """Return the gradients of the tables and of both sides.

    Args:
      plan: the tiles.
      saved: the inputs, the outputs, and of each row [n, b, h, block] the sum of its weights and the shift of its
        scores. The last arrays have the types of the gradients of keys.
      o_grad: the gradient of outputs [n, b, h, block, d].
    """
    tables, q, k, o, total, shift, given = saved
    groups, first_tile = k.tokens.mapped.shape[2], skipper(plan, tables.strips, k.tokens)
    # With w = p / total, p = exp(s - shift): dL/ds = w * (dL/dw - delta), delta_i = o_i . dL/do_i. The incoming
    # gradient is divided by the total, not p. And p is not exp(s - log-sum-exp), which rounds for large scores.
    o_grad = o_grad / total[..., None]
    delta, floor = (o * o_grad).sum(axis=-1), shift + jnp.log(total)

    def query_block(sums: tuple[SharedArrays, Tokens], block: tuple[Any, ...]):
        q, *back, floor = block
        of_q = group_by_key_head(q.tokens.mapped, groups) if "decay" not in defined_hooks(plan.encoding) else None
        rows_of_heads = materialize((of_q, group_by_key_head(back[0], groups)))

        def visit(j: Any, carry: Any, masked: bool, far: bool = False) -> Any:
            (params, strips, sink), of_k, of_q = carry
            tile = take_tile(plan, tables, q, k, j, far)
            table_grads, k_grads, q_grads = _tile_gradients(plan, tile, back, rows_of_heads, masked)
            first = first_row(plan, q.number, j, far)
            if plan.learned:
                strips = jax.tree.map(lambda x, g: _add_slice(x, g, first, axis=1), strips, table_grads.strips)
            of_k = jax.tree.map(lambda x, g: _add_slice(x, g[None], j, axis=0), of_k, k_grads)
            return SharedArrays(_add(params, table_grads.params), strips, sink), of_k, _add(of_q, q_grads)

        carry = *sums, _zeros(q.tokens)
        if plan.diagonal:
            last = q.number * plan.query_block // plan.key_block
            carry = visit(last, carry, masked=True)
            for first, end, far in earlier_tiles(plan, q.number, last, first_tile and first_tile(q, floor)):
                carry = jax.lax.fori_loop(first, end, functools.partial(visit, masked=False, far=far), carry)
        else:
            carry = visit_visible_tiles(plan, q, k.slots, visit, carry)
        return carry[:2], carry[2]

    start, blocks = _zeros((tables, _transpose_keys(k.tokens))), (q, o_grad, shift, delta, floor)
    if plan.query_blocks > 1:
        (of_tables, of_k), of_q = jax.lax.scan(query_block, start, blocks)
    else:
        first_block, *rows = take_block(blocks, 0)
        (of_tables, of_k), of_q = query_block(start, (first_block._replace(number=0), *rows))
        of_q = jax.tree.map(lambda x: x[None], of_q)
    if tables.sink is not None:  # a key without a value: dL/dw = 0, and dL/ds = -w * delta, summed over rows
        of_rows = jnp.exp(tables.sink[None, None, :, None] - shift) * delta
        of_tables = of_tables._replace(sink=-of_rows.sum(axis=(0, 1, 3)))
    mapped, values = materialize((of_k.mapped, of_k.values))
    grads = of_tables, of_q, _transpose_keys(of_k._replace(mapped=mapped, values=values))
    of_tables, of_q, of_k = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, (tables, q.tokens, given))
    return of_tables, Block(of_q, None), Block(of_k, None)  # type: ignore[arg-type]


def _tile_gradients(plan: Plan, pairs: TileInputs, back: Any, rows_of_heads: Any, masked: bool):
    """Return one tile's part of the gradients of the tables (of its own part of the strips), of keys, and of queries.

    back: the gradient of outputs over the totals [b, h, q, d], the shifts and the deltas [b, h, q]. rows_of_heads:
    mapped queries, and the gradient of outputs, as `group_by_key_head` returns them.
    """
    q, k, (o_grad, shift, delta), (of_queries, of_outputs) = pairs.q.tokens, pairs.k.tokens, back, rows_of_heads
    visible, decays = visible_pairs(plan.mask, pairs.q.slots, pairs.k.slots), "decay" in defined_hooks(plan.encoding)
    strips = pairs.tables.strips if plan.learned else jax.lax.stop_gradient(pairs.tables.strips)
    tables = pairs.tables._replace(strips=strips)

    def scores(tables: SharedArrays, s: jax.Array | None, q: Tokens, k: Tokens) -> jax.Array:
        tile = pairs._replace(tables=tables, q=pairs.q._replace(tokens=q), k=pairs.k._replace(tokens=k))
        return adjust_scores(tile, mapped_products(tile) if s is None else s, visible)

    s, pull_scores = jax.vjp(scores, tables, None if decays else mapped_products(pairs), q, k)
    p = jnp.exp(hide_pairs(bound_scores(pairs, s), visible, masked) - shift[..., None])
    p_grad, extra_grad = products(o_grad, k.values), None

    def added_values(tables: SharedArrays, p: jax.Array) -> jax.Array | None:
        return value_terms(pairs._replace(tables=tables), p)

    extra, pull_extra = jax.vjp(added_values, tables, p)
    if extra is not None:
        extra_grad, by_extra = pull_extra(o_grad)
        p_grad = p_grad + by_extra
    p, s_grad = round_operands((p, p * (p_grad - delta[..., None])), k.values.dtype)
    table_grads, s_grad, q_grads, k_grads = pull_scores(s_grad)
    if extra_grad is not None:
        if not is_on_cpu():  # again from the weights that are stored; XLA drops the first
            extra_grad = jax.vjp(lambda tables: added_values(tables, p), tables)[1](o_grad)[0]
        table_grads = _add(table_grads, extra_grad)
    k_grads = _transpose_keys(k_grads)._replace(values=sums_over_queries(of_outputs, p))
    if not decays:
        of_q, of_k = map(at_least_float32, (q_grads.mapped, k_grads.mapped))
        q_grads = q_grads._replace(mapped=of_q + sum_values(s_grad, k.mapped))
        k_grads = k_grads._replace(mapped=of_k + sums_over_queries(of_queries, s_grad))
    return table_grads, k_grads, q_grads


def _transpose_keys(k: Tokens) -> Tokens:
    """Return keys or their gradients with mapped keys and values transposed."""
    return k._replace(mapped=transpose_on_cpu(k.mapped), values=transpose_on_cpu(k.values))


def _add_slice(total: jax.Array, part: jax.Array, first: Any, axis: int) -> jax.Array:
    """Add `part` to `total` from index `first` of an axis on."""
    there = jax.lax.dynamic_slice_in_dim(total, first, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, there + part.astype(total.dtype), first, axis)


def _zeros(tree: Any) -> Any:
    """Return zeros in which gradients are summed: at least float32, whatever the operands are."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), tree)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)
