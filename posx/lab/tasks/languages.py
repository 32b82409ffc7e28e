"""Tasks that ask whether a string is in a regular language. Source: Jerad et al. (arXiv 2608.11909), appendix E.1.

They train five layers of width 64 with eight heads on strings of up to 40 symbols, and test 41 to 500. <sep> stands
for their end of a string, where their classifier reads. They do not say how they draw strings. Here members and other
strings are equally likely, and the others are near members, so that neither a length nor a count tells the answer.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posx.lab.tasks.base import Item, Items, Task


@dataclasses.dataclass(frozen=True)
class Language(Task):
    """A language over `letters`. The answer is y for its members and n for other strings.

    A language defines `string`, which returns the letters of a member or of another string.
    """

    letters: ClassVar[str] = "ab"

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*self.letters, "y", "n")

    def size(self, n: int) -> int:
        return n + 4

    def string(self, key: jax.Array, n: jax.Array, room: int, is_member: jax.Array) -> jax.Array:
        """Return the numbers of n letters, int32 [room], of a string that is in the language if `is_member`."""
        raise NotImplementedError

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        kind_key, string_key = jax.random.split(key)
        is_member = jax.random.bernoulli(kind_key)
        return self.ask(self.string(string_key, n, room, is_member), is_member)

    def ask(self, string: jax.Array, is_member: jax.Array) -> Item:
        """Return the item that asks about a string."""
        return Item(string, len(self.letters) + jnp.where(is_member, 0, 1)[None], jnp.int32(1))


@dataclasses.dataclass(frozen=True)
class AaStar(Language):
    """(aa)*: is the number n of letters even? All letters are a.

    There is one string of each length. So the lengths of training can be learned by heart, and only longer strings
    show whether a model counts modulo 2. The items of a length are copies of few strings. Not star-free.
    """

    fewest: ClassVar[int] = 0
    letters: ClassVar[str] = "a"

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        return self.ask(jnp.zeros(room, jnp.int32), n % 2 == 0)


@dataclasses.dataclass(frozen=True)
class AbStar(Language):
    """(ab)*: n pairs of letters, all of them ab?

    Another string is a member with one letter changed, with two unequal neighbours exchanged, or with all letters
    changed, (ba)*. Each is equally likely, at a uniform place. The exchange keeps the number of a. Star-free.
    Differs: no string has an odd length, which would tell that it is not a member.
    """

    def size(self, n: int) -> int:
        return 2 * n + 4

    def row(self, key: jax.Array, n: jax.Array, length: int) -> Items:
        return super().row(key, 2 * n, length)

    def string(self, key: jax.Array, n: jax.Array, room: int, is_member: jax.Array) -> jax.Array:
        kind_key, place_key = jax.random.split(key)
        kind, at = jax.random.randint(kind_key, (), 0, 3), jnp.arange(room)
        place = jax.random.randint(place_key, (), 0, jnp.where(kind == 1, n - 1, n))
        is_changed = jnp.stack([at == place, (at == place) | (at == place + 1), at >= 0])[kind]
        return jnp.where(is_changed & ~is_member, 1 - at % 2, at % 2)


@dataclasses.dataclass(frozen=True)
class StartsWithA(Language):
    """a followed by anything: is the first of n letters a? The others are independent. Star-free."""

    def string(self, key: jax.Array, n: jax.Array, room: int, is_member: jax.Array) -> jax.Array:
        letters = jax.random.randint(key, (room,), 0, 2)
        return letters.at[0].set(jnp.where(is_member, 0, 1))


@dataclasses.dataclass(frozen=True)
class EndsWithA(Language):
    """Anything followed by a: is the last of n letters a? The others are independent. Star-free."""

    def string(self, key: jax.Array, n: jax.Array, room: int, is_member: jax.Array) -> jax.Array:
        letters = jax.random.randint(key, (room,), 0, 2)
        return letters.at[n - 1].set(jnp.where(is_member, 0, 1))


@dataclasses.dataclass(frozen=True)
class ContainsAb(Language):
    """Anything, ab, anything: does b follow a somewhere among n letters a, b and c?

    Letters are independent, but a b after a becomes c. A member then gets ab at one uniform place, and has it nowhere
    else. Star-free. With two letters alone each string with an a before a b would be a member, neighbours or not.
    """

    fewest: ClassVar[int] = 2
    letters: ClassVar[str] = "abc"

    def string(self, key: jax.Array, n: jax.Array, room: int, is_member: jax.Array) -> jax.Array:
        letter_key, place_key = jax.random.split(key)
        a, b, c = range(3)
        letters, at = jax.random.randint(letter_key, (room,), 0, 3), jnp.arange(room)
        letters = jnp.where((letters == b) & (jnp.roll(letters, 1) == a) & (at > 0), c, letters)
        place = jax.random.randint(place_key, (), 0, n - 1)
        planted = jnp.where(at == place, a, jnp.where(at == place + 1, b, letters))
        return jnp.where(is_member, planted, letters)
