"""T5's learned bias per bucket of distance."""

import dataclasses
import functools
import itertools
import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, ByDistance, Dims, Encoding, Features, Params, as_float, fact, normal
from posx.contract.fields import Buckets, Channels, Tokens
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class T5(Encoding):
    """bias_h(r) = table[bucket(r), h]: a learned bias per bucket of distance, r = i - j in tokens.

    The first half of the buckets holds one distance each. The others grow logarithmically up to `max_distance`. Causal:
    all keys after the query share bucket 0. Bidirectional: each side has half of the buckets, keys after the query the
    upper half. A fractional distance belongs to the bucket of the next whole distance towards 0. One table for all
    layers unless `per_layer`. Defaults at training length L: `max_distance` is L/2, since the published 128 leaves
    buckets untrained at L <= 128. `num_buckets` is the largest number up to 32 that leaves no bucket empty.

    Reference: Raffel et al. 2020, arXiv 1910.10683, section 2.1; table N(0, m^-1/2) as in HF's port.
    Differs: the sources have whole positions only. T5 drops the 1/sqrt(d) of the logits and folds it into its
    initialisation. `scaled=False` does so too (and reads `head_dim`, which `resolve` sets).
    Sensitive: to the table's learning rate. At the model's own rate the loss at L after 2 M bytes is worse by 0.15 nats
    a byte at 4e-3. It is worse by 0.37 at 1e-3. Its losses beyond L come from the table's delay too
    (experiments/recipe). GPT-NeoX and x-transformers multiply the table by sqrt(head width). Under Adam this multiplies
    the learning rate.
    """

    num_buckets: Buckets | None = None
    max_distance: Tokens | None = None
    bidirectional: bool = False
    scaled: bool = True
    per_layer: bool = False
    head_dim: Channels = 0

    causal_only = fact(lambda self: not self.bidirectional)
    shared = fact(lambda self: frozenset() if self.per_layer else frozenset({"table"}))
    reach = fact(lambda self: self.max_distance)
    about = About(
        "arXiv 1910.10683",
        "from below 2 L to 8 L in papers, flat to 32 L in our small study; past max_distance one bucket",
        lr_multiplier=10.0,  # biases start near 0 and must move by nats, too far for Adam; see experiments/recipe
    )

    def __post_init__(self) -> None:
        if self.num_buckets is None or self.max_distance is None:
            return
        least = 4 if self.bidirectional else 2
        if self.num_buckets < least or self.num_buckets % 2:
            raise ConfigError(f"t5: num_buckets={self.num_buckets} must be even and at least {least}")
        if self.max_distance <= (exact := self._buckets_per_side // 2):
            raise ConfigError(
                f"t5: max_distance={self.max_distance} must be above {exact}, the distances that have a bucket each"
            )

    @property
    def _buckets_per_side(self) -> int:
        return self.num_buckets // 2 if self.bidirectional else self.num_buckets

    def resolve(self, dims: Dims) -> Self:
        far = self.fill_open(max_distance=max(dims.train_len // 2, 2))
        sized = far if self.scaled else dataclasses.replace(far, head_dim=dims.head_dim)
        return sized.fill_open(num_buckets=_most_buckets(far.max_distance, sides=2 if self.bidirectional else 1))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return {"table": normal(rng, (self.num_buckets, dims.num_heads), dims.model_dim**-0.5)}

    def acts_on(self, hook: str) -> bool:
        return super().acts_on(hook) and not (hook == "logit_scale" and self.scaled)

    def logit_scale(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        return jnp.full((1, *pos.shape), math.sqrt(self.head_dim), as_float(0).dtype)

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        return ByDistance(bias=params["table"][self.bucket(as_float(distance))].T)

    def bucket(self, distance: jax.Array) -> jax.Array:
        """Return the bucket of signed distances i - j [n]."""
        starts = as_float(_starts(self._buckets_per_side, self.max_distance))
        past = jnp.abs(distance) if self.bidirectional else jnp.maximum(distance, 0)
        index = jnp.searchsorted(starts, past, side="right", method="compare_all")
        return jnp.where(distance <= -1, index + self._buckets_per_side, index) if self.bidirectional else index


@functools.cache
def geometric_series(first: int, last: int, steps: int, up: bool) -> np.ndarray:
    """Return first (last / first)^(j / steps), j = 0 .. steps, in exact integers, rounded up or down.

    Published code takes logarithms of distances. They round differently from library to library, just at the borders.
    """
    terms = []
    for j in range(steps + 1):
        power = first ** (steps - j) * last**j - up
        n = round(first * (last / first) ** (j / steps))  # the largest n with n^steps <= power, or one more
        terms.append(n - (n**steps > power) + up)
    return np.array(terms, np.int64)


def _starts(num_buckets: int, max_distance: int) -> list[int]:
    """Return the first distance of buckets 1 .. n-1 of one side, for n buckets.

    Buckets up to e = n/2 start at their own number, bucket e + j at e (max_distance / e)^(j / (n - e)), rounded up.
    """
    exact = num_buckets // 2
    logarithmic = geometric_series(exact, max_distance, num_buckets - exact, up=True)
    return [*range(1, exact), *logarithmic[:-1].tolist()]


def _most_buckets(max_distance: int, sides: int) -> int:
    """Return the largest even number of buckets, up to 32, with no empty bucket on any side."""
    for num_buckets in range(32, 2 * sides, -2):
        n = num_buckets // sides
        if n // 2 < max_distance and all(a < b for a, b in itertools.pairwise(_starts(n, max_distance))):
            return num_buckets
    return 2 * sides
