"""A learned vector for every position, added to the token embeddings."""

import dataclasses
from typing import Annotated

import jax
import numpy as np

from posx.contract import About, Dims, Params, at_least_float32, check_defined, normal
from posx.contract.fields import at_least
from posx.encodings.position_table import BEYOND, PositionTable


@dataclasses.dataclass(frozen=True)
class Learned(PositionTable):
    """x_p <- x_p + W[p], W [num_positions, m] (default: one row per training position), W ~ N(0, std).

    `beyond` decides for positions after the last row: "error" (undefined), "clamp" (the last row again), or
    "interpolate". For the last, `at_length(n)` stretches the table linearly over n positions, ends to ends. It changes
    nothing if n is within the table.

    Reference: Gehring et al. 2017, arXiv 1705.03122; Radford et al. 2019 (GPT-2).
    Differs: std 0.02 as in BERT and the HF port of GPT-2; OpenAI's GPT-2 code has 0.01.
    Sensitive: at the model's own learning rate it is 0.09 nats a byte worse at L after 2 M bytes.
    """

    std: Annotated[float, at_least(0)] = 0.02

    shared = frozenset({"table"})
    decayed = shared  # as in GPT and BERT
    about = About(
        "arXiv 1705.03122",
        BEYOND,
        lr_multiplier=10.0,  # rows start at 0.02 and each is read once a window; see experiments/recipe
    )

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        return {"table": normal(rng, (self.num_positions, dims.model_dim), self.std)}

    def embed(self, params: Params, x: jax.Array, pos: jax.Array) -> jax.Array:
        """Add the rows. Raises UndefinedLength if a position past the last row is known on the host."""
        if not isinstance(pos, jax.core.Tracer) and getattr(pos, "is_fully_addressable", True):
            check_defined(self, 0, np.max(pos, initial=0))
        wide = at_least_float32(x)
        return (wide + self._rows(params["table"], pos).astype(wide.dtype)).astype(x.dtype)
