"""Pictures, of which a model predicts hidden patches from all other patches."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from posx.contract.fields import at_least, at_most
from posx.lab.tasks.base import BOS, FIRST, Items, Task

#: The shortest and the longest side of a rectangle, in patches.
SIDES = 2, 5


@dataclasses.dataclass(frozen=True)
class DeadLeaves(Task):
    """A square picture covered by rectangles of random colours, sides and places, the last one on top of the others.

    Sides are 2 to 5 patches. A symbol is the colour of a patch, and patches are in raster order. A rectangle may pass
    the border, and all its places are equally likely. So the statistics of a patch and its neighbours depend on neither
    their place nor the side of the picture. (side + 4)^2 rectangles leave a patch uncovered once in 200,000: it
    has the colour of the first one. Each pair of patches shares a rectangle with a probability that falls with the
    distance along both axes, and is 0 beyond 4 patches.

    Source: the dead leaves model of images, Lee, Mumford and Huang 2001, International Journal of Computer Vision 41.
    """

    colours: Annotated[int, at_least(2), at_most(64)] = 8

    fewest: ClassVar[int] = 4
    objective: ClassVar = "masked"

    @property
    def alphabet(self) -> tuple[str, ...]:
        return tuple(f"c{n}" for n in range(self.colours))

    def size(self, n: int) -> int:
        return n + 1

    def longest(self, length: int) -> int:
        return length if math.isqrt(length) ** 2 == length else self.fewest - 1

    def length_problem(self, length: int) -> str:
        side = max(math.isqrt(length), 2)
        return f"square pictures alone, and {length} patches are none. Give {side**2} or {(side + 1) ** 2}"

    def row(self, key: jax.Array, n: jax.Array, length: int) -> Items:
        """Return <bos> and the patches of a picture. Each of these may be hidden."""
        side = math.isqrt(length)
        place_key, size_key, colour_key = jax.random.split(key, 3)
        count = (side + SIDES[1] - 1) ** 2
        first = jax.random.randint(place_key, (count, 2), 1 - SIDES[1], side)
        sides = jax.random.randint(size_key, (count, 2), SIDES[0], SIDES[1] + 1)
        colours = jax.random.randint(colour_key, (count,), 0, self.colours)
        at = jnp.arange(side)
        covers = (at[None, :, None] >= first[:, None]) & (at[None, :, None] < (first + sides)[:, None])  # [n, side, 2]
        both = covers[:, :, None, 0] & covers[:, None, :, 1]
        top = jnp.where(both, jnp.arange(count)[:, None, None], 0).max(axis=0)
        tokens = jnp.concatenate([jnp.array([BOS]), FIRST + colours[top].ravel()])
        return Items(tokens.astype(jnp.int32), jnp.arange(length + 1) > 0)
