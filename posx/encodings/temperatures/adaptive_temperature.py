"""The temperature of ASEntmax, with softmax."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Features, Heads, Params, at_least_float32, exact_einsum, normal
from posx.encodings.temperatures.heads import after_plain_heads, check_plain_heads, keys_so_far
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class AdaptiveTemperature(Encoding):
    """tau_h(p) = delta + beta_h ln(p + 2)^gamma_h, beta = softplus(x W_beta), gamma = gamma_range tanh(x W_gamma), with
    x [m] the query's layer input.

    ln(p + 2) is above 0 for the first token too, where a negative power of ln(p + 1) would be infinite. It acts on all
    products inside the scale, biases are added after it. W_beta and W_gamma [m, h] are N(0, 0.02), per layer: tau
    starts around 1.7, the further from it the larger m (nine of ten at position 1,024: 1.2 to 2.9 at m = 64, 1.05 to 9
    at 512). The first `plain_heads` keep 1, as the ALiBi heads of NAPE do in the source.

    Reference: Vasylenko et al. 2025, arXiv 2506.16640, ASEntmax; "adapt-softplus-tanh" of the released sparse_gemma.py.
    Differs: softmax stands in the place of entmax. The source's learned constants beta_h, gamma_h that do not look at
    x, and the bias vectors of its projections, off there too, are left out.
    """

    delta: float = 1.0
    gamma_range: float = 2.0
    plain_heads: Heads = 0

    shift_invariant = False
    caches_mapped_keys = True
    causal_only = True  # it counts the keys up to the query
    extrapolates = "helps others, in its paper with entmax; RoPE no further in our small study"
    paper = "arXiv 2506.16640"

    def __post_init__(self) -> None:
        check_plain_heads("adaptive_temperature", self.plain_heads)
        if self.gamma_range < 0:
            raise ConfigError(f"adaptive_temperature: gamma_range={self.gamma_range} must be at least 0")

    def resolve(self, dims: Dims) -> Self:
        check_plain_heads("adaptive_temperature", self.plain_heads, dims)
        return self

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        shape = dims.model_dim, dims.num_heads - self.plain_heads
        beta_rng, gamma_rng = jax.random.split(rng)
        return {"w_beta": normal(beta_rng, shape, 0.02), "w_gamma": normal(gamma_rng, shape, 0.02)}

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        beta, gamma = (exact_einsum("tm,mh->th", at_least_float32(x), params[name]) for name in ("w_beta", "w_gamma"))
        return {"beta": jax.nn.softplus(beta), "gamma": self.gamma_range * jnp.tanh(gamma)}, carry

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        beta, gamma = features["beta"].T, features["gamma"].T
        grown = self.delta + beta * jnp.log(keys_so_far(pos) + 1)[None, :] ** gamma
        return after_plain_heads(self.plain_heads, grown)
