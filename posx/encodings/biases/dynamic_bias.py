"""Dynamic position bias: a network of the distance."""

import dataclasses
from typing import Annotated, Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, HiddenUnits, Params
from posx.encodings.biases.networks import init_layers, layer_names, through_layers
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DynamicBias(Encoding):
    """bias_h(r) = f(sign(r) ln(1 + |r|))_h, r = i - j in tokens, f a network 1 -> `width` -> ... -> h with SiLU.

    `depth` hidden layers, of model_dim/4 units by default; one network for all layers unless `per_layer`. With
    `log_distance` off it is f(r): at far distances the network's straight ends are steep, and neighbours there differ
    by what float32 rounds away. Added after the 1/sqrt(d) scale.

    Reference: Wang et al. 2022 (CrossFormer), arXiv 2108.00154; the logarithm is Swin V2's, arXiv 2111.09883; sizes and
    activation of x-transformers' DynamicPositionBias.
    Differs: x-transformers reads r unless told otherwise, has a bias in the last layer, which no softmax sees, and can
    normalise hidden layers, as CrossFormer does.
    """

    width: HiddenUnits | None = None
    depth: Annotated[int, "hidden layers"] = 2
    log_distance: bool = True
    per_layer: bool = False

    caches_mapped_keys = True
    extrapolates = "on in straight lines beyond L; flat to 16 L in our small study"
    paper = "arXiv 2108.00154"

    def __post_init__(self) -> None:
        for name in ("width", "depth"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"dynamic_bias: {name}={getattr(self, name)} must be at least 1")

    @property
    def shared(self) -> frozenset[str]:
        return frozenset() if self.per_layer else layer_names(self.depth + 1)

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(width=max(dims.model_dim // 4, 1))

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        self.require_resolved()
        return init_layers(rng, (1, *[self.width] * self.depth, dims.num_heads))

    def curve(self, params: Params, distance: jax.Array) -> jax.Array:
        self.require_resolved()
        x = jnp.sign(distance) * jnp.log1p(jnp.abs(distance)) if self.log_distance else distance
        return through_layers(params, x, self.depth + 1, jax.nn.silu)
