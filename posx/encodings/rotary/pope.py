"""Polar coordinate position embedding."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from posx.encodings.angles import angles, inverse_frequencies
from posx.encodings.base import Dims, Encoding, Features, Params, at_least_float32
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Pope(Encoding):
    """Content sets magnitudes, position sets phases: s_ij = sum_c mu(q_ic) mu(k_jc) cos((j - i) theta_c + delta_hc)
    / sqrt(d), with mu = softplus and a frequency for each channel, theta_c = base^(-c/d), c = 0 .. d-1.

    Mapped vectors are 2d wide, [mu cos, mu sin]. `delta` [h, d] is learned and clamped to [-2 pi, 0]; it starts at 0,
    or uniform in that range (`delta_start`). It turns queries back instead of keys forward, which is the same product,
    so that every query head has its own where heads share keys. To look r tokens back delta would have to rise by r
    theta_c, where the range ends: from 0 such heads are slow to learn or do not, from a uniform start they do. A delta
    outside its range has no gradient, as in PoPE-pytorch, and stays where it is.

    Reference: Gopalakrishnan, Csordas, Schmidhuber and Mozer 2025, arXiv 2509.10534.
    Differs: PoPE-pytorch can leave channels out, which then keep their sign and are not turned.
    """

    base: float = 10000.0
    delta_start: str = "zero"

    caches_mapped_keys = True
    planes = "magnitudes and phases"
    extrapolates = "better than RoPE; rises from 1.5 L in our small study"
    paper = "arXiv 2509.10534"

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise ConfigError(f"pope: base={self.base} must be above 1")
        if self.delta_start not in ("zero", "uniform"):
            raise ConfigError(f"pope: delta_start={self.delta_start!r} is unknown; allowed: zero, uniform")

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        shape = (dims.num_heads, dims.head_dim)
        if self.delta_start == "zero":
            return {"delta": jnp.zeros(shape, jnp.float32)}
        return {"delta": jax.random.uniform(rng, shape, jnp.float32, -2 * math.pi, 0.0)}

    def _map(self, vectors: jax.Array, pos: jax.Array, delta: jax.Array, turned_back: bool) -> jax.Array:
        vectors, rest = jnp.split(vectors, [delta.shape[-1]], axis=-1)  # channels that a chain has appended pass
        phase = angles(pos, inverse_frequencies(self.base, 2 * vectors.shape[-1]))[:, None, :]
        if turned_back:
            inside = jnp.where(delta > 0, 0.0, jnp.where(delta < -2 * math.pi, -2 * math.pi, delta))
            phase = phase - inside[None]
        magnitude = jax.nn.softplus(at_least_float32(vectors))
        both = (magnitude * wave(phase).astype(magnitude.dtype) for wave in (jnp.cos, jnp.sin))
        return jnp.concatenate([*(x.astype(vectors.dtype) for x in both), rest], axis=-1)

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map(vectors, pos, params["delta"], turned_back=True)

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map(vectors, pos, params["delta"], turned_back=False)
