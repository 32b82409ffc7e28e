"""The short history: what some hooks see of the tokens before each one (`Encoding.history`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posx.encodings.base import Encoding


def seen_by(
    encoding: Encoding, hook: str, x: jax.Array, idx: Any, segment: Any = None, recent: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """What `hook` is given of x [b, t, ...], and what it has to be given as `recent` with the tokens that follow.

    x itself and None where it sees single tokens; else windows [b, t, 1 + n, ...], a token's own first, then the n
    before it, and the last n tokens [b, n, ...]; zeros where the document has none, and before empty slots.

    Args:
      idx, segment: arrival orders and document numbers [t] or [b, t]; idx None where slots stand in that order.
      recent: [b, n, ...], the tokens that came before all of x, of the same document; None at the start.
    """
    n = encoding.history.get(hook, 0)
    if not n:
        return x, None
    if segment is not None:
        segment = jnp.atleast_2d(jnp.asarray(segment))
    if recent is None:
        recent = jnp.zeros((x.shape[0], n, *x.shape[2:]), x.dtype)
    whole = jnp.concatenate([recent.astype(x.dtype), x], axis=1)
    if idx is None and segment is None:
        before = [whole[:, n - s : n - s + x.shape[1]] for s in range(1, n + 1)]
        return jnp.stack([x, *before], axis=2), whole[:, -n:]
    idx = jnp.atleast_2d(jnp.arange(x.shape[1]) if idx is None else jnp.asarray(idx))  # documents may be mixed
    sources, newest = _by_arrival(idx, segment, n)
    before = [_kept(_taken(whole, source), idx >= 0) for source in sources]
    if segment is not None:
        before = [_kept(y, same) for y, same in zip(before, _same_document(segment, n, sources), strict=True)]
    return jnp.stack([x, *before], axis=2), _taken(whole, newest)


def _by_arrival(idx: jax.Array, segment: jax.Array | None, n: int) -> tuple[list[jax.Array], jax.Array]:
    """Where among n recent tokens and those of idx [b or 1, t] the 1st .. n-th before each lie, and the last n of all.

    Empty slots (-1) come before everything, then the recent ones, so that each token has n before it, then document
    after document, each in its order of arrival.
    """
    idx, segment = jnp.broadcast_arrays(idx, jnp.zeros_like(idx) if segment is None else segment)
    kind = jnp.pad(jnp.where(idx < 0, 0, 2), ((0, 0), (n, 0)), constant_values=1)
    arrival, document = (jnp.pad(x, ((0, 0), (n, 0))) for x in (idx, segment))  # recent ones stay as they are
    order = jnp.lexsort((arrival, document, kind), axis=1)
    rank = jnp.argsort(order, axis=1)[:, n:]
    sources = [jnp.take_along_axis(order, jnp.maximum(rank - s, 0), axis=1) for s in range(1, n + 1)]
    return sources, order[:, -n:]


def _taken(x: jax.Array, source: jax.Array) -> jax.Array:
    """x [b, t, ...] at source [b or 1, s]."""
    return jnp.take_along_axis(x, jnp.expand_dims(source, tuple(range(2, x.ndim))), axis=1)


def _same_document(segment: jax.Array, n: int, sources: list[jax.Array]) -> list[jax.Array]:
    """bool [b or 1, t]: whether the 1st .. n-th token before each is of its document. What came before all is zero
    and may count as either."""
    whole = jnp.pad(segment, ((0, 0), (n, 0)), mode="edge")
    whole = jnp.broadcast_to(whole, (sources[0].shape[0], whole.shape[1])) if whole.shape[0] == 1 else whole
    return [_taken(whole, source) == segment for source in sources]


def _kept(x: jax.Array, kept: jax.Array) -> jax.Array:
    return jnp.where(jnp.expand_dims(kept, tuple(range(2, x.ndim))), x, jnp.zeros((), x.dtype))
