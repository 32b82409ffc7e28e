"""Dynamic position bias: a network of the distance."""

import dataclasses
from typing import Annotated, Self

import jax
import jax.numpy as jnp

from posx.contract import About, ByDistance, Dims, Encoding, Params, as_float, fact
from posx.contract.fields import HiddenUnits, at_least
from posx.encodings.networks import apply_layers, init_layers, layer_names


@dataclasses.dataclass(frozen=True)
class DynamicBias(Encoding):
    """bias_h(r) = f(sign(r) ln(1 + |r|))_h, r = i - j in tokens, f a network 1 -> `width` -> ... -> h with SiLU.

    `depth` hidden layers, of model_dim/4 units by default. One network for all layers unless `per_layer`. With
    `log_distance` off it is f(r). At far distances f(r) is linear and steep, and float32 rounds the differences of
    neighbours there.

    Reference: Wang et al. 2022 (CrossFormer), arXiv 2108.00154; the logarithm is Swin V2's, arXiv 2111.09883; sizes and
    activation of x-transformers' DynamicPositionBias.
    Differs: x-transformers reads r by default, and its last layer has a bias, which changes no softmax. It can
    normalise hidden layers, as CrossFormer does.
    """

    width: HiddenUnits | None = None
    depth: Annotated[int, "hidden layers", at_least(1)] = 2
    log_distance: bool = True
    per_layer: bool = False

    shared = fact(lambda self: frozenset() if self.per_layer else layer_names(self.depth + 1))
    about = About("arXiv 2108.00154", "linear beyond L; flat to 16 L in our small study")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(width=max(dims.model_dim // 4, 1))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return init_layers(rng, (1, *[self.width] * self.depth, dims.num_heads))

    def by_distance(self, params: Params, distance: jax.Array) -> ByDistance:
        r = as_float(distance)
        x = jnp.sign(r) * jnp.log1p(jnp.abs(r)) if self.log_distance else r
        return ByDistance(bias=apply_layers(params, x, self.depth + 1, jax.nn.silu))
