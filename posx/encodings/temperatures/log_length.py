"""Logits that grow with the logarithm of the length."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Features, Params, Tokens
from posx.encodings.temperatures.heads import keys_so_far
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LogLength(Encoding):
    """tau(p) = max(1, ln(p + 1) / ln(L)), L = `train_len`: over more keys attention stays about as sharp as at L.

    It acts on all products inside the scale, biases are added after it. Nothing changes at the training length, so it
    can be added to a trained model. p counts from the start of the document, and all keys before, also those that a
    window hides.

    Reference: the factor ln n, Chiang and Cholak 2022, arXiv 2202.12172, and Su, kexue.fm/archives/8823; its base and
    the maximum as in Qwen's use_logn_attn.
    """

    train_len: Tokens | None = None

    shift_invariant = False
    caches_mapped_keys = True
    causal_only = True  # it counts the keys up to the query
    extrapolates = "acts beyond L only; RoPE no further in our small study"
    paper = "arXiv 2202.12172"

    def __post_init__(self) -> None:
        if self.train_len is not None and self.train_len < 2:
            raise ConfigError(f"log_length: train_len={self.train_len} must be at least 2")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(train_len=max(dims.train_len, 2))

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        self.require_resolved()
        return jnp.maximum(jnp.log(keys_so_far(pos)) / math.log(self.train_len), 1)
