"""Small functions of arrays that encodings share: types, distances, exact products."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_float(x: Any) -> jax.Array:
    """Return `x` in float32, or in float64 if 64-bit types are on: the type of all that depends on position."""
    return jnp.asarray(x, jnp.result_type(float))


def wide_dtype(dtype: Any) -> np.dtype:
    """Return float64 for float64, else float32. jnp.promote_types would refuse under strict promotion."""
    return np.promote_types(dtype, np.float32)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Return `x` in float32, or in float64 if it is float64."""
    return x.astype(wide_dtype(x.dtype))


#: A product in the type of its operands. Accelerators round float32 operands unless "highest" is asked for.
exact_einsum = functools.partial(jnp.einsum, precision="highest")


def distances(q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Return signed distances i - j [q, k] as floats. Positions are subtracted first, exactly if they are integers."""
    return as_float(q_pos[:, None] - k_pos[None, :])


def normal(rng: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Draw float32 numbers from N(0, std)."""
    return std * jax.random.normal(rng, shape, jnp.float32)


def normals(rng: jax.Array, shapes: dict[str, tuple[int, ...]], std: float) -> dict[str, jax.Array]:
    """Draw arrays of these shapes by name, `normal` each from its own key."""
    rngs = jax.random.split(rng, len(shapes))
    return {name: normal(own, shape, std) for own, (name, shape) in zip(rngs, shapes.items(), strict=True)}


def shifted_rows(x: jax.Array) -> jax.Array:
    """Return [..., a, n] of x [..., a, a + n]: row i from place a - 1 - i on, as a slice of the flattened rows."""
    *batch, a, width = x.shape
    flat = x.reshape(*batch, a * width)[..., a - 1 : a - 1 + a * (width - 1)]
    return flat.reshape(*batch, a, width - 1)[..., : width - a]
