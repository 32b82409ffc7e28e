"""KERPLE: kernelised relative positions."""

import dataclasses

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Params, as_float
from posx.errors import ConfigError

#: Bounds of p and a as they are read. With a power above 2 the bias would be no kernel.
LEAST, LARGEST_POWER = 0.01, 2.0


@dataclasses.dataclass(frozen=True)
class Kerple(Encoding):
    """A learned penalty that grows with distance, r = i - j in tokens:

        bias_h(r) = -p_h ln(1 + a_h |r|)    if `form` is "log"
        bias_h(r) = -a_h |r|^p_h            if `form` is "power"

    p and a [h] start at U(0, 2) and U(0, 1). They are the same in all layers unless `per_layer`. Both are at least 0.01
    where they are read, and p of the power form at most 2. A stored value beyond a bound is read as its mirror image in
    that bound, so that its gradient is never 0. Added after the 1/sqrt(d) scale.

    Reference: Chi et al. 2022, arXiv 2205.09921; starts and bounds of the released ParallelKerpleLog and -Power.
    Differs: the authors' code clips the stored parameters to the bounds before each step. NeMo learns b, a and p of
    -b ln(1 + a |r|^p), which start at ALiBi's slopes, 1 and 1. The power form's multiplicative weights e^(-a' |r|^p')
    are left out.
    """

    form: str = "log"
    per_layer: bool = False

    caches_mapped_keys = True
    lr_multiplier = 3.0  # 0.02 nats a byte better than 1 (log; power: as good), see experiments/leaderboard
    extrapolates = "flat to 16 L in its paper and our small study; elsewhere rises by 8 to 16 L"
    paper = "arXiv 2205.09921"

    def __post_init__(self) -> None:
        if self.form not in ("log", "power"):
            raise ConfigError(f"kerple: form={self.form!r} is unknown; allowed: log, power")

    @property
    def fades(self) -> bool:  # type: ignore[override]
        return self.form == "power"  # the other falls too, but so slowly that no tile is ever skipped

    @property
    def shared(self) -> frozenset[str]:
        return frozenset() if self.per_layer else frozenset({"p", "a"})

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        p_rng, a_rng = jax.random.split(rng)
        return {
            "p": jax.random.uniform(p_rng, (dims.num_heads,), jnp.float32, 0, 2),
            "a": jax.random.uniform(a_rng, (dims.num_heads,), jnp.float32),
        }

    def curve(self, params: Params, distance: jax.Array) -> jax.Array:
        far, a = jnp.abs(as_float(distance))[None, :], _above(params["a"], LEAST)[:, None]
        if self.form == "log":
            return -_above(params["p"], LEAST)[:, None] * jnp.log1p(a * far)
        # At 0 the power has no finite derivative by distance if p < 1, so it is evaluated elsewhere.
        power = jnp.where(far > 0, far, 1) ** _within(params["p"], LEAST, LARGEST_POWER)[:, None]
        return jnp.where(far > 0, -a * power, 0)


def _above(x: jax.Array, least: float) -> jax.Array:
    """Return x, mirrored at `least` if it is below."""
    return jnp.where(x < least, 2 * least - x, x)


def _within(x: jax.Array, least: float, most: float) -> jax.Array:
    """Return x, mirrored at `least` and `most` until it is between them. Its slope is 1 or -1 everywhere."""
    width = most - least
    along = jnp.mod(x - least, 2 * width)
    mirrored = least + jnp.where(along < width, along, 2 * width - along)
    return jnp.where((x >= least) & (x <= most), x, mirrored)
