"""Rotary position embedding."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.angles import inverse_frequencies, sin_cos
from posx.encodings.base import Channels, Dims, Encoding, Features, Params, at_least_float32
from posx.errors import ConfigError


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array, layout: str) -> jax.Array:
    """Turns plane c of x [t, h, d'] by the angle of sin[t, c], cos[t, c], or [t, h, c] where heads have angles of their
    own; planes are (2c, 2c+1) interleaved, (c, c + d/2) half_split. Channels from d on, twice as many as there are
    angles, pass."""
    if sin.ndim == 2:
        sin, cos = sin[:, None, :], cos[:, None, :]
    if x.shape[-1] > 2 * sin.shape[-1]:
        turned, rest = jnp.split(x, [2 * sin.shape[-1]], axis=-1)
        return jnp.concatenate([rotate(turned, sin, cos, layout), rest], axis=-1)
    if layout == "interleaved":
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


@dataclasses.dataclass(frozen=True)
class Rope(Encoding):
    """Rotates plane c of queries and keys by pos * theta_c, theta_c = base^(-2c/d): logits depend on i - j only.

    `layout` "half_split" (GPT-NeoX, Llama in HF) or "interleaved" (the paper, GPT-J); one fixed permutation of the
    projections' channels turns one into the other. `rotary_dim` channels are rotated (default: all), the rest pass.

    Reference: Su et al. 2021, arXiv 2104.09864, equations 15 and 34.
    Differs: x-transformers rotates only half of the head by default.
    """

    base: float = 10000.0
    layout: str = "half_split"
    rotary_dim: Channels | None = None

    caches_mapped_keys = True
    extrapolates = "no: slow planes meet unseen angles beyond 1.2 to 2 L"
    paper = "arXiv 2104.09864"

    def __post_init__(self) -> None:
        if self.layout not in ("half_split", "interleaved"):
            raise ConfigError(f"rope: layout={self.layout!r} is unknown; allowed: half_split, interleaved")
        if not self.base > 1:
            raise ConfigError(f"rope: base={self.base} must be above 1")
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ConfigError(f"rope: rotates pairs of channels, so an even width is needed, not {self.rotary_dim}")

    @property
    def planes(self) -> str:  # type: ignore[override]
        return self.layout if self.layout == "interleaved" else f"{self.layout} of {self.rotary_dim}"

    def resolve(self, dims: Dims) -> Self:
        if self.rotary_dim is not None and self.rotary_dim > dims.head_dim:
            raise ConfigError(f"rope: rotary_dim={self.rotary_dim} is more than head_dim={dims.head_dim}")
        return self.fill_open(rotary_dim=dims.head_dim)

    def _map(self, vectors: jax.Array, pos: jax.Array) -> jax.Array:
        sin, cos = sin_cos(pos, inverse_frequencies(self.base, self.rotary_dim))
        wide = at_least_float32(vectors)
        return rotate(wide, sin.astype(wide.dtype), cos.astype(wide.dtype), self.layout).astype(vectors.dtype)

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map(vectors, pos)

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self._map(vectors, pos)
