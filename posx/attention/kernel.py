"""The kernel executor: flash attention in Pallas (flash.py) for encodings whose formula it can evaluate.

It serves token maps, logit scales, biases by distance, token biases, `decay` and sinks, under every mask, with
documents and grouped key heads. Lengths are padded to whole blocks, widths of heads to powers of two.

A bias by distance is tabulated at the consecutive distances of a call, and tiles gather their numbers from this strip.
For 4,096 causal tokens it takes 16 KiB a head. The bias of all pairs would take 64 MiB.

On an NVIDIA GPU Pallas compiles the kernels with Triton, a backend that JAX deprecates from 0.11 on and may remove.
Elsewhere Pallas interprets the kernels, so that they can be tested. They have not run on a GPU yet, and `auto` takes
other executors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.arguments import Slots
from posx.attention.blockwise import blockwise
from posx.attention.tiles import SAFE, SAFE_HALF, Block, Pairs, Tables, Tokens, finite, sinks
from posx.contract import Encoding, Params, acting, at_least_float32, distance_terms, of_kinds

if TYPE_CHECKING:
    from posx.attention.flash import Grid

#: Tokens in a block, and the fewest: Triton multiplies matrices of at least 16 rows.
BLOCK, SMALLEST = 64, 16


def kernel_refusal(encoding: Encoding, params: Params, in_order: bool, consecutive: bool) -> str | None:
    """Return why the kernel cannot serve this call, None if it can.

    Args:
      encoding: the resolved encoding.
      params: its parameters, or their shapes.
      in_order: queries and keys are the same tokens, in order of arrival.
      consecutive: positions are known and count up by one.
    """
    refused = [*of_kinds(encoding, "pair", "tile")]
    refused += [f"by_distance.{name}" for name in distance_terms(encoding, params) if name != "bias"]
    if refused:
        return f"{type(encoding).__name__} acts on {', '.join(refused)}, which the kernel does not support"
    if not in_order:
        return "the kernel needs whole sequences in order, without idx"
    if not consecutive and (hooks := acting(encoding, ("by_distance", "decay"))):
        return f"{type(encoding).__name__} acts on {hooks[0]}: the kernel needs known positions that count up by one"
    return None


def kernel(pairs: Pairs, *, in_order: bool = False, offset: int | None = None, block: int = BLOCK) -> jax.Array:
    """Return attention outputs [b, h, q, d] as `dense` does, from the kernel.

    Args:
      pairs: a whole call.
      in_order, offset: see `blockwise`.
      block: tokens in a block, a power of two of at least 16.

    Raises:
      ValueError: the kernel cannot serve the call.
    """
    from posx.attention.flash import Grid, Shared  # Pallas takes a while to import
    from posx.attention.flash_backward import flash

    encoding, mask, (params, *_), q, k = pairs
    if why := kernel_refusal(encoding, params, in_order, offset is not None):
        raise ValueError(f"executor 'kernel' cannot serve this call: {why}. Give executor='blockwise'.")
    num_tokens, heads, width = pairs.sizes[0], q.tokens.mapped.shape[1], k.tokens.values.shape[-1]
    block = min(block, max(SMALLEST, _power_of_two(num_tokens)))
    biased, learned = "bias" in distance_terms(encoding, params), bool(jax.tree.leaves(params))
    documents, blocks = q.slots.segment is not None, -(-num_tokens // block)
    grid = Grid(encoding, mask, block, blocks, heads, documents, biased and learned)
    rate = at_least_float32(jnp.asarray(encoding.decay(params))) if encoding.acts_on("decay") else None

    def run(tables: Tables, q: Block, k: Block) -> jax.Array:
        bias = _bias_strip(grid, encoding, tables.params, offset) if biased else None
        shared = Shared(bias, None if rate is None else _widened(rate[None, :, None]), sinks(pairs))
        return flash(grid, shared, _whole_blocks(q, block), _whole_blocks(k, block))[:, :, :num_tokens, :width]

    def otherwise(*parts: Any) -> jax.Array:
        return blockwise(Pairs(encoding, mask, *parts), in_order=in_order, offset=offset)

    if rate is None:
        return run(*pairs[2:])
    # Powers of the decay over one block must stay finite, see `tiles.mapped_products`.
    safe = jnp.abs(rate).max() * block < (SAFE_HALF if q.tokens.mapped.dtype == jnp.float16 else SAFE)
    return jax.lax.cond(safe, run, otherwise, *pairs[2:])


def _bias_strip(grid: Grid, encoding: Encoding, params: Params, offset: Any) -> jax.Array:
    """Return the bias by distance at all distances of a call, rising by one, [1, h or 1, n]; the last is never read."""
    lowest = offset + 1 - (grid.ahead + 1) * grid.block
    distance = jnp.asarray(lowest + np.arange((grid.diagonals + 1) * grid.block), jnp.int32)
    strip: Any = finite(encoding.by_distance(params, distance).bias)
    return at_least_float32(strip)[None]


def _whole_blocks(side: Block, block: int) -> Block:
    """Return the arrays of one side that the kernel reads, padded with empty slots to whole blocks."""
    tokens, (pos, idx, segment), padding = side.tokens, side.slots, -side.slots.idx.shape[1] % block

    def vectors(x: jax.Array, least: int = SMALLEST) -> jax.Array:
        return _widened(jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) if padding else x, least)

    def numbers(x: jax.Array, **how: Any) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, padding)), **how) if padding else x

    read = jax.tree.map(vectors, Tokens(tokens.mapped, tokens.values))
    token_bias = None if tokens.token_bias is None else vectors(tokens.token_bias, least=1)
    segment = None if segment is None else numbers(segment)
    slots = Slots(numbers(pos, mode="edge"), numbers(idx, constant_values=-1), segment)
    return Block(read._replace(token_bias=token_bias), slots)


def _widened(x: jax.Array, least: int = SMALLEST) -> jax.Array:
    """Return x with zeros up to a power of two of channels, at least `least`."""
    channels = max(least, _power_of_two(x.shape[-1]))
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, channels - x.shape[-1])]) if channels > x.shape[-1] else x


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
