"""The fused executor: the vendor's kernel behind `jax.nn.dot_product_attention`, for encodings that fit it.

That is: token maps (RoPE, absolute ones, NoPE), temperatures, and content-free biases, handed over as one slab
[1, h, q, k]. On a GPU with 16-bit operands it is cuDNN, elsewhere the XLA form of the same call, which is how it is
tested where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.masks import Mask
from posx.attention.tiles import Slots, Tokens, score_bias
from posx.encodings.base import Encoding, Params

#: `auto` leaves slabs of more pairs than this to the blockwise executor: 8 heads of them hold 1 GB in bfloat16.
SLAB_PAIRS = 8192 * 8192


def refusal(encoding: Encoding, mask: Mask, in_order: bool, segments: bool) -> str | None:
    """Why the kernel cannot serve this call, None if it can."""
    by_content = [hook for hook in ("relative", "score", "mix") if encoding.acts_on(hook)]
    if by_content:
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
    encoding: Encoding, mask: Mask, params: Params, q: Tokens, k: Tokens, q_slots: Slots, k_slots: Slots,
    *, in_order: bool = False, **_: Any,
) -> jax.Array:  # fmt: skip
    """As `dense`, by one call of the kernel. Raises ValueError for what it cannot serve."""
    if why := refusal(encoding, mask, in_order, q_slots.segment is not None):
        raise ValueError(f"executor 'fused' cannot serve this call: {why}; use blockwise")
    bias = score_bias(encoding, params, q_slots.pos, k_slots.pos)
    width, values = k.mapped.shape[-1], k.values
    if values.shape[-1] < width:  # the kernel wants keys and values of one width
        values = jnp.pad(values, [(0, 0)] * 3 + [(0, width - values.shape[-1])])
    o = jax.nn.dot_product_attention(
        q.mapped.swapaxes(1, 2), k.mapped.swapaxes(1, 2), values.swapaxes(1, 2),
        bias=None if bias is None else bias.astype(q.mapped.dtype),
        scale=1.0,  # queries come scaled
        is_causal=mask.causal,
        local_window_size=(mask.window - 1, 0) if mask.window else None,
        implementation="cudnn" if is_native(q.mapped.dtype) else "xla",
    )  # fmt: skip
    return o[..., : k.values.shape[-1]].swapaxes(1, 2)
