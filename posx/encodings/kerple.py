"""KERPLE: kernelised relative positions."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from posx.contract import About, ByDistance, Dims, Encoding, Params, as_float, fact

#: Bounds of p and a as they are read. With a power above 2 the bias would be no kernel.
LEAST, LARGEST_POWER = 0.01, 2.0


@dataclasses.dataclass(frozen=True)
class Kerple(Encoding):
    """A learned penalty that grows with distance, r = i - j in tokens:

        bias_h(r) = -p_h ln(1 + a_h |r|)    if `form` is "log"
        bias_h(r) = -a_h |r|^p_h            if `form` is "power"

    p and a [h] start at U(0, 2) and U(0, 1). All layers share them unless `per_layer`. As read, both are at least 0.01,
    and p of the power form is at most 2. A stored value beyond a bound is read as its mirror image in that bound, so
    its gradient is never 0.

    Reference: Chi et al. 2022, arXiv 2205.09921; starts and bounds of the released ParallelKerpleLog and -Power.
    Differs: the authors' code clips the stored parameters to the bounds before each step. NeMo learns b, a and p of
    -b ln(1 + a |r|^p), which start at ALiBi's slopes, 1 and 1. With p fixed at these slopes and a at 1 the log form is
    `alibi(scale=log)`. The power form's multiplicative weights e^(-a' |r|^p') are left out.
    """

    form: Literal["log", "power"] = "log"
    per_layer: bool = False

    fades = fact(lambda self: self.form == "power")  # the log form falls so slowly that no tile is ever skipped
    shared = fact(lambda self: frozenset() if self.per_layer else frozenset({"p", "a"}))
    about = About(
        "arXiv 2205.09921",
        "flat to 16 L in its paper and our small study; elsewhere rises by 8 to 16 L",
        lr_multiplier=3.0,  # 0.02 nats a byte better than 1 (log; power: as good), see experiments/leaderboard
    )

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        p_rng, a_rng = jax.random.split(rng)
        return {
            "p": jax.random.uniform(p_rng, (dims.num_heads,), jnp.float32, 0, 2),
            "a": jax.random.uniform(a_rng, (dims.num_heads,), jnp.float32),
        }

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        r, a = jnp.abs(as_float(distance))[None, :], _mirror(LEAST, params["a"])[:, None]
        if self.form == "log":
            p = _mirror(LEAST, params["p"])[:, None]
            return ByDistance(bias=-p * jnp.log1p(a * r))
        p = _fold_range(LEAST, LARGEST_POWER, params["p"])[:, None]
        # At r = 0 the power has no finite derivative if p < 1, so it is evaluated at 1 instead.
        power = jnp.where(r > 0, r, 1) ** p
        return ByDistance(bias=jnp.where(r > 0, -a * power, 0))


def _mirror(least: float, x: jax.Array) -> jax.Array:
    """Return x, mirrored at `least` if it is below."""
    return jnp.where(x < least, 2 * least - x, x)


def _fold_range(least: float, most: float, x: jax.Array) -> jax.Array:
    """Return x, mirrored at `least` and `most` until it is between them. Its slope is 1 or -1 everywhere."""
    width = most - least
    along = jnp.mod(x - least, 2 * width)
    mirrored = least + jnp.where(along < width, along, 2 * width - along)
    return jnp.where((x >= least) & (x <= most), x, mirrored)
