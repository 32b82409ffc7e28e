"""The fused executor: the vendor's kernel behind `jax.nn.dot_product_attention`, for encodings that fit it.

It serves token maps (RoPE, absolute encodings, NoPE), logit scales, and biases that depend on positions alone. A bias
becomes one slab [1, h, q, k] at training lengths. At greater lengths there is one slab for each block of queries, one
after the other. At consecutive positions a slab is spread out from a strip of distances. On an NVIDIA GPU with 16-bit
operands the kernel is cuDNN. Elsewhere it is the XLA form of the same call, so that it can be tested without a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.blockwise import blockwise
from posx.attention.decay import run_in_one_block
from posx.attention.masks import Mask
from posx.attention.plan import join_blocks, split_into_blocks
from posx.attention.tiles import LOWEST, Block, TileInputs, bias_strip, content_free_bias, repeat_heads, visible_pairs
from posx.contract import (
    ByDistance,
    Encoding,
    Params,
    acting_hooks,
    at_least_float32,
    defined_hooks,
    distance_terms,
    select_hooks,
)
from posx.machine.platforms import compute_capability, platform

#: The most query-key pairs of one slab: 1 GB for 8 heads in float32. Biases stay in float32 beside 16-bit operands too.
#: XLA's cuDNN call accepts that since openxla/xla pull request 32985 (October 2025), but not for their gradients.
SLAB_PAIRS = 8192 * 4096

#: The compute capability from which on cuDNN's kernel takes heads of 256 channels, instead of 128.
HOPPER = 9.0


def refusal(
    encoding: Encoding, params: Params, mask: Mask, in_order: bool, segments: bool, native: bool = False
) -> str | None:
    """Return why the kernel cannot serve this call, None if it can.

    Args:
      encoding: the resolved encoding.
      params: its parameters, or their shapes.
      mask: the mask of the call.
      in_order: queries and keys are the same tokens, in order of arrival.
      segments: the call has document numbers.
      native: the vendor's kernel would run, see `is_native`. Its gradients of a float32 bias were wrong on an H200.
    """
    # A sink could be read off the log-sum-exp that JAX's call returns, but cuDNN's backward pass drops its gradient.
    refused = [*acting_hooks(encoding, ("token_bias",)), *select_hooks(encoding, "tile", "head")]
    refused += [f"by_distance.{name}" for name in distance_terms(encoding, params) if name != "bias"]
    if refused:
        return f"{type(encoding).__name__} acts on {', '.join(refused)}, which the kernel does not support"
    if not in_order or segments:
        return "the kernel needs whole sequences in order, without idx and segment"
    if mask.sinks:
        return "the kernel does not support the sinks of a mask"
    if native and is_biased(encoding) and jax.tree.leaves(params):
        return f"{type(encoding).__name__} may learn its bias, and cuDNN's gradient of a float32 bias is wrong"
    return None


def is_biased(encoding: Encoding) -> bool:
    """Return whether an encoding that the kernel serves adds a bias by position."""
    return bool(acting_hooks(encoding, ("by_distance", "bias")))


def is_native(vectors: Any) -> bool:
    """Return whether the vendor's kernel serves vectors of this type and shape [..., d] on the platform traced for."""
    if platform() != "cuda" or jnp.dtype(vectors.dtype).itemsize != 2:
        return False
    return vectors.shape[-1] <= (256 if compute_capability() >= HOPPER else 128)


def fused(
    pairs: TileInputs, *, in_order: bool = False, offset: int | None = None, slab_pairs: int = SLAB_PAIRS
) -> jax.Array:
    """Return attention outputs as `dense` does, from the kernel.

    The kernel is called once, or once for each block of queries if the bias of all pairs exceeds `slab_pairs`. `offset`
    is that of `blockwise`. Raises ValueError for a call that the kernel cannot serve.
    """
    encoding, mask, tables, q, _ = pairs
    native = is_native(q.tokens.mapped)
    if why := refusal(encoding, tables.params, mask, in_order, q.slots.segment is not None, native):
        raise ValueError(f"executor 'fused' cannot serve this call: {why}. Give executor='blockwise'.")
    run = functools.partial(_call_kernel, native=native, offset=offset, slab_pairs=slab_pairs)
    return run_in_one_block(pairs, run, functools.partial(blockwise, in_order=in_order, offset=offset))


