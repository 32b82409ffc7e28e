"""A learned vector for every position, and the choices for positions beyond the table."""

import copy
import dataclasses
from typing import Literal, Self

import jax
import jax.numpy as jnp

from posx.contract import Dims, Encoding, as_float, fact
from posx.contract.fields import TableRows, Tokens

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

    def _rows(self, table: jax.Array, pos: jax.Array) -> jax.Array:
        """Return rows of the table at pos [t], NaN for positions without a row: no gather clamps silently."""
        table, last = jnp.asarray(table), table.shape[0] - 1
        if self.beyond == "clamp":
            return table[jnp.clip(pos, 0, last)]
        if self.stretched_to > table.shape[0]:
            place = as_float(pos) * (last / (self.stretched_to - 1))
            low = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, max(last - 1, 0))
            share = (place - as_float(low)).astype(table.dtype)[:, None]
            rows = table[low] * (1 - share) + table[jnp.minimum(low + 1, last)] * share
            has_row = (pos >= 0) & (pos < self.stretched_to)
            return jnp.where(has_row[:, None], rows, jnp.nan)
        return table.at[jnp.where(pos < 0, last + 1, pos)].get(mode="fill", fill_value=jnp.nan)
