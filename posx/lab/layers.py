"""Plain functions of activations [b*t, m] and weights: products, norms, GELU, embedding lookup, dropout, positions.

XLA's CPU backend computes the gradient of a two-dimensional product in about half the time of a three-dimensional one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.accelerators import round_operands
from posx.attention.cpu import materialize
from posx.machine.guard import barrier
from posx.machine.platforms import is_on_cpu


def linear(x: jax.Array, w: jax.Array, dtype: str) -> jax.Array:
    """Multiply x [n, i] by w [i, o] with operands in `dtype` and a float32 result, in the backward pass too.

    Accelerators store the gradient of x in `dtype`, as torch's autocast does: half the bytes of the next pass.

    Both forms have the same gradient. The form for narrow operands rounds the incoming gradient to `dtype` too, which
    is no linear map. It therefore has no forward-mode derivative. Hessian-vector products need reverse mode twice.
    """
    return (_linear if dtype == "float32" else _narrow_linear)(x, w, dtype)


def _product(x: jax.Array, w: jax.Array, dtype: str) -> jax.Array:
    return barrier(jnp.dot(x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32))


_linear = jax.custom_jvp(_product, nondiff_argnums=(2,))


@_linear.defjvp
def _linear_tangent(dtype: str, primals: Any, tangents: Any):
    (x, w), (x_tangent, w_tangent) = primals, tangents
    # The gradient of w is the transpose of the product below: it contracts the rows of `transposed`. That is made once:
    # XLA's CPU backend is slower if a product contracts the rows of its left operand.
    transposed, w_tangent = materialize(x.astype(dtype).T), barrier(w_tangent.astype(dtype))
    by_weights = jax.lax.dot_general(transposed, w_tangent, (((0,), (0,)), ((), ())))
    return _linear(x, w, dtype), _linear(x_tangent, w, dtype) + by_weights


_narrow_linear = jax.custom_vjp(_product, nondiff_argnums=(2,))


def _narrow_forward(x: jax.Array, w: jax.Array, dtype: str):
    # The backward pass reads the same casts: weights are cast once. Arrays without a row keep the types of x and w.
    narrow = x.astype(dtype), w.astype(dtype)
    return _product(*narrow, dtype), (*narrow, x[:0], w[:0])


def _narrow_backward(dtype: str, saved: Any, grad: jax.Array):
    x, w, of_x, of_w = saved
    grad = grad.astype(dtype)
    x_grad, w_grad = round_operands(_product(grad, w.T, dtype), x.dtype), _product(materialize(x.T), grad, dtype)
    return x_grad.astype(of_x.dtype), w_grad.astype(of_w.dtype)


_narrow_linear.defvjp(_narrow_forward, _narrow_backward)


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """Return the tanh form of GELU. Its slope is one element-wise function: half the time of JAX's chain on CPUs.

    Accelerators compute the slope anew from x in the backward pass, out of another form of 1 + tanh. If both passes had
    the same, XLA would keep an array of it, and memory is what these passes wait for.
    """
    return jax.nn.gelu(x, approximate=True)


@gelu.defjvp
def _gelu_tangent(primals: Any, tangents: Any):
    (x,), (x_tangent,) = primals, tangents
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    inner, by_x = scale * (x + cubic * x**3), scale * (1 + 3 * cubic * x * x)
    if is_on_cpu():
        t = jnp.tanh(inner)
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * by_x
    else:
        share = jax.nn.sigmoid(2 * inner)  # (1 + tanh) / 2
        slope = share + 2 * x * share * (1 - share) * by_x
    return gelu(x), slope * x_tangent


#: The activation of each form of `model.mlp`.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu, "gelu_exact": functools.partial(jax.nn.gelu, approximate=False), "swiglu": jax.nn.silu, "geglu": gelu,
}  # fmt: skip


def embed_tokens(table: jax.Array, tokens: Any) -> jax.Array:
    """Return rows [b, t, m] of a table [v, m], NaN for ids outside it."""
    tokens = jnp.asarray(tokens).astype(jnp.int32)
    return table.at[jnp.where(tokens < 0, table.shape[0], tokens)].get(mode="fill", fill_value=jnp.nan)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide x by the root of its mean square over the last axis plus `eps`, and multiply it by `scale`."""
    spread = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * spread * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


def layer_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Return the `rms_norm` of x minus its mean over the last axis."""
    return rms_norm(x - jnp.mean(x, axis=-1, keepdims=True), scale, eps)


def dropout(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Set entries of x [b*t, m] to 0 with probability `rate`, and divide the others by 1 - rate.

    rng: one key [b] for each row, so that a row draws the same numbers at any place in the batch; None drops nothing.
    """
    if rng is None or rate == 0:
        return x
    shape = (x.shape[0] // rng.shape[0], x.shape[1])
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(rng)
    return jnp.where(kept.reshape(x.shape), x / (1 - rate), 0)


def fold_in(rng: jax.Array | None, n: int) -> jax.Array | None:
    """Return keys [b] for the n-th use of keys [b]."""
    return None if rng is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(rng, n)


def sequential(length: int) -> np.ndarray:
    """Return int32 positions 0 .. length - 1, [t], on the host: limits can be checked before tracing."""
    return np.arange(length, dtype=np.int32)
