"""xPos: rotations whose products decay with distance."""

import dataclasses
from typing import Annotated, Self

import jax
import numpy as np

from posx.contract import About, Dims, Encoding, Features, Params, as_float, fact
from posx.contract.fields import Channels, above
from posx.encodings.rope import Rope


@dataclasses.dataclass(frozen=True)
class Xpos(Encoding):
    """s_ij = sum_c <q~_ic, k~_jc> zeta_c^((i - j) / B) / sqrt(d), zeta_c = (2c + 0.4 d) / (1.4 d).

    q~ and k~ are rotated by RoPE, c counts its d/2 planes, d its rotated channels. zeta rises from 0.29 for the fastest
    plane to nearly 1 for the slowest, so fast planes count less far away. It is causal only, since products with later
    keys would grow. Channels that pass unrotated do not decay. `scale_base` is B in tokens, by default half the
    training length: the paper has 512 for texts of 1,024.

    Reference: Sun et al. 2022, arXiv 2212.10554, section 3.2.
    Differs: other code multiplies queries by zeta^((i-p)/B) and keys by zeta^((p-j)/B) about a centre p, the middle of
    the current text. This overflows in float32 36,000 tokens away, and goes wrong if a cache has another centre. Here
    executors take powers relative to each block of queries. NeMo has B = 2,048. The paper also attends by blocks at
    inference.
    """

    rope: Rope = Rope()  # noqa: RUF009 (a value)
    scale_base: Annotated[float, "tokens", above(0)] | None = None
    head_dim: Channels | None = None

    causal_only = True
    planes = fact(lambda self: self.rope.planes)
    about = About(
        "arXiv 2212.10554", "fast planes fade, slow ones meet unseen angles; nearly flat to 16 L in our small study"
    )

    def resolve(self, dims: Dims) -> Self:
        return super().resolve(dims).fill_open(scale_base=dims.train_len / 2)

    def query(self, params: Params, vectors: jax.Array, pos: jax.Array, features: Features) -> jax.Array:
        return self.rope.query(params, vectors, pos, features)

    key = query

    def decay(self, params: Params) -> jax.Array:
        """Return -ln(zeta_c) / B: a product of channels that are r tokens apart is multiplied by zeta_c^(r / B)."""
        d = self.rope.rotary_dim
        zeta = (2 * np.arange(d // 2) + 0.4 * d) / (1.4 * d)
        of_planes = -np.log(zeta) / self.scale_base
        of_channels = np.tile(of_planes, 2) if self.rope.layout == "half_split" else np.repeat(of_planes, 2)
        return as_float(np.pad(of_channels, (0, self.head_dim - d)))[None]
