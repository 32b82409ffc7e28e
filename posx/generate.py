"""Text from a trained model: chunked prefill into the cache, then one token at a time, for every encoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.cache import Cache
from posx.errors import ConfigError
from posx.positions import sequential

if TYPE_CHECKING:
    from posx.model import Model


@dataclasses.dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the most likely token; `top_k` 0 samples from all. Raises ConfigError."""

    temperature: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or self.top_k < 0:
            raise ConfigError(f"temperature={self.temperature}, top_k={self.top_k}: neither may be negative")


def sample(logits: jax.Array, sampling: Sampling, rng: jax.Array) -> jax.Array:
    """Next tokens [b] from logits [b, v]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(rng, logits / sampling.temperature).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
def _forward(model: Model, params: Any, tokens: jax.Array, pos: jax.Array, idx: jax.Array, cache: Cache):
    return model.cached(params, tokens, pos, idx, cache)


@functools.partial(jax.jit, static_argnums=1)
def _sample(logits: jax.Array, sampling: Sampling, rng: jax.Array) -> jax.Array:
    return sample(logits, sampling, rng)


def prefill(model: Model, params: Any, tokens: np.ndarray, cache: Cache, chunk: int = 256) -> tuple[jax.Array, Cache]:
    """Logits [b, v] of the token after each prompt, and the filled cache.

    tokens: [b, t], prompts of unequal length padded on the left with -1. Positions count from each prompt's own start.
    Chunks of one size share one compiled program; what fills up the first chunk is empty slots (idx -1).
    """
    length = tokens.shape[1]
    padding = -length % min(chunk, max(length, 1))
    tokens = np.pad(tokens, ((0, 0), (padding, 0)), constant_values=-1)
    place = np.broadcast_to(sequential(tokens.shape[1]), tokens.shape)
    before = (tokens < 0).sum(axis=1, keepdims=True)
    idx = np.where(tokens < 0, -1, place).astype(np.int32)
    pos = np.maximum(place - before, 0).astype(np.int32)
    for start in range(0, tokens.shape[1], chunk):
        part = slice(start, start + chunk)
        logits, cache = _forward(model, params, np.maximum(tokens[:, part], 0), pos[:, part], idx[:, part], cache)
    return logits[:, -1], cache


def generate(
    model: Model,
    params: Any,
    prompts: list[np.ndarray],
    num_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    chunk: int = 256,
) -> Iterator[np.ndarray]:
    """Yields `num_tokens` arrays [b] of new token ids after `prompts` (token ids, lengths may differ).

    Raises ConfigError for an empty prompt, or where prompt and new tokens go past what an encoding is defined for.
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    if min((len(prompt) for prompt in prompts), default=0) < 1 or num_tokens < 1:
        raise ConfigError("generate needs prompts of at least one token each, and at least one token to make")
    if longest + num_tokens >= 2**31:
        raise ConfigError(f"num_tokens={num_tokens}: positions end at 2**31")
    model = model.at_length(longest + num_tokens)
    last = model.max_position
    if last is not None and longest + num_tokens - 2 > last:
        raise ConfigError(
            f"prompt and new tokens make {longest + num_tokens} tokens, but this encoding is defined up to position "
            f"{last}: at most {max(last + 2 - longest, 0)} new tokens"
        )
    tokens = np.full((len(prompts), longest), -1, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[longest - len(prompt) :] = prompt
    chunk = min(chunk, longest)
    prompt_slots = -(-longest // chunk) * chunk
    model, params = model.tabulated(params, longest + num_tokens)
    cache = model.empty_cache(len(prompts), prompt_slots + num_tokens)
    logits, cache = prefill(model, params, tokens, cache, chunk)
    pos = np.array([[len(prompt)] for prompt in prompts], np.int32)
    rng = jax.random.key(seed)
    for n in range(num_tokens):
        new = _sample(logits, sampling, jax.random.fold_in(rng, n))
        yield np.asarray(new)
        if n + 1 < num_tokens:
            idx = np.full_like(pos, prompt_slots + n)
            step_logits, cache = _forward(model, params, new[:, None], pos + n, idx, cache)
            logits = step_logits[:, 0]
