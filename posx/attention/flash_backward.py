"""The backward pass of flash attention: each tile once more in three kernels, from the kept rows.

They recompute s and w = p / total of a tile, and pull the gradient of s back by `jax.vjp` of the functions of a tile.
`_of_queries` sums the gradients of a query block over key blocks, `_of_keys` those of a key block over query blocks.
`_of_diagonal` sums the gradient of a bias by distance over the tiles of one block diagonal, which read the same biases.
Therefore no array of all pairs is written, and no sum depends on the order in which instances run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posx.attention import strips
from posx.attention.flash import Grid, Shared, blocks_at, call, dot, factors, forward, over_keys, part, quotient, scored
from posx.attention.tiles import Block, Tokens, hidden, visible_pairs
from posx.contract import at_least_float32


class Rows(NamedTuple):
    """Arrays of the backward pass: the gradient of outputs [b, h, q, d], and of each row [b, h, q] three numbers."""

    o_grad: Any
    total: Any
    shift: Any
    delta: Any


class Gradients(NamedTuple):
    """One tile's part of the gradients: of the bias [1, 1, block, block], the rate, and both sides' tokens."""

    bias: Any
    rate: Any
    q: Tokens
    k: Tokens


def backward(grid: Grid, saved: Any, o_grad: jax.Array):
    """Return the gradients of the shared arrays and of both sides, of outputs' gradient [b, h, q, d]."""
    shared, q, k, o, total, shift = saved
    delta = (o * o_grad).sum(axis=-1)
    operands = shared._replace(sink=None), q, k, Rows(o_grad.astype(k.tokens.values.dtype), total, shift, delta)

    def run(kernel: Callable, count: int, tree: Any) -> Any:
        """Return the gradients of arrays [b, h, count * block or 1, d], or [b, h, count, block, block]."""

        def block(x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((min(grid.block, x.shape[-2]), x.shape[-1]), jnp.float32)

        (found,) = call(grid, kernel, count, (jax.tree.map(block, tree),), *operands)
        return jax.tree.map(_summed, found, tree)

    of_q, of_rate = run(_of_queries, grid.blocks, (q.tokens, shared.rate))
    of_k = run(_of_keys, grid.blocks, k.tokens)
    of_bias = None
    if grid.learned:
        tiles, pull = jax.vjp(functools.partial(_bias_tiles, grid), shared.bias)
        (of_bias,) = pull(run(_of_diagonal, grid.diagonals, tiles))
    of_sink = None
    if shared.sink is not None:  # a key without a value: dL/dw = 0, and dL/ds = -w * delta, summed over rows
        of_sink = -(jnp.exp(shared.sink[None, :, None] - shift) / total * delta).sum(axis=(0, 2))
        of_sink = of_sink.astype(shared.sink.dtype)
    return Shared(of_bias, of_rate, of_sink), Block(of_q, None), Block(of_k, None)  # type: ignore[arg-type]


def _bias_tiles(grid: Grid, strip: jax.Array) -> jax.Array:
    """Return the bias of a tile of each block diagonal, [1, h or 1, n, block, block] of the bias by distance."""
    parts = strip.reshape(-1, grid.diagonals + 1, grid.block)
    rising = jnp.concatenate([parts[:, :-1], parts[:, 1:]], axis=2)
    falling = jnp.pad(rising[..., -2::-1], ((0, 0), (0, 0), (0, 1))).reshape(-1, 2 * grid.block)
    return strips.toeplitz(falling, grid.block).reshape(1, -1, grid.diagonals, grid.block, grid.block)


def _summed(found: jax.Array, x: jax.Array) -> jax.Array:
    """Return gradients [b, h, n, *block] as those of x: summed over all sequences, heads and blocks that share it."""
    b, h, n, *block = found.shape
    found = found.reshape(b, x.shape[1], h // x.shape[1], n, *block).sum(axis=2)
    found = found.sum(axis=0, keepdims=True) if x.shape[0] < b else found
    found = found.sum(axis=2, keepdims=True) if x.shape[2] == 1 else found
    return found.reshape(x.shape).astype(x.dtype)


def _over_queries(grid: Grid, j: Any, visit: Callable, carry: Any) -> Any:
    """Call visit(i, carry, masked) for the query blocks i that may see key block j."""
    if grid.plain:
        carry = visit(j, carry, masked=True)
        return jax.lax.fori_loop(j + 1, grid.blocks, functools.partial(visit, masked=False), carry)
    end: Any = grid.blocks
    if grid.mask.window and not grid.mask.sinks:
        end = jnp.minimum(quotient((j + 1) * grid.block + grid.mask.window - 2, grid.block) + 1, end)
    return jax.lax.fori_loop(j if grid.mask.causal else 0, end, functools.partial(visit, masked=True), carry)


def _gradients(grid: Grid, shared: Shared, q: Block, k: Block, rows: Rows, masked: bool) -> Gradients:
    """Return one tile's part of all gradients. The compiler drops those that a kernel does not use."""
    dtype, (bias, rate, _) = q.tokens.mapped.dtype, shared
    (o_grad, v), (total, shift, delta) = (rows.o_grad[0, 0], k.tokens.values[0, 0]), (x[0][:, None] for x in rows[1:])

    def operands(rate: Any, q_mapped: jax.Array, k_mapped: jax.Array) -> tuple[jax.Array, jax.Array]:
        return factors(rate, _with(q, mapped=q_mapped), _with(k, mapped=k_mapped))

    def terms(bias: Any, of_q: Any, of_k: Any, s: jax.Array) -> jax.Array:
        return scored(grid, bias, _with(q, token_bias=of_q), _with(k, token_bias=of_k), s)

    wide = (at_least_float32(x.tokens.mapped) for x in (q, k))  # else gradients would be rounded in each tile
    found, pull_operands = jax.vjp(operands, rate, *wide)
    by_q, by_k = (x[0, 0].astype(dtype) for x in found)
    products = dot(by_q, by_k, (1, 1))[None, None]
    s, pull_terms = jax.vjp(terms, bias, q.tokens.token_bias, k.tokens.token_bias, products)
    w = jnp.exp(hidden(s, visible_pairs(grid.mask, q.slots, k.slots), masked)[0, 0] - shift) / total
    s_grad = w * (dot(o_grad, v, (1, 1)) - delta)
    of_bias, q_bias, k_bias, of_products = pull_terms(s_grad[None, None])
    of_products = of_products[0, 0].astype(dtype)
    by_operands = dot(of_products, by_k), dot(of_products, by_q, (0, 0))
    of_rate, of_q, of_k = pull_operands(tuple(x[None, None] for x in by_operands))
    of_values = dot(w.astype(v.dtype), o_grad, (0, 0))[None, None]
    return Gradients(of_bias, of_rate, Tokens(of_q, token_bias=q_bias), Tokens(of_k, of_values, token_bias=k_bias))


def _with(side: Block, **arrays: Any) -> Block:
    return side._replace(tokens=side.tokens._replace(**arrays))


def _of_queries(grid: Grid, shared: Shared, q_side: Block, k_side: Block, row_refs: Rows, out: Any):
    """Write the gradients of query block i and its part of the gradient of the rate."""
    i = pl.program_id(0)
    q, rows = blocks_at(grid, (q_side, row_refs), i)

    def visit(j: Any, carry: Any, masked: bool) -> Any:
        found = _gradients(grid, part(grid, shared, i, j), q, blocks_at(grid, k_side, j), rows, masked)
        return _add(carry, (found.q, found.rate))

    _write(out, over_keys(grid, i, visit, _zeros(out)))


def _of_keys(grid: Grid, shared: Shared, q_side: Block, k_side: Block, row_refs: Rows, out: Any):
    """Write the gradients of key block j, from one query head."""
    j = pl.program_id(0)
    k = blocks_at(grid, k_side, j)

    def visit(i: Any, carry: Any, masked: bool) -> Any:
        q, rows = blocks_at(grid, (q_side, row_refs), i)
        return _add(carry, _gradients(grid, part(grid, shared, i, j), q, k, rows, masked).k)

    _write(out, _over_queries(grid, j, visit, _zeros(out)))


def _of_diagonal(grid: Grid, shared: Shared, q_side: Block, k_side: Block, row_refs: Rows, out: Any):
    """Write the gradient of the bias tile of one block diagonal: the sum of the tiles that read it."""
    lag = pl.program_id(0) - grid.ahead  # of the keys behind the queries, in blocks

    def visit(i: Any, carry: Any) -> Any:
        (q, rows), k = blocks_at(grid, (q_side, row_refs), i), blocks_at(grid, k_side, i - lag)
        return _add(carry, _gradients(grid, part(grid, shared, i, i - lag), q, k, rows, True).bias)

    first, end = jnp.maximum(lag, 0), jnp.minimum(grid.blocks + lag, grid.blocks)
    if grid.mask.window and not grid.mask.sinks:
        end = jnp.where((lag - 1) * grid.block + 1 < grid.mask.window, end, first)
    _write(out, jax.lax.fori_loop(first, end, visit, _zeros(out)))


def _zeros(refs: Any) -> Any:
    return jax.tree.map(lambda ref: jnp.zeros((1, 1, *ref.shape), jnp.float32), refs)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, part)


def _write(refs: Any, found: Any) -> None:
    for ref, x in zip(jax.tree.leaves(refs), jax.tree.leaves(found), strict=True):
        ref[...] = x[0, 0].astype(ref.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(grid: Grid, shared: Shared, q: Block, k: Block) -> jax.Array:
    """Return attention outputs [b, h, q, d], float32, of whole blocks of tokens."""
    return forward(grid, shared, q, k)[0]


def _flash_forward(grid: Grid, shared: Shared, q: Block, k: Block):
    o, total, shift = forward(grid, shared, q, k)
    return o, (shared, q, k, o, total, shift)


flash.defvjp(_flash_forward, backward)
