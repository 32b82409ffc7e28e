"""Exact angles p w of positions p at frequencies w, in radians per token, for rotations and waves.

A product in float32 is off by p * 2^-24 radians: 0.06 at a million tokens, and integers beyond 2^24 collapse. Here a
frequency is split, on the host in float64, into whole units of 2^-32 turns and a rest of at most half a unit. Positions
times units wrap in 32-bit integers exactly as angles wrap in turns. Only the small product with the rest is rounded.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import Dims, as_float
from posx.errors import ConfigError

_UNITS = 2.0**32  # per turn
#: 2^200 / (2 pi), to its last bit.
_TURNS_PER_RADIAN = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E4107F


def _split_units(frequencies: np.ndarray) -> tuple[jax.Array, np.ndarray]:
    """Split frequencies [c] into whole units per token, wrapped to int32, and the rest in float64."""
    units = frequencies / (2 * np.pi) * _UNITS
    whole = np.rint(units)
    return jnp.asarray((whole % _UNITS).astype(np.uint32).view(np.int32)), units - whole


@functools.cache
def _factors() -> np.ndarray:
    """Return 2^(e - 86) / (2 pi) for each exponent e of a float32 below 2^32, [159, 3] words of uint32.

    The last word is the fraction. A float of exponent e and mantissa m (24 bits) is m times this, in 2^-64 turns.
    """
    shifted = [_TURNS_PER_RADIAN >> (200 - 32 - (e - 86)) for e in range(159)]
    return np.array([[x >> n & 0xFFFFFFFF for n in (64, 32, 0)] for x in shifted], np.uint32)


def _product(m: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the high and the low word of uint32 products, with m below 2^24."""
    (m1, m0), (w1, w0) = ((x >> 16, x & 0xFFFF) for x in (m, word))
    low, cross = m0 * w0, m0 * w1
    middle = (low >> 16) + (cross & 0xFFFF) + m1 * w0
    return m1 * w1 + (cross >> 16) + (middle >> 16), (middle << 16) | (low & 0xFFFF)


def _split_units_traced(frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split float32 frequencies [c], traced or not, as `_split_units`, with the rest in float32.

    A frequency that is NaN, infinite or at least 2^32 has a rest of NaN.
    """
    bits = jax.lax.bitcast_convert_type(frequencies, jnp.uint32)
    exponent = (bits >> 23 & 0xFF).astype(jnp.int32)
    mantissa = jnp.where(exponent > 0, bits & 0x7FFFFF | 0x800000, 0)
    words = jnp.asarray(_factors())[jnp.minimum(exponent, 158)]
    carried, _ = _product(mantissa, words[..., 2])
    high, low = _product(mantissa, words[..., 1])
    part = low + carried  # units of 2^-64 turns
    whole = mantissa * words[..., 0] + high + (part < low).astype(jnp.uint32) + (part >> 31)  # rounded
    rest = part.astype(jnp.int32).astype(jnp.float32) / jnp.float32(_UNITS)
    negative = bits >> 31 > 0
    whole = jax.lax.bitcast_convert_type(whole, jnp.int32)
    rest = jnp.where(exponent > 158, jnp.nan, jnp.where(negative, -rest, rest))
    return jnp.where(negative, -whole, whole), rest


def check_pairs(name: str, dims: Dims) -> None:
    """Raise ConfigError unless the channels of a head make pairs, which the encoding `name` rotates."""
    if dims.head_dim % 2:
        raise ConfigError(f"{name}: head_dim={dims.head_dim} must be even, because pairs of channels rotate")


def inverse_frequencies(base: float, width: int) -> np.ndarray:
    """Return w_c = base^(-2c/width), c = 0 .. width/2 - 1, in radians per token, in float64 on the host."""
    return base ** (-np.arange(0, width, 2) / width)


def angles(pos: jax.Array, frequencies: np.ndarray | jax.Array) -> jax.Array:
    """Return positions times frequencies up to whole turns, exact at any position of int32.

    A product in float32 is off by up to p w 2^-24 radians: 0.06 at position 1,000,000 and w = 1. Here sines and cosines
    of the result are within 1e-6 of those of p w, at any int32 position and for w up to 1. Logits of a rotation then
    depend on distances alone, however far the text has come. Both arguments have the gradients of the product.

    Args:
      pos: [n] in tokens, int32 or float32. A float is taken as it is. Floats are 2^-24 of their size apart: 0.06 tokens
        at position 1,000,000. If it is NaN, infinite or at least 2^31 in size, so are its angles NaN.
      frequencies: w, [...] in radians per token. NumPy arrays are read in float64. JAX arrays, which may be learned and
        traced, are exact as the float32 numbers that they are. If they are NaN, infinite or at least 2^32, so are the
        angles NaN.

    Returns:
      Radians [n, ...] between -1.5 pi and 1.5 pi, float32. If 64-bit types are on, the product itself in float64.
    """
    pos = jnp.asarray(pos)
    shape, flat = (len(pos), *frequencies.shape), frequencies.reshape(-1)
    product = as_float(pos)[:, None] * as_float(flat)[None, :]
    if product.dtype == jnp.float64:
        return product.reshape(shape)
    wrapped, rest_units = _split_units(flat) if isinstance(flat, np.ndarray) else _split_units_traced(as_float(flat))
    rest = jnp.asarray(rest_units * (2 * np.pi / _UNITS), jnp.float32)
    tokens = pos
    if not jnp.issubdtype(pos.dtype, jnp.integer):  # a cast of a larger float to int32 would return a number
        tokens = jnp.where(jnp.abs(pos) < 2.0**31, jnp.floor(pos), jnp.nan)
    units = tokens.astype(jnp.int32)[:, None] * wrapped[None, :]
    radians = as_float(units) * np.float32(2 * np.pi / _UNITS) + as_float(tokens)[:, None] * rest[None, :]
    if tokens is not pos:
        radians = radians + (as_float(pos) - tokens)[:, None] * as_float(flat)[None, :]
    return (radians if isinstance(flat, np.ndarray) else _with_slope(radians, product)).reshape(shape)


def sin_cos(pos: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return sines and cosines of `angles`, each [n, ...] for frequencies [...], in at least float32."""
    radians = angles(pos, frequencies)
    return jnp.sin(radians), jnp.cos(radians)


@jax.custom_jvp
def _with_slope(value: jax.Array, of: jax.Array) -> jax.Array:
    """Return `value` with the derivative of `of`, which differs from it by rounding and whole turns."""
    return value


# The primal goes through `_with_slope` again, or the derivative of a derivative would be that of `value`: 0.
_with_slope.defjvp(lambda primals, tangents: (_with_slope(*primals), tangents[1].astype(primals[0].dtype)))


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
        radians = slope if start is None else slope + start[None]
        return jnp.where(known, radians, jnp.nan), radians[-1]
    wrapped, rest = _split_units(frequencies)
    tokens = jnp.round(steps)
    part = (steps - tokens) * as_float(frequencies / (2 * np.pi) * _UNITS)[None, None, :]
    part = jnp.round(part + tokens * as_float(rest)[None, None, :])
    sums = jnp.cumsum(tokens.astype(jnp.int32) * wrapped[None, None, :] + part.astype(jnp.int32), axis=0)
    if start is not None:
        sums = sums + start[None]
    radians = _with_slope(as_float(sums) * np.float32(2 * np.pi / _UNITS), slope)
    return jnp.where(known, radians, jnp.nan), sums[-1]
