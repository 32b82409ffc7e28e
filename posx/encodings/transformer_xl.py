"""Transformer-XL's relative attention."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Features, Params, Tile, at_least_float32, normal
from posx.encodings.rope import inverse_frequencies
from posx.encodings.sinusoidal import sinusoid
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TransformerXL(Encoding):
    """s_ij = [ (q_i + u) . k_j + (q_i + v) . (W_R R_{i-j}) ] / sqrt(d), R_r = [sin r w | cos r w], w_c = base^(-2c/m).

    W_R [m, h, d] per layer; u, v [h, d] once for all layers unless `untie_biases`; all N(0, 0.02). `clamp_len` > 0
    clips |r| (tokens) before R. Negative distances are served as in XLNet. Segment memory is the key/value cache.

    Reference: Dai et al. 2019, arXiv 1901.02860, section 3.3.
    Differs: no dropout on R. DeepMind's causal version reads the table in the wrong order, so its prefixes change.
    """

    base: float = 10000.0
    clamp_len: int = 0
    untie_biases: bool = False

    extrapolates = "defined everywhere; stayed flat to 32 L in our small study"
    paper = "arXiv 1901.02860"

    def __post_init__(self) -> None:
        if self.clamp_len < 0:
            raise ConfigError(f"transformer_xl: clamp_len={self.clamp_len} must be 0 (off) or a distance in tokens")
        if not self.base > 1:
            raise ConfigError(f"transformer_xl: base={self.base} must be above 1")

    @property
    def shared(self) -> frozenset[str]:
        return frozenset() if self.untie_biases else frozenset({"u", "v"})

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
        wide = at_least_float32(vectors)
        return (wide + params["u"].astype(wide.dtype)[None]).astype(vectors.dtype)

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        q = tile.q.astype(s.dtype) + params["v"].astype(s.dtype)[None]
        wave = jnp.einsum("qhd,mhd->hqm", q, params["w_r"].astype(s.dtype))
        sines, cosines = jnp.split(wave, 2, axis=-1)
        relative = self._clamped if self.clamp_len else self._unclamped
        return s + relative(sines, cosines, tile) / math.sqrt(tile.q.shape[-1])

    def _unclamped(self, sines: jax.Array, cosines: jax.Array, tile: Tile) -> jax.Array:
        """sum_c sines_c sin((i-j) w_c) + cosines_c cos((i-j) w_c), split over i and j by the addition theorems.

        Exact for any positions, and a plain product of [q, m] and [k, m] with no table of distances.
        """
        frequencies = inverse_frequencies(self.base, 2 * sines.shape[-1])
        origin = tile.q_pos[0]  # only differences matter; small angles stay exact far from zero
        sin_i, cos_i = (x.astype(sines.dtype) for x in sinusoid(tile.q_pos - origin, frequencies))
        sin_j, cos_j = (x.astype(sines.dtype) for x in sinusoid(tile.k_pos - origin, frequencies))
        sin_i, cos_i = sin_i[None], cos_i[None]
        left = jnp.concatenate([cosines * sin_i - sines * cos_i, sines * sin_i + cosines * cos_i], axis=-1)
        return jnp.einsum("hqm,km->hqk", left, jnp.concatenate([sin_j, cos_j], axis=-1))

    def _clamped(self, sines: jax.Array, cosines: jax.Array, tile: Tile) -> jax.Array:
        frequencies = inverse_frequencies(self.base, 2 * sines.shape[-1])
        # At most 2 clamp_len + 1 whole distances remain, so they are tabulated and read.
        sin_r, cos_r = sinusoid(jnp.arange(-self.clamp_len, self.clamp_len + 1), frequencies)
        per_row = jnp.einsum("hqm,nm->hqn", sines, sin_r.astype(sines.dtype))
        per_row += jnp.einsum("hqm,nm->hqn", cosines, cos_r.astype(sines.dtype))
        distance = tile.q_pos[:, None] - tile.k_pos[None, :]
        rows = jnp.clip(distance, -self.clamp_len, self.clamp_len).astype(jnp.int32) + self.clamp_len
        return jnp.take_along_axis(per_row, jnp.broadcast_to(rows[None], (per_row.shape[0], *rows.shape)), axis=-1)
