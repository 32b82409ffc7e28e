"""Rotary position embedding."""

import dataclasses
from typing import Annotated, Literal, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Features, Params, at_least_float32, fact, wide_dtype
from posx.contract.fields import Base, even, snake_case
from posx.encodings.angles import sin_cos
from posx.encodings.frequencies import FrequencyRule, Geometric
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Rope(Encoding):
    """A rotation of plane c of queries and keys at position p by p theta_c, theta_c = base^(-2c/d).

    Logits then depend on i - j only. `layout` is "half_split" (GPT-NeoX, Llama in HF) or "interleaved" (the paper,
    GPT-J). One fixed permutation of the projections' channels turns one layout into the other. The first `rotary_dim`
    channels are rotated, by default all d. The rest pass unchanged. `frequencies` is a rule for other theta, which
    may also multiply cosines and sines: see `posx.encodings.frequencies`. HoPE, arXiv 2410.21216, is
    rope(frequencies=whole_turns).

    Reference: Su et al. 2021, arXiv 2104.09864, equations 15 and 34.
    Differs: x-transformers rotates only half of the head by default.
    """

    base: Base = 10000.0
    layout: Literal["half_split", "interleaved"] = "half_split"
    rotary_dim: Annotated[int, "channels", even(2)] | None = None
    frequencies: FrequencyRule = Geometric()  # noqa: RUF009 (a value)

    planes = fact(lambda self: self.layout if self.layout == "interleaved" else f"{self.layout} of {self.rotary_dim}")
    about = About("arXiv 2104.09864", "no: slow planes meet unseen angles beyond 1.2 to 2 L")

    def resolve(self, dims: Dims) -> Self:
        if self.rotary_dim is not None and self.rotary_dim > dims.head_dim:
            raise ConfigError(f"rope: rotary_dim={self.rotary_dim} is more than head_dim={dims.head_dim}")
        check_base("rope", self.frequencies, self.base)
        return super().resolve(dims).fill_open(rotary_dim=dims.head_dim)

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        waves = sin_cos(pos, self.frequencies.checked(self.base, self.rotary_dim))
        return rotate_heads(vectors, *waves, self.frequencies.magnitude, self.layout)

    key = query


def check_base(name: str, rule: FrequencyRule, base: float) -> None:
    """Raise ConfigError if the encoding `name` has a base that its rule for frequencies does not read."""
    if not rule.reads_base and base != Rope.base:
        word = snake_case(type(rule))
        raise ConfigError(f"{name}: base={base} has no effect on {word}. Leave it out, or write {Rope.base:g}.")


def rotate_heads(x: jax.Array, sin: jax.Array, cos: jax.Array, magnitude: float, layout: str) -> jax.Array:
    """Return x [t, h, d] rotated and times `magnitude`, for waves [t, c], or [t, g, c] if key heads have their own."""
    sin, cos = magnitude * sin, magnitude * cos
    if sin.ndim == 3:
        sin, cos = (jnp.repeat(wave, x.shape[1] // wave.shape[1], axis=1) for wave in (sin, cos))
    return rotate(x, sin, cos, layout)


def rotate_planes(angles: jax.Array, x: jax.Array) -> jax.Array:
    """Return x [t, h, 2c] with half-split planes rotated by the angles [t, g, c] of key heads, g dividing h."""
    angles = jnp.repeat(angles.astype(wide_dtype(x.dtype)), x.shape[1] // angles.shape[1], axis=1)
    return rotate(x, jnp.sin(angles), jnp.cos(angles))


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array, layout: str = "half_split") -> jax.Array:
    """Rotate plane c of x [t, h, d] by the angles of sin and cos, [t, c] or [t, h, c], in at least float32.

    Plane c holds channels (2c, 2c + 1) if interleaved, (c, c + n) if half_split, for n angles. The channels from 2n on
    pass unchanged.
    """
    if sin.ndim == 2:
        sin, cos = sin[:, None, :], cos[:, None, :]
    width = 2 * sin.shape[-1]
    if x.shape[-1] > width:
        return jnp.concatenate([rotate(x[..., :width], sin, cos, layout), x[..., width:]], axis=-1)
    wide = at_least_float32(x)
    sin, cos = sin.astype(wide.dtype), cos.astype(wide.dtype)
    if layout == "interleaved":
        pairs = wide.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return rotated.astype(x.dtype)
