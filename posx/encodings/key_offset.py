"""A partial key offset: some channels of the key before."""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp

from posx.contract import About, Encoding, Features, Params
from posx.contract.fields import above, at_most


@dataclasses.dataclass(frozen=True)
class KeyOffset(Encoding):
    """A key whose last channels are taken from the token before: k_j[d - n:] <- k_{j-1}[d - n:], n = share * d.

    A query that matches a token's predecessor then finds the token itself: induction in one layer. No position is read.
    The first token of a document has zeros there. It is meant for the channels that RoPE does not rotate. As it looks
    back, it comes first: key_offset+rope(rotary_dim=4) for heads of 8 channels, half of them moved by the default
    `share`.

    Reference: modded-nanogpt, github.com/KellerJordan/modded-nanogpt/pull/169 (no paper, nothing on arXiv).
    Differs: there the first token of a batch keeps its own channels. The first token of a later document gets those of
    the document before it. Only layers with long windows do it. That record's RoPE pairs channels c and c + d/2 of the
    whole head. It leaves the 2nd and 4th quarters alone, which are moved: a permutation of the order here. Later
    records have the same order as here.
    """

    share: Annotated[float, above(0), at_most(1)] = 0.5

    axes = 0  # no position is read
    history = {"key": 1}
    about = About(
        "github.com/KellerJordan/modded-nanogpt/pull/169",
        "sees one token back at any length: the rest depends on the encodings chained with it",
    )

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        own, before = vectors[:, 0], vectors[:, 1]
        kept = own.shape[-1] - math.ceil(self.share * own.shape[-1] - 1e-9)
        return jnp.concatenate([own[..., :kept], before[..., kept:]], axis=-1)
