"""NAPE: heads with a penalty on distance beside heads without positions."""

import dataclasses
from typing import Annotated, Literal, Self

import jax
import numpy as np

from posx.contract import About, ByDistance, Dims, Encoding, Params
from posx.contract.fields import Heads, at_least
from posx.encodings.alibi import straight_fall
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Nape(Encoding):
    """bias_h(r) = -m_h |r|, r = i - j in tokens: m_h = 1/h for the first heads h = 1, 2, ..., and 0 for the others.

    The first `alibi_heads` have a slope, by default half of all heads, rounded down. `slopes` "exponential" are
    2^-(h-1). The slopes do not depend on the number of heads, and are steeper than ALiBi's.

    Reference: Vasylenko et al. 2025, arXiv 2506.16640; slopes and order of heads of the released sparse_gemma.py.
    """

    slopes: Literal["linear", "exponential"] = "linear"
    alibi_heads: Annotated[int, "heads", at_least(0)] | None = None
    num_heads: Heads | None = None
    about = About(
        "arXiv 2506.16640", "near heads stay, far heads spread; flat to 16 L in our small study, with softmax"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alibi_heads is not None and self.num_heads is not None and self.alibi_heads > self.num_heads:
            raise ConfigError(f"nape: alibi_heads={self.alibi_heads} must be at most num_heads={self.num_heads}")

    def resolve(self, dims: Dims) -> Self:
        return super().resolve(dims).fill_open(alibi_heads=dims.num_heads // 2)

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        h = np.arange(1, self.num_heads + 1)
        slopes = 1 / h if self.slopes == "linear" else 2.0 ** (1 - h)
        return ByDistance(bias=straight_fall(np.where(h <= self.alibi_heads, slopes, 0), distance))
