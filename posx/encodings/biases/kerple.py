"""KERPLE: kernelised relative positions."""

import dataclasses

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Params
from posx.errors import ConfigError

#: The least p and a, and the largest p of the power form, beyond which it is no kernel.
LEAST, LARGEST_POWER = 0.01, 2.0


@dataclasses.dataclass(frozen=True)
class Kerple(Encoding):
    """A learned penalty that grows with distance: bias_h(r) = -p_h ln(1 + a_h |r|) in the `form` "log",
    -a_h |r|^p_h in the form "power", r = i - j in tokens.

    p and a have one value per head, the same in all layers unless `per_layer`. They start at U(0, 2) and U(0, 1) and
    are kept in bounds where they are read, at least 0.01, and p of the power form at most 2: beyond a bound they count
    as their mirror image in it, so that none is stuck there. Added after the 1/sqrt(d) scale.

    Reference: Chi et al. 2022, arXiv 2205.09921; starts and bounds of the released ParallelKerpleLog and -Power.
    Differs: the authors' code cuts the stored parameters at the bounds before each step. NeMo has -b ln(1 + a |r|^p)
    with fixed a = 0 and p = 1, which is no bias whatever b. The power form's multiplicative weights e^(-a' |r|^p') are
    left out.
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
        a = _above(params["a"], LEAST)[:, None]
        far = jnp.abs(distance)[None, :]
        if self.form == "log":
            return -_above(params["p"], LEAST)[:, None] * jnp.log1p(a * far)
        p = LARGEST_POWER - _above(LARGEST_POWER - _above(params["p"], LEAST), 0.0)  # below its largest too
        p = _above(p, LEAST)[:, None]
        # At 0 the power has no finite derivative by distance where p < 1, so it is taken elsewhere.
        power = jnp.where(far > 0, far, 1) ** p
        return jnp.where(far > 0, -a * power, 0)


def _above(x: jax.Array, least: float) -> jax.Array:
    """x, or its mirror image where it is below `least`: never below, and never without a gradient."""
    return jnp.where(x < least, 2 * least - x, x)
