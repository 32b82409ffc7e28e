"""The fused executor: the vendor's kernel behind `jax.nn.dot_product_attention`, for encodings that fit it.

It serves token maps (RoPE, absolute encodings, NoPE), logit scales, and biases that depend on positions alone. A bias
becomes one slab [1, h, q, k] at training lengths. At greater lengths there is one slab for each block of queries, one
after the other. On a GPU with 16-bit operands the kernel is cuDNN. Elsewhere it is the XLA form of the same call, so
that it can be tested without a GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.blocks import joined, split_into_blocks
from posx.attention.masks import Mask
from posx.attention.tiles import Block, Pairs, content_free_bias, visible_pairs
from posx.contract import Encoding, Params, acting, at_least_float32, distance_terms, of_kinds

#: The most query-key pairs of one slab: 1 GB for 8 heads in float32. Biases stay in float32 beside 16-bit operands too.
#: XLA's cuDNN call accepts that since openxla/xla pull request 32985 (October 2025).
SLAB_PAIRS = 8192 * 4096


def refusal(encoding: Encoding, params: Params, mask: Mask, in_order: bool, segments: bool) -> str | None:
    """Return why the kernel cannot serve this call, None if it can.

    Args:
      encoding: the resolved encoding.
      params: its parameters, or their shapes.
      mask: the mask of the call.
      in_order: queries and keys are the same tokens, in order of arrival.
      segments: the call has document numbers.
    """
    by_content = [*acting(encoding, ("token_bias",)), *of_kinds(encoding, "channel", "tile")]
    by_content += [f"by_distance.{name}" for name in distance_terms(encoding, params) if name != "bias"]
    if by_content:
        return f"{type(encoding).__name__} acts on {', '.join(by_content)}, which the kernel does not support"
    if not in_order or segments:
        return "the kernel needs whole sequences in order, without idx and segment"
    if mask.sinks:
        return "the kernel does not support sinks"
    return None


def is_native(dtype: Any) -> bool:
    """Return whether the vendor's kernel runs here, for operands of this type."""
    return jax.default_backend() in ("gpu", "cuda", "rocm") and jnp.dtype(dtype).itemsize == 2


def fused(pairs: Pairs, *, in_order: bool = False, slab_pairs: int = SLAB_PAIRS, **_: Any) -> jax.Array:
    """Return attention outputs as `dense` does, from the kernel.

    The kernel is called once, or once for each block of queries if the bias of all pairs exceeds `slab_pairs`. Raises
    ValueError for a call that the kernel cannot serve.
    """
    encoding, mask, tables, q, k = pairs
    if why := refusal(encoding, tables.params, mask, in_order, q.slots.segment is not None):
        raise ValueError(f"executor 'fused' cannot serve this call: {why}. Give executor='blockwise'.")
    keys, values, (num_queries, num_keys) = k.tokens.mapped, k.tokens.values, pairs.sizes
    # The kernel needs keys and values of one width.
    values = jnp.pad(values, [(0, 0)] * 3 + [(0, max(0, keys.shape[-1] - values.shape[-1]))])
    has_bias = encoding.acts_on("bias") or encoding.acts_on("by_distance")
    blocks = -(-num_queries * num_keys // slab_pairs) if has_bias else 1

    def kernel(q: Block, **visible: Any) -> jax.Array:
        bias = content_free_bias(encoding, tables.params, q.slots.pos, k.slots.pos)
        with jax.numpy_dtype_promotion("standard"):  # JAX's own code mixes types
            return jax.nn.dot_product_attention(
                q.tokens.mapped.swapaxes(1, 2), keys.swapaxes(1, 2), values.swapaxes(1, 2),
                bias=None if bias is None else at_least_float32(bias),
                scale=1.0,  # queries are already scaled
                implementation="cudnn" if is_native(q.tokens.mapped.dtype) else "xla",
                **visible,
            ).swapaxes(1, 2)  # fmt: skip

    @jax.checkpoint  # else the gradient would keep all slabs
    def slab(part: Block) -> jax.Array:
        # Padding of the last block sees every key, because kernels differ in the output of a row without keys.
        visible = visible_pairs(mask, part.slots, k.slots) | (part.slots.idx < 0)[..., None]
        return kernel(part, mask=visible[:, None])

    if blocks == 1:
        o = kernel(q, is_causal=mask.causal, local_window_size=(mask.window - 1, 0) if mask.window else None)
    else:
        o = joined(jax.lax.map(slab, split_into_blocks(q, -(-num_queries // blocks))))[:, :, :num_queries]
    return o[..., : k.tokens.values.shape[-1]]
