"""The backward pass of the blockwise executor: each tile once more, from the kept maxima and sums of its rows.

Scores and weights of a tile are recomputed. The gradients of its matrix products are written out by hand. The gradients
of all terms that position adds come from `jax.vjp` of the same functions of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.attention.blocks import Plan, Tables, block_at, first_row, over_blocks, skipper, strip_of, walk
from posx.attention.cpu import made_once, queries_transposed, transposed_products
from posx.attention.products import mapped_products, products
from posx.attention.tiles import Block, Pairs, Tokens, adjusted, hidden, value_terms, visible_pairs, weighted
from posx.contract import Params, wide_dtype


class Sums(NamedTuple):
    """Gradients summed over tiles, at least float32.

    Gradients of mapped keys and values are transposed, [n, b, g, d, block]. Every product then contracts the minor axis
    of its left side, which is about twice as fast on XLA's CPU backend.
    """

    tables: Tables
    mapped: jax.Array
    values: jax.Array
    keys: Tokens  # the rest of the key side


class Back(NamedTuple):
    """The gradient that arrives at a block of queries, and what its rows kept of the forward pass."""

    o_grad: jax.Array  # [b, h, q, d] over the rows' totals
    shift: jax.Array  # [b, h, q]
    delta: jax.Array  # [b, h, q]


def backward(plan: Plan, saved: Any, o_grad: jax.Array):
    """Return the gradients of the tables, both sides and the blocks' numbers (None).

    Args:
      plan: the tiles.
      saved: the inputs, the outputs, and of each row [n, b, h, block] the sum of its weights and the shift of its
        scores.
      o_grad: the gradient of outputs [n, b, h, block, d].
    """
    tables, q, k, numbers, o, total, shift = saved
    encoding, groups = plan.encoding, k.tokens.mapped.shape[2]
    first_tile = skipper(plan, tables.strips, k.tokens)
    # With w = p / total, p = exp(s - shift): dL/ds = w * (dL/dw - delta), delta_i = o_i . dL/do_i. The incoming
    # gradient is divided by the total, not p. And p is not exp(s - log-sum-exp), which rounds for large scores.
    o_grad = o_grad / total[..., None]
    back, floor = Back(o_grad, shift, (o * o_grad).sum(axis=-1)), shift + jnp.log(total)

    def query_block(sums: Sums, numbered: Any):
        i, (q, back, floor) = numbered
        of_q = queries_transposed(q.tokens.mapped, groups) if not encoding.acts_on("decay") else None
        transposed = made_once((of_q, queries_transposed(back.o_grad, groups)))

        def visit(j: Any, carry: Any, masked: bool, far: bool = False) -> Any:
            sums, q_grads = carry
            pairs = Pairs(q, block_at(k, j), strip_of(plan, tables.strips, i, j, far))
            grads, q_grad = _tile_gradients(plan, tables.params, pairs, back, transposed, masked)
            first, strips = first_row(plan, i, j, far), sums.tables.strips
            if plan.learned:
                strips = jax.tree.map(lambda x, g: _add_slice(x, g, first, axis=1), strips, grads.tables.strips)
            params = _add(sums.tables.params, grads.tables.params)
            per_block = jax.tree.map(lambda x, g: _add_slice(x, g[None], j, axis=0), sums[1:], grads[1:])
            return Sums(Tables(params, strips), *per_block), _add(q_grads, q_grad)

        nothing = sums, _zeros(q.tokens)
        return walk(plan, i, q.slots, k.slots, visit, nothing, lambda _: first_tile(i, q, floor))

    rest = k.tokens._replace(mapped=None, values=None)
    start = Sums(_zeros(tables), _zeros(k.tokens.mapped.mT), _zeros(k.tokens.values.mT), _zeros(rest))
    sums, q_grad = over_blocks(plan, query_block, start, numbers, (q, back, floor))
    mapped, values = made_once((sums.mapped, sums.values))
    grads = (sums.tables, q_grad, sums.keys._replace(mapped=mapped.mT, values=values.mT))
    of_tables, of_q, of_k = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, (tables, q.tokens, k.tokens))
    return of_tables, Block(of_q, None), Block(of_k, None), None  # type: ignore[arg-type]


def _tile_gradients(plan: Plan, params: Params, pairs: Pairs, back: Back, transposed: Any, masked: bool):
    """Return one tile's part of `Sums` (of the strips: of the tile's strip), and of the gradient of q."""
    q, k = pairs.q.tokens, pairs.k.tokens
    visible = visible_pairs(plan.mask, pairs.q.slots, pairs.k.slots)
    strip = pairs.strips if plan.learned else jax.lax.stop_gradient(pairs.strips)

    def scores(params: Params, strip: Any, s: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        tile = Pairs(Block(q, pairs.q.slots), Block(k, pairs.k.slots), strip)
        return adjusted(plan.encoding, params, s, tile, visible)

    def mixed(params: Params, strip: Any, p: jax.Array) -> jax.Array | None:
        return value_terms(plan.encoding, params, p, pairs._replace(strips=strip))

    s = mapped_products(plan.encoding, params, pairs.pos, q.mapped, k.mapped)
    s, pull_scores = jax.vjp(scores, params, strip, s, q, k)
    p = jnp.exp(hidden(s, visible, masked) - back.shift[..., None])
    p_grad = products(back.o_grad, k.values)
    added, pull_mixed = jax.vjp(mixed, params, strip, p)
    mixed_grads = None
    if added is not None:
        *mixed_grads, mixed_p_grad = pull_mixed(back.o_grad)
        p_grad = p_grad + mixed_p_grad
    params_grad, strip_grad, s_grad, q_grad, k_grad = pull_scores(p * (p_grad - back.delta[..., None]))
    if mixed_grads is not None:
        params_grad, strip_grad = _add((params_grad, strip_grad), tuple(mixed_grads))
    q_transposed, o_transposed = transposed
    by_q, by_k, by_params = _products_gradient(plan, params, pairs, q_transposed, s_grad)
    if by_params is not None:
        params_grad = _add(params_grad, by_params)
    sums = Sums(
        Tables(params_grad, strip_grad),
        k_grad.mapped.mT + by_k,
        transposed_products(o_transposed, p),
        k_grad._replace(mapped=None, values=None),
    )
    return sums, q_grad._replace(mapped=q_grad.mapped + by_q)


def _products_gradient(plan: Plan, params: Params, pairs: Pairs, q_transposed: Any, s_grad: jax.Array):
    """Return the gradients of mapped queries, of mapped keys (transposed as in `Sums`), and of params or None."""
    q, k = pairs.q.tokens.mapped, pairs.k.tokens.mapped
    if not plan.encoding.acts_on("decay"):
        return weighted(s_grad, k), transposed_products(q_transposed, s_grad), None
    _, pull = jax.vjp(lambda *args: mapped_products(plan.encoding, args[0], pairs.pos, *args[1:]), params, q, k)
    by_params, by_q, by_k = pull(s_grad)
    return by_q, by_k.mT, by_params


def _add_slice(total: jax.Array, part: jax.Array, first: Any, axis: int) -> jax.Array:
    """Add `part` to `total` from index `first` of an axis on."""
    there = jax.lax.dynamic_slice_in_dim(total, first, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, there + part.astype(total.dtype), first, axis)


def _zeros(tree: Any) -> Any:
    """Return zeros in which gradients are summed: at least float32, whatever the operands are."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), tree)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)
