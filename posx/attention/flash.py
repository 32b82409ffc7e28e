"""Flash attention in Pallas, forward and backward, over the same functions of a tile as the blockwise executor.

    each instance of the forward kernel has a sequence, a head and query block i:
        o, top, total = 0, -inf, 0                       # 0, z, 1 with a sink of logit z
        for each key block j that i may see:
            s = scores(tile i, j)                        # tiles.py: the formula, with the block's product q k^T
            new = max(top, row maxima of s)
            p = exp(s - new);  shrink = exp(top - new)
            o = o * shrink + p v;  total = total * shrink + row sums of p;  top = new
        outputs of i = o / total

The backward pass (flash_backward.py) recomputes s of each tile from the kept rows, through the same functions.

Every array is read by blocks of its token axis. An instance holds one sequence and one head, so that arrays of a tile
have axes of 1 in place of b and h. A first axis or heads of 1 are shared by all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posx.attention import strips
from posx.attention.masks import Mask
from posx.attention.tiles import INVISIBLE, Block, Pairs, Tables, adjusted, decayed_vectors, hidden, visible_pairs
from posx.contract import ByDistance, Encoding
from posx.machine.platforms import platform


class Grid(NamedTuple):
    """The tiles of one call, known before tracing: `blocks` blocks of queries and as many of keys, in order."""

    encoding: Encoding
    mask: Mask
    block: int  # tokens
    blocks: int
    heads: int
    documents: bool
    learned: bool  # whether the bias by distance may get a gradient

    @property
    def ahead(self) -> int:
        """The number of block diagonals whose keys are after the queries."""
        return 0 if self.mask.causal else self.blocks - 1

    @property
    def diagonals(self) -> int:
        return self.blocks + self.ahead

    @property
    def plain(self) -> bool:
        """Whether tiles below the diagonal need no mask."""
        return self.mask.causal and not self.mask.window and not self.documents


class Shared(NamedTuple):
    """Arrays of the whole call that get gradients, at least float32. An unused array is None.

    bias: the bias at all distances of the tiles, rising by one, [1, h or 1, n]. rate: the value of `decay`,
    [1, h or 1, 1, d']. sink: logits [h].
    """

    bias: Any = None
    rate: Any = None
    sink: Any = None


def dot(a: jax.Array, b: jax.Array, over: tuple[int, int] = (1, 0)) -> jax.Array:
    """Return the product of two matrices in float32, summed over one axis of each."""
    return jax.lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32)


def blocks_at(grid: Grid, refs: Any, n: Any) -> Any:
    """Return block n of arrays: tokens [t, d] as [1, 1, block, d], slots [t] as [1, block]."""
    found = jax.tree.map(lambda ref: ref[pl.ds(n * grid.block, grid.block), ...], refs)
    return jax.tree.map(lambda x: x[None, None] if x.ndim == 2 else x[None], found)


def factors(rate: Any, q: Block, k: Block) -> tuple[jax.Array, jax.Array]:
    """Return mapped queries and keys, with `decay` times its powers."""
    vectors = q.tokens.mapped, k.tokens.mapped
    return vectors if rate is None else decayed_vectors(rate[0, :, 0], q.slots.pos, k.slots.pos, *vectors)


def scored(grid: Grid, bias: Any, q: Block, k: Block, s: jax.Array) -> jax.Array:
    """Return the scores [1, 1, block, block] of products s."""
    tables = Tables({}, ByDistance(bias=None if bias is None else strips.Made(bias[0])))
    return adjusted(Pairs(grid.encoding, grid.mask, tables, q, k), s, s)


def part(grid: Grid, shared: Shared, i: Any, j: Any) -> Shared:
    """Return the arrays that tile (i, j) reads, with axes of 1 for sequences and heads."""
    rate = None if shared.rate is None else shared.rate[...][None, None]
    if shared.bias is None:
        return Shared(None, rate)
    behind = jnp.arange(grid.block)[:, None] - jnp.arange(grid.block)[None, :]
    place = (i - j + grid.ahead + 1) * grid.block - 1 + behind
    return Shared(shared.bias[place][None, None], rate)


def _forward(grid: Grid, shared: Shared, q_side: Block, k_side: Block, o_ref: Any, total_ref: Any, shift_ref: Any):
    i = pl.program_id(0)
    q = blocks_at(grid, q_side, i)

    def visit(j: Any, carry: Any, masked: bool) -> Any:
        (o, top, total), k, (bias, rate, _) = carry, blocks_at(grid, k_side, j), part(grid, shared, i, j)
        by_q, by_k = (x[0, 0].astype(q.tokens.mapped.dtype) for x in factors(rate, q, k))
        s = scored(grid, bias, q, k, dot(by_q, by_k, (1, 1))[None, None])
        s = hidden(s, visible_pairs(grid.mask, q.slots, k.slots), masked)[0, 0]
        new_top = jnp.maximum(top, s.max(axis=1))
        shift = jnp.where(new_top > INVISIBLE, new_top, 0)
        p, shrink = jnp.exp(s - shift[:, None]), jnp.exp(top - shift)
        v = k.tokens.values[0, 0]
        return o * shrink[:, None] + dot(p.astype(v.dtype), v), new_top, total * shrink + p.sum(axis=1)

    rows = jnp.zeros(grid.block, jnp.float32)
    nothing = jnp.zeros(o_ref.shape, jnp.float32), rows + INVISIBLE, rows
    if shared.sink is not None:
        nothing = nothing[0], rows + shared.sink[...], rows + 1
    o, top, total = over_keys(grid, i, visit, nothing)
    total = jnp.where(total > 0, total, 1)
    o_ref[...], total_ref[...], shift_ref[...] = o / total[:, None], total, jnp.where(top > INVISIBLE, top, 0)


def over_keys(grid: Grid, i: Any, visit: Callable, carry: Any) -> Any:
    """Call visit(j, carry, masked) for the key blocks j that query block i may see."""
    if grid.plain:
        carry = jax.lax.fori_loop(0, i, functools.partial(visit, masked=False), carry)
        return visit(i, carry, masked=True)
    first = 0
    if grid.mask.window and not grid.mask.sinks:
        first = quotient(jnp.maximum(i * grid.block - grid.mask.window + 1, 0), grid.block)
    end = i + 1 if grid.mask.causal else grid.blocks
    return jax.lax.fori_loop(first, end, functools.partial(visit, masked=True), carry)


def quotient(x: Any, divisor: int) -> Any:
    return jax.lax.div(x, jnp.asarray(divisor, x.dtype))


def call(grid: Grid, kernel: Callable, count: int, out: Any, *operands: Any) -> Any:
    """Run a kernel for `count` blocks of every head and sequence.

    An instance gets the arrays of its sequence and its head. It writes one block of each array of `out`, a tree of
    shapes of blocks: the results are float32 [b, h, count, *block].
    """
    b = max(x.shape[0] for x in jax.tree.leaves(operands) if x.ndim > 1)

    def read(x: jax.Array) -> pl.BlockSpec:
        """Return the part that an instance reads: a first axis or heads of 1 are shared, as key heads are."""

        def place(_: Any, head: Any, sequence: Any) -> tuple[Any, ...]:
            own = quotient(head, grid.heads // heads) if heads > 1 else 0
            return (sequence if x.shape[0] > 1 else 0, own, *(0 for _ in x.shape[2:]))

        if x.ndim == 1:
            return pl.BlockSpec((None,), lambda _, head, sequence: (head,))
        if x.ndim == 2:
            return pl.BlockSpec((None, x.shape[1]), lambda _, head, sequence: (sequence if x.shape[0] > 1 else 0, 0))
        heads = x.shape[1]
        return pl.BlockSpec((None, None, *x.shape[2:]), place)

    def written(block: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *block), lambda n, h, b: (b, h, n, *(0 for _ in block)))

    widest = max(x.shape[-1] for x in jax.tree.leaves(operands[1:3]) if x.ndim == 4)
    compiled = platform() == "cuda"
    return pl.pallas_call(
        functools.partial(kernel, grid),
        grid=(count, grid.heads, b),
        in_specs=jax.tree.map(read, operands),
        out_specs=jax.tree.map(lambda x: written(x.shape), out),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct((b, grid.heads, count, *x.shape), x.dtype), out),
        compiler_params=_by_triton(num_warps=4 if widest <= 64 else 8) if compiled else None,
        interpret=not compiled,
        name=f"posx{kernel.__name__}",
    )(*operands)  # fmt: skip


def _by_triton(num_warps: int) -> Any:
    from jax.experimental.pallas import triton  # JAX may remove it

    return triton.CompilerParams(num_warps=num_warps, num_stages=2)


def forward(grid: Grid, shared: Shared, q: Block, k: Block) -> tuple[jax.Array, ...]:
    """Return outputs [b, h, q, d], and of each row the sum of its weights and the shift of its scores."""
    shapes = (grid.block, k.tokens.values.shape[-1]), (grid.block,), (grid.block,)
    found = call(grid, _forward, grid.blocks, tuple(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes), shared, q, k)
    return tuple(x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in found)
