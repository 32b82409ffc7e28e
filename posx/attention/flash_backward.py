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

from posx.attention.flash import (
    Grid,
    Shared,
    bias_of,
    bias_tiles,
    block_at,
    call,
    dot,
    finite_scores,
    forward,
    over_keys,
    quotient,
    scored,
    tabled,
    unseen,
    weights,
)  # fmt: skip
from posx.attention.tiles import Block, Tokens
from posx.contract import at_least_float32


class Rows(NamedTuple):
    """Arrays of the backward pass: the gradient of outputs [b, q, h, d], and of each row [b, h, q] two numbers."""

    o_grad: Any
    lse: Any
    delta: Any


class Gradients(NamedTuple):
    """One tile's part of the gradients: of the bias [1, 1, block, block] and of both sides' tokens."""

    bias: Any
    q: Tokens
    k: Tokens


def backward(grid: Grid, saved: Any, gradients: tuple[jax.Array, jax.Array]):
    """Return the gradients of the shared arrays and of both sides, of those of outputs and of `lse`.

    A score s_ij of weight w_ij gets w_ij (<o_grad_i, v_j> - delta_i), with delta_i = <o_grad_i, o_i> - lse_grad_i.
    """
    (shared, q, k, o, lse), (o_grad, lse_grad) = saved, gradients
    delta = (at_least_float32(o) * at_least_float32(o_grad)).sum(axis=-1).swapaxes(1, 2) - lse_grad
    rows, (b, h) = Rows(o_grad.astype(k.tokens.values.dtype), lse, delta), lse.shape[:2]

    def run(kernel: Callable, count: int, tree: Any, by_keys: bool = False, last_first: bool = False) -> Any:
        """Return the gradients of arrays [b or 1, count * block, h or fewer, d] and [b or 1, h or fewer, n]."""

        def part(x: jax.Array) -> jax.ShapeDtypeStruct:
            d, heads = x.shape[3:], x.shape[-2]
            return jax.ShapeDtypeStruct((grid.block, *d), x.dtype if (x.shape[0], heads) == (b, h) else jnp.float32)

        operands = tabled(grid, shared, by_keys), q, k, rows
        (found,) = call(grid, kernel, count, (jax.tree.map(part, tree),), *operands, last_first=last_first)
        return jax.tree.map(_summed, found, tree)

    of_q = run(_of_queries, grid.blocks, q.tokens, last_first=grid.mask.causal)
    of_k = run(_of_keys, grid.blocks, k.tokens, by_keys=True)
    of_bias = None
    if grid.learned:
        tiles, pull = jax.vjp(functools.partial(bias_tiles, grid), shared.bias)
        (of_bias,) = pull(run(_of_diagonal, grid.diagonals, tiles))
    of_slope = None if shared.slope is None else jnp.zeros_like(shared.slope)
    return Shared(of_bias, of_slope), Block(of_q, None), Block(of_k, None)  # type: ignore[arg-type]


def _summed(found: jax.Array, x: jax.Array) -> jax.Array:
    """Return gradients [b, t, h, d] or [b, h, t] as those of x: summed over all sequences and heads that share it."""
    axis = x.ndim - 2
    found = found.reshape(*found.shape[:axis], x.shape[axis], -1, *found.shape[axis + 1 :]).sum(axis=axis + 1)
    return (found.sum(axis=0, keepdims=True) if x.shape[0] < found.shape[0] else found).astype(x.dtype)


def _over_queries(grid: Grid, j: Any, visit: Callable, carry: Any) -> Any:
    """Call visit(i, carry, masked) for the query blocks i that may see key block j."""
    first: Any = j if grid.mask.causal else 0
    end: Any = grid.blocks
    if grid.plain:
        past = jnp.minimum(first + grid.masked, end)
        carry = jax.lax.fori_loop(first, past, functools.partial(visit, masked=True), carry)
        return jax.lax.fori_loop(past, end, functools.partial(visit, masked=False), carry)
    if grid.mask.window and not grid.mask.sinks:
        end = jnp.minimum(quotient((j + 1) * grid.block + grid.mask.window - 2, grid.block) + 1, end)
    return jax.lax.fori_loop(first, end, functools.partial(visit, masked=True), carry)


