"""Partial key offset."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from posx.encodings.base import Encoding, Features, Params
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class KeyOffset(Encoding):
    """The last channels of a key are those of the token before it: k_j[d - n:] <- k_{j-1}[d - n:], n = share * d.

    A query that meets what came before a token finds the token itself: induction in one layer. No position is read.
    The first token of a document has zeros there. Meant for the channels that RoPE leaves alone; as it looks back it
    comes first: key_offset+rope(rotary_dim=4) for heads of 8 channels, of which the default `share` leaves RoPE half.

    Reference: modded-nanogpt, github.com/KellerJordan/modded-nanogpt/pull/169 (no paper, nothing on arXiv).
    Differs: there the first token of a batch keeps its own channels, that of a later document gets those of the
    document before it, and only layers with long windows do it. That record's RoPE pairs channels c and c + d/2 of the
    whole head and leaves the 2nd and 4th quarters alone, which are moved: a permutation of this order (later records
    have it as here).
    """

    share: float = 0.5

    history = {"key": 1}
    caches_mapped_keys = True
    extrapolates = "sees one token back at any length: the rest is up to what it is chained with"
    paper = "github.com/KellerJordan/modded-nanogpt/pull/169"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"key_offset: share={self.share} must be above 0 and at most 1")

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        own, before = vectors[:, 0], vectors[:, 1]
        kept = own.shape[-1] - math.ceil(self.share * own.shape[-1] - 1e-9)
        return jnp.concatenate([own[..., :kept], before[..., kept:]], axis=-1)
