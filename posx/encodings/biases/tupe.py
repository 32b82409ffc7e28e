"""TUPE: untied position-to-position correlations."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from posx.encodings.absolute.rows import Rows
from posx.encodings.base import Dims, Features, Params, TableRows, Tokens, as_float, exact_einsum, normal


@dataclasses.dataclass(frozen=True)
class Tupe(Rows):
    """s_ij = (q_i . k_j + (p_i U_Q) . (p_j U_K)) / sqrt(2d), p = LayerNorm(table[pos]), projections split over heads.

    The second product is made of d more channels of queries and keys. This is TUPE-A; TUPE-R is Chain((Tupe(), T5())).
    table [num_positions, m] (default L rows), U_Q [m, h, d] and U_K [m, g, d] are N(0, 0.02) and shared by all layers.
    Positions in `untied` (the paper's [CLS]) read the learned theta [2, h] instead of that product and its scale:
    theta_0 where they are the query, theta_1 where they are the key. `beyond` as in Learned.

    Reference: Ke, He and Liu 2021, arXiv 2006.15595, equations 7, 8 and 10.
    Differs: with fewer key than query heads, which the paper has not, heads that share W_K share U_K. The released
    code gives U_Q, U_K a bias vector and takes theta from two spare rows of the table. Its TUPE-R reads T5's buckets on
    both sides of the query, and gives pairs that hold [CLS] two buckets of their own, which t5 has not.
    Sensitive: at 0.08 and more (10 times 8e-3, 30 times 4e-3) it no longer learns; below that 1 to 10 times the model's
    rate differ by less than 0.01 nats a byte at L.
    """

    num_positions: TableRows | None = None
    beyond: str = "error"
    untied: tuple[Tokens, ...] = ()
    stretched_to: Tokens = dataclasses.field(default=0, init=False, repr=False)

    paper = "arXiv 2006.15595"

    @property
    def shared(self) -> frozenset[str]:
        return frozenset({"table", "norm_scale", "norm_bias", "u_q", "u_k"} | ({"theta"} if self.untied else set()))

    @property
    def decayed(self) -> frozenset[str]:
        return self.shared - {"norm_scale", "norm_bias"}  # the released code's, which decays those two as well

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        self.require_resolved()
        m, h, d = dims.model_dim, dims.num_heads, dims.head_dim
        table_rng, q_rng, k_rng, theta_rng = jax.random.split(rng, 4)
        params = {
            "table": normal(table_rng, (self.num_positions, m), 0.02),
            "norm_scale": jnp.ones((m,), jnp.float32),
            "norm_bias": jnp.zeros((m,), jnp.float32),
            "u_q": normal(q_rng, (m, h, d), 0.02),
            "u_k": normal(k_rng, (m, dims.num_kv_heads or h, d), 0.02),
        }
        return params | ({"theta": normal(theta_rng, (2, h), 0.02)} if self.untied else {})

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        return jnp.full(pos.shape, math.sqrt(0.5), as_float(0).dtype)

    def _projected(self, params: Params, name: str, pos: jax.Array) -> jax.Array:
        """p U [t, h, d], zero where the position is untied."""
        p = self._rows(params["table"], pos)
        centred = p - p.mean(axis=-1, keepdims=True)
        spread = jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        p = centred * spread * params["norm_scale"][None] + params["norm_bias"][None]
        return jnp.where(self._is_untied(pos), 0, exact_einsum("tm,mhd->thd", p, params[name]))

    def _is_untied(self, pos: jax.Array) -> jax.Array:
        special = jnp.asarray(self.untied, pos.dtype)
        return (pos[:, None] == special[None, :]).any(axis=1)[:, None, None]

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        channels = [self._projected(params, "u_q", pos)]
        if self.untied:
            # Times sqrt(2d), as theta stands outside the scale. An untied query reads theta_0 at every key, any other
            # query theta_1 at untied keys.
            theta = params["theta"][:, None, :, None] * math.sqrt(2 * params["u_q"].shape[-1])
            channels += [jnp.where(self._is_untied(pos), theta[0], 0), jnp.where(self._is_untied(pos), 0, theta[1])]
        return _append(vectors, channels)

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        channels = [self._projected(params, "u_k", pos)]
        if self.untied:
            untied = self._is_untied(pos)
            channels += [jnp.ones(untied.shape), untied]
        return _append(vectors, channels)


def _append(vectors: jax.Array, channels: list[jax.Array]) -> jax.Array:
    """`vectors` [t, h, d] with more channels [t, h or 1, ...] behind."""
    rows = (jnp.broadcast_to(x, (*vectors.shape[:2], x.shape[-1])).astype(vectors.dtype) for x in channels)
    return jnp.concatenate([vectors, *rows], axis=-1)
