"""Sandwich: the inner products of sinusoidal vectors, as a bias."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.angles import inverse_frequencies, sin_cos
from posx.encodings.base import Channels, Dims, Encoding, Heads, Params, as_float
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Sandwich(Encoding):
    """bias_h(r) = H / (8 h) * sum_c (cos(r w_c) - 1), w_c = base^(-2c/width), heads h = 1 .. H, r = i - j in tokens.

    c counts width/2 frequencies from `first`. With first = 0 the sum is PE(i) . PE(j) - width/2 of a sinusoidal
    encoding that is `width` wide; the constant makes it 0 at r = 0 and drops out of the softmax. It falls as a
    logarithm does, but in waves. Nothing is learned. Added after the 1/sqrt(d) scale.

    Reference: Chi et al. 2023, arXiv 2212.10356, code of appendix E; width 128.
    Differs: that code, and attention-gym, have no constant, which is NeMo's; NeMo counts c from 1 (`first=1`).
    """

    width: Channels = 128
    first: int = 0
    base: float = 10000.0
    num_heads: Heads | None = None

    caches_mapped_keys = True
    extrapolates = "falls like a logarithm, in waves; flat to 16 L in our small study"
    paper = "arXiv 2212.10356"

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2:
            raise ConfigError(f"sandwich: width={self.width} must be even and at least 2")
        if self.first not in (0, 1):
            raise ConfigError(f"sandwich: first={self.first} must be 0 or 1")
        if not self.base > 1:
            raise ConfigError(f"sandwich: base={self.base} must be above 1")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(num_heads=dims.num_heads)

    def acts_on(self, hook: str) -> bool:
        return super().acts_on(hook)  # says that both hooks below are meant: they agree wherever floats are exact

    def bias(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        """As `curve` has it, from distances that are still whole: a wave is another one a token on, at any distance."""
        values = self.curve(params, (q_pos[:, None] - k_pos[None, :]).ravel())
        return values.reshape(-1, q_pos.shape[0], k_pos.shape[0])

    def curve(self, params: Params, distance: jax.Array) -> jax.Array:
        self.require_resolved()
        frequencies = inverse_frequencies(self.base, self.width) * self.base ** (-2 * self.first / self.width)
        _, cos = sin_cos(jnp.abs(distance), frequencies)
        wave = (cos - 1).sum(axis=-1)
        factor = as_float([self.num_heads / (8 * h) for h in range(1, self.num_heads + 1)])
        return factor[:, None] * wave[None, :]
