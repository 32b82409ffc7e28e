"""Scalable softmax."""

import dataclasses
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Features, Params, normal
from posx.contract.fields import at_least, snake_case
from posx.encodings.log_length import keys_so_far
from posx.errors import ConfigError

#: The number of first heads with unscaled logits.
PlainHeads = Annotated[int, "heads", at_least(0)]


@dataclasses.dataclass(frozen=True)
class Ssmax(Encoding):
    """tau_h(p) = s_h ln(n), n = p + 1 keys: weights n^(s z) instead of e^z, so the largest does not fade with n.

    s is learned, per head and layer, from N(`initial`, 0.01). With `initial` = 1/mean(ln n) over the training length
    the mean factor is 1. That is 0.168 at L = 1024, and suits a model trained without SSMax. At n = 1 the factor is 0,
    and the only key has all the weight anyway. The first `plain_heads` keep 1, as the ALiBi heads of NAPE do in
    ASEntmax.

    Reference: Nakanishi 2025, arXiv 2501.19399; initial values of deep-spin/asentmax.
    Differs: asentmax reads ln(p + 2). The paper's variant with a learned constant beside s ln(n) is left out.
    """

    initial: float = 1.0
    plain_heads: PlainHeads = 0

    shift_invariant = False
    causal_only = True  # counts the keys up to the query
    about = About(
        "arXiv 2501.19399",
        "helps others, in papers: weights do not fade; RoPE no further in our small study",
        lr_multiplier=10.0,  # with RoPE 0.04 nats a byte better than 1, see experiments/leaderboard
    )

    def resolve(self, dims: Dims) -> Self:
        check_plain_heads(self, dims)
        return self

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return {"s": self.initial + normal(rng, (dims.num_heads - self.plain_heads,), 0.01)}

    def logit_scale(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        grown = params["s"][:, None] * jnp.log(keys_so_far(pos))[None, :]
        return prepend_plain_heads(self.plain_heads, grown)


def prepend_plain_heads(plain_heads: int, scales: jax.Array) -> jax.Array:
    """Return logit scales [h, q]: 1 for the plain heads, `scales` [h - plain_heads, q] for the last heads."""
    if not plain_heads:
        return scales
    return jnp.concatenate([jnp.ones((plain_heads, scales.shape[1]), scales.dtype), scales])


def check_plain_heads(encoding: Any, dims: Dims) -> None:
    """Raise ConfigError if no head would be scaled."""
    if encoding.plain_heads >= dims.num_heads:
        name = snake_case(type(encoding))
        raise ConfigError(f"{name}: plain_heads={encoding.plain_heads} must be below num_heads={dims.num_heads}")
