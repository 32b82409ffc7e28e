"""The pass back of the blockwise executor: each tile once more, from what the pass forward kept of its rows.

Of a tile are formed again its scores and weights; the gradients of its products come by hand, those of all that
position adds by pulling the gradient of the scores back through the same functions of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.attention.blocks import Plan, Tables, block_at, first_row, over_blocks, skipper, strip_of, walk
from posx.attention.products import is_plain, mapped_products, products
from posx.attention.tiles import Block, Pairs, Tokens, adjusted, hidden, value_terms, visible_pairs, weighted
from posx.encodings.base import Params, wide_dtype


class Sums(NamedTuple):
    """Gradients summed over tiles, at least float32.

    Those of mapped keys and of values lie transposed, [n, b, g, d, block]: then every product contracts the minor axis
    of its left side, which XLA's CPU backend takes about twice as fast.
    """

    tables: Tables
    mapped: jax.Array
    values: jax.Array
    keys: Tokens  # all else of the key side


class Back(NamedTuple):
    """What comes back to a block of queries, and what its rows kept of the pass forward."""

    o_grad: jax.Array  # [b, h, q, d] over the rows' totals
    shift: jax.Array  # [b, h, q]
    delta: jax.Array  # [b, h, q]


def backward(plan: Plan, saved: Any, o_grad: jax.Array):
    """Gradients of the tables, both sides and the blocks' numbers (None), for those of outputs [n, b, h, block, d].

    saved: what was attended to, the outputs, and of each row [n, b, h, block] the sum of its weights and what was taken
    off its scores before they were exponentiated.
    """
    tables, q, k, numbers, o, total, shift = saved
    encoding, groups = plan.encoding, k.tokens.mapped.shape[2]
    first_tile = skipper(plan, tables.strips, k.tokens)
    # With w = p / total, p = exp(s - shift): dL/ds = w * (dL/dw - delta), delta_i = o_i . dL/do_i. What comes back is
    # divided by the total, not p; and p is not exp(s - log-sum-exp), which large scores would round.
    o_grad = o_grad / total[..., None]
    back, floor = Back(o_grad, shift, (o * o_grad).sum(axis=-1)), shift + jnp.log(total)

    def query_block(sums: Sums, numbered: Any):
        i, (q, back, floor) = numbered
        # Without the barrier XLA folds these small transposes into the products with the large score matrices.
        of_q = _turned(q.tokens.mapped, groups) if is_plain(encoding) else None
        turned = jax.lax.optimization_barrier((of_q, _turned(back.o_grad, groups)))

        def visit(j: Any, carry: Any, masked: bool, far: bool = False) -> Any:
            sums, q_grads = carry
            pairs = Pairs(q, block_at(k, j), strip_of(plan, tables.strips, i, j, far))
            grads, q_grad = _tile_gradients(plan, tables.params, pairs, back, turned, masked)
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
    mapped, values = jax.lax.optimization_barrier((sums.mapped, sums.values))
    grads = (sums.tables, q_grad, sums.keys._replace(mapped=mapped.mT, values=values.mT))
    of_tables, of_q, of_k = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, (tables, q.tokens, k.tokens))
    return of_tables, Block(of_q, None), Block(of_k, None), None  # type: ignore[arg-type]


def _tile_gradients(plan: Plan, params: Params, pairs: Pairs, back: Back, turned: Any, masked: bool):
    """One tile's part of `Sums` (strips: of the tile's strip), and of the gradient of q."""
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
    q_turned, o_turned = turned
    by_q, by_k, by_params = _products_gradient(plan, params, pairs, q_turned, s_grad)
    if by_params is not None:
        params_grad = _add(params_grad, by_params)
    sums = Sums(
        Tables(params_grad, strip_grad),
        k_grad.mapped.mT + by_k,
        _turned_products(o_turned, p),
        k_grad._replace(mapped=None, values=None),
    )
    return sums, q_grad._replace(mapped=q_grad.mapped + by_q)


def _products_gradient(plan: Plan, params: Params, pairs: Pairs, q_turned: Any, s_grad: jax.Array):
    """Of the tile's mapped queries; of its mapped keys, transposed as in `Sums`; and of params, where products read
    them."""
    q, k = pairs.q.tokens.mapped, pairs.k.tokens.mapped
    if is_plain(plan.encoding):
        return weighted(s_grad, k), _turned_products(q_turned, s_grad), None
    _, pull = jax.vjp(lambda *args: mapped_products(plan.encoding, args[0], pairs.pos, *args[1:]), params, q, k)
    by_params, by_q, by_k = pull(s_grad)
    return by_q, by_k.mT, by_params


def _turned(x: jax.Array, groups: int) -> jax.Array:
    """[b, h, q, d] as [b, g, d, h/g * q]: the queries that a key head serves, side by side."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1]).mT


def _turned_products(x: jax.Array, w: jax.Array) -> jax.Array:
    """sum over queries of x [b, g, d, h/g * q] times w [b, h, q, k]: [b, g, d, k], at least float32."""
    w = w.reshape(*x.shape[:2], -1, w.shape[-1]).astype(x.dtype)
    return jnp.einsum("bgdq,bgqk->bgdk", x, w, preferred_element_type=wide_dtype(x.dtype))


def _add_slice(total: jax.Array, part: jax.Array, first: Any, axis: int) -> jax.Array:
    """`part` added to `total` from place `first` of an axis on."""
    there = jax.lax.dynamic_slice_in_dim(total, first, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, there + part.astype(total.dtype), first, axis)


def _zeros(tree: Any) -> Any:
    """Where gradients are summed: at least float32, whatever the operands are."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), tree)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)
