"""Forms of attention's operations that suit XLA's CPU backend. Accelerators get the plain operations.

There a barrier would forbid a fusion, and a sum by a product would round its operands.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from posx.contract import wide_dtype
from posx.machine.platforms import is_on_cpu


def materialize(tree: Any) -> Any:
    """Return `tree` behind an optimisation barrier: XLA makes its arrays once, in the layout that is written.

    Without it, XLA's CPU backend folds transposes and gathers into each product that reads them.
    """
    return jax.lax.optimization_barrier(tree) if is_on_cpu() else tree


def operand_dtype(dtype: Any) -> Any:
    """Return the type of the operands of attention's products.

    On CPUs bfloat16 becomes float32: these narrow batched products run slower in bfloat16 there, and some of their
    forms not at all.
    """
    return wide_dtype(dtype) if is_on_cpu() else dtype


def row_maxima(x: jax.Array, columns: int = 32) -> jax.Array:
    """Return maxima over the last axis. Blocks of columns are compared element by element before the last are reduced.

    A reduction of all columns takes six times as long on XLA's CPU backend.
    """
    if x.shape[-1] % columns or not is_on_cpu():
        return x.max(axis=-1)
    blocks = [x[..., n : n + columns] for n in range(0, x.shape[-1], columns)]
    return functools.reduce(jnp.maximum, blocks).max(axis=-1)


def row_sums(x: jax.Array) -> jax.Array:
    """Sum over the last axis, by a product since the layout of x may have another axis innermost."""
    return x @ jnp.ones(x.shape[-1], x.dtype) if is_on_cpu() else x.sum(axis=-1)


@jax.custom_jvp
def plus_shared(s: jax.Array, term: jax.Array) -> jax.Array:
    """Add a term that all sequences share, [1, h, q, k], to s [b, h, q, k]."""
    return s + term


@plus_shared.defjvp
def _plus_shared_tangent(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]):
    (s, term), (s_tangent, term_tangent) = primals, tangents
    if not is_on_cpu():
        return plus_shared(s, term), s_tangent + term_tangent
    # Repeated by a product, so that the gradient is a sum by a product. XLA's CPU backend is twenty times slower at
    # sums over any axis but the last.
    repeated = jnp.ones((s.shape[0], 1), s.dtype) @ term_tangent.reshape(1, -1)
    return plus_shared(s, term), s_tangent + repeated.reshape(s.shape)


def transpose_on_cpu(x: jax.Array) -> jax.Array:
    """Return x [..., t, d] as [..., d, t] on CPUs, where products that contract the minor axis are twice as fast."""
    return x.mT if is_on_cpu() else x


def group_by_key_head(x: jax.Array, groups: int) -> jax.Array:
    """Return [b, h, q, d] as [b, g, h/g * q, d], the queries that a key head serves side by side, transposed."""
    return transpose_on_cpu(x.reshape(x.shape[0], groups, -1, x.shape[-1]))


def sums_over_queries(x: jax.Array, w: jax.Array) -> jax.Array:
    """Sum x, as `group_by_key_head` returns it, times w [b, h, q, k] over queries: [b, g, k, d] transposed.

    The sum is at least float32.
    """
    w = w.reshape(*x.shape[:2], -1, w.shape[-1]).astype(x.dtype)
    operands = ("bgdq,bgqk->bgdk", x, w) if is_on_cpu() else ("bgqk,bgqd->bgkd", w, x)
    return jnp.einsum(*operands, preferred_element_type=wide_dtype(x.dtype))
