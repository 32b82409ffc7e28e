"""The short history: the last few tokens before each token, which some hooks read (`Encoding.history`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posx.attention.arguments import zero_outside
from posx.contract import Encoding


def with_previous_tokens(
    encoding: Encoding, hook: str, x: jax.Array, idx: Any, segment: Any = None, recent: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the input of `hook` for x [b, t, ...], and the `recent` of the call for the tokens that follow.

    Args:
      encoding: whose `history` gives n, the number of earlier tokens that `hook` sees.
      hook: the name of the hook.
      x: [b, t, ...].
      idx: arrival orders [t] or [b, t]; None if the slots are in that order.
      segment: document numbers [t] or [b, t]; None for one document.
      recent: [b, n, ...], the tokens of the same document before all of x; None at the start.

    Returns:
      x and None if n is 0. Else windows [b, t, 1 + n, ...] and the last n tokens [b, n, ...]. A window has the token
      itself first, then the tokens before it in arrival order. It has zeros before the start of the document, and
      behind an empty slot.
    """
    n = encoding.history.get(hook, 0)
    if not n:
        return x, None
    if recent is None:
        recent = jnp.zeros((x.shape[0], n, *x.shape[2:]), x.dtype)
    whole = jnp.concatenate([recent.astype(x.dtype), x], axis=1)
    if idx is None and segment is None:
        before = [whole[:, n - s : n - s + x.shape[1]] for s in range(1, n + 1)]
        return jnp.stack([x, *before], axis=2), whole[:, -n:]
    idx = jnp.arange(x.shape[1]) if idx is None else jnp.asarray(idx)  # documents may be interleaved
    segment = jnp.zeros_like(idx) if segment is None else jnp.asarray(segment)
    idx, segment = jnp.broadcast_arrays(jnp.atleast_2d(idx), jnp.atleast_2d(segment))
    # Empty slots first, then the recent tokens, so that each token has n slots before it. Then document by document,
    # each in its order of arrival. Slots before all tokens hold zeros, so their document does not matter.
    kind = jnp.pad(jnp.where(idx < 0, 0, 2), ((0, 0), (n, 0)), constant_values=1)
    arrival, document = (jnp.pad(x, ((0, 0), (n, 0)), mode="edge") for x in (idx, segment))
    order = jnp.lexsort((arrival, document, kind), axis=1)
    rank, before = jnp.argsort(order, axis=1)[:, n:], []
    for s in range(1, n + 1):
        source = jnp.take_along_axis(order, jnp.maximum(rank - s, 0), axis=1)
        before.append(zero_outside(_take_slots(whole, source), (idx >= 0) & (_take_slots(document, source) == segment)))
    return jnp.stack([x, *before], axis=2), _take_slots(whole, order[:, -n:])


def _take_slots(x: jax.Array, source: jax.Array) -> jax.Array:
    """Return the slots `source` [b or 1, s] of x [b, t, ...]."""
    return jnp.take_along_axis(x, jnp.expand_dims(source, tuple(range(2, x.ndim))), axis=1)
