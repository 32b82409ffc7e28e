"""BAM: attention with a generalised Gaussian prior over distance."""

import dataclasses
from typing import Annotated, Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.encodings.base import Dims, Encoding, Heads, Params, as_float
from posx.encodings.biases.alibi import alibi_slopes
from posx.encodings.checks import check_names
from posx.errors import ConfigError

#: Keeps the power and its derivatives finite where a key stands at the centre, in tokens.
EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Bam(Encoding):
    """The log of a prior over distance: bias_h(r) = -e^scale_h (|r + c_h| + 1e-5)^shape_h, c_h = e^loc_h - e^-loc_h,
    r = i - j in tokens; a positive loc puts the centre of the prior ahead of the query.

    shape, scale and loc [h] are arrays where `learned` names them, else fixed at where they start: shape at 1, or on a
    line from the first of `shapes` at the first head to the last at the last; e^scale at ALiBi's slopes, or at
    `initial_scale` for all heads; loc at `initial_loc`. So it starts as ALiBi. The same in all layers unless
    `per_layer`. Added after the 1/sqrt(d) scale.

    Reference: Bianchessi et al. 2025, arXiv 2505.22842, GGD-BAM, in the form of models/bam.py as released in May 2025,
    which takes the logarithm of the slopes for scale as well.
    Differs: that file has shape fixed at 1 if it is not learned. Its first revisions, until March 2025, have scale in
    place of e^scale, inside the power. The released bam_ssmax multiplies the prior by s ln(n) too; bam+ssmax multiplies
    products alone. bam(shapes=(0, 0), initial_scale=1, per_layer=true) starts without any position.
    """

    learned: tuple[str, ...] = ("shape", "scale")
    shapes: tuple[float, float] = (1.0, 1.0)
    initial_scale: Annotated[float, "nats a token^shape"] = 0.0
    initial_loc: float = 0.0
    per_layer: bool = False
    num_heads: Heads | None = None

    caches_mapped_keys = True
    lr_multiplier = 3.0  # 0.01 to 0.02 nats a byte better than 1, see experiments/leaderboard
    extrapolates = "heads of small shape keep sight of far keys; flat to 16 L in our small study"
    paper = "arXiv 2505.22842"

    def __post_init__(self) -> None:
        check_names("bam: learned", self.learned, ("shape", "scale", "loc"), least=0)
        if self.initial_scale < 0:
            raise ConfigError(f"bam: initial_scale={self.initial_scale} must be above 0, or 0 for ALiBi's slopes")

    @property
    def shared(self) -> frozenset[str]:
        return frozenset() if self.per_layer else frozenset(self.learned)

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(num_heads=dims.num_heads)

    def _start(self) -> dict[str, np.ndarray]:
        self.require_resolved()
        scale = np.full(self.num_heads, self.initial_scale) if self.initial_scale else alibi_slopes(self.num_heads)
        return {
            "shape": np.linspace(*self.shapes, self.num_heads),
            "scale": np.log(scale),
            "loc": np.full(self.num_heads, self.initial_loc),
        }

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return {name: jnp.asarray(value, jnp.float32) for name, value in self._start().items() if name in self.learned}

    def curve(self, params: Params, distance: jax.Array) -> jax.Array:
        fixed = self._start()
        shape, scale, loc = (
            (params[name] if name in self.learned else as_float(fixed[name]))[:, None]
            for name in ("shape", "scale", "loc")
        )
        away = jnp.abs(distance[None, :] + (jnp.exp(loc) - jnp.exp(-loc)))
        return -jnp.exp(scale) * (away + EPSILON) ** shape
