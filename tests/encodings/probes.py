"""What an encoding does to logits and weights, seen from outside through `attend`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import posx


def attention_weights(encoding, params, q, k, q_pos, k_pos=None, mask=posx.full(), x=None) -> jax.Array:
    """Softmax weights [h, q, k] of one sequence: with the identity as values, the outputs are the weights."""
    q_pos = jnp.asarray(q_pos)
    return _weights(encoding, params, q, k, q_pos, q_pos if k_pos is None else jnp.asarray(k_pos), mask, x)


@functools.partial(jax.jit, static_argnames=("encoding", "mask"))
def _weights(encoding, params, q, k, q_pos, k_pos, mask, x):
    length, num_kv_heads = k.shape[:2]
    v = jnp.broadcast_to(jnp.eye(length, dtype=k.dtype)[:, None], (length, num_kv_heads, length))
    sides = (posx.Slots(pos, jnp.arange(pos.shape[0], dtype=jnp.int32)) for pos in (q_pos, k_pos))
    x = None if x is None else jnp.asarray(x)[None]
    o = posx.attend(encoding, params, q[None], k[None], v[None], *sides, mask=mask, x=x)
    return o[0].swapaxes(0, 1)


@functools.partial(jax.jit, static_argnums=0)
def distance_bias(encoding, params, r) -> jax.Array:
    """Return the bias by distance [h or 1, ...] at signed distances r [...]."""
    r = jnp.asarray(r)
    found = encoding.by_distance(params, r.ravel()).bias
    return found.reshape(found.shape[0], *r.shape)


def vectors(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def softmax(logits) -> np.ndarray:
    w = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return w / w.sum(axis=-1, keepdims=True)


def plain_logits(q, k) -> np.ndarray:
    """<q_i, k_j> / sqrt(d), [h, q, k]."""
    return np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
