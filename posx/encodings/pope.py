"""Polar coordinate position embedding."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Features, Params, at_least_float32
from posx.contract.fields import Base
from posx.encodings.angles import angles, inverse_frequencies


@dataclasses.dataclass(frozen=True)
class Pope(Encoding):
    """s_ij = sum_c mu(q_ic) mu(k_jc) cos((j - i) theta_c + delta_hc) / sqrt(d), mu = softplus.

    Content sets magnitudes, position sets phases. Each channel has a frequency, theta_c = base^(-c/d), c = 0 .. d-1.
    Mapped vectors [mu cos, mu sin] are 2d wide. `delta` [h, d] is learned and clamped to [-2 pi, 0]. It starts at 0, or
    uniform in that range (`delta_start`). Here it rotates queries back instead of keys forward. The product is the
    same, and every query head has its own delta when heads share keys. To look r tokens back, delta would have to rise
    by r theta_c, but its range ends at 0. Heads that start at 0 learn to look back slowly or not at all, heads with a
    uniform start learn it. A delta outside its range has no gradient, as in PoPE-pytorch, and stays there.

    Reference: Gopalakrishnan, Csordas, Schmidhuber and Mozer 2025, arXiv 2509.10534.
    Differs: PoPE-pytorch can leave channels out, which then keep their sign and are not rotated.
    """

    base: Base = 10000.0
    delta_start: Literal["zero", "uniform"] = "zero"

    planes = "magnitudes and phases"
    about = About("arXiv 2509.10534", "better than RoPE; rises from 1.5 L in our small study")

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        shape = (dims.num_heads, dims.head_dim)
        if self.delta_start == "zero":
            return {"delta": jnp.zeros(shape, jnp.float32)}
        return {"delta": jax.random.uniform(rng, shape, jnp.float32, -2 * math.pi, 0.0)}

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        delta = params["delta"]
        clamped = jnp.where(delta > 0, 0.0, jnp.where(delta < -2 * math.pi, -2 * math.pi, delta))
        return _polar(vectors, self._phases(params, pos) - clamped[None])

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return _polar(vectors, self._phases(params, pos))

    def _phases(self, params: Params, pos: jax.Array) -> jax.Array:
        """Return p theta_c, [t, 1, d]."""
        return angles(pos, inverse_frequencies(self.base, 2 * params["delta"].shape[-1]))[:, None, :]


def _polar(vectors: jax.Array, phase: jax.Array) -> jax.Array:
    """Return [mu cos, mu sin] for vectors [t, h, d] and phases [t, h or 1, d]. Channels that a chain appended pass."""
    vectors, rest = jnp.split(vectors, [phase.shape[-1]], axis=-1)
    mu = jax.nn.softplus(at_least_float32(vectors))
    both = (mu * wave(phase).astype(mu.dtype) for wave in (jnp.cos, jnp.sin))
    return jnp.concatenate([*(x.astype(vectors.dtype) for x in both), rest], axis=-1)
