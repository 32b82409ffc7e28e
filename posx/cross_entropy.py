"""Log-probabilities of target tokens, without ever holding the logits of a large vocabulary all at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from posx.encodings.base import at_least_float32

#: Logits held at a time, 64 MB in float32. The gradient holds two or three arrays of that size; below it one pass over
#: all tokens is the faster way, above it memory and caches are worth a second product in the backward pass.
LARGEST_LOGITS = 2**24


def token_log_probs(
    unembed: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: jax.Array, vocab_size: int
) -> jax.Array:
    """Log-probabilities (nats, at least float32) [b, t] of targets [b, t] under the logits of hidden [b, t, m].

    unembed: hidden [b, t, m] -> logits [b, t, v]. Where b * t * v is large, it is called for some tokens of every row
    at a time (so that rows may live on many devices), and again in the backward pass.
    """
    if targets.size * vocab_size <= LARGEST_LOGITS:
        return _log_probs(unembed(hidden), targets)
    b, t = targets.shape
    chunk = math.ceil(t / math.ceil(targets.size * vocab_size / LARGEST_LOGITS))

    def chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, -t % chunk)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(b, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    # Within a loop nothing can be merged with the first computation, so no barrier against that is needed.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def part(tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _log_probs(unembed(tokens[0]), tokens[1])

    found = jax.lax.map(part, (chunks(hidden), chunks(targets)))
    return found.swapaxes(0, 1).reshape(b, -1)[:, :t]


def _log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logits = at_least_float32(logits)
    targets = targets.astype(jnp.int32)
    index = jnp.where(targets < 0, logits.shape[-1], targets)  # beyond the vocabulary is NaN; -1 would be the last id
    chosen = jnp.take_along_axis(logits, index[..., None], axis=-1, mode="fill")[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
