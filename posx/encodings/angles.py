"""Exact angles p w of positions p at frequencies w, in radians per token, for rotations and waves.

A product in float32 is off by p * 2^-24 radians: 0.06 at a million tokens, and integers beyond 2^24 collapse. Here a
frequency is split, on the host in float64, into whole units of 2^-32 turns and a rest of at most half a unit. Positions
times units wrap in 32-bit integers exactly as angles wrap in turns. Only the small product with the rest is rounded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import Dims, as_float
from posx.errors import ConfigError

_UNITS = 2.0**32  # per turn


def _in_units(frequencies: np.ndarray) -> tuple[jax.Array, np.ndarray]:
    """Split frequencies [c] into whole units per token, wrapped to int32, and the rest in float64."""
    units = frequencies / (2 * np.pi) * _UNITS
    whole = np.rint(units)
    return jnp.asarray((whole % _UNITS).astype(np.uint32).view(np.int32)), units - whole


def check_pairs(name: str, dims: Dims) -> None:
    """Raise ConfigError unless the channels of a head make pairs, which the encoding `name` rotates."""
    if dims.head_dim % 2:
        raise ConfigError(f"{name}: head_dim={dims.head_dim} must be even, because pairs of channels rotate")


def inverse_frequencies(base: float, width: int) -> np.ndarray:
    """Return w_c = base^(-2c/width), c = 0 .. width/2 - 1, in radians per token, in float64 on the host."""
    return base ** (-np.arange(0, width, 2) / width)


def angles(pos: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Return pos [n] times frequencies [c] up to whole turns, radians [n, c], to 1e-6 at any int32 position.

    The angle of a float position is as exact, but float32 itself spaces positions by 2^-24 of their size (0.06 tokens
    at a million). If 64-bit types are on, this is a product in float64.
    """
    pos = jnp.asarray(pos)
    if as_float(0).dtype == jnp.float64:
        return as_float(pos)[:, None] * as_float(frequencies)[None, :]
    wrapped, rest_units = _in_units(frequencies)
    rest = jnp.asarray(rest_units * (2 * np.pi / _UNITS), jnp.float32)
    tokens = pos if jnp.issubdtype(pos.dtype, jnp.integer) else jnp.floor(pos)
    units = tokens.astype(jnp.int32)[:, None] * wrapped[None, :]
    found = as_float(units) * np.float32(2 * np.pi / _UNITS) + as_float(tokens)[:, None] * rest[None, :]
    if tokens is pos:
        return found
    return found + (as_float(pos) - tokens)[:, None] * as_float(frequencies)[None, :]


def sin_cos(pos: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return sines and cosines of `angles`, each [n, ...] for frequencies [...], in at least float32."""
    found = angles(pos, frequencies.ravel())
    found = found.reshape(len(found), *frequencies.shape)
    return jnp.sin(found), jnp.cos(found)


@jax.custom_jvp
def _with_slope(value: jax.Array, of: jax.Array) -> jax.Array:
    """Return `value` with the derivative of `of`, which differs from it by rounding and whole turns."""
    return value


# The primal goes through `_with_slope` again, or the derivative of a derivative would be that of `value`: 0.
_with_slope.defjvp(lambda primals, tangents: (_with_slope(*primals), tangents[1]))


def running_angles(steps: jax.Array, frequencies: np.ndarray, start: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return angles w_c (steps_1 + .. + steps_t) up to whole turns, [t, h, c], and the `start` of the next call.

    steps [t, h, c], frequencies w [c]. A sum of angles in float32 is off by its own size times 2^-24 at every step.
    Here each step is rounded once, to 2^-32 turns and to the 24 bits of a float. The sum of integers wraps as angles do
    and loses nothing, so it is the same in any chunks. Its error after 100 000 steps is 1e-4 radians if all steps are
    1, and 1e-5 if they are random. It is 1e-3 if one float's rounding adds up, as for steps of 0.3. No gradient flows
    to `start`. If 64-bit types are on, this is a sum in float64. A step that is NaN, infinite or at least 2^31 gives
    NaN there, and counts as 0 for later tokens.
    """
    known = jnp.abs(steps) < 2.0**31
    steps = jnp.where(known, steps, 0)  # a cast to int32 would return a number
    slope = jnp.cumsum(steps * as_float(frequencies)[None, None, :], axis=0)
    if slope.dtype == jnp.float64:
        found = slope if start is None else slope + start[None]
        return jnp.where(known, found, jnp.nan), found[-1]
    wrapped, rest = _in_units(frequencies)
    tokens = jnp.round(steps)
    part = (steps - tokens) * as_float(frequencies / (2 * np.pi) * _UNITS)[None, None, :]
    part = jnp.round(part + tokens * as_float(rest)[None, None, :])
    sums = jnp.cumsum(tokens.astype(jnp.int32) * wrapped[None, None, :] + part.astype(jnp.int32), axis=0)
    if start is not None:
        sums = sums + start[None]
    found = _with_slope(as_float(sums) * np.float32(2 * np.pi / _UNITS), slope)
    return jnp.where(known, found, jnp.nan), sums[-1]
