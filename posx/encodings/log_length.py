"""A logit scale that grows with the logarithm of the position."""

import dataclasses
import math
from typing import Annotated, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Features, Params, as_float
from posx.contract.fields import at_least


def keys_so_far(pos: jax.Array) -> jax.Array:
    """Return p + 1, at least 1: the keys up to a query at pos [q], with those that a window hides."""
    return jnp.maximum(as_float(pos), 0) + 1


@dataclasses.dataclass(frozen=True)
class LogLength(Encoding):
    """tau(p) = max(1, ln(p + 1) / ln(L)), L = `train_len`: a logit scale that keeps attention about as sharp as at L.

    It changes nothing within the training length, so it can be added to a trained model. p counts from the start of the
    document. All earlier keys count, also those that a window hides.

    Reference: the factor ln n, Chiang and Cholak 2022, arXiv 2202.12172, and Su, kexue.fm/archives/8823; its base and
    the maximum as in Qwen's use_logn_attn.
    """

    train_len: Annotated[int, "tokens", at_least(2)] | None = None

    shift_invariant = False
    causal_only = True  # counts the keys up to the query
    about = About("arXiv 2202.12172", "acts beyond L only; RoPE no further in our small study")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(train_len=max(dims.train_len, 2))

    def logit_scale(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        return jnp.maximum(jnp.log(keys_so_far(pos)) / math.log(self.train_len), 1)[None]
