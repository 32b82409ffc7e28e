"""Tasks whose answer counts: majorities, parity and addition. Source: Huang et al. (arXiv 2410.02140), appendix E."""

from __future__ import annotations

import dataclasses
import string
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from posx.contract.fields import at_least, at_most
from posx.lab.tasks.base import Item, Task, shuffle

BITS = ("0", "1")


def bits_with_zeros(key: jax.Array, zeros: jax.Array, n: jax.Array, room: int) -> jax.Array:
    """Return n bits in a random order, of which `zeros` are 0, int32 [room]."""
    return (shuffle(key, n, room) >= zeros).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class BinaryMajority(Task):
    """Which bit occurs more often? The number of zeros is uniform among those without a tie."""

    alphabet: ClassVar = BITS

    def size(self, n: int) -> int:
        return n + 4

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        count_key, order_key = jax.random.split(key)
        zeros = jax.random.randint(count_key, (), 0, n + n % 2)
        zeros = jnp.where((n % 2 == 0) & (2 * zeros >= n), zeros + 1, zeros)  # passes over the tie
        answer = (2 * zeros < n).astype(jnp.int32)
        return Item(bits_with_zeros(order_key, zeros, n, room), answer[None], jnp.int32(1))


@dataclasses.dataclass(frozen=True)
class Majority(Task):
    """Which letter occurs most often? Letters are independent; items with a tie at the top are drawn again."""

    symbols: Annotated[int, at_least(2), at_most(26)] = 26

    @property
    def alphabet(self) -> tuple[str, ...]:
        return tuple(string.ascii_lowercase[: self.symbols])

    def size(self, n: int) -> int:
        return n + 4

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        letters = jnp.arange(self.symbols)

        def draw(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            key, own = jax.random.split(key)
            question = jax.random.randint(own, (room,), 0, self.symbols)
            counts = ((question[:, None] == letters[None]) & (jnp.arange(room) < n)[:, None]).sum(axis=0)
            return key, question, counts

        def is_tie(drawn: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return (drawn[2] == drawn[2].max()).sum() > 1

        _, question, counts = jax.lax.while_loop(is_tie, lambda drawn: draw(drawn[0]), draw(key))
        return Item(question, counts.argmax()[None], jnp.int32(1))


@dataclasses.dataclass(frozen=True)
class Parity(Task):
    """Is the number of ones even (e) or odd (o)? That number is uniform."""

    fewest: ClassVar[int] = 0
    alphabet: ClassVar = (*BITS, "e", "o")

    def size(self, n: int) -> int:
        return n + 4

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        count_key, order_key = jax.random.split(key)
        ones = jax.random.randint(count_key, (), 0, n + 1)
        return Item(bits_with_zeros(order_key, n - ones, n, room), 2 + ones[None] % 2, jnp.int32(1))


@dataclasses.dataclass(frozen=True)
class Addition(Task):
    """The sum of two binary numbers, a + b, of n symbols with the sign. The first digit is 1 unless it is the only one.

    Digits are written from the largest to the smallest. The sizes of the numbers are uniform. The token before the
    answer is <sep>, which stands for =. n differs by 1 from Huang et al., who count = among the symbols. A sum may
    have fewer digits than `size` allows for n symbols, so a row may be shorter than its length asks for.
    """

    fewest: ClassVar[int] = 3
    alphabet: ClassVar = (*BITS, "+")

    def size(self, n: int) -> int:
        return n + 2 + n - 1 + 1

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        size_key, digit_key = jax.random.split(key)
        first = jax.random.randint(size_key, (), 1, n - 1)  # digits of a, so b has n - 1 - first
        second, at = n - 1 - first, jnp.arange(room)
        digits = jax.random.bernoulli(digit_key, shape=(room,)).astype(jnp.int32)
        digits = jnp.where((at == 0) & (first > 1) | (at == first + 1) & (second > 1), 1, digits)
        question = jnp.where(at == first, 2, digits)

        def from_smallest(start: jax.Array, count: jax.Array) -> jax.Array:
            return jnp.where(at < count, digits[jnp.clip(start + count - 1 - at, 0, room - 1)], 0)

        def add(carry: jax.Array, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
            total = carry + pair
            return total // 2, total % 2

        sums = from_smallest(jnp.int32(0), first) + from_smallest(first + 1, second)
        _, total = jax.lax.scan(add, jnp.int32(0), sums)
        top = jnp.where(total > 0, at, 0).max()
        return Item(question, total[jnp.clip(top - at, 0, room - 1)], top + 1)
