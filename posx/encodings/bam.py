"""BAM: attention with a generalised Gaussian prior over distance."""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, ByDistance, Dims, Encoding, Params, as_float, fact
from posx.contract.fields import Heads, at_least
from posx.encodings.alibi import alibi_slopes

#: Tokens. Keeps the power and its derivatives finite for a key at the centre of the prior.
EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Bam(Encoding):
    """bias_h(r) = -e^scale_h (|r + c_h| + 1e-5)^shape_h, c_h = e^loc_h - e^-loc_h, r = i - j in tokens.

    It is the logarithm of a prior over distance. A positive loc puts the centre of the prior ahead of the query. Three
    arrays [h] start as follows, and with the defaults the bias starts as ALiBi:

        shape_h = linspace(*shapes, H)_h
        e^scale_h = initial_scale, or ALiBi's slopes if it is 0
        loc_h = initial_loc

    The arrays that `learned` names are parameters, the others stay fixed. All layers share them unless `per_layer`.

    Reference: Bianchessi et al. 2025, arXiv 2505.22842, GGD-BAM, in the form of models/bam.py as released in May 2025.
    That file takes the logarithm of the slopes for scale too.
    Differs: that file fixes shape at 1 if it is not learned. Its revisions until March 2025 have scale in place of
    e^scale, inside the power. The released bam_ssmax multiplies the prior by s ln(n) too, bam+ssmax multiplies products
    alone. bam(shapes=(0, 0), initial_scale=1, per_layer=true) starts without any position.
    """

    learned: tuple[Literal["shape", "scale", "loc"], ...] = ("shape", "scale")
    shapes: tuple[float, float] = (1.0, 1.0)
    initial_scale: Annotated[float, "nats a token^shape", at_least(0)] = 0.0
    initial_loc: float = 0.0
    per_layer: bool = False
    num_heads: Heads | None = None

    shared = fact(lambda self: frozenset() if self.per_layer else frozenset(self.learned))
    about = About(
        "arXiv 2505.22842",
        "heads of small shape still attend to far keys; flat to 16 L in our small study",
        lr_multiplier=3.0,  # 0.01 to 0.02 nats a byte better than 1, see experiments/leaderboard
    )

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return {name: jnp.asarray(x, jnp.float32) for name, x in self._initial().items() if name in self.learned}

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        arrays = self._initial() | params
        shape, scale, loc = (as_float(arrays[name])[:, None] for name in ("shape", "scale", "loc"))
        c = jnp.exp(loc) - jnp.exp(-loc)
        from_centre = jnp.abs(as_float(distance)[None, :] + c)
        return ByDistance(bias=-jnp.exp(scale) * (from_centre + EPSILON) ** shape)

    def _initial(self) -> dict[str, np.ndarray]:
        slopes = np.full(self.num_heads, self.initial_scale) if self.initial_scale else alibi_slopes(self.num_heads)
        return {
            "shape": np.linspace(*self.shapes, self.num_heads),
            "scale": np.log(slopes),
            "loc": np.full(self.num_heads, self.initial_loc),
        }
