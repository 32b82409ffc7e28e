"""Attention with linear biases."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.encodings.base import Dims, Encoding, Heads, Params, as_float
from posx.errors import ConfigError


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Slopes [h] in nats per token: 2^(-8(h+1)/H) for H a power of two.

    Otherwise the slopes of the largest power of two c below H, then the 1st, 3rd, 5th ... of the 2c series.
    """
    c = 2 ** math.floor(math.log2(num_heads))
    first = 2.0 ** (-8 * np.arange(1, c + 1) / c)
    between = 2.0 ** (-4 * np.arange(1, 2 * c + 1, 2) / c)
    return np.concatenate([first, between[: num_heads - c]])


def straight_fall(slopes: np.ndarray, distance: jax.Array) -> jax.Array:
    """-slope_h * |r|, [h, n], for slopes [h] and signed distances [n]."""
    return -as_float(slopes)[:, None] * jnp.abs(distance)[None, :]


@dataclasses.dataclass(frozen=True)
class Alibi(Encoding):
    """A penalty that grows linearly with distance: bias_h(r) = -slope_h * |r|, r = i - j in tokens.

    The absolute value makes it the symmetric form in bidirectional use. Added after the 1/sqrt(d) scale.

    Reference: Press, Smith and Lewis 2022, arXiv 2108.12409, section 3.
    Differs: BLOOM adds slope * key index instead, equal after softmax but poor in bfloat16; Falcon adds before scaling.
    """

    num_heads: Heads | None = None

    caches_mapped_keys = True
    fades = True
    extrapolates = "yes: flat or slightly falling perplexity"
    paper = "arXiv 2108.12409"

    def __post_init__(self) -> None:
        if self.num_heads is not None and self.num_heads < 1:
            raise ConfigError(f"alibi: num_heads={self.num_heads} must be at least 1")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(num_heads=dims.num_heads)

    def curve(self, params: Params, distance: jax.Array) -> jax.Array:
        self.require_resolved()
        return straight_fall(alibi_slopes(self.num_heads), distance)
