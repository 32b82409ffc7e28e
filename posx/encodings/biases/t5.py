"""T5's learned bias per bucket of distance."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.encodings.base import Buckets, Channels, Dims, Encoding, Features, Params, Tokens, as_float, normal
from posx.errors import ConfigError


def bucket_starts(num_buckets: int, max_distance: int) -> np.ndarray:
    """First distance (tokens) of buckets 1 .. n-1 of one side: one token each up to e = n/2, then logarithmic.

    Bucket e + j starts at the least n with n >= e (max_distance/e)^(j/(N-e)), found in exact integers: the log of the
    published form rounds differently from library to library just at these points.
    """
    exact = num_buckets // 2
    wide = num_buckets - exact
    starts = list(range(1, exact + 1))
    for j in range(1, wide):
        power = exact ** (wide - j) * max_distance**j
        n = round(exact * (max_distance / exact) ** (j / wide))  # at most a rounding error away
        while n**wide < power:
            n += 1
        while (n - 1) ** wide >= power:
            n -= 1
        starts.append(n)
    return np.array(starts, np.float64)


def every_bucket_is_met(num_buckets: int, max_distance: int) -> bool:
    """Whether each bucket of one side holds a distance."""
    return num_buckets // 2 < max_distance and bool(np.all(np.diff(bucket_starts(num_buckets, max_distance)) > 0))


@dataclasses.dataclass(frozen=True)
class T5(Encoding):
    """bias_h(r) = table[bucket(r), h]: buckets of one token up to half of them, then logarithmic to max_distance.

    Causal: r = i - j, the future shares bucket 0. Bidirectional: half of the buckets for each side, keys after the
    query in the upper half. A distance between two whole ones has the bucket of the one nearer to 0. Defaults at
    training length L: max_distance L/2, since the published 128 leaves buckets untrained at L <= 128, and as many
    buckets, up to 32, as leave none without a distance. One table for all layers unless `per_layer`.

    Reference: Raffel et al. 2020, arXiv 1910.10683, section 2.1; table N(0, m^-1/2) as in HF's port.
    Differs: the sources have whole positions only. T5 drops the 1/sqrt(d) of the logits and folds it into its
    initialisation; `scaled=False` gives that (and reads `head_dim`, which `resolve` sets).
    Sensitive: to the table's learning rate. At the model's own it is 0.15 nats a byte worse at L after 2 M bytes at
    4e-3, 0.37 at 1e-3, and what it loses beyond L is the table's delay too (experiments/recipe). GPT-NeoX and
    x-transformers multiply the table by sqrt(head width), which under Adam is a rate so many times higher.
    """

    num_buckets: Buckets | None = None
    max_distance: Tokens | None = None
    bidirectional: bool = False
    scaled: bool = True
    per_layer: bool = False
    head_dim: Channels = 0

    caches_mapped_keys = True
    lr_multiplier = 10.0  # biases start near 0 and belong nats away, too far for steps of Adam; see experiments/recipe
    extrapolates = "from below 2 L to 8 L in papers, flat to 32 L in our small study; past max_distance one bucket"
    paper = "arXiv 1910.10683"

    def __post_init__(self) -> None:
        if self.num_buckets is None or self.max_distance is None:
            return
        least = 4 if self.bidirectional else 2
        if self.num_buckets < least or self.num_buckets % 2:
            raise ConfigError(f"t5: num_buckets={self.num_buckets} must be even and at least {least}")
        exact = self._buckets_per_side // 2
        if self.max_distance <= exact:
            raise ConfigError(
                f"t5: max_distance={self.max_distance} must be above {exact}, the distances that have a bucket each"
            )

    @property
    def causal_only(self) -> bool:  # type: ignore[override]
        return not self.bidirectional

    @property
    def _buckets_per_side(self) -> int:
        return self.num_buckets // 2 if self.bidirectional else self.num_buckets

    @property
    def shared(self) -> frozenset[str]:
        return frozenset() if self.per_layer else frozenset({"table"})

    @property
    def reach(self) -> int | None:
        return self.max_distance

    def resolve(self, dims: Dims) -> Self:
        far = self.fill_open(max_distance=max(dims.train_len // 2, 2))
        if not self.scaled:
            far = dataclasses.replace(far, head_dim=dims.head_dim)
        sides = 2 if self.bidirectional else 1
        fits = (n for n in range(32, 2 * sides, -2) if every_bucket_is_met(n // sides, far.max_distance))
        return far.fill_open(num_buckets=next(fits, 2 * sides))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        self.require_resolved()
        return {"table": normal(rng, (self.num_buckets, dims.num_heads), dims.model_dim**-0.5)}

    def bucket(self, distance: jax.Array) -> jax.Array:
        """Bucket index [n] of signed distances i - j [n]."""
        self.require_resolved()
        starts = jnp.asarray(bucket_starts(self._buckets_per_side, self.max_distance), distance.dtype)
        past = jnp.abs(distance) if self.bidirectional else jnp.maximum(distance, 0)
        index = jnp.searchsorted(starts, past, side="right", method="compare_all")
        return jnp.where(distance <= -1, index + self._buckets_per_side, index) if self.bidirectional else index

    def acts_on(self, hook: str) -> bool:
        return super().acts_on(hook) and not (hook == "temperature" and self.scaled)

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
        return None if self.scaled else jnp.full(pos.shape, math.sqrt(self.head_dim), as_float(0).dtype)

    def curve(self, params: Params, distance: jax.Array) -> jax.Array:
        return params["table"][self.bucket(distance)].T
