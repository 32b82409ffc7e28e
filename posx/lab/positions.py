"""Position policies: which positions the tokens of a row have, as frozen values that compose with every encoding.

    sequential               0 to t - 1
    offset(longest=N)        trained at o to o + t - 1, o uniform from 0 to N - t for each row; measured at 0 to t - 1
    randomised(longest=N)    t of the positions 0 to N - 1 in rising order, drawn for each step and measured length
    grid                     rows and columns of a square picture: token i at (i // side, i % side), side * side = t

Letters: t tokens of a row, b rows, N positions. Draws depend on the seed, the step and the number of a row alone. So a
resumed run has the same ones, however a batch is divided.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.contract.fields import at_least, at_most, snake_case
from posx.encodings.grammar import parse_value, unparse
from posx.errors import UndefinedLength

#: The keys of a seed that draw positions of training and of measured windows. Earlier keys are of parameters and
#: dropout.
_TRAINED, _MEASURED = 3, 4

#: N. `attend` takes longer steps from token to token for a mark of padding.
Count = Annotated[int, "positions", at_least(1), at_most(2**24)]


def _key(seed: int, number: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), number + 1)[number]


@dataclasses.dataclass(frozen=True)
class PositionPolicy:
    """A rule for the positions of the tokens of a row."""

    #: The numbers of a position.
    axes: ClassVar[int] = 1

    def length_problem(self, length: int) -> str:
        """Return why a window of `length` tokens has no positions and what to do, "" if it has some."""
        return ""

    @property
    def most(self) -> int | None:
        """The most tokens of a window that can be measured, None for no limit."""
        return None

    def last(self, length: int) -> int:
        """Return the last position, on any axis, that training on rows of `length` tokens can meet."""
        return length - 1

    def train(self, seed: int, step: Any, rows: jax.Array, length: int) -> jax.Array | None:
        """Return positions int32 [t] or [b, t] of the rows of a step; None for 0 to t - 1. Axes come last.

        Args:
          seed: of the run.
          step: from 0.
          rows: the numbers [b] of rows in the batch.
          length: t.
        """
        return None

    def measure(self, seed: int, length: int) -> jax.Array | None:
        """Return the positions int32 [t] of a window that is measured; None for 0 to t - 1."""
        return None

    def __str__(self) -> str:
        return unparse({"name": snake_case(type(self)), **vars(self)})


@dataclasses.dataclass(frozen=True)
class Sequential(PositionPolicy):
    """Token j has position j."""


@dataclasses.dataclass(frozen=True)
class Offset(PositionPolicy):
    """A random offset o for each row of training: its token j has position o + j.

    So absolute positions beyond the training length are trained too. Measured windows have no offset.

    Reference: Huang et al. 2025, arXiv 2410.02140, appendix E, and their code.
    Differs: their o is uniform from 0 to N less the tokens of an item; here to N less those of a row with its padding.
    """

    longest: Count

    def last(self, length: int) -> int:
        return self.longest - 1

    def train(self, seed: int, step: Any, rows: jax.Array, length: int) -> jax.Array:
        key = jax.random.fold_in(_key(seed, _TRAINED), step)

        def draw(row: jax.Array) -> jax.Array:
            return jax.random.randint(jax.random.fold_in(key, row), (), 0, self.longest - length + 1, jnp.int32)

        return jax.vmap(draw)(rows)[:, None] + jnp.arange(length, dtype=jnp.int32)[None]


@dataclasses.dataclass(frozen=True)
class Randomised(PositionPolicy):
    """A random set of t of the positions 0 to N - 1 for the t tokens of a row, in rising order.

    All sets are equally likely. All rows of a step have the same positions. A measured window has random positions too,
    the same in all windows of its length. They depend on the seed of the run, so the spread over seeds covers them.

    Reference: Ruoss et al. 2023, arXiv 2305.16843, section 3 ("once per batch"), and their code.
    Differs: they draw again for every 64 measured sequences, and for every layer of RoPE. Their rows have no padding.
    """

    longest: Count

    @property
    def most(self) -> int:
        return self.longest

    def last(self, length: int) -> int:
        return self.longest - 1

    def train(self, seed: int, step: Any, rows: jax.Array, length: int) -> jax.Array:
        return self._draw(jax.random.fold_in(_key(seed, _TRAINED), step), length)

    def measure(self, seed: int, length: int) -> jax.Array:
        return self._draw(jax.random.fold_in(_key(seed, _MEASURED), length), length)

    def _draw(self, key: jax.Array, length: int) -> jax.Array:
        return jnp.sort(jax.random.choice(key, self.longest, (length,), replace=False)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Grid(PositionPolicy):
    """The row and the column of each patch of a square picture in raster order: token i is at (i // side, i % side).

    A window has side * side tokens, in training and when it is measured. Encodings must read two axes, or no position.
    """

    axes = 2

    def length_problem(self, length: int) -> str:
        if length == (self.last(length) + 1) ** 2:
            return ""
        side = self.last(length)
        return f"{self} needs a square number of tokens, and {length} is none. Give {side**2} or {(side + 1) ** 2}."

    def last(self, length: int) -> int:
        return math.isqrt(length - 1)

    def train(self, seed: int, step: Any, rows: jax.Array, length: int) -> Any:
        return self.measure(seed, length)

    def measure(self, seed: int, length: int) -> Any:
        if problem := self.length_problem(length):
            raise UndefinedLength(problem)
        return np.stack(np.divmod(np.arange(length, dtype=np.int32), self.last(length) + 1), axis=-1)


POLICIES: dict[str, type[PositionPolicy]] = {snake_case(cls): cls for cls in (Sequential, Offset, Randomised, Grid)}


@functools.cache
def parse_policy(text: str) -> PositionPolicy:
    """Return the policy that a text names, as "offset(longest=300)". Raises ConfigError."""
    examples = {name: f"{name}(longest=512)" if dataclasses.fields(cls) else name for name, cls in POLICIES.items()}
    return parse_value(text, "position policy", "policies", POLICIES, examples)


class Positions(NamedTuple):
    """The positions of one run: its policy, and the seed that it draws from."""

    policy: PositionPolicy = Sequential()
    seed: int = 0

    def train(self, step: Any, rows: jax.Array, length: int) -> jax.Array | None:
        """Return positions [t] or [b, t] of the rows of a step, as `PositionPolicy.train`."""
        return self.policy.train(self.seed, step, rows, length)

    def measure(self, length: int) -> np.ndarray | None:
        """Return the positions [t], or [t, axes], of a measured window, None for 0 to t - 1.

        Raises UndefinedLength if the policy has fewer positions, or none for this number of tokens.
        """
        if self.policy.most is not None and length > self.policy.most:
            raise UndefinedLength(f"{self.policy} has too few positions for {length} tokens.")
        return _host_positions(self.policy, self.seed, length)


@functools.lru_cache(maxsize=64)
def _host_positions(policy: PositionPolicy, seed: int, length: int) -> np.ndarray | None:
    with jax.ensure_compile_time_eval():  # a user may call a model within `jit`
        pos = policy.measure(seed, length)
        return None if pos is None else np.asarray(pos)
