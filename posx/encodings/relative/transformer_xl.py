"""Transformer-XL's relative attention."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.angles import inverse_frequencies, sin_cos
from posx.encodings.base import (
    Dims,
    Encoding,
    Features,
    Params,
    Relative,
    Tokens,
    at_least_float32,
    exact_einsum,
    normal,
)
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TransformerXL(Encoding):
    """s_ij = [ (q_i + u) . k_j + (q_i + v) . (W_R R_{i-j}) ] / sqrt(d), R_r = [sin r w | cos r w], w_c = base^(-2c/m).

    W_R [m, h, d] per layer; u, v [h, d] once for all layers unless `untie_biases`; all N(0, 0.02). `clamp_len` > 0
    clips |r| (tokens) before R. Negative distances are served as in XLNet. Segment memory is the key/value cache.

    Reference: Dai et al. 2019, arXiv 1901.02860, section 3.3.
    Differs: no dropout on R. DeepMind's causal version reads the table in the wrong order, so its prefixes change.
    Sensitive: little; 1 to 30 times the model's rate are within 0.027 nats a byte of each other at L.
    """

    base: float = 10000.0
    clamp_len: Tokens = 0
    untie_biases: bool = False

    extrapolates = "defined everywhere; stayed flat to 32 L in our small study"
    paper = "arXiv 1901.02860"
    lr_multiplier = 3.0  # 0.006 nats a byte better than 1 at 2 M bytes, 0.007 at 5 M; see experiments/recipe

    def __post_init__(self) -> None:
        if self.clamp_len < 0:
            raise ConfigError(f"transformer_xl: clamp_len={self.clamp_len} must be 0 (off) or a distance in tokens")
        if not self.base > 1:
            raise ConfigError(f"transformer_xl: base={self.base} must be above 1")

    @property
    def shared(self) -> frozenset[str]:
        return frozenset() if self.untie_biases else frozenset({"u", "v"})

    @property
    def reach(self) -> int | None:
        return self.clamp_len or None

    def resolve(self, dims: Dims) -> Self:
        if dims.model_dim % 2:
            raise ConfigError(f"transformer_xl: sines and cosines need an even model_dim, not {dims.model_dim}")
        return self

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        shapes = {
            "u": (dims.num_heads, dims.head_dim),
            "v": (dims.num_heads, dims.head_dim),
            "w_r": (dims.model_dim, dims.num_heads, dims.head_dim),
        }
        rngs = jax.random.split(rng, len(shapes))
        return {name: normal(r, shape, 0.02) for r, (name, shape) in zip(rngs, shapes.items(), strict=True)}

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        wide, u = at_least_float32(vectors), params["u"]
        # In a chain, vectors may have more channels by now: u meets those that were projected.
        u = jnp.pad(u, ((0, 0), (0, vectors.shape[-1] - u.shape[-1])))
        return (wide + u.astype(wide.dtype)[None]).astype(vectors.dtype)

    def relative(self, params: Params, distance: jax.Array) -> Relative:
        if self.clamp_len:
            distance = jnp.clip(distance, -self.clamp_len, self.clamp_len)
        waves = jnp.concatenate(sin_cos(distance, inverse_frequencies(self.base, params["w_r"].shape[0])), axis=-1)
        rows = exact_einsum("nm,mhd->nhd", waves, params["w_r"].astype(waves.dtype))
        return Relative(query=rows, bias=exact_einsum("hd,nhd->nh", params["v"].astype(rows.dtype), rows))
