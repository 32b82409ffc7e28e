"""A logit scale that grows in steps, as in Llama 4."""

import dataclasses
from typing import Annotated, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Dims, Encoding, Features, Params, as_float
from posx.contract.fields import at_least, below


@dataclasses.dataclass(frozen=True)
class Llama4Temperature(Encoding):
    """tau(p) = 1 + attn_scale ln(1 + floor((p + 1) / floor_scale)): a logit scale with a step every floor_scale tokens.

    `floor_scale` is the training length by default. In a window of that length only the last query changes, by 7 %. The
    published 8192 would change nothing before 8192 tokens.

    Reference: Llama 4 in transformers (attn_temperature_tuning, on layers without RoPE, as SSMax, arXiv 2501.19399).
    Differs: Ministral 3 has floor(p / L) there.
    """

    attn_scale: Annotated[float, at_least(0)] = 0.1
    floor_scale: Annotated[int, "tokens", at_least(1), below(2**31)] | None = None

    shift_invariant = False
    causal_only = True  # counts the keys up to the query
    about = About("arXiv 2501.19399", "acts from token L on; RoPE no further in our small study")

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(floor_scale=dims.train_len)

    def logit_scale(self, params: Params, pos: jax.Array, features: Features) -> jax.Array:
        # Integers are divided: far positions in float32 could round up to the next step. p + 1 is never formed, as it
        # would overflow at the last int32 position.
        whole, rest = jnp.divmod(jnp.maximum(pos, 0), self.floor_scale)
        steps = as_float(whole) + as_float((rest + 1) // self.floor_scale)
        return 1 + self.attn_scale * jnp.log1p(steps)[None]
