"""Text from a trained model: chunked prefill into the cache, then one token at a time, for every encoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.cache import Cache
from posx.encodings import spec_text
from posx.errors import ConfigError, NonFiniteError
from posx.evaluation.ids import token_ids
from posx.lab.positions import PositionPolicy, Positions
from posx.machine.platforms import product_precision

if TYPE_CHECKING:
    from posx.lab.model import Model


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The settings of sampling. Negative, infinite and NaN values raise ConfigError.

    Attributes:
      temperature: divides the logits. 0 takes the most likely token, and so does a value below 1.2e-38, because float32
        cannot divide by it.
      top_k: samples from the k most likely tokens, 0 from all.
      vocab_size: leaves out ids from it on, for which a model may have rows and its tokenizer no token; 0 leaves out
        none.
    """

    temperature: float = 1.0
    top_k: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or self.top_k < 0:
            raise ConfigError(
                f"temperature={self.temperature}, top_k={self.top_k}: both must be finite and not negative. Give 0 "
                "or a positive number."
            )


def sample(logits: jax.Array, sampling: Sampling, rng: jax.Array) -> jax.Array:
    """Return the next tokens [b] from logits [b, v], -1 for a row with NaN or infinite logits.

    Row n draws with its own key: entry n of keys [b], or one made of a single key and n. The contents and the number of
    the other rows change nothing.
    """
    logits = logits[:, : sampling.vocab_size or None]
    best = logits.max(axis=-1, keepdims=True)
    numbers = jnp.finfo(logits.dtype)
    if sampling.temperature < float(numbers.tiny):
        tokens = jnp.argmax(logits, axis=-1)
    else:
        # Subtract before the division: logits divided by a tiny number are infinite.
        scaled = (logits - best) / min(sampling.temperature, float(numbers.max))
        if 0 < sampling.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
            scaled = jnp.where(logits < least, -jnp.inf, scaled)
        rngs = rng if rng.ndim else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, jnp.arange(len(logits)))
        tokens = jax.vmap(jax.random.categorical)(rngs, scaled)
    return jnp.where(jnp.isfinite(best[:, 0]), tokens, -1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5)
def _forward(model: Model, params: Any, tokens: jax.Array, pos: jax.Array, idx: jax.Array, cache: Cache):
    """Return logits [b, v] after the last of tokens [b, t], and the cache with these appended."""
    with product_precision("highest"):  # as in evaluation
        logits, cache = model.decode(params, tokens, pos, idx, cache)
    return logits[:, -1], cache


@functools.partial(jax.jit, static_argnums=1)
def _sample(logits: jax.Array, sampling: Sampling, rng: jax.Array, n: int) -> jax.Array:
    """Return new token n of each row, under one key or keys [b]."""
    fold = jax.random.fold_in
    return sample(logits, sampling, jax.vmap(fold, (0, None))(rng, n) if rng.ndim else fold(rng, n))


def prefill(
    model: Model, params: Any, tokens: np.ndarray, cache: Cache, chunk: int = 128, pos: np.ndarray | None = None
) -> tuple[jax.Array, Cache]:
    """Return logits [b, v] of the token after each prompt, and the filled cache.

    Positions and arrival orders count from each prompt's own start. Chunks of one size share one compiled program.
    Empty slots (idx -1) complete the first chunk.

    Args:
      model: the model.
      params: its parameters.
      tokens: [b, t], prompts of unequal length padded on the left with -1.
      cache: an empty one, from `model.empty_cache`.
      chunk: tokens of one call of the model.
      pos: positions [n] of the first n >= t tokens of a text; None for 0 to n - 1.

    Raises:
      ConfigError: the cache has tokens or too few slots, a row has no token or padding after one, or an id is out of
        range.
    """
    tokens = np.asarray(token_ids(tokens, "[b, t]", least=-1, vocab_size=model.vocab_size))
    length = tokens.shape[1]
    if min(length, chunk) < 1 or (tokens < 0).all(axis=1).any():
        raise ConfigError(
            f"tokens {list(tokens.shape)}, chunk={chunk}: give at least one token a row, and a chunk of at least 1."
        )
    padding = -length % min(chunk, length)
    tokens = np.pad(tokens, ((0, 0), (padding, 0)), constant_values=-1)
    cache.check_room(tokens.shape[1])
    idx = np.where(tokens < 0, -1, np.cumsum(tokens >= 0, axis=1, dtype=np.int32) - 1)
    cache.check_orders(idx)
    places = np.maximum(idx, 0) if pos is None else pos[np.maximum(idx, 0)]
    for start in range(0, tokens.shape[1], chunk):
        part = slice(start, start + chunk)
        logits, cache = _forward(model, params, np.maximum(tokens[:, part], 0), places[:, part], idx[:, part], cache)
    return logits, cache