def _gradients(grid: Grid, bias: Any, q: Block, k: Block, rows: Rows, masked: bool, by_keys: bool = False) -> Gradients:
    """Return one tile's part of all gradients. The compiler drops those that a kernel does not use.

    by_keys: the products are made with keys first, so that weights meet the sums over queries as they are.
    """
    (by_q, by_k), (o_grad, v) = (x.tokens.mapped[0, 0] for x in (q, k)), (rows.o_grad[0, 0], k.tokens.values[0, 0])
    lse, delta = rows.lse[0], rows.delta[0]

    def terms(bias: Any, of_q: Tokens, of_k: Tokens, s: jax.Array) -> jax.Array:
        of_q, of_k = (own._replace(mapped=x.tokens.mapped) for own, x in ((of_q, q), (of_k, k)))
        return scored(grid, bias, q._replace(tokens=of_q), k._replace(tokens=of_k), s, by_keys)

    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        return dot(b, a, (1, 1)).T if by_keys else dot(a, b, (1, 1))

    nothing: Any = None
    of_terms = (x.tokens._replace(mapped=nothing, values=None) for x in (q, k))
    s, pull = jax.vjp(terms, bias, *of_terms, products(by_q, by_k)[None, None])
    w = weights(unseen(grid, q, k, finite_scores(grid, s), masked)[0, 0], lse)
    s_grad = w * (products(o_grad, v) - delta[:, None])
    of_bias, by_terms_q, by_terms_k, of_products = pull(s_grad[None, None])
    of_products = of_products[0, 0].astype(by_q.dtype)
    of_q, of_k, of_v = dot(of_products, by_k), dot(of_products, by_q, (0, 0)), dot(w.astype(v.dtype), o_grad, (0, 0))
    of_q, of_k, of_v = (x[None, None] for x in (of_q, of_k, of_v))
    return Gradients(of_bias, by_terms_q._replace(mapped=of_q), by_terms_k._replace(mapped=of_k, values=of_v))


def _of_queries(grid: Grid, i: Any, shared: Shared, q_side: Block, k_side: Block, row_refs: Rows, out: Any):
    """Write the gradients of query block i."""
    q, rows = block_at(grid, (q_side, row_refs), i)

    def visit(j: Any, carry: Any, masked: bool) -> Any:
        found = _gradients(grid, bias_of(grid, shared, i, j), q, block_at(grid, k_side, j), rows, masked)
        return _add(carry, found.q)

    _write(out, over_keys(grid, i, visit, _zeros(out)))


def _of_keys(grid: Grid, j: Any, shared: Shared, q_side: Block, k_side: Block, row_refs: Rows, out: Any):
    """Write the gradients of key block j, from one query head."""
    k = block_at(grid, k_side, j)

    def visit(i: Any, carry: Any, masked: bool) -> Any:
        q, rows = block_at(grid, (q_side, row_refs), i)
        bias = bias_of(grid, shared, i, j, by_keys=True)
        return _add(carry, _gradients(grid, bias, q, k, rows, masked, by_keys=True).k)

    _write(out, _over_queries(grid, j, visit, _zeros(out)))


def _of_diagonal(grid: Grid, n: Any, shared: Shared, q_side: Block, k_side: Block, row_refs: Rows, out: Any):
    """Write the gradient of the bias tile of one diagonal: the sum of the tiles that read it."""
    lag = n - grid.ahead  # of the keys behind the queries, in blocks
    bias = bias_of(grid, shared, lag, 0)

    def visit(i: Any, carry: Any) -> Any:
        (q, rows), k = block_at(grid, (q_side, row_refs), i), block_at(grid, k_side, i - lag)
        return _add(carry, _gradients(grid, bias, q, k, rows, True).bias)

    first, end = jnp.maximum(lag, 0), jnp.minimum(grid.blocks + lag, grid.blocks)
    if grid.mask.window and not grid.mask.sinks:
        end = jnp.where((lag - 1) * grid.block + 1 < grid.mask.window, end, first)
    _write(out, jax.lax.fori_loop(first, end, visit, _zeros(out)))


def _zeros(refs: Any) -> Any:
    def zeros(ref: Any) -> jax.Array:
        return jnp.zeros((1, 1, *ref.shape) if len(ref.shape) > 1 else (1, *ref.shape), jnp.float32)

    return jax.tree.map(zeros, refs)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, part)


def _write(refs: Any, found: Any) -> None:
    for ref, x in zip(jax.tree.leaves(refs), jax.tree.leaves(found), strict=True):
        ref[...] = x.reshape(ref.shape).astype(ref.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(grid: Grid, shared: Shared, q: Block, k: Block) -> tuple[jax.Array, jax.Array]:
    """Return what `forward` returns of whole blocks of tokens, vectors [b, t, h, d]."""
    return forward(grid, shared, q, k)


def _flash_forward(grid: Grid, shared: Shared, q: Block, k: Block):
    o, lse = forward(grid, shared, q, k)
    return (o, lse), (shared, q, k, o, lse)


flash.defvjp(_flash_forward, backward)