def _call_kernel(pairs: TileInputs, *, native: bool, offset: int | None, slab_pairs: int) -> jax.Array:
    encoding, mask, tables, q, k = pairs
    blocks, num_queries = -(-math.prod(pairs.sizes) // slab_pairs) if is_biased(encoding) else 1, pairs.sizes[0]
    # cuDNN takes keys and values of one width, a multiple of 8. JAX's call has gradients for even lengths alone.
    width, multiple = max(k.tokens.mapped.shape[-1], k.tokens.values.shape[-1]), 2 if native else 1
    width += -width % 8 if native else 0
    values = repeat_heads(k.tokens.values, k.tokens.mapped.shape[1])
    keys, values = (_vectors(x, width, multiple) for x in (k.tokens.mapped, values))

    size = -(-num_queries // blocks)  # of a block
    strip = None
    if offset is not None and "by_distance" in defined_hooks(encoding):  # all distances, the largest first
        distances = np.arange(offset + blocks * size - 1, offset - pairs.sizes[1] - 1, -1, dtype=np.int32)
        strip = ByDistance(bias=bias_strip(encoding, tables.params, distances))

    def kernel(q: Block, visible: jax.Array | None = None, **options: Any) -> jax.Array:
        of_block = strip
        if strip is not None:  # from the largest distance of the block on
            start, length = (blocks - 1 - q.number) * size, size + pairs.sizes[1]
            of_block = ByDistance(bias=jax.lax.dynamic_slice_in_dim(strip.bias, start, length, axis=1))
        bias = content_free_bias(encoding, tables.params, q.slots.pos, k.slots.pos, of_block)
        if bias is not None:  # cuDNN would add its mask as -2^41, above the lowest biases
            bias = at_least_float32(bias if visible is None else jnp.where(visible, bias, 2 * LOWEST))
            visible, bias = None, _pad_axis(_pad_axis(bias, 2, multiple), 3, multiple, 2 * LOWEST)
        elif visible is None and not mask.causal and keys.shape[1] > pairs.sizes[1]:
            visible = jnp.ones((1, 1, *pairs.sizes), bool)
        with jax.numpy_dtype_promotion("standard"):  # JAX's own code mixes types
            o = jax.nn.dot_product_attention(
                _vectors(q.tokens.mapped, width, multiple), keys, values,
                # Padded keys are seen by nobody, and a padded query sees the others. Causal masks need no more.
                mask=None if visible is None else _pad_axis(_pad_axis(visible, 2, multiple, True), 3, multiple, False),
                scale=1.0, bias=bias,  # queries are already scaled
                implementation="cudnn" if native else "xla",
                **options,
            )  # fmt: skip
        return o[:, : q.slots.idx.shape[-1]].swapaxes(1, 2)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # else the gradient would keep all slabs
    def slab(part: Block) -> jax.Array:
        # Padding of the last block sees every key, because kernels differ in the output of a row without keys.
        visible = visible_pairs(mask, part.slots, k.slots) | (part.slots.idx < 0)[..., None]
        return kernel(part, visible[:, None])

    if blocks == 1:
        o = kernel(
            q._replace(number=0), is_causal=mask.causal, local_window_size=(mask.window - 1, 0) if mask.window else None
        )
    else:
        o = join_blocks(jax.lax.map(slab, split_into_blocks(q, size)))[:, :, :num_queries]
    return o[..., : k.tokens.values.shape[-1]]


def _pad_axis(x: jax.Array, axis: int, multiple: int, value: Any = 0) -> jax.Array:
    """Return x with an axis padded to a multiple."""
    pad = [(0, -n % multiple if axis == place else 0) for place, n in enumerate(x.shape)]
    return jnp.pad(x, pad, constant_values=value)


def _vectors(x: jax.Array, width: int, multiple: int) -> jax.Array:
    """Return vectors [b, h, t, d] as the kernel takes them, [b, t, h, width], with padded tokens."""
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])
    return _pad_axis(x.swapaxes(1, 2), 1, multiple)
