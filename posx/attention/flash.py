"""Flash attention in Pallas, forward and backward, over the same functions of a tile as the blockwise executor.

    each instance of the forward kernel has a sequence, a head and query block i:
        o, top, total = 0, -inf, 0
        for each key block j that i may see:
            s = scores(tile i, j)                        # tiles.py: the formula, with the block's product q k^T
            new = max(top, row maxima of s)
            p = exp(s - new);  shrink = exp(top - new)
            o = o * shrink + p v;  total = total * shrink + row sums of p;  top = new
        outputs of i = o / total;  keep top and total

Further entries of the softmax, such as sinks, are added outside, by `top` and `total` of each row. Outputs and `total`
have gradients. `top` cancels, so it needs none. Their log-sum-exp would round log(total) away beside a large score.

The backward pass (flash_backward.py) recomputes s of each tile from the kept rows, through the same functions.

Vectors stay as they are projected, [b, t, h, d], so that nothing is transposed. Every array is read by blocks of its
token axis. An instance holds one sequence and one head, so that arrays of a tile have axes of 1 in place of b and h. A
first axis or heads of 1 are shared by all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posx.attention import strips
from posx.attention.masks import Mask
from posx.attention.tiles import (
    INVISIBLE,
    LOWEST,
    Block,
    SharedArrays,
    TileInputs,
    finite_term,
    hide_pairs,
    visible_pairs,
    with_terms,
)
from posx.contract import ByDistance, Encoding, as_float
from posx.machine.platforms import platform

#: The logarithm of e to base 2, and its float32 bits.
LOG2E, LOG2E_IN_PTX = math.log2(math.e), "0f3FB8AA3B"


class KernelGrid(NamedTuple):
    """The tiles of one call, known before tracing: `blocks` blocks of queries and as many of keys, in order."""

    encoding: Encoding
    mask: Mask
    block: int  # tokens, a power of two
    blocks: int
    heads: int
    documents: bool
    learned: bool  # whether the bias by distance may get a gradient
    near: int  # keys that do not exist for a query: the last ones, its own included
    wide: bool  # whether outputs are float32, since more is added to them before they are rounded
    warps: int  # of an instance
    score: Any = None  # the `Pointwise` of a score that acts pair by pair

    @property
    def num_ahead(self) -> int:
        """The number of block diagonals whose keys are after the queries."""
        return 0 if self.mask.causal else self.blocks - 1

    @property
    def diagonals(self) -> int:
        return self.blocks + self.num_ahead

    @property
    def plain(self) -> bool:
        """Whether tiles below the first `num_masked` diagonals need no mask."""
        return self.mask.causal and not self.mask.window and not self.documents

    @property
    def num_masked(self) -> int:
        """The number of block diagonals, from the main one down, that have later or near keys."""
        return 1 + -(-max(self.near - 1, 0) // self.block)


class Shared(NamedTuple):
    """Arrays of the whole call that get gradients, at least float32. An unused array is None.

    Attributes:
      bias: [h or 1, n], the bias by distance as a strip; in a kernel the tiles of all diagonals. See `bias_tiles` for
        both.
      slope: [h], in place of a bias that is slope_h times the distance, without gradients.
    """

    bias: Any = None
    slope: Any = None


def dot(a: jax.Array, b: jax.Array, over: tuple[int, int] = (1, 0)) -> jax.Array:
    """Return the product of two matrices in float32, summed over one axis of each.

    Full float32 is three products of TF32 on a GPU, off by about 1e-6. Without its tensor cores registers would spill.
    """
    precision, asked = None, jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if asked == "highest" and a.dtype == jnp.float32 and platform() == "cuda":
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    axes = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def read_block(grid: KernelGrid, refs: Any, n: Any) -> Any:
    """Return block n of arrays of one head: vectors [t, d] as [1, 1, block, d], numbers [t] as [1, block]."""
    block = jax.tree.map(lambda ref: ref[pl.ds(n * grid.block, grid.block), ...], refs)
    return jax.tree.map(lambda x: x[None, None] if x.ndim == 2 else x[None], block)


def score_products(grid: KernelGrid, bias: Any, q: Block, k: Block, s: jax.Array, by_keys: bool = False) -> jax.Array:
    """Return the scores [1, 1, q, k] of products s. by_keys: these were made with keys first."""
    tables = SharedArrays({}, ByDistance(bias=None if bias is None else strips.Made(bias[0])))
    s = with_terms(TileInputs(grid.encoding, grid.mask, tables, *(_all_axes(x) for x in (q, k))), s)
    if grid.score is None:
        return s
    return grid.score.score_pairs(*((x.tokens.features, x.fixed) for x in (q, k)), s, by_keys)


def finite_scores(grid: KernelGrid, s: jax.Array) -> jax.Array:
    """Return scores, finite if `score` made them."""
    return s if grid.score is None else finite_term(s)


def _all_axes(side: Block) -> Block:
    """Return a block whose token biases have axes of 1 for sequences and heads."""
    token_bias = jax.tree.map(lambda x: x[None], side.tokens.token_bias)
    return side._replace(tokens=side.tokens._replace(token_bias=token_bias))


def hide_unseen(grid: KernelGrid, q: Block, k: Block, s: jax.Array, masked: bool) -> jax.Array:
    """Return scores [1, 1, q, k] of a tile without the pairs that are invisible or near, if it is masked."""
    seen = visible_pairs(grid.mask, q.slots, k.slots)
    if grid.near:
        seen &= q.slots.idx[:, :, None] - k.slots.idx[:, None] >= grid.near
    return hide_pairs(s, seen, masked)


def read_bias(grid: KernelGrid, shared: Shared, i: Any, j: Any, by_keys: bool = False) -> Any:
    """Return the bias by distance of tile (i, j), [1, 1, q, k], or None. by_keys: see `bias_tiles`."""
    places = jnp.arange(grid.block)
    if shared.slope is not None:
        ends = (shared.slope[...] * as_float(x) for x in ((i - j) * grid.block + places, places))
        return jnp.subtract.outer(*ends)[None, None]
    if shared.bias is None:
        return None
    bias = shared.bias[pl.ds(i * grid.block - j * grid.block + grid.num_ahead * grid.block, grid.block), :]
    return (bias.T if by_keys else bias)[None, None]


def _forward(
    grid: KernelGrid, i: Any, shared: Shared, q_side: Block, k_side: Block, o_ref: Any, top_ref: Any, total_ref: Any
):
    q = read_block(grid, q_side, i)

    def visit(j: Any, carry: Any, masked: bool) -> Any:
        (o, top, total), k = carry, read_block(grid, k_side, j)
        products = dot(q.tokens.mapped[0, 0], k.tokens.mapped[0, 0], (1, 1))
        s = score_products(grid, read_bias(grid, shared, i, j), q, k, products[None, None])
        s = hide_unseen(grid, q, k, finite_scores(grid, s), masked)[0, 0]
        new_top = jnp.maximum(top, s.max(axis=1))
        shift = jnp.where(new_top > INVISIBLE, new_top, 0)
        p, shrink = weights(s, shift), jnp.exp(top - shift)
        v = k.tokens.values[0, 0]
        return o * shrink[:, None] + dot(p.astype(v.dtype), v), new_top, total * shrink + p.sum(axis=1)

    rows = jnp.zeros(grid.block, jnp.float32)
    o, top, total = visit_keys(grid, i, visit, (jnp.zeros(o_ref.shape, jnp.float32), rows + INVISIBLE, rows))
    total = jnp.where(total == 0, 1, total)
    o_ref[...] = (o * (1 / total)[:, None]).astype(o_ref.dtype)
    top_ref[...], total_ref[...] = jnp.maximum(top, 2 * LOWEST), total


def weights(s: jax.Array, shift: jax.Array) -> jax.Array:
    """Return exp(s - shift), shift by rows.

    The unit of exponents of a GPU computes powers of two. XLA's own code for them also serves exponents below -126.
    """
    if platform() != "cuda":  # XLA may round a product before a sum in one pass and not in the other
        return jnp.exp2((s - shift[:, None]) * LOG2E)
    from jax.experimental.pallas import triton  # JAX may remove it

    shift = (shift * -LOG2E)[:, None]
    (values,) = triton.elementwise_inline_asm(
        f"{{ .reg .f32 x; fma.rn.f32 x, $1, {LOG2E_IN_PTX}, $2; ex2.approx.ftz.f32 $0, x; }}",
        args=[s, jnp.broadcast_to(shift, s.shape)], constraints="=f,f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(s.shape, s.dtype)],
    )  # fmt: skip
    return values


def visit_keys(grid: KernelGrid, i: Any, visit: Callable, carry: Any) -> Any:
    """Call visit(j, carry, masked) for the key blocks j that query block i may see."""
    first: Any = 0
    end = i + 1 if grid.mask.causal else grid.blocks
    if grid.plain:
        first = jnp.maximum(end - grid.num_masked, 0)
        carry = jax.lax.fori_loop(0, first, functools.partial(visit, masked=False), carry)
    elif grid.mask.window and not grid.mask.sinks:
        first = quotient(jnp.maximum(i * grid.block - grid.mask.window + 1, 0), grid.block)
    return jax.lax.fori_loop(first, end, functools.partial(visit, masked=True), carry)


def quotient(x: Any, divisor: int) -> Any:
    return jax.lax.div(x, jnp.asarray(divisor, x.dtype))


def call(
    grid: KernelGrid, kernel: Callable, count: int, out: Any, *operands: Any, last_first: bool = False, stages: int = 2
) -> Any:
    """Run kernel(grid, n, *operands, *out) for `count` blocks n of every head and sequence.

    An instance reads the arrays of its sequence and its head. It writes one block of each array of `out`, a tree of
    shapes of blocks: [block, d] of [b, count * block, h, d], [block] of [b, h, count * block].

    Args:
      grid, kernel, count, out, operands: as above.
      last_first: the last block is the longest. It begins first, so that no long instance is left at the end.
      stages: those of an instance's loop, one more than the blocks that are loaded ahead.
    """
    b = max(x.shape[0] for x in jax.tree.leaves(operands) if x.ndim > 1)

    def number(n: Any) -> Any:
        return count - 1 - n if last_first else n

    def sequence_index(x: jax.Array, sequence: Any) -> Any:
        return sequence if x.shape[0] > 1 else 0

    def head_index(heads: int, head: Any) -> Any:
        """Return the place of a head's part: heads of 1 are shared, as key heads are."""
        return quotient(head, grid.heads // heads) if heads > 1 else 0

    def read(x: jax.Array) -> pl.BlockSpec:
        places: dict[int, Callable] = {
            1: lambda _, h, b: (h,),
            2: lambda _, h, b: (sequence_index(x, b), 0),
            3: lambda _, h, b: (sequence_index(x, b), head_index(x.shape[1], h), 0),
            4: lambda _, h, b: (sequence_index(x, b), 0, head_index(x.shape[2], h), 0),
        }
        one = {0, x.ndim - 2} if x.ndim > 2 else {0}  # the axes of sequences and heads
        return pl.BlockSpec(tuple(None if axis in one else n for axis, n in enumerate(x.shape)), places[x.ndim])

    def output_spec(x: Any) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
        tokens = count * x.shape[0]
        if len(x.shape) == 1:
            spec = pl.BlockSpec((None, None, *x.shape), lambda n, h, b: (b, h, number(n)))
            return spec, jax.ShapeDtypeStruct((b, grid.heads, tokens), x.dtype)
        spec = pl.BlockSpec((None, x.shape[0], None, x.shape[1]), lambda n, h, b: (b, number(n), h, 0))
        return spec, jax.ShapeDtypeStruct((b, tokens, grid.heads, x.shape[1]), x.dtype)

    def instance(*refs: Any) -> None:
        kernel(grid, number(pl.program_id(0)), *refs)

    leaves, tree = jax.tree.flatten(out)
    specs, shapes = (jax.tree.unflatten(tree, part) for part in zip(*map(output_spec, leaves), strict=True))
    compiled = platform() == "cuda"
    return pl.pallas_call(
        instance,
        grid=(count, grid.heads, b),
        in_specs=jax.tree.map(read, operands),
        out_specs=specs,
        out_shape=shapes,
        compiler_params=_triton_params(grid.warps, stages) if compiled else None,
        interpret=not compiled,
        name=f"posx{kernel.__name__}",
    )(*operands)


def _triton_params(warps: int, stages: int) -> Any:
    from jax.experimental.pallas import triton  # JAX may remove it

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


def bias_tiles(grid: KernelGrid, strip: jax.Array, by_keys: bool = False) -> jax.Array:
    """Return the bias of a tile of each diagonal, [1, n * block, h or 1, block], of the bias by distance.

    Args:
      grid: the tiles.
      strip: [h or 1, (n + 1) * block], the bias at all distances of the tiles, and one below them, rising by one.
      by_keys: tiles are transposed, as products with keys first are.
    """
    parts = strip.reshape(strip.shape[0], grid.diagonals + 1, grid.block)
    # The distances of a tile are those of the tile before, one block on.
    rising = jnp.concatenate([parts[:, :-1], parts[:, 1:]], axis=2).reshape(-1, 2 * grid.block)
    # The distance of entry (a, b) is a - b. Rows of keys read the strip as it rises, from b = block - 1 up.
    of_rows = jnp.roll(rising, -1, axis=1) if by_keys else jnp.flip(rising, axis=1)
    return strips.toeplitz(of_rows, grid.block).reshape(strip.shape[0], -1, grid.block).swapaxes(0, 1)[None]


def tabulate_bias(grid: KernelGrid, shared: Shared, by_keys: bool = False) -> Shared:
    """Return the shared arrays as a kernel reads them: the bias in tiles."""
    return shared if shared.bias is None else shared._replace(bias=bias_tiles(grid, shared.bias, by_keys))


def forward(grid: KernelGrid, shared: Shared, q: Block, k: Block) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return outputs [b, q, h, d], and of each row [b, h, q] the highest score and the sum of exp(score - highest).

    If a row sees nothing, they are 0, a finite number below all scores, and 1.
    """
    v = k.tokens.values
    o = jax.ShapeDtypeStruct((grid.block, v.shape[-1]), jnp.float32 if grid.wide else v.dtype)
    row = jax.ShapeDtypeStruct((grid.block,), jnp.float32)
    how: Any = {"last_first": grid.mask.causal, "stages": 3}
    return call(grid, _forward, grid.blocks, (o, row, row), tabulate_bias(grid, shared), q, k, **how)
