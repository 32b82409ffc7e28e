"""Fourier position embedding."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.encodings.angles import inverse_frequencies, sin_cos
from posx.encodings.base import (
    Channels,
    Dims,
    Encoding,
    Features,
    Heads,
    Params,
    Tokens,
    as_float,
    at_least_float32,
    exact_einsum,
    normal,
)
from posx.encodings.rotary.rope import rotate
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Fope(Encoding):
    """RoPE with mixed waves: sin_f(p) = sin(p theta) S_g, cos_f(p) = cos(p theta) C_g turn plane f in the place of
    sin(p theta_f), cos(p theta_f). S_g, C_g [n, n] of each key head are I + N(0, gain^2 2 / ((g + n) n)).

    Only the n frequencies base^(-2c/d) of at least 2 pi / `original_len` (default: the training length) are left, those
    that turn once or more in it. The planes of the others stand still: "doubled" is sin = cos = 1, an eighth of a turn
    that counts twice in logits, "plain" sin = 0. Logits depend on i - j alone only where S = C = I. The matrices are
    not trained, but drawn from `seed`, the same for all layers and runs that have it: a layer policy of fope(seed=0),
    fope(seed=1), ... has others. With `learned` they are parameters of each layer. The gain is 0.3 for 60 M parameters,
    0.4 for 180 M, 0.6 for 1.2 B.

    Reference: Hua et al. 2025, arXiv 2412.17739; github.com/TsinghuaC3I/Fourier-Position-Embedding, olmo/model.py.
    Differs: that code, which "doubled" follows on its authors' word (its issue 6), draws new matrices for each layer
    and run, has as many key heads as query heads, and leaves at most d/4 planes: where more turn, it starts them from
    every n-th frequency and the last from noise alone. vLLM's is "plain" and has no such bound.
    """

    base: float = 10000.0
    gain: float = 0.3
    original_len: Tokens | None = None
    dropped: str = "doubled"
    learned: bool = False
    seed: int = 0
    num_kv_heads: Heads | None = None
    head_dim: Channels | None = None

    shift_invariant = False
    caches_mapped_keys = True
    extrapolates = "better than RoPE: no plane meets unseen angles; rises from 1.5 L in our small study"
    paper = "arXiv 2412.17739"

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise ConfigError(f"fope: base={self.base} must be above 1")
        if self.gain < 0:
            raise ConfigError(f"fope: gain={self.gain} must be at least 0")
        if self.original_len is not None and self.original_len < 1:
            raise ConfigError(f"fope: original_len={self.original_len} must be at least 1")
        if self.dropped not in ("doubled", "plain"):
            raise ConfigError(f"fope: dropped={self.dropped!r} is unknown; allowed: doubled, plain")
        if self.seed < 0:
            raise ConfigError(f"fope: seed={self.seed} must be at least 0")

    @property
    def decayed(self) -> frozenset[str]:
        return frozenset({"sin", "cos"}) if self.learned else frozenset()

    def resolve(self, dims: Dims) -> Self:
        if dims.head_dim % 2:
            raise ConfigError(f"fope: head_dim={dims.head_dim} must be even, as pairs of channels turn")
        key_heads = dims.num_kv_heads or dims.num_heads
        return self.fill_open(original_len=dims.train_len, num_kv_heads=key_heads, head_dim=dims.head_dim)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        if not self.learned:
            return {}
        n = len(self._frequencies())
        noise = normal(rng, (2, self.num_kv_heads, n, n), self._std(n))
        return dict(zip(("sin", "cos"), jnp.eye(n, dtype=jnp.float32)[None, None] + noise, strict=True))

    def _frequencies(self) -> np.ndarray:
        self.require_resolved()
        frequencies = inverse_frequencies(self.base, self.head_dim)
        return frequencies[frequencies >= 2 * np.pi / self.original_len]

    def _std(self, n: int) -> float:
        """Xavier's, as PyTorch counts the fans of an array [g, n, n]: g n out of it and n n into it."""
        return self.gain * math.sqrt(2 / ((self.num_kv_heads + n) * max(n, 1)))

    def _fixed(self, n: int) -> dict[str, np.ndarray]:
        noise = np.random.default_rng(self.seed).standard_normal((2, self.num_kv_heads, n, n))
        return dict(zip(("sin", "cos"), np.eye(n) + self._std(n) * noise, strict=True))

    def _map(self, params: Params, vectors: jax.Array, pos: jax.Array) -> jax.Array:
        frequencies = self._frequencies()
        wide = at_least_float32(vectors)
        matrices = params if self.learned else self._fixed(len(frequencies))
        still = self.head_dim // 2 - len(frequencies)
        sin, cos = sin_cos(pos, frequencies)

        def mixed(wave: jax.Array, name: str, rest: float) -> jax.Array:
            series = exact_einsum("tn,gnf->tgf", wave, as_float(matrices[name]))
            series = jnp.pad(series, ((0, 0), (0, 0), (0, still)), constant_values=rest)
            return jnp.repeat(series, vectors.shape[1] // series.shape[1], axis=1).astype(wide.dtype)

        sin, cos = mixed(sin, "sin", float(self.dropped == "doubled")), mixed(cos, "cos", 1.0)
        return rotate(wide, sin, cos, "half_split").astype(vectors.dtype)

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map(params, vectors, pos)

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map(params, vectors, pos)
