"""Scalable softmax."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Features, Heads, Params, normal
from posx.encodings.temperatures.heads import after_plain_heads, check_plain_heads, keys_so_far


@dataclasses.dataclass(frozen=True)
class Ssmax(Encoding):
    """tau_h(p) = s_h ln(n), n = p + 1 keys: weights n^(s z) instead of e^z, so that the largest does not fade with n.

    It acts on all products inside the scale, biases are added after it. s is learned, per head and layer, from
    N(`initial`, 0.01); 1/mean(ln n) over the training length as `initial` makes the mean factor 1 (0.168 at L = 1024,
    for a model trained without). At n = 1 the factor is 0, and the one key has all the weight whatever its logit. The
    first `plain_heads` keep 1, as the ALiBi heads of NAPE do in ASEntmax.

    Reference: Nakanishi 2025, arXiv 2501.19399; initial values of deep-spin/asentmax.
    Differs: asentmax reads ln(p + 2). The paper's variant with a learned constant beside s ln(n) is left out.
    """

    initial: float = 1.0
    plain_heads: Heads = 0

    shift_invariant = False
    caches_mapped_keys = True
    causal_only = True  # it counts the keys up to the query
    lr_multiplier = 10.0  # with RoPE 0.04 nats a byte better than 1, see experiments/leaderboard
    extrapolates = "helps others, in papers: weights do not fade; RoPE no further in our small study"
    paper = "arXiv 2501.19399"

    def __post_init__(self) -> None:
        check_plain_heads("ssmax", self.plain_heads)

    def resolve(self, dims: Dims) -> Self:
        check_plain_heads("ssmax", self.plain_heads, dims)
        return self

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return {"s": self.initial + normal(rng, (dims.num_heads - self.plain_heads,), 0.01)}

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        grown = params["s"][:, None] * jnp.log(keys_so_far(pos))[None, :]
        return after_plain_heads(self.plain_heads, grown)
