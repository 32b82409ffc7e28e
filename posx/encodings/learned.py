"""A learned vector for every position, added to the token embeddings."""

import copy
import dataclasses
from typing import Annotated, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract import About, Dims, Encoding, Params, as_float, at_least_float32, check_defined, fact, normal
from posx.contract.fields import TableRows, Tokens, at_least

#: The behaviour of tables beyond the training length.
BEYOND = "no: undefined beyond the table (clamp, interpolate on request)"


@dataclasses.dataclass(frozen=True, init=False)
class PositionTable(Encoding):
    """An encoding that reads a table [num_positions, m], by default one row for every training position.

    `beyond` decides for positions after the last row, see `Learned`. `stretched_to` is no setting: only `at_length`
    sets it, so no spec, config or constructor can name it.
    """

    num_positions: TableRows | None = None
    beyond: Literal["error", "clamp", "interpolate"] = "error"
    stretched_to: Tokens = dataclasses.field(default=0, init=False, repr=False)

    shift_invariant = False
    integer_positions = True
    max_position = fact(
        lambda self: None if self.beyond == "clamp" else max(self.num_positions or 0, self.stretched_to) - 1
    )

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(num_positions=dims.train_len)

    def at_length(self, length: int) -> Self:
        stretched = copy.copy(self)
        object.__setattr__(stretched, "stretched_to", length if self.beyond == "interpolate" else 0)
        return stretched

    def tabulated(self, params: Params, length: int) -> tuple[Self, Params]:
        """Return the value with the rows of all positions below `length`, as `at_length` stretched them."""
        if not self.stretched_to:
            return self, params
        table = jnp.asarray(params["table"])
        rows = _stretch_rows(table, np.arange(length, dtype=np.int32), max(self.stretched_to, table.shape[0]))
        return dataclasses.replace(self, num_positions=length), params | {"table": rows}

    def _rows(self, table: jax.Array, pos: jax.Array) -> jax.Array:
        """Return rows of the table at pos [t], NaN for positions without a row: no gather clamps silently."""
        table, last = jnp.asarray(table), table.shape[0] - 1
        if self.beyond == "clamp":
            return table[jnp.clip(pos, 0, last)]
        if self.stretched_to > table.shape[0]:
            return _stretch_rows(table, pos, self.stretched_to)
        return table.at[jnp.where(pos < 0, last + 1, pos)].get(mode="fill", fill_value=jnp.nan)


@jax.jit
def _stretch_rows(table: jax.Array, pos: jax.Array, length: int) -> jax.Array:
    """Return rows for pos [t] of the table stretched over `length` positions; all lengths share a program."""
    last = table.shape[0] - 1
    place = as_float(pos) * (as_float(last) / jnp.maximum(as_float(length) - 1, 1))
    low = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, max(last - 1, 0))
    share = (place - as_float(low)).astype(table.dtype)[:, None]
    rows = table[low] * (1 - share) + table[jnp.minimum(low + 1, last)] * share
    has_row = (pos >= 0) & (pos < length)
    return jnp.where(has_row[:, None], rows, jnp.nan)


@dataclasses.dataclass(frozen=True)
class Learned(PositionTable):
    """x_p <- x_p + W[p], W [num_positions, m] (default: one row per training position), W ~ N(0, std).

    `beyond` decides for positions after the last row: "error" (undefined), "clamp" (the last row again), or
    "interpolate". For "interpolate", `at_length(n)` stretches the table linearly over n positions, from its first row
    to its last. A length n within the table changes nothing.

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
