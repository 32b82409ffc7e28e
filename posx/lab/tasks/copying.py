"""Tasks whose answer repeats the question, or a part of it. Source, unless a class names another: Huang et al. (arXiv
2410.02140), appendix E.
"""

from __future__ import annotations

import dataclasses
import string
from typing import Annotated

import jax
import jax.numpy as jnp

from posx.contract.fields import at_least, at_most
from posx.lab.tasks.base import Item, Task, shuffle


@dataclasses.dataclass(frozen=True)
class UniqueCopy(Task):
    """Repeat n symbols, no two of which are equal."""

    symbols: Annotated[int, at_least(1), at_most(2**16)] = 150

    @property
    def alphabet(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.symbols)))

    @property
    def most(self) -> int:
        return self.symbols

    def size(self, n: int) -> int:
        return 2 * n + 3

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        question = shuffle(key, jnp.int32(self.symbols), self.symbols)
        return Item(question, question, n, jnp.arange(self.symbols))


@dataclasses.dataclass(frozen=True)
class Sort(UniqueCopy):
    """Write n different numbers in rising order."""

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        question = super().item(key, n, room).question
        asked = jnp.where(jnp.arange(self.symbols) < n, question, self.symbols)
        return Item(question, jnp.sort(asked), n, jnp.argsort(asked))


@dataclasses.dataclass(frozen=True)
class RepeatCopy(Task):
    """Repeat n independent symbols, of so few kinds that a neighbourhood does not tell a place."""

    symbols: Annotated[int, at_least(2), at_most(26)] = 2

    @property
    def alphabet(self) -> tuple[str, ...]:
        return tuple(string.ascii_lowercase[: self.symbols])

    def size(self, n: int) -> int:
        return 2 * n + 3

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        question = jax.random.randint(key, (room,), 0, self.symbols)
        return Item(question, question, n, jnp.arange(room))


@dataclasses.dataclass(frozen=True)
class SelectiveCopy(Task):
    """Repeat the symbols that stand at random places among blanks, in their order.

    A quarter of the n symbols, at most `copied`, are none of the blanks. Source: Gu and Dao (arXiv 2312.00752), section
    4.1.1, with 16 symbols of 16 kinds.
    """

    symbols: Annotated[int, at_least(2), at_most(26)] = 16
    copied: Annotated[int, at_least(1)] = 16

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*string.ascii_lowercase[: self.symbols], ".")

    def size(self, n: int) -> int:
        return n + 3 + max(1, min(self.copied, n // 4))

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        place_key, symbol_key = jax.random.split(key)
        count = jnp.clip(n // 4, 1, self.copied)
        is_copied = shuffle(place_key, n, room) < count
        symbols = jax.random.randint(symbol_key, (room,), 0, self.symbols)
        places = jnp.argsort(~is_copied, stable=True)  # those that are copied first
        return Item(jnp.where(is_copied, symbols, self.symbols), symbols[places], count, places)
