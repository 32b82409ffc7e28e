"""Llama 4's temperature."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Features, Params, Tokens, as_float
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Llama4Temperature(Encoding):
    """tau(p) = 1 + attn_scale ln(1 + floor((p + 1) / floor_scale)): steps at every floor_scale tokens.

    It acts on all products inside the scale, biases are added after it. `floor_scale` is the training length by
    default: of a window of that length only the last query changes, by 7 %. The published 8192 would change nothing at
    all before 8192 tokens.

    Reference: Llama 4 in transformers (attn_temperature_tuning, on layers without RoPE, as SSMax, arXiv 2501.19399).
    Differs: Ministral 3 has floor(p / L) there.
    """

    attn_scale: float = 0.1
    floor_scale: Tokens | None = None

    shift_invariant = False
    caches_mapped_keys = True
    causal_only = True  # it counts the keys up to the query
    extrapolates = "acts from token L on; RoPE no further in our small study"
    paper = "arXiv 2501.19399"

    def __post_init__(self) -> None:
        if self.floor_scale is not None and not 1 <= self.floor_scale < 2**31:
            raise ConfigError(f"llama4_temperature: floor_scale={self.floor_scale} must be at least 1 and below 2^31")
        if self.attn_scale < 0:
            raise ConfigError(f"llama4_temperature: attn_scale={self.attn_scale} must be at least 0")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(floor_scale=dims.train_len)

    def temperature(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        self.require_resolved()
        # Whole positions are divided as such: as float32, far ones could round up to the next step. p + 1 is never
        # formed, as it would overflow at the last int32 position.
        whole, rest = jnp.divmod(jnp.maximum(pos, 0), self.floor_scale)
        steps = as_float(whole) + as_float((rest + 1) // self.floor_scale)
        return 1 + self.attn_scale * jnp.log1p(steps)
