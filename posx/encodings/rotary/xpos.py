"""Rotations whose products fall with distance."""

import dataclasses
from typing import Self

import jax
import numpy as np

from posx.encodings.base import Channels, Dims, Encoding, Features, FloatTokens, Params, as_float, require_encoding
from posx.encodings.rotary.rope import Rope
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Xpos(Encoding):
    """RoPE, and plane c of a pair's product multiplied by zeta_c^((i-j)/B): what turns fast counts less far away.

    zeta_c = (2c + 0.4 d) / (1.4 d) for d rotated channels, 0.29 for the fastest plane to nearly 1 for the slowest;
    causal only, as it would grow ahead. Channels that pass unrotated do not fall. `scale_base` is B in tokens, by
    default half the training length: the paper has 512 for texts of 1,024.

    Reference: Sun et al. 2022, arXiv 2212.10554, section 3.2.
    Differs: other code multiplies queries by zeta^((i-p)/B) and keys by zeta^((p-j)/B) about a centre p, half the
    length at hand. That overflows in float32 36,000 tokens away, and goes wrong where a cache has another centre; here
    executors take powers from each block of queries. NeMo has B = 2,048. The paper also attends by blocks at inference.
    """

    rope: Rope = Rope()  # noqa: RUF009 (a value)
    scale_base: FloatTokens | None = None
    head_dim: Channels | None = None

    caches_mapped_keys = True
    causal_only = True
    extrapolates = "fast planes fade, slow ones meet unseen angles; nearly flat to 16 L in our small study"
    paper = "arXiv 2212.10554"

    def __post_init__(self) -> None:
        if self.scale_base is not None and not self.scale_base > 0:
            raise ConfigError(f"xpos: scale_base={self.scale_base} must be above 0 tokens")

    @property
    def planes(self) -> str:  # type: ignore[override]
        return self.rope.planes

    def require_resolved(self) -> None:
        super().require_resolved()
        require_encoding(self.rope, "Xpos: rope")
        self.rope.require_resolved()

    def resolve(self, dims: Dims) -> Self:
        resolved = dataclasses.replace(self, rope=self.rope.resolve(dims))
        return resolved.fill_open(scale_base=dims.train_len / 2, head_dim=dims.head_dim)

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self.rope.query(params, vectors, pos, features)

    def key(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self.rope.key(params, vectors, pos, features)

    def decay(self, params: Params) -> jax.Array:
        d = self.rope.rotary_dim
        of_planes = -np.log((2 * np.arange(d // 2) + 0.4 * d) / (1.4 * d)) / self.scale_base
        rotated = np.tile(of_planes, 2) if self.rope.layout == "half_split" else np.repeat(of_planes, 2)
        return as_float(np.pad(rotated, (0, self.head_dim - d)))[None]
