"""NAPE: heads with a penalty on distance beside heads without positions."""

import dataclasses
from typing import Self

import jax
import numpy as np

from posx.encodings.base import Dims, Encoding, Heads, Params
from posx.encodings.biases.alibi import straight_fall
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Nape(Encoding):
    """bias_h(r) = -m_h |r|, r = i - j in tokens: m_h = 1/h for the first heads h = 1, 2, ..., and 0 for the others.

    `alibi_heads` have a slope, half of the heads by default, rounded down. `slopes` "exponential" are 2^-(h-1). They do
    not depend on how many there are, and are steeper than ALiBi's. Added after the 1/sqrt(d) scale.

    Reference: Vasylenko et al. 2025, arXiv 2506.16640; slopes and order of heads of the released sparse_gemma.py.
    """

    slopes: str = "linear"
    alibi_heads: Heads | None = None
    num_heads: Heads | None = None

    caches_mapped_keys = True
    extrapolates = "near heads stay, far heads spread; flat to 16 L in our small study, with softmax"
    paper = "arXiv 2506.16640"

    def __post_init__(self) -> None:
        if self.slopes not in ("linear", "exponential"):
            raise ConfigError(f"nape: slopes={self.slopes!r} is unknown; allowed: linear, exponential")
        if self.alibi_heads is not None and self.alibi_heads < 0:
            raise ConfigError(f"nape: alibi_heads={self.alibi_heads} must be at least 0")
        if self.alibi_heads is not None and self.num_heads is not None and self.alibi_heads > self.num_heads:
            raise ConfigError(f"nape: alibi_heads={self.alibi_heads} must be at most num_heads={self.num_heads}")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(num_heads=dims.num_heads).fill_open(alibi_heads=dims.num_heads // 2)

    def curve(self, params: Params, distance: jax.Array) -> jax.Array:
        self.require_resolved()
        h = np.arange(1, self.num_heads + 1)
        slopes = 1 / h if self.slopes == "linear" else 2.0 ** (1 - h)
        return straight_fall(np.where(h <= self.alibi_heads, slopes, 0), distance)
