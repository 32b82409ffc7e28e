"""A learned vector for every position, added to the token embeddings."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from posx.encodings.base import Dims, Encoding, Params, as_float, at_least_float32, normal
from posx.errors import ConfigError

BEYOND = ("error", "clamp", "interpolate")


def check_beyond(name: str, beyond: str, num_positions: int | None) -> None:
    if beyond not in BEYOND:
        raise ConfigError(f"{name}: beyond={beyond!r} is unknown; allowed: {', '.join(BEYOND)}")
    if num_positions is not None and num_positions < 1:
        raise ConfigError(f"{name}: num_positions={num_positions} must be at least 1")


def read_rows(table: jax.Array, pos: jax.Array, beyond: str, stretched_to: int) -> jax.Array:
    """Rows of table [n, m] at pos [t]; NaN where the position has no row, so that no gather clamps silently."""
    table, last = jnp.asarray(table), table.shape[0] - 1
    if beyond == "clamp":
        return table[jnp.clip(pos, 0, last)]
    if stretched_to > table.shape[0]:
        place = as_float(pos) * (last / (stretched_to - 1))
        low = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, max(last - 1, 0))
        share = (place - as_float(low)).astype(table.dtype)[:, None]
        rows = table[low] * (1 - share) + table[jnp.minimum(low + 1, last)] * share
        inside = (pos >= 0) & (pos < stretched_to)
        return jnp.where(inside[:, None], rows, jnp.nan)
    return table.at[jnp.where(pos < 0, last + 1, pos)].get(mode="fill", fill_value=jnp.nan)


@dataclasses.dataclass(frozen=True)
class Learned(Encoding):
    """x_p <- x_p + W[p], W [num_positions, m] (default: one row per training position), W ~ N(0, std).

    `beyond` says what happens after the last row: "error" (undefined), "clamp" (the last row again), or "interpolate"
    (`at_length(n)` stretches the table linearly over n positions, ends to ends; n within the table changes nothing).

    Reference: Gehring et al. 2017, arXiv 1705.03122; Radford et al. 2019 (GPT-2).
    Differs: std 0.02 as in BERT and the HF port of GPT-2; OpenAI's GPT-2 code has 0.01.
    """

    num_positions: int | None = None
    beyond: str = "error"
    std: float = 0.02
    stretched_to: int = 0

    shift_invariant = False
    caches_mapped_keys = True
    integer_positions = True
    extrapolates = "no: undefined beyond the table (clamp, interpolate on request)"
    paper = "arXiv 1705.03122"

    def __post_init__(self) -> None:
        if self.std < 0:
            raise ConfigError(f"learned: std={self.std} must not be negative")
        check_beyond("learned", self.beyond, self.num_positions)

    @property
    def shared(self) -> frozenset[str]:
        return frozenset({"table"})

    @property
    def decayed(self) -> frozenset[str]:
        return self.shared  # as in GPT and BERT

    @property
    def max_position(self) -> int | None:
        self.require_resolved()
        return None if self.beyond == "clamp" else max(self.num_positions, self.stretched_to) - 1

    def resolve(self, dims: Dims) -> Self:
        return self.fill_open(num_positions=dims.train_len)

    def at_length(self, length: int) -> Self:
        return dataclasses.replace(self, stretched_to=length if self.beyond == "interpolate" else 0)

    def init(self, rng: jax.Array, dims: Dims) -> Params:
        self.require_resolved()
        return {"table": normal(rng, (self.num_positions, dims.model_dim), self.std)}

    def embed(self, params: Params, x: jax.Array, pos: jax.Array) -> jax.Array:
        wide = at_least_float32(x)
        return (wide + read_rows(params["table"], pos, self.beyond, self.stretched_to).astype(wide.dtype)).astype(
            x.dtype
        )
