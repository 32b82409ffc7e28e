"""The backward pass of flash attention: each tile once more in three kernels, from the kept rows.

They recompute s and w = exp(s - top) / total of a tile, and pull the gradient of s back by `jax.vjp` of a tile's
functions. `_query_gradients` sums the gradients of a query block over key blocks, `_key_gradients` those of a key block
over query blocks. `_bias_gradients` sums the gradient of a bias by distance over the tiles of one block diagonal, which
read the same biases. Therefore no array of all pairs is written, and no sum depends on the order in which instances
run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posx.attention.flash import (
    KernelGrid,
    Shared,
    bias_tiles,
    call,
    dot,
    finite_scores,
    forward,
    hide_unseen,
    quotient,
    read_bias,
    read_block,
    score_products,
    tabulate_bias,
    visit_keys,
    weights,
)  # fmt: skip
from posx.attention.tiles import Block, Tokens
from posx.contract import at_least_float32


class Rows(NamedTuple):
    """Arrays of the backward pass: the gradient of outputs [b, q, h, d], and numbers [b, h, q] of each row."""

    o_grad: Any
    top: Any  # the highest score
    share: Any  # 1 / total: the weight of the highest score
    delta: Any


class Gradients(NamedTuple):
    """One tile's part of the gradients: of the bias [1, 1, block, block] and of both sides' tokens."""

    bias: Any
    q: Tokens
    k: Tokens


def kernel_backward(grid: KernelGrid, saved: Any, gradients: tuple[jax.Array, jax.Array, jax.Array]):
    """Return the gradients of the shared arrays and of both sides, of those of outputs and of `total`.

    A score s_ij of weight w_ij gets w_ij (<o_grad_i, v_j> - delta_i), with
    delta_i = <o_grad_i, o_i> - total_i total_grad_i. The gradient of `top` is not read: all that is made of both rows
    depends on total_i exp(top_i) alone.
    """
    (shared, q, k, o, top, total), (o_grad, _, total_grad) = saved, gradients
    delta = (at_least_float32(o) * at_least_float32(o_grad)).sum(axis=-1).swapaxes(1, 2) - total * total_grad
    rows, (b, h) = Rows(o_grad.astype(k.tokens.values.dtype), top, 1 / total, delta), top.shape[:2]

    def run(kernel: Callable, count: int, tree: Any, by_keys: bool = False, last_first: bool = False) -> Any:
        """Return the gradients of arrays [b or 1, count * block, h or fewer, d] and [b or 1, h or fewer, n]."""

        def part(x: jax.Array) -> jax.ShapeDtypeStruct:
            d, heads = x.shape[3:], x.shape[-2]
            return jax.ShapeDtypeStruct((grid.block, *d), x.dtype if (x.shape[0], heads) == (b, h) else jnp.float32)

        operands = tabulate_bias(grid, shared, by_keys), q, k, rows
        (gradients,) = call(grid, kernel, count, (jax.tree.map(part, tree),), *operands, last_first=last_first)
        return jax.tree.map(_sum_shared, gradients, tree)

    of_q = run(_query_gradients, grid.blocks, q.tokens, last_first=grid.mask.causal)
    of_k = run(_key_gradients, grid.blocks, k.tokens, by_keys=True)
    of_bias = None
    if grid.learned:
        tiles, pull = jax.vjp(functools.partial(bias_tiles, grid), shared.bias)
        (of_bias,) = pull(run(_bias_gradients, grid.diagonals, tiles))
    of_slope = None if shared.slope is None else jnp.zeros_like(shared.slope)
    return Shared(of_bias, of_slope), Block(of_q, None), Block(of_k, None)  # type: ignore[arg-type]


def _sum_shared(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """Return gradients [b, t, h, d] or [b, h, t] as those of x: summed over all sequences and heads that share it."""
    axis = x.ndim - 2
    gradient = gradient.reshape(*gradient.shape[:axis], x.shape[axis], -1, *gradient.shape[axis + 1 :]).sum(
        axis=axis + 1
    )
    return (gradient.sum(axis=0, keepdims=True) if x.shape[0] < gradient.shape[0] else gradient).astype(x.dtype)


def _visit_queries(grid: KernelGrid, j: Any, visit: Callable, carry: Any) -> Any:
    """Call visit(i, carry, masked) for the query blocks i that may see key block j."""
    first: Any = j if grid.mask.causal else 0
    end: Any = grid.blocks
    if grid.plain:
        past = jnp.minimum(first + grid.num_masked, end)
        carry = jax.lax.fori_loop(first, past, functools.partial(visit, masked=True), carry)
        return jax.lax.fori_loop(past, end, functools.partial(visit, masked=False), carry)
    if grid.mask.window and not grid.mask.sinks:
        end = jnp.minimum(quotient((j + 1) * grid.block + grid.mask.window - 2, grid.block) + 1, end)
    return jax.lax.fori_loop(first, end, functools.partial(visit, masked=True), carry)


def _gradients(
    grid: KernelGrid, bias: Any, q: Block, k: Block, rows: Rows, masked: bool, by_keys: bool = False
) -> Gradients:
    """Return one tile's part of all gradients. The compiler drops those that a kernel does not use.

    by_keys: the products are made with keys first, so that weights meet the sums over queries as they are.
    """
    (by_q, by_k), (o_grad, v) = (x.tokens.mapped[0, 0] for x in (q, k)), (rows.o_grad[0, 0], k.tokens.values[0, 0])
    top, share, delta = rows.top[0], rows.share[0], rows.delta[0]

    def terms(bias: Any, of_q: Tokens, of_k: Tokens, s: jax.Array) -> jax.Array:
        of_q, of_k = (own._replace(mapped=x.tokens.mapped) for own, x in ((of_q, q), (of_k, k)))
        return score_products(grid, bias, q._replace(tokens=of_q), k._replace(tokens=of_k), s, by_keys)

    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        return dot(b, a, (1, 1)).T if by_keys else dot(a, b, (1, 1))

    nothing: Any = None
    of_terms = (x.tokens._replace(mapped=nothing, values=None) for x in (q, k))
    s, pull = jax.vjp(terms, bias, *of_terms, products(by_q, by_k)[None, None])
    w = weights(hide_unseen(grid, q, k, finite_scores(grid, s), masked)[0, 0], top) * share[:, None]
    s_grad = w * (products(o_grad, v) - delta[:, None])
    of_bias, by_terms_q, by_terms_k, of_products = pull(s_grad[None, None])
    of_products = of_products[0, 0].astype(by_q.dtype)
    of_q, of_k, of_v = dot(of_products, by_k), dot(of_products, by_q, (0, 0)), dot(w.astype(v.dtype), o_grad, (0, 0))
    of_q, of_k, of_v = (x[None, None] for x in (of_q, of_k, of_v))
    return Gradients(of_bias, by_terms_q._replace(mapped=of_q), by_terms_k._replace(mapped=of_k, values=of_v))


def _query_gradients(grid: KernelGrid, i: Any, shared: Shared, q_side: Block, k_side: Block, row_refs: Rows, out: Any):
    """Write the gradients of query block i."""
    q, rows = read_block(grid, (q_side, row_refs), i)

    def visit(j: Any, carry: Any, masked: bool) -> Any:
        part = _gradients(grid, read_bias(grid, shared, i, j), q, read_block(grid, k_side, j), rows, masked)
        return _add(carry, part.q)

    _write(out, visit_keys(grid, i, visit, _zeros(out)))


def _key_gradients(grid: KernelGrid, j: Any, shared: Shared, q_side: Block, k_side: Block, row_refs: Rows, out: Any):
    """Write the gradients of key block j, from one query head."""
    k = read_block(grid, k_side, j)

    def visit(i: Any, carry: Any, masked: bool) -> Any:
        q, rows = read_block(grid, (q_side, row_refs), i)
        bias = read_bias(grid, shared, i, j, by_keys=True)
        return _add(carry, _gradients(grid, bias, q, k, rows, masked, by_keys=True).k)

    _write(out, _visit_queries(grid, j, visit, _zeros(out)))


def _bias_gradients(grid: KernelGrid, n: Any, shared: Shared, q_side: Block, k_side: Block, row_refs: Rows, out: Any):
    """Write the gradient of the bias tile of one diagonal: the sum of the tiles that read it."""
    lag = n - grid.num_ahead  # of the keys behind the queries, in blocks
    bias = read_bias(grid, shared, lag, 0)

    def visit(i: Any, carry: Any) -> Any:
        (q, rows), k = read_block(grid, (q_side, row_refs), i), read_block(grid, k_side, i - lag)
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


def _write(refs: Any, values: Any) -> None:
    for ref, x in zip(jax.tree.leaves(refs), jax.tree.leaves(values), strict=True):
        ref[...] = x.reshape(ref.shape).astype(ref.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(grid: KernelGrid, shared: Shared, q: Block, k: Block) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what `forward` returns of whole blocks of tokens, vectors [b, t, h, d]."""
    return forward(grid, shared, q, k)


def _flash_forward(grid: KernelGrid, shared: Shared, q: Block, k: Block):
    out = forward(grid, shared, q, k)
    return out, (shared, q, k, *out)


flash.defvjp(_flash_forward, kernel_backward)
