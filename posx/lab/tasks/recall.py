"""Tasks that recall one of many things: flip-flop, associative recall, passkey."""

from __future__ import annotations

import dataclasses
import string
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from posx.contract.fields import at_least, at_most
from posx.lab.tasks.base import Item, Items, Task, shuffle


@dataclasses.dataclass(frozen=True)
class FlipFlop(Task):
    """A memory of one bit: w writes the bit that follows, r reads the last written one, i ignores its bit.

    n instructions, each with a bit. The first one writes, the last one reads. The others ignore with probability
    `ignore`, and write or read with the rest in equal parts. The bits after r are the answers. Source: Liu et al.
    (arXiv 2306.00946), FFL(0.8) with 256 instructions; FFL(0.98) is its sparse test, FFL(0.1) its dense one.
    """

    ignore: Annotated[float, at_least(0), at_most(1)] = 0.8
    fewest: ClassVar[int] = 2
    alphabet: ClassVar = ("0", "1", "w", "r", "i")

    def size(self, n: int) -> int:
        return 2 * n + 2

    def row(self, key: jax.Array, n: jax.Array, length: int) -> Items:
        room = length // 2 + 1
        what_key, bit_key = jax.random.split(key)
        at, write, read = jnp.arange(room), 2, 3
        other = (1 - self.ignore) / 2
        what = 2 + jax.random.choice(what_key, 3, (room,), p=jnp.array([other, other, self.ignore]))
        what = jnp.where(at == 0, write, jnp.where(at == n - 1, read, what))
        bits = jax.random.bernoulli(bit_key, shape=(room,)).astype(jnp.int32)
        last = jax.lax.cummax(jnp.where(what == write, at, 0))
        bits = jnp.where(what == read, bits[last], bits)
        return self.paired_row(jnp.stack([what, bits], axis=1), what == read, last, n, length)


@dataclasses.dataclass(frozen=True)
class Mqar(Task):
    """Recall the value of each key (multi-query associative recall).

    n pairs of tokens. The first eighth are keys with their values. Among the noise after them each key comes once more,
    at any place, and its value is the answer. No two keys and no two values are equal. Source: Arora et al. (arXiv
    2312.04927), figure 2, from 4 keys in 64 tokens on. Theirs puts most questions soon after the keys, and its noise
    has keys and values too.
    """

    symbols: Annotated[int, at_least(1), at_most(2**15)] = 256
    noise: Annotated[int, at_least(1), at_most(2**15)] = 64
    fewest: ClassVar[int] = 2

    @property
    def alphabet(self) -> tuple[str, ...]:
        kinds = ("k", self.symbols), ("v", self.symbols), ("n", self.noise)
        return tuple(f"{kind}{n}" for kind, count in kinds for n in range(count))

    @property
    def most(self) -> int:
        return 8 * self.symbols + 7

    def size(self, n: int) -> int:
        return 2 * n + 2

    def row(self, key: jax.Array, n: jax.Array, length: int) -> Items:
        room = length // 2 + 1
        most, count = max(1, room // 8), jnp.maximum(n // 8, 1)
        keys, values, place_key, noise_key = jax.random.split(key, 4)
        kinds = (shuffle(k, jnp.int32(self.symbols), self.symbols)[:most] for k in (keys, values))
        known = jnp.stack([number * self.symbols + kind for number, kind in enumerate(kinds)], axis=1)
        noise = 2 * self.symbols + jax.random.randint(noise_key, (room, 2), 0, self.noise)
        at = jnp.arange(room)
        asked = shuffle(place_key, n - count, room)[jnp.maximum(at - count, 0)]  # noise from `count` on
        number = jnp.where(at < count, at, asked)  # of the key
        has_key = (number < count) & (at < n)
        symbols = jnp.where(has_key[:, None], known[jnp.minimum(number, most - 1)], noise)
        return self.paired_row(symbols, has_key & (at >= count), number, n, length)


@dataclasses.dataclass(frozen=True)
class Passkey(Task):
    """Find the digits after the one mark among noise, and repeat them. Source: Mohtashami and Jaggi (2305.16300).

    n symbols: noise letters, and at a uniform depth the mark # and the digits. Theirs is English text.
    """

    digits: Annotated[int, at_least(1), at_most(64)] = 5
    noise: Annotated[int, at_least(1), at_most(26)] = 26

    @property
    def fewest(self) -> int:  # type: ignore[override]
        return self.digits + 1

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*string.digits, "#", *string.ascii_lowercase[: self.noise])

    def size(self, n: int) -> int:
        return n + 3 + self.digits

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        place_key, digit_key, noise_key = jax.random.split(key, 3)
        mark = jax.random.randint(place_key, (), 0, n - self.digits)
        digits = jax.random.randint(digit_key, (self.digits,), 0, 10)
        noise = 11 + jax.random.randint(noise_key, (room,), 0, self.noise)
        at = jnp.arange(room) - mark - 1
        inside = jnp.where((at >= 0) & (at < self.digits), digits[jnp.clip(at, 0, self.digits - 1)], noise)
        return Item(jnp.where(at == -1, 10, inside), digits, jnp.int32(self.digits), mark + 1 + jnp.arange(self.digits))
