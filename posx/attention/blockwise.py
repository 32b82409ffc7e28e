"""The blockwise executor: online softmax over tiles, memory linear in length, with its own backward pass.

Forward keeps, per query block, a running maximum, sum and output. Backward recomputes each tile from the saved
log-sum-exp and pulls its gradient back through the same tile functions, so that every encoding, learned or not, is
served by the one formula.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.masks import Mask
from posx.attention.tiles import INVISIBLE, Slots, Tokens, tile_scores, tile_values, visible_pairs
from posx.encodings.base import Encoding, Params, wide_dtype

QUERY_BLOCK = 256
KEY_BLOCK = 512


def blockwise(
    encoding: Encoding,
    mask: Mask,
    params: Params,
    q: Tokens,
    k: Tokens,
    q_slots: Slots,
    k_slots: Slots,
    query_block: int = QUERY_BLOCK,
    key_block: int = KEY_BLOCK,
) -> jax.Array:
    """As `dense`, over tiles of query_block x key_block tokens; lengths are padded up to whole tiles."""
    num_queries, num_keys = q_slots.idx.shape[0], k_slots.idx.shape[0]
    query_block = min(query_block, num_queries)
    key_block = num_keys if encoding.tiling == "rows" else min(key_block, num_keys)
    q, q_slots = _blocks(q, q_slots, query_block)
    k, k_slots = _blocks(k, k_slots, key_block)
    o = _attend((encoding, mask), params, q, k, q_slots, k_slots)
    return o.reshape(-1, *o.shape[2:])[:num_queries]


def _blocks(tokens: Tokens, slots: Slots, block: int) -> tuple[Tokens, Slots]:
    """Every array [t, ...] as [n, block, ...]; what fills the last block is an empty slot (idx -1)."""
    padding = -slots.idx.shape[0] % block

    def cut(x: jax.Array, **pad: Any) -> jax.Array:
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), **pad)
        return x.reshape(-1, block, *x.shape[1:])

    # Empty slots repeat the last position, so that they stay within what the encoding is defined for.
    pos = cut(slots.pos, mode="edge")
    segment = None if slots.segment is None else cut(slots.segment)
    return jax.tree.map(cut, tokens), Slots(pos, cut(slots.idx, constant_values=-1), segment)


def _forward(static: tuple[Encoding, Mask], params: Params, q: Tokens, k: Tokens, q_slots: Slots, k_slots: Slots):
    """Outputs [n, block, h, d] and log-sum-exps [n, h, block] of the scores."""
    encoding, mask = static

    def query_block(block):
        q_tile, q_where = block

        def key_block(carry, block):
            k_tile, k_where = block

            def add(carry):
                o, top, total = carry
                s, visible = tile_scores(encoding, mask, params, q_tile, k_tile, q_where, k_where)
                new_top = jnp.maximum(top, s.max(axis=-1))
                p = jnp.where(visible[None], jnp.exp(s - new_top[:, :, None]), 0)
                shrink = jnp.exp(top - new_top)
                o = o * shrink.T[:, :, None] + tile_values(encoding, params, p, k_tile.values, q_where, k_where)
                return o, new_top, total * shrink + p.sum(axis=-1)

            return _if_visible(mask, q_where, k_where, add, lambda carry: carry, carry), None

        num_queries, num_heads = q_tile.vectors.shape[:2]
        dtype = wide_dtype(q_tile.vectors.dtype)
        empty = jnp.zeros((num_queries, num_heads, k.values.shape[-1]), dtype)
        top = jnp.full((num_heads, num_queries), INVISIBLE, dtype)
        (o, top, total), _ = jax.lax.scan(key_block, (empty, top, jnp.zeros_like(top)), (k, k_slots))
        total_or_one = jnp.where(total > 0, total, 1)
        return o / total_or_one.T[:, :, None], jnp.where(total > 0, top + jnp.log(total_or_one), 0)

    return jax.lax.map(query_block, (q, q_slots))


def _if_visible(mask: Mask, q_where: Slots, k_where: Slots, compute, skip, operand):
    return jax.lax.cond(visible_pairs(mask, q_where, k_where).any(), compute, skip, operand)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, params, q, k, q_slots, k_slots):
    return _forward(static, params, q, k, q_slots, k_slots)[0]


def _attend_forward(static, params, q, k, q_slots, k_slots):
    o, lse = _forward(static, params, q, k, q_slots, k_slots)
    return o, (params, q, k, q_slots, k_slots, o, lse)


def _attend_backward(static, saved, o_grad):
    encoding, mask = static
    params, q, k, q_slots, k_slots, o, lse = saved
    # With p = exp(s - lse), dL/ds = p * (dL/dp - delta), delta_i = o_i . dL/do_i: so delta enters as the cotangent of
    # each tile's row sums, and the rest is the ordinary pull-back of one tile.
    delta = (o * o_grad).sum(axis=-1).swapaxes(1, 2)

    def query_block(grads, block):
        q_tile, q_where, o_grad_tile, lse_tile, delta_tile = block

        def key_block(grads, block):
            k_tile, k_where = block

            def tile(params, q_tile, k_tile):
                s, visible = tile_scores(encoding, mask, params, q_tile, k_tile, q_where, k_where)
                p = jnp.where(visible[None], jnp.exp(s - lse_tile[:, :, None]), 0)
                return tile_values(encoding, params, p, k_tile.values, q_where, k_where), p.sum(axis=-1)

            def pull_back(operands):
                grads = jax.vjp(tile, *operands)[1]((o_grad_tile, -delta_tile))
                return _add(_zeros(operands), grads)

            operands = (params, q_tile, k_tile)
            params_grad, q_grad, k_grad = _if_visible(mask, q_where, k_where, pull_back, _zeros, operands)
            return _add(grads, (params_grad, q_grad)), k_grad

        k_grads, params_grad = grads
        (params_grad, q_grad), k_grad = jax.lax.scan(key_block, (params_grad, _zeros(q_tile)), (k, k_slots))
        return (_add(k_grads, k_grad), params_grad), q_grad

    start = (_zeros(k), _zeros(params))
    (k_grad, params_grad), q_grad = jax.lax.scan(query_block, start, (q, q_slots, o_grad, lse, delta))
    grads = jax.tree.map(lambda g, x: g.astype(x.dtype), (params_grad, q_grad, k_grad), (params, q, k))
    return *grads, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _zeros(tree):
    """Where gradients are summed: at least float32, whatever the operands are."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), tree)


def _add(total, part):
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)
