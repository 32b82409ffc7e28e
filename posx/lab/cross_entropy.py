"""Log-probabilities of target tokens, without holding all logits of a large vocabulary at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posx.contract import at_least_float32

#: The most logits held at a time, 64 MB in float32. The gradient holds two or three arrays of that size. Up to this
#: number one pass over all tokens is faster. Above it, chunks save memory and fit caches better. That is worth a second
#: product in the backward pass.
LARGEST_LOGITS = 2**24


def log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return log-probabilities [b, t], nats, of targets [b, t] under logits [b, t, v]."""
    logits = at_least_float32(logits)
    targets = targets.astype(jnp.int32)
    index = jnp.where(targets < 0, logits.shape[-1], targets)  # outside the vocabulary: NaN. -1 would be the last id
    chosen = jnp.take_along_axis(logits, index[..., None], axis=-1, mode="fill")[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def score_answers(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `log_probs`, and whether each target has the largest logit, bool [b, t]."""
    return log_probs(logits, targets), logits.argmax(axis=-1).astype(targets.dtype) == targets


@jax.named_scope("cross_entropy")
def token_scores(
    unembed: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    vocab_size: int,
    score: Callable[[jax.Array, jax.Array], Any] = log_probs,
) -> Any:
    """Return the scores of targets [b, t] under the logits of hidden [b, t, m], by default their log-probabilities.

    If b * t * v is large, `unembed` is called for some tokens of every row at a time, and again in the backward pass.
    Each call has all rows, because they may be sharded over devices.

    Args:
      unembed: maps hidden [b, t, m] to logits [b, t, v].
      hidden: outputs of the last layer.
      targets: token ids. An id outside the vocabulary gives NaN.
      vocab_size: v.
      score: maps logits [b, t, v] and targets [b, t] to arrays [b, t].

    Returns:
      The result of `score`. Log-probabilities are at least float32, or float64 if the logits are.
    """
    if targets.size * vocab_size <= LARGEST_LOGITS:
        return score(unembed(hidden), targets)
    b, t = targets.shape
    chunk = math.ceil(t / math.ceil(targets.size * vocab_size / LARGEST_LOGITS))

    def chunks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, -t % chunk)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(b, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    # Inside a loop XLA cannot merge the recomputation with the first computation, so no barrier is needed.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def part(tokens: tuple[jax.Array, jax.Array]) -> Any:
        return score(unembed(tokens[0]), tokens[1])

    scores = jax.lax.map(part, (chunks(hidden), chunks(targets)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(b, -1)[:, :t], scores)
