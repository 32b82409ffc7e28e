"""FIRE: functional interpolation of relative positions."""

import dataclasses
from typing import Annotated, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Params, as_float, distances, fact
from posx.contract.fields import HiddenUnits, at_least
from posx.encodings.networks import apply_layers, init_layers, layer_names

#: Keeps the share finite if c is 0.
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Fire(Encoding):
    """bias_ij = f(psi(|i - j|) / psi(max(i, T))), psi(x) = ln(1 + |c| x), f a network 1 -> `width` -> h with ReLU.

    The input is the distance as a share of the text so far, in [0, 1] for keys behind the query at any length. Beyond T
    tokens it depends on the query's position, counted from the start of its document. T = |multiplier| * `threshold`,
    at least 1. c and multiplier are learned, from 0.1 and 1. `threshold` is L/2 by default. With the published 512 and
    a shorter training length, distances would never be divided by the position of the query. One network per layer,
    unless `per_layer` is off.

    Reference: Li et al. 2024, arXiv 2310.04418; sizes, initial values and the 1e-6 as in the code of its appendix.
    Differs: that code does not keep T above 0. Its last layer has a bias, which changes no softmax. DAPE's port needs
    all queries at once to score one.
    """

    threshold: Annotated[float, "tokens", at_least(1)] | None = None
    width: HiddenUnits = 32
    per_layer: bool = True

    shift_invariant = False
    shared = fact(lambda self: frozenset() if self.per_layer else frozenset({"c", "multiplier"}) | layer_names(2))
    about = About(
        "arXiv 2310.04418",
        "disputed: its input stays in range at any length; rises from 2 L in our small study",
        lr_multiplier=3.0,  # 0.01 nats a byte better than 1 or 10, see experiments/leaderboard
    )

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(threshold=max(dims.train_len / 2, 1.0))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        start = {"c": jnp.asarray(0.1, jnp.float32), "multiplier": jnp.asarray(1, jnp.float32)}
        return start | init_layers(rng, (1, self.width, dims.num_heads))

    def bias(self, params: Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        def psi(x: jax.Array) -> jax.Array:
            return jnp.log1p(jnp.abs(params["c"]) * x)

        least = jnp.maximum(jnp.abs(params["multiplier"]) * self.threshold, 1)
        whole = psi(jnp.maximum(as_float(q_pos), least)) + EPSILON
        share = psi(jnp.abs(distances(q_pos, k_pos))) / whole[:, None]
        return apply_layers(params, share, 2, jax.nn.relu)
