"""The logit scale of ASEntmax, with softmax."""

import dataclasses
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Features, Params, at_least_float32, exact_einsum, normals
from posx.contract.fields import at_least
from posx.encodings.log_length import keys_so_far
from posx.encodings.ssmax import PlainHeads, check_plain_heads, prepend_plain_heads


@dataclasses.dataclass(frozen=True)
class AdaptiveTemperature(Encoding):
    """tau_h(p) = delta + beta_h ln(p + 2)^gamma_h, a logit scale set by the query's layer input x [m].

    beta = softplus(x W_beta), gamma = gamma_range tanh(x W_gamma). ln(p + 2) is above 0 for the first token too: a
    negative power of ln(p + 1) would be infinite there. W_beta and W_gamma [m, h] are N(0, 0.02), per layer. tau starts
    around 1.7, and spreads more the larger m is. At position 1,024, 90 % are within 1.2 to 2.9 at m = 64, and within
    1.05 to 9 at m = 512. The first `plain_heads` keep 1, as the ALiBi heads of NAPE do in the source.

    Reference: Vasylenko et al. 2025, arXiv 2506.16640, ASEntmax; "adapt-softplus-tanh" of the released sparse_gemma.py.
    Differs: softmax replaces entmax. Left out are the source's learned constants beta_h and gamma_h, which ignore
    x, and the bias vectors of its projections, which are off there too.
    """

    delta: float = 1.0
    gamma_range: Annotated[float, at_least(0)] = 2.0
    plain_heads: PlainHeads = 0

    shift_invariant = False
    causal_only = True  # counts the keys up to the query
    about = About("arXiv 2506.16640", "helps others, in its paper with entmax; RoPE no further in our small study")

    def resolve(self, dims: Dims) -> Self:
        check_plain_heads(self, dims)
        return self

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        shape = dims.model_dim, dims.num_heads - self.plain_heads
        return normals(rng, {"w_beta": shape, "w_gamma": shape}, 0.02)

    def features(self, params: Params, x: jax.Array, pos: jax.Array, carry: Any) -> tuple[Features, Any]:
        beta, gamma = (exact_einsum("tm,mh->th", at_least_float32(x), params[name]) for name in ("w_beta", "w_gamma"))
        return {"beta": jax.nn.softplus(beta), "gamma": self.gamma_range * jnp.tanh(gamma)}, carry

    def logit_scale(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        beta, gamma = features["beta"].T, features["gamma"].T
        grown = self.delta + beta * jnp.log(keys_so_far(pos) + 1)[None, :] ** gamma
        return prepend_plain_heads(self.plain_heads, grown)
