"""Distances of RoPE, remapped beyond a window: Self-Extend and ReRoPE."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Self

import jax
import jax.numpy as jnp

from posx.contract import About, Composite, Dims, Params, Tile, fact
from posx.contract.fields import Length, at_least
from posx.encodings.angles import sin_cos
from posx.encodings.rope import Rope, rotate
from posx.machine.platforms import is_on_cpu


@dataclasses.dataclass(frozen=True)
class SelfExtend(Composite):
    """RoPE at the distance r = i - j if r < w, else at floor(i / G) - floor(j / G) + w - floor(w / G).

    w is `window`, by default a quarter of the training length. G is `group`: tokens beyond w share positions in groups.
    No distance is then larger than those of texts of L tokens, up to (L - w) G + w tokens. G = 0 stands for one group
    of all, so that every distance beyond w is w: ReRoPE. It has no parameters, and is meant for trained RoPE models.

    Pairs beyond w take two more products, so attention takes longer than RoPE's.

    Reference: Jin et al. 2024, arXiv 2401.01325; ReRoPE: Su 2023, kexue.fm/archives/9708.
    Differs: Left out is Leaky ReRoPE, which has fractions in place of groups.
    """

    rope: Rope = Rope()  # noqa: RUF009 (a value)
    window: Length | None = None
    group: Annotated[int, "tokens", at_least(0)] = 4

    last_map = True
    integer_positions = True
    shift_invariant = fact(lambda self: self.group < 2)  # groups begin at position 0
    about = About("arXiv 2401.01325", "on a trained RoPE model yes, up to (L - w) G + w tokens in its paper")

    def resolve(self, dims: Dims) -> Self:
        return super().resolve(dims).fill_open(window=max(dims.train_len // 4, 1))

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        w, g = self.window, self.group
        if g:
            at = tile.q_pos // g + (w - w // g), tile.k_pos // g
        else:
            at = jnp.full_like(tile.q_pos, w), jnp.zeros_like(tile.k_pos)
        far = tile.q_pos[:, None] - tile.k_pos[None, :] >= w
        return move_products(self.rope, s, tile, [(far, *at)])


def move_products(
    rope: Rope, s: jax.Array, tile: Tile, moves: Sequence[tuple[jax.Array, jax.Array, jax.Array]]
) -> jax.Array:
    """Return scores s [h, q, k] with the products of RoPE at other positions, for some pairs.

    Vectors that are mapped turn on by the change of position, as rotations add. So maps before RoPE in a chain keep
    their effect. There are none after it: see `Chain`.

    Args:
      rope: its products are in s.
      s, tile: as `score` is given them.
      moves: the pairs, bool [q, k], and the positions [q] and [k] at which their vectors meet. No pair is in two moves.
    """

    theta = rope.frequencies.checked(rope.base, rope.rotary_dim)

    def turn(x: jax.Array, pos: jax.Array, to: jax.Array) -> jax.Array:
        return rotate(x, *sin_cos(to - pos, theta), rope.layout)

    def change(s: jax.Array, pairs: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        q, k = turn(tile.mapped_q, tile.q_pos, q_pos), turn(tile.mapped_k, tile.k_pos, k_pos)
        q = jnp.concatenate([q, -tile.mapped_q], axis=-1)
        k = jnp.concatenate([k, tile.mapped_k], axis=-1)
        gain = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=s.dtype)  # the new product less the old one
        gain = gain * tile.logit_scale / math.sqrt(tile.q.shape[-1])
        return s + jnp.where(pairs[None], gain, 0).astype(s.dtype)

    for move in moves:
        if len(tile.q) == 1 or (len(moves) == 1 and not is_on_cpu()):  # a product costs less than a branch on a device
            s = change(s, *move)
        else:  # a tile without pairs of this move is left as it is
            s = jax.lax.cond(move[0].any(), change, lambda s, *_: s, s, *move)
    return s
