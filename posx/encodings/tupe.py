"""TUPE: correlations of positions, untied from content."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Features, Params, as_float, exact_einsum, fact, normals
from posx.contract.fields import Tokens
from posx.encodings.learned import BEYOND, PositionTable


@dataclasses.dataclass(frozen=True)
class Tupe(PositionTable):
    """s_ij = (q_i . k_j + (p_i U_Q) . (p_j U_K)) / sqrt(2d), p = LayerNorm(table[pos]), projections split over heads.

    Appended channels of queries and keys form the second product. This is TUPE-A. TUPE-R is tupe+t5(bidirectional=true)
    in an encoder, as published, and tupe+t5 under causal masks.
    table [num_positions, m] (default L rows), U_Q [m, h, d] and U_K [m, g, d] are N(0, 0.02) and shared by all layers.
    `beyond` as in Learned. For positions in `untied` (the paper's [CLS]) a learned theta [2, h] replaces the second
    product and its scale. It is theta_0 if the query is untied, else theta_1 if the key is. With 1_p = 1 if p is
    untied:

        q~_i = [q_i, (1 - 1_i) p_i U_Q, sqrt(2d) 1_i theta_0, sqrt(2d) (1 - 1_i) theta_1]
        k~_j = [k_j, (1 - 1_j) p_j U_K,          1,                    1_j              ]

    Reference: Ke, He and Liu 2021, arXiv 2006.15595, equations 7, 8 and 10.
    Differs: heads that share W_K share U_K; the paper has as many key as query heads. The released code gives U_Q and
    U_K a bias vector and takes theta from two spare rows of the table. Its TUPE-R gives pairs that hold [CLS] two
    buckets of their own, which t5 lacks.
    Sensitive: at a rate of 0.08 or more (10 times 8e-3, 30 times 4e-3) it no longer learns. Below that, 1 to 10 times
    the model's rate differ by less than 0.01 nats a byte at L.
    """

    untied: tuple[Tokens, ...] = ()

    shared = fact(
        lambda self: frozenset({"table", "norm_scale", "norm_bias", "u_q", "u_k", *["theta"] * bool(self.untied)})
    )
    decayed = fact(lambda self: self.shared - {"norm_scale", "norm_bias"})  # the released code decays these two as well
    about = About("arXiv 2006.15595", BEYOND)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        m, h, d = dims.model_dim, dims.num_heads, dims.head_dim
        shapes = {"table": (self.num_positions, m), "u_q": (m, h, d), "u_k": (m, dims.kv_heads, d), "theta": (2, h)}
        params = {"norm_scale": jnp.ones(m, jnp.float32), "norm_bias": jnp.zeros(m, jnp.float32)}
        params |= normals(rng, shapes, 0.02)
        return {name: params[name] for name in params if name in self.shared}

    def logit_scale(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        return jnp.full((1, *pos.shape), math.sqrt(0.5), as_float(0).dtype)

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        channels = [self._project_positions(params, "u_q", pos)]
        if self.untied:
            untied = self._is_untied(pos)
            theta = params["theta"][:, None, :, None] * math.sqrt(2 * params["u_q"].shape[-1])
            channels += [jnp.where(untied, theta[0], 0), jnp.where(untied, 0, theta[1])]
        return _append(vectors, channels)

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        channels = [self._project_positions(params, "u_k", pos)]
        if self.untied:
            untied = self._is_untied(pos)
            channels += [jnp.ones(untied.shape), untied]
        return _append(vectors, channels)

    def _project_positions(self, params: Params, name: str, pos: jax.Array) -> jax.Array:
        """Return p U [t, h, d], zero for untied positions."""
        p = _layer_norm(self._rows(params["table"], pos), params["norm_scale"], params["norm_bias"])
        return jnp.where(self._is_untied(pos), 0, exact_einsum("tm,mhd->thd", p, params[name]))

    def _is_untied(self, pos: jax.Array) -> jax.Array:
        untied = jnp.asarray(self.untied, pos.dtype)
        return (pos[:, None] == untied[None, :]).any(axis=1)[:, None, None]


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse_std = jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return centred * inverse_std * scale[None] + bias[None]


def _append(vectors: jax.Array, channels: list[jax.Array]) -> jax.Array:
    """Append channels [t, h or 1, n] to `vectors` [t, h, d]."""
    rows = (jnp.broadcast_to(x, (*vectors.shape[:2], x.shape[-1])).astype(vectors.dtype) for x in channels)
    return jnp.concatenate([vectors, *rows], axis=-1)
