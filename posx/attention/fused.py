"""The fused executor: the vendor's kernel behind `jax.nn.dot_product_attention`, for encodings that fit it.

That is: token maps (RoPE, absolute ones, NoPE), temperatures, and content-free biases, handed over as a slab
[1, h, q, k]: one at training lengths, beyond them one after the other for blocks of queries. On a GPU with 16-bit
operands it is cuDNN, elsewhere the XLA form of the same call, which is how it is tested where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.blocks import cut_into_blocks, joined
from posx.attention.masks import Mask
from posx.attention.tiles import Block, Order, Pairs, Slots, score_bias, visible_pairs
from posx.encodings.base import BIASES, PAIRWISE, Encoding, Params, acting, at_least_float32

#: The most query-key pairs of one slab: 8 heads of them hold 1 GB in float32, which biases stay in beside operands of
#: 16 bits too; XLA's cuDNN call takes them so since openxla/xla pull request 32985 (October 2025).
SLAB_PAIRS = 8192 * 4096


def refusal(encoding: Encoding, mask: Mask, in_order: bool, segments: bool) -> str | None:
    """Why the kernel cannot serve this call, None if it can."""
    if by_content := acting(encoding, ("potential", *PAIRWISE)):
        return f"{type(encoding).__name__} acts on {', '.join(by_content)}, which the kernel has no place for"
    if not in_order or segments:
        return "the kernel takes whole sequences in order only (no q_idx, k_idx, q_segment, k_segment)"
    if mask.sinks:
        return "the kernel has no sinks"
    return None


def is_native(dtype: Any) -> bool:
    """Whether the vendor's kernel runs here, for operands of this type."""
    return jax.default_backend() in ("gpu", "cuda", "rocm") and jnp.dtype(dtype).itemsize == 2


def fused(
    encoding: Encoding, mask: Mask, params: Params, q: Block, k: Block,
    *, order: Order = Order(), slab_pairs: int = SLAB_PAIRS,
) -> jax.Array:  # fmt: skip
    """As `dense`, by the kernel: once, or block by block where the bias of all pairs would exceed `slab_pairs`.

    Raises ValueError for what it cannot serve.
    """
    if why := refusal(encoding, mask, order.in_order, q.slots.segment is not None):
        raise ValueError(f"executor 'fused' cannot serve this call: {why}; use blockwise")
    keys, values = k.tokens.mapped, k.tokens.values
    width = keys.shape[-1]
    if values.shape[-1] < width:  # the kernel wants keys and values of one width
        values = jnp.pad(values, [(0, 0)] * 3 + [(0, width - values.shape[-1])])
    num_queries, num_keys = Pairs(q, k).size
    has_bias = bool(acting(encoding, BIASES))
    blocks = -(-num_queries * num_keys // slab_pairs) if has_bias else 1

    def kernel(queries: jax.Array, slots: Slots, **visible: Any) -> jax.Array:
        bias = score_bias(encoding, params, slots.pos, k.slots.pos)
        with jax.numpy_dtype_promotion("standard"):  # JAX's own code mixes types
            return jax.nn.dot_product_attention(
                queries.swapaxes(1, 2), keys.swapaxes(1, 2), values.swapaxes(1, 2),
                bias=None if bias is None else at_least_float32(bias),
                scale=1.0,  # queries come scaled
                implementation="cudnn" if is_native(queries.dtype) else "xla",
                **visible,
            ).swapaxes(1, 2)  # fmt: skip

    if blocks == 1:
        window = (mask.window - 1, 0) if mask.window else None
        o = kernel(q.tokens.mapped, q.slots, is_causal=mask.causal, local_window_size=window)
    else:

        @jax.checkpoint  # or the gradient would keep all slabs
        def block(part: Block) -> jax.Array:
            # What fills up the last block sees every key: kernels differ in what a row without any gives.
            visible = visible_pairs(mask, part.slots, k.slots) | (part.slots.idx < 0)[..., None]
            return kernel(part.tokens.mapped, part.slots, mask=visible[:, None])

        o = joined(jax.lax.map(block, cut_into_blocks(q, -(-num_queries // blocks))))[:, :, :num_queries]
    return o[..., : k.tokens.values.shape[-1]]
