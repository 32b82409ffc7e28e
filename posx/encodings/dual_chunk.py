"""Distances of RoPE, remapped by chunks: Dual Chunk Attention."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from posx.contract import About, Composite, Dims, Params, Tile
from posx.contract.fields import Length
from posx.encodings.rope import Rope
from posx.encodings.self_extend import move_products
from posx.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DualChunk(Composite):
    """RoPE at the distance P_i - (j mod s), where P_i depends on the chunk of s tokens that j is in.

        i's chunk: P_i = i mod s    the one before: P_i = min(i mod s + s, c - 1)    earlier ones: P_i = c - 1

    s is `chunk`, by default three quarters of the training length. c is `window`, by default the training length. No
    distance is then above c - 1, at any length. Distances up to c - s and s are those of the text, across chunks too.
    In earlier chunks a distance gives the place within the key's chunk, but not the chunk. It has no parameters, and is
    meant for trained RoPE models. Chunks begin at position 0.

    Pairs in two chunks take two more products, so attention takes longer than RoPE's.

    Reference: An et al. 2024, arXiv 2402.17463, section 3.
    Differs: the released code has s = 11/16 L and ends at 3/4 L in place of c - 1. Keys of later chunks, which the
    paper hides, keep their distance.
    """

    rope: Rope = Rope()  # noqa: RUF009 (a value)
    chunk: Length | None = None
    window: Length | None = None

    last_map = True
    integer_positions = True
    shift_invariant = False  # chunks begin at position 0
    about = About("arXiv 2402.17463", "on a trained RoPE model yes, in its paper")

    def resolve(self, dims: Dims) -> Self:
        resolved = super().resolve(dims).fill_open(chunk=max(3 * dims.train_len // 4, 1), window=dims.train_len)
        if resolved.chunk > resolved.window:
            raise ConfigError(f"dual_chunk: chunk={resolved.chunk} must be at most window={resolved.window}")
        return resolved

    def score(self, params: Params, s: jax.Array, tile: Tile) -> jax.Array:
        size, last = self.chunk, jnp.full_like(tile.q_pos, self.window - 1)
        behind = tile.q_pos[:, None] // size - tile.k_pos[None, :] // size
        near, k_pos = jnp.minimum(tile.q_pos % size + size, last), tile.k_pos % size
        return move_products(self.rope, s, tile, [(behind == 1, near, k_pos), (behind > 1, last, k_pos)])