def generate(
    model: Model,
    params: Any,
    prompts: list[np.ndarray],
    num_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    seed: int | Sequence[int] = 0,
    chunk: int = 128,
    positions: Positions = Positions(),
) -> Iterator[np.ndarray]:
    """Yield `num_tokens` arrays [b] of new token ids, one for each prompt.

    The tokens of a prompt do not depend on the other prompts, nor on their number. Its first n tokens do not depend on
    `num_tokens`. Encodings that are set for a length (`Encoding.at_length`) and random positions are the exception.
    Both are set for the prompt and the new tokens together.

    Few programs serve texts of all lengths. A cache has 256, 1,024, 4,096 ... slots, see `cache_capacity`, and the
    first chunk of the prompts is padded. Each capacity has one program for a chunk and one for a new token. Encodings
    that carry sums have one more for chunks after the first, those with tables by position or distance one for the
    tables.

    Args:
      model: the model.
      params: its parameters.
      prompts: token ids; lengths may differ.
      num_tokens: new tokens for each prompt.
      sampling: temperature and top_k.
      seed: of the random draws, below 2**32. A list has one for each prompt, whose draws then are the same at any place
        among the prompts.
      chunk: tokens of one call of the model while it reads the prompts.
      positions: of the run that the model was trained in.

    Raises:
      ConfigError: positions with other axes than the encoding reads. An empty prompt, or token ids outside the
        vocabulary. Prompt and new tokens past the last position of the encoding, or of the policy. Prompts whose
        lengths would set the encoding, or the positions, to different values. Another number of seeds.
      NonFiniteError: NaN or infinite logits.
    """
    prompts = [
        np.asarray(token_ids(prompt, "[t]", name=f"prompts[{n}]", vocab_size=model.vocab_size))
        for n, prompt in enumerate(prompts)
    ]
    encodings = _fit_model(model, prompts, num_tokens, chunk, positions.policy).encodings
    longest = max(map(len, prompts))
    places = positions.measure(longest + num_tokens)
    tokens = np.full((len(prompts), longest), -1, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[longest - len(prompt) :] = prompt
    capacity = cache_capacity(-(-longest // chunk) * chunk + num_tokens - 1)
    tokens = np.pad(tokens, ((0, 0), (-longest % chunk, 0)), constant_values=-1)
    model, params = model.tabulated(params, max(capacity, positions.policy.most or 0), encodings)
    cache = model.empty_cache(len(prompts), capacity)
    logits, cache = prefill(model, params, tokens, cache, chunk, places)
    first = np.array([[len(prompt)] for prompt in prompts], np.int32)
    rng = _key(seed, len(prompts))
    for n in range(num_tokens):
        new = _sample(logits, sampling, rng, n)
        ids = np.asarray(new)
        if (ids < 0).any():
            raise NonFiniteError(
                f"new token {n + 1} of prompt {int((ids < 0).argmax())}: the model's logits are NaN or infinite. "
                "Check the weights, or use a checkpoint from before training diverged."
            )
        yield ids
        if n + 1 < num_tokens:
            idx = first + n
            logits, cache = _forward(model, params, ids[:, None], idx if places is None else places[idx], idx, cache)


def _key(seed: int | Sequence[int], count: int) -> jax.Array:
    """Return the key of a seed, or keys [count] of a list of seeds. Raises ConfigError for a list of another length."""
    if not isinstance(seed, Sequence):
        return jax.random.key(seed)
    if len(seed) != count:
        raise ConfigError(f"seed has {len(seed)} entries for {count} prompts. Give one for each prompt, or one number.")
    return jax.vmap(jax.random.key)(np.array(seed, np.uint32))


def _fit_model(model: Model, prompts: list[np.ndarray], num_tokens: int, chunk: int, policy: PositionPolicy) -> Model:
    """Return the model set for the length of these texts. Raises ConfigError as `generate` does."""
    model.config.require_causal("generating text")
    most = policy.most  # None if positions are not random
    for encoding in model.distinct:
        if encoding.axes not in (0, policy.axes):
            raise ConfigError(
                f"{spec_text(encoding)} reads positions with axes={encoding.axes}, but positions={policy} has "
                f"axes={policy.axes}. Pass those of the model's training, such as posx.load(RUN)[0].positions."
            )
    longest = max((len(prompt) for prompt in prompts), default=0)
    if min((len(prompt) for prompt in prompts), default=0) < 1 or min(num_tokens, chunk) < 1:
        raise ConfigError(
            f"num_tokens={num_tokens}, chunk={chunk}: generate needs at least one new token, chunks of at least one "
            "token, and prompts of at least one token. Give positive numbers and no empty prompt."
        )
    if longest + num_tokens >= 2**31:
        raise ConfigError(
            f"num_tokens={num_tokens} after a prompt of {longest} tokens: positions must stay below 2**31. "
            f"{_shorter(longest, 2**31 - 1)}"
        )
    own = [model.at_length(length + num_tokens) for length in sorted({len(prompt) for prompt in prompts})]
    if len(set(own)) > 1 or (most and len(own) > 1):
        what = "these random positions are" if most else "this encoding is"
        raise ConfigError(
            f"prompts of {len(own)} different lengths: {what} set for the length of the text, so the longest "
            "prompt would change the text after the shorter ones. Call generate once for each length."
        )
    if most and longest + num_tokens > most:
        raise ConfigError(
            f"num_tokens={num_tokens} after a prompt of {longest} tokens: the model draws from {most} positions. "
            f"{_shorter(longest, most)}"
        )
    last = own[-1].max_position
    if last is not None and longest + num_tokens - 2 > last:
        raise ConfigError(
            f"num_tokens={num_tokens} after a prompt of {longest} tokens: this encoding is defined up to position "
            f"{last}. {_shorter(longest, last + 2)}"
        )
    return own[-1]


def _shorter(longest: int, most: int) -> str:
    """Return how to make a prompt of `longest` tokens and its new tokens at most `most` tokens."""
    if longest < most:
        return f"Ask for at most {most - longest} new tokens."
    return f"Shorten the prompt to at most {most - 1} tokens."


def cache_capacity(count: int) -> int:
    """Return the slots of a cache for `count` tokens: 256, 1,024, 4,096, 16,384, ...

    A token reads all slots, filled or not. Powers of 2 would waste less time, but compile twice the programs.
    """
    return 256 * 4 ** max(0, -(-(count - 1).bit_length() // 2) - 4)
