"""The word problem of the permutations of five things, which no transformer of constant depth solves at all lengths."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posx.lab.tasks.base import Item, Task

#: The 120 permutations of 0 to 4 in the order of their digits, [120, 5].
PERMUTATIONS = np.array(list(itertools.permutations(range(5))))


@functools.cache
def product_table() -> np.ndarray:
    """Return the number of the permutation that applies b after a, [a, b]."""
    number = {tuple(one): n for n, one in enumerate(PERMUTATIONS.tolist())}
    return np.array([[number[tuple(b[a])] for b in PERMUTATIONS] for a in PERMUTATIONS], np.int32)


@dataclasses.dataclass(frozen=True)
class S5(Task):
    """Apply n permutations of five things one after the other; the answer is the permutation that results.

    Symbols are permutations, 01234 is the one that changes nothing. A negative control: NC1-complete, so that no
    encoding should reach all lengths. Source: Merrill et al. (arXiv 2404.08819).
    """

    alphabet: ClassVar = tuple("".join(map(str, one)) for one in PERMUTATIONS)

    def size(self, n: int) -> int:
        return n + 4

    def item(self, key: jax.Array, n: jax.Array, room: int) -> Item:
        question = jax.random.randint(key, (room,), 0, len(PERMUTATIONS))
        asked = jnp.where(jnp.arange(room) < n, question, 0)
        product = jax.lax.associative_scan(lambda a, b: jnp.asarray(product_table())[a, b], asked)[-1]
        return Item(question, product[None], jnp.int32(1))
