"""The kernel executor: flash attention in Pallas (flash.py) for encodings whose formula it can evaluate.

It serves token maps, logit scales, biases by distance, token biases, `decay` and sinks, under every mask, with
documents and grouped key heads. Under causal masks it serves vectors by distance that are constant beyond a small
distance (near.py). It serves a `score` that acts pair by pair (pointwise.py). Lengths are padded to whole blocks,
widths of heads to powers of two.

A bias by distance is tabulated at the consecutive distances of a call, as one tile for each diagonal of tiles. For
4,096 causal tokens it takes 1 MiB a head. The bias of all pairs would take 64 MiB. A bias that is a straight line is
not read.

On an NVIDIA GPU Pallas compiles the kernels with Triton, a backend that JAX deprecates from 0.11 on and may remove.
Elsewhere Pallas interprets the kernels, so that they can be tested.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.arguments import Slots, drop_axes
from posx.attention.blockwise import blockwise
from posx.attention.decay import run_in_one_block
from posx.attention.masks import Mask
from posx.attention.near import near_keys, near_refusal, with_near
from posx.attention.pointwise import pointwise, pointwise_score, score_shapes
from posx.attention.tiles import Block, TileInputs, Tokens, bias_strip, sinks
from posx.contract import Encoding, Params, Tile, at_least_float32, defined_hooks, distance_terms, select_hooks
from posx.machine.platforms import compute_capability, platform

if TYPE_CHECKING:
    from posx.attention.flash import KernelGrid

#: Tokens in a block, and the fewest: Triton multiplies matrices of at least 16 rows. On an H200 64 by 64 tokens were
#: the fastest of seven shapes of tiles in every kernel, at 64 channels.
BLOCK, SMALLEST = 64, 16

#: The most channels of a head, and the compute capability from which on Triton has loads that do not wait.
WIDEST, AMPERE = 128, 8.0


def kernel_refusal(
    encoding: Encoding,
    params: Params,
    mask: Mask,
    in_order: bool = True,
    offset: int | None = 0,
    tile: Tile | None = None,
) -> str | None:
    """Return why the kernel cannot serve this call, None if it can.

    Args:
      encoding: the resolved encoding.
      params: its parameters, or their shapes.
      mask: the mask.
      in_order: queries and keys are the same tokens, in order of arrival.
      offset: see `blockwise`.
      tile: the arrays that `score` is given, or their shapes. If it is None, every score is refused.
    """
    if refused := select_hooks(encoding, *(("pair", "tile") if tile is None else ("pair",))):
        return f"{type(encoding).__name__} acts on {', '.join(refused)}, which the kernel does not support"
    if tile and "score" in defined_hooks(encoding) and isinstance(why := pointwise(encoding, params, tile), str):
        return f"the score of {type(encoding).__name__} {why}, which the kernel does not support"
    if "score" in defined_hooks(encoding) and near_keys(encoding, params, offset or 0):
        return (
            f"{type(encoding).__name__} has a score and vectors by distance, which the kernel does not support together"
        )
    if encoding.axes > 1 and "score" in defined_hooks(encoding):
        return f"{type(encoding).__name__} has a score and positions with axes, which the kernel does not support"
    if not in_order:
        return "the kernel needs whole sequences in order, without idx"
    if offset is None and "by_distance" in defined_hooks(encoding):
        return f"{type(encoding).__name__} acts on by_distance: the kernel needs known positions that count up by one"
    return near_refusal(encoding, params, mask, offset or 0)


def is_compiled(vectors: Any) -> bool:
    """Return whether the platform traced for compiles the kernel for vectors of this shape [..., d]: Ampere or later.

    Wider heads would exceed the memory that blocks share. A platform without a device is taken for one.
    """
    return platform() == "cuda" and vectors.shape[-1] <= WIDEST and not 0 < compute_capability() < AMPERE


def kernel(pairs: TileInputs, *, in_order: bool = False, offset: int | None = None, block: int = BLOCK) -> jax.Array:
    """Return attention outputs [b, h, q, d] as `dense` does, from the kernel.

    Args:
      pairs: a whole call.
      in_order, offset: see `blockwise`.
      block: tokens in a block, a power of two of at least 16.

    Raises:
      ValueError: the kernel cannot serve the call.
    """
    from posx.attention.flash import KernelGrid, Shared  # Pallas takes a while to import
    from posx.attention.flash_backward import flash

    encoding, mask, (params, *_), q, k = pairs
    tile = score_shapes(pairs)
    if why := kernel_refusal(encoding, params, mask, in_order, offset, tile):
        raise ValueError(f"executor 'kernel' cannot serve this call: {why}. Give executor='blockwise'.")
    num_tokens, heads, channels = pairs.sizes[0], q.tokens.mapped.shape[1], k.tokens.values.shape[-1]
    widest = max(q.tokens.mapped, k.tokens.mapped, k.tokens.values, key=lambda x: x.shape[-1])
    if platform() == "cuda" and not is_compiled(widest):
        raise ValueError(
            f"executor 'kernel' serves heads of at most {WIDEST} channels, on GPUs of compute capability {AMPERE} or "
            "later. Give executor='blockwise'."
        )
    block = min(block, max(SMALLEST, _power_of_two(num_tokens)))
    otherwise = functools.partial(blockwise, in_order=in_order, offset=offset)
    if "score" in defined_hooks(encoding) and num_tokens == 1:  # `pointwise` tells axes apart by their sizes
        return otherwise(pairs)
    score, numbers = pointwise_score(pairs, tile)
    biased, learned = "bias" in distance_terms(encoding, params), bool(jax.tree.leaves(params))
    near = near_keys(encoding, params, offset or 0)
    grid = KernelGrid(
        encoding, mask, block, -(-num_tokens // block), heads, q.slots.segment is not None, biased and learned, near,
        wide=near > 0 or "sink" in defined_hooks(encoding), warps=4 if widest.shape[-1] <= 64 else 8, score=score,
    )  # fmt: skip

    def run(pairs: TileInputs) -> jax.Array:
        bias = slope = None
        if biased and (learned or (slope := _slope(grid, encoding, offset)) is None):
            lowest = (offset or 0) - (grid.num_ahead + 1) * block  # one below those of the tiles, see `bias_tiles`
            distances = np.arange(lowest, lowest + (grid.diagonals + 1) * block)
            strip: Any = bias_strip(encoding, pairs.tables.params, distances)
            bias = at_least_float32(strip)
        sides = (_whole_blocks(*side, block) for side in zip(pairs[3:], numbers, strict=True))
        o, *rows = flash(grid, Shared(bias, slope), *sides)
        o, (top, total) = o[:, :num_tokens, :, :channels], (x[..., :num_tokens] for x in rows)
        if (sink := sinks(pairs)) is not None and not near:
            o = o * jax.nn.sigmoid(top - sink[None, :, None] + jnp.log(total)).swapaxes(1, 2)[..., None]
        o = o.swapaxes(1, 2)
        return with_near(pairs, offset or 0, near, o, top, total) if near else o

    return run_in_one_block(pairs, run, otherwise)


def _slope(grid: KernelGrid, encoding: Encoding, offset: int | None) -> jax.Array | None:
    """Return numbers [h] if the bias of all visible pairs is their product with the distance, else None.

    A kernel then reads no biases. The encoding has no parameters.
    """
    if not grid.mask.causal or offset:
        return None
    distance = np.arange(grid.blocks * grid.block, dtype=np.int32)
    with jax.ensure_compile_time_eval():
        bias = np.asarray(encoding.by_distance({}, jnp.asarray(distance)).bias, np.float32)
    slopes = np.broadcast_to(bias[:, 1:2], (grid.heads, 1))
    straight = np.isfinite(slopes).all() and np.array_equal(bias, slopes[: len(bias)] * np.float32(distance))
    return jnp.asarray(slopes[:, 0]) if straight else None


def _whole_blocks(side: Block, read: tuple[Any, Any], block: int) -> Block:
    """Return the arrays of one side that the kernel reads, padded with empty slots to whole blocks.

    read: the numbers [b, h or 1, t] that a score reads, those with gradients and the others. Empty slots have the last
    token's, for which the score is finite.
    """
    tokens, (pos, idx, segment), padding = side.tokens, side.slots, -side.slots.idx.shape[1] % block
    pos = drop_axes(pos)  # no hook that the kernel serves reads axes

    def vectors(x: jax.Array) -> jax.Array:
        x = x.swapaxes(1, 2)
        return _widen(jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x)

    def numbers(x: jax.Array, **how: Any) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, padding)), **how) if padding else x

    vectors_read = jax.tree.map(vectors, Tokens(tokens.mapped, tokens.values))
    token_bias = None
    if tokens.token_bias is not None:  # its summands are arrays of their own: a tile has no axis for them
        padded = jnp.pad(tokens.token_bias, ((0, 0), (0, 0), (0, padding), (0, 0)))
        token_bias = tuple(jnp.moveaxis(padded, -1, 0))
    segment = None if segment is None else numbers(segment)
    slots = Slots(numbers(pos, mode="edge"), numbers(idx, constant_values=-1), segment)
    by_score, fixed = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, padding)), mode="edge"), read)
    return Block(vectors_read._replace(token_bias=token_bias, features=by_score), slots, fixed=fixed)


def _widen(x: jax.Array) -> jax.Array:
    """Return x with zeros up to a power of two of channels."""
    channels = max(SMALLEST, _power_of_two(x.shape[-1]))
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, channels - x.shape[-1])]) if channels > x.shape[-1] else x


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
