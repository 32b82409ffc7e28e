"""Fixed sinusoidal vectors added to the token embeddings."""

import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, Dims, Encoding, Params, at_least_float32
from posx.contract.fields import Base
from posx.encodings.angles import inverse_frequencies, sin_cos
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Sinusoidal(Encoding):
    """PE(p)[2c] = sin(p w_c), PE(p)[2c+1] = cos(p w_c), w_c = base^(-2c/m), added to the embeddings.

    `layout` is "interleaved" (the paper) or "concatenated" (all sines, then all cosines: tensor2tensor,
    Transformer-XL). `exponent` is "2c/m" (the paper), or "c/(m/2-1)" (tensor2tensor, fairseq) with a last wavelength of
    exactly 2 pi base.

    Reference: Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    Differs: fairseq and XGLM start at position padding_idx + 1; give them the shifted positions.
    """

    base: Base = 10000.0
    layout: Literal["interleaved", "concatenated"] = "interleaved"
    exponent: Literal["2c/m", "c/(m/2-1)"] = "2c/m"

    shift_invariant = False
    about = About("arXiv 1706.03762", "no: unseen phases, breaks within a few tokens")

    def resolve(self, dims: Dims) -> Self:
        if dims.model_dim % 2:
            raise ConfigError(f"sinusoidal: model_dim={dims.model_dim} must be even, for pairs of channels")
        return self

    def frequencies(self, model_dim: int) -> np.ndarray:
        """Return w_c, c = 0 .. m/2 - 1, in radians per token, in float64 on the host."""
        if self.exponent == "2c/m":
            return inverse_frequencies(self.base, model_dim)
        return self.base ** (-np.arange(model_dim // 2) / max(model_dim // 2 - 1, 1))

    def embed(self, params: Params, x: jax.Array, pos: jax.Array) -> jax.Array:
        sin, cos = sin_cos(pos, self.frequencies(x.shape[-1]))
        if self.layout == "interleaved":
            vectors = jnp.stack([sin, cos], axis=-1).reshape(x.shape)
        else:
            vectors = jnp.concatenate([sin, cos], axis=-1)
        wide = at_least_float32(x)
        return (wide + vectors.astype(wide.dtype)).astype(x.dtype)
