"""A learned vector for every position, and what happens where there is none."""

import copy
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, TableRows, Tokens, as_float
from posx.errors import ConfigError

BEYOND = ("error", "clamp", "interpolate")


class Rows(Encoding):
    """An encoding that reads a table [num_positions, m], by default one row for every training position.

    `beyond` says what happens after the last row, see `Learned`. Each class declares the fields, in its own order.
    `stretched_to` is no setting: only `at_length` sets it, so that no spec, config or constructor can name it.
    """

    num_positions: TableRows | None
    beyond: str
    stretched_to: Tokens

    shift_invariant = False
    caches_mapped_keys = True
    integer_positions = True
    extrapolates = "no: undefined beyond the table (clamp, interpolate on request)"

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        if self.beyond not in BEYOND:
            raise ConfigError(f"{name}: beyond={self.beyond!r} is unknown; allowed: {', '.join(BEYOND)}")
        if self.num_positions is not None and self.num_positions < 1:
            raise ConfigError(f"{name}: num_positions={self.num_positions} must be at least 1")

    @property
    def max_position(self) -> int | None:
        self.require_resolved()
        return None if self.beyond == "clamp" else max(self.num_positions or 0, self.stretched_to) - 1

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(num_positions=dims.train_len)

    def at_length(self, length: int) -> Self:
        stretched = copy.copy(self)
        object.__setattr__(stretched, "stretched_to", length if self.beyond == "interpolate" else 0)
        return stretched

    def _rows(self, table: jax.Array, pos: jax.Array) -> jax.Array:
        """Rows of the table at pos [t]; NaN where the position has no row, so that no gather clamps silently."""
        table, last = jnp.asarray(table), table.shape[0] - 1
        if self.beyond == "clamp":
            return table[jnp.clip(pos, 0, last)]
        if self.stretched_to > table.shape[0]:
            place = as_float(pos) * (last / (self.stretched_to - 1))
            low = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, max(last - 1, 0))
            share = (place - as_float(low)).astype(table.dtype)[:, None]
            rows = table[low] * (1 - share) + table[jnp.minimum(low + 1, last)] * share
            inside = (pos >= 0) & (pos < self.stretched_to)
            return jnp.where(inside[:, None], rows, jnp.nan)
        return table.at[jnp.where(pos < 0, last + 1, pos)].get(mode="fill", fill_value=jnp.nan)
