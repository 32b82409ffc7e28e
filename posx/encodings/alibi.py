"""Attention with linear biases."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, ByDistance, Encoding, Params, as_float, fact
from posx.contract.fields import Heads


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return slopes [h] in nats per token: 2^(-8(h+1)/H) for H a power of two.

    Otherwise the slopes of the largest power of two c below H, then the 1st, 3rd, 5th ... of the 2c series.
    """
    c = 2 ** math.floor(math.log2(num_heads))
    first = 2.0 ** (-8 * np.arange(1, c + 1) / c)
    between = 2.0 ** (-4 * np.arange(1, 2 * c + 1, 2) / c)
    return np.concatenate([first, between[: num_heads - c]])


def straight_fall(slopes: np.ndarray, distance: jax.Array) -> jax.Array:
    """Return -slope_h * |r|, [h, n], for slopes [h] and signed distances [n]."""
    return -as_float(slopes)[:, None] * jnp.abs(as_float(distance))[None, :]


@dataclasses.dataclass(frozen=True)
class Alibi(Encoding):
    """A penalty that grows with distance, r = i - j in tokens:

        bias_h(r) = -slope_h * |r|            if `scale` is "linear"
        bias_h(r) = -slope_h * ln(1 + |r|)    if `scale` is "log"

    The absolute value makes it the symmetric form in bidirectional use. Added after the 1/sqrt(d) scale. In the log
    form distance alone takes no weight to 0 in float32. It is KERPLE's log form with fixed p = slope and a = 1.

    Reference: Press, Smith and Lewis 2022, arXiv 2108.12409, section 3; the log form: arXiv 2608.03994.
    Differs: BLOOM adds slope * key index instead, equal after softmax but imprecise in bfloat16; Falcon adds before
    scaling.
    """

    num_heads: Heads | None = None
    scale: Literal["linear", "log"] = "linear"

    fades = fact(lambda self: self.scale == "linear")  # the log form falls so slowly that no tile is ever skipped
    about = About("arXiv 2108.12409", "yes: flat or slightly falling perplexity (linear scale)")

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        r = jnp.log1p(jnp.abs(as_float(distance))) if self.scale == "log" else distance
        return ByDistance(bias=straight_fall(alibi_slopes(self.num_heads), r))
