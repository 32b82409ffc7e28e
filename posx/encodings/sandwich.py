"""Sandwich: the inner products of sinusoidal vectors, as a bias."""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from posx.contract import About, ByDistance, Encoding, Params, as_float
from posx.contract.fields import Base, Heads, even
from posx.encodings.angles import inverse_frequencies, sin_cos


@dataclasses.dataclass(frozen=True)
class Sandwich(Encoding):
    """bias_h(r) = H / (8 h) * sum_c (cos(r w_c) - 1), w_c = base^(-2c/width), heads h = 1 .. H, r = i - j in tokens.

    c counts width/2 frequencies from `first`. With first = 0 the sum is PE(i) . PE(j) - width/2 of a sinusoidal
    encoding that is `width` wide; the constant makes the bias 0 at r = 0 and drops out of the softmax. It falls
    like a logarithm, but in waves. Nothing is learned.

    Reference: Chi et al. 2023, arXiv 2212.10356, code of appendix E; width 128.
    Differs: that code, and attention-gym, have no constant, which is NeMo's; NeMo counts c from 1 (`first=1`).
    """

    width: Annotated[int, "channels", even(2)] = 128
    first: Literal[0, 1] = 0
    base: Base = 10000.0
    num_heads: Heads | None = None
    about = About("arXiv 2212.10356", "falls like a logarithm, in waves; flat to 16 L in our small study")

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        frequencies = inverse_frequencies(self.base, self.width) * self.base ** (-2 * self.first / self.width)
        _, cos = sin_cos(jnp.abs(distance), frequencies)
        wave = (cos - 1).sum(axis=-1)
        factor = as_float([self.num_heads / (8 * h) for h in range(1, self.num_heads + 1)])
        return ByDistance(bias=factor[:, None] * wave[None, :])
