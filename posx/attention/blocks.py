"""How the blockwise executor cuts its work: tile sizes, blocks of tokens, the walk over tiles, strips of distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import cut
from posx.attention.masks import Mask
from posx.attention.tiles import Block, Slots, Strips, Tokens, by_distance, finite, visible_pairs
from posx.encodings.base import (
    BY_DISTANCE,
    FALLING,
    PAIRWISE,
    Encoding,
    Params,
    Relative,
    acting,
    as_float,
    at_least_float32,
)


class Plan(NamedTuple):
    """What is known before tracing."""

    encoding: Encoding
    mask: Mask
    in_order: bool
    query_blocks: int
    #: Tokens in a tile.
    query_block: int
    key_block: int
    #: Of the first query from the first key, where distances are consecutive; else None.
    offset: int | None = None
    #: Places a query stands behind a key, from which on the strips are constant; None if no tile lies beyond.
    reach: int | None = None
    #: Whether tiles whose curve or potential has fallen so far that they provably weigh nothing are left out.
    skip: bool = False
    #: Whether there are parameters, so that gradients of the strips are wanted.
    learned: bool = False

    @property
    def farthest(self) -> int:
        """The largest distance of a tile."""
        return self.offset + self.query_blocks * self.query_block - 1  # type: ignore[operator]


class Tables(NamedTuple):
    """What all tiles share: params, empty where no hook reads them in a tile, and the strips of all distances."""

    params: Params
    strips: Strips | None


def block_sizes(num_queries: int, num_keys: int, rows: int, by_strips: bool, devices: int = 1) -> tuple[int, int]:
    """Tokens in a tile for `rows` = b * h score matrices: what ran fastest on one core of a CPU, and on several, which
    want larger tiles where there are few rows, about 4 MB of scores, as they share the products of each.

    `by_strips`: products with strips cost (query_block + key_block) / key_block of those with keys, so tiles are wide.
    Blocks divide the lengths evenly, so that little is filled up; in self-attention a key block is a whole number of
    query blocks, so that only the last tile of a row lies on the diagonal. devices: what the blocks of queries are
    dealt out to, from both ends.
    """
    size, ratio = (64, 2) if by_strips else (128, 1)
    if rows < 32 and not cut.is_one_core():
        size, ratio = 256, 2
    query_block = _even(num_queries, size, 1 if devices == 1 else 2 * devices)
    if num_queries != num_keys:
        return query_block, _even(num_keys, size * ratio)
    return query_block, query_block * min(ratio, count_blocks(num_keys, query_block))


def _even(num_tokens: int, block: int, multiple: int = 1) -> int:
    """The size of blocks of at most `block` tokens, as many as are a multiple of `multiple`."""
    return count_blocks(num_tokens, count_blocks(count_blocks(num_tokens, block), multiple) * multiple)


def tabulate(encoding: Encoding, params: Params, distances: np.ndarray, queries: jax.Array | None) -> Strips:
    """`curve` and `relative` at distances [n], falling by one. queries: [b, h, q, d] as projected, for `relative`."""
    curve = finite(encoding.curve(params, as_float(distances))) if encoding.acts_on("curve") else None
    vectors = Relative() if queries is None else by_distance(encoding, params, jnp.asarray(distances), queries)
    # Behind the barrier heads are in front in memory too: a tile reads its distances in one piece.
    return Strips(curve, jax.lax.optimization_barrier(jax.tree.map(lambda x: x.swapaxes(0, 1), vectors)))


def reads_params(encoding: Encoding, strips: Strips | None) -> bool:
    """Whether a hook is called inside tiles, where it reads the parameters."""
    by_position = encoding.acts_on("bias") and (strips is None or strips.curve is None)
    by_distance = strips is None and acting(encoding, BY_DISTANCE)
    of_pairs = acting(encoding, (hook for hook in PAIRWISE if hook not in BY_DISTANCE))
    return bool(by_position or by_distance or of_pairs)


def can_skip(encoding: Encoding, mask: Mask, slots: Slots) -> bool:
    """Whether a tile's scores are bounded by its curve, its potential and the norms of its vectors, and its queries see
    themselves."""
    known = encoding.acts_on("curve") or not encoding.acts_on("bias")
    bounded = known and acting(encoding, FALLING) and not acting(encoding, PAIRWISE)
    return bool(bounded) and mask.causal and not mask.window and slots.segment is None


def cut_into_blocks(side: Block, block: int) -> Block:
    """Every array of one side cut into blocks along its token axis, blocks in front: [n, ..., block, ...].

    What fills the last block is an empty slot (idx -1) that repeats the last position, for which encodings are defined.
    """
    tokens, slots = side
    padding = -slots.idx.shape[1] % block

    def cut(x: jax.Array, axis: int, **pad: Any) -> jax.Array:
        x = jnp.pad(x, [(0, padding if n == axis else 0) for n in range(x.ndim)], **pad) if padding else x
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]), axis, 0)

    features = jax.tree.map(lambda x: cut(x, 1), tokens.features)
    vectors = jax.tree.map(lambda x: cut(x, 2), tokens._replace(features={}))
    segment = None if slots.segment is None else cut(slots.segment, 1)
    where = Slots(cut(slots.pos, 1, mode="edge"), cut(slots.idx, 1, constant_values=-1), segment)
    return Block(vectors._replace(features=features), where)


def count_blocks(num_tokens: int, block: int) -> int:
    return -(-num_tokens // block)


def joined(x: jax.Array) -> jax.Array:
    """[n, b, h, block, d] -> [b, h, n * block, d]."""
    n, b, h, block, d = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(b, h, n * block, d)


def over_blocks(plan: Plan, step: Callable, carry: Any, numbers: jax.Array | None, blocks: Any) -> Any:
    """`jax.lax.scan` of step(carry, (i, block i)) over the query blocks; no loop where there is one.

    numbers: which of all blocks those here are; None for all.
    """
    if plan.query_blocks > 1:
        return jax.lax.scan(step, carry, (jnp.arange(plan.query_blocks) if numbers is None else numbers, blocks))
    carry, found = step(carry, (0, block_at(blocks, 0)))
    return carry, jax.tree.map(lambda x: x[None], found)


def walk(
    plan: Plan, i: Any, q_where: Slots, k_slots: Slots, visit: Callable, carry: Any, first: Callable[[Any], Any]
) -> Any:
    """`visit(j, carry, masked, far)` over the key blocks j that query block i may see, the one on the diagonal first.

    far: all pairs of the tile lie beyond `plan.reach`. first: from what the diagonal's tile left in the carry to the
    first key block that may weigh anything.
    """
    count, query_block, key_block = k_slots.idx.shape[0], plan.query_block, plan.key_block
    causal_past = plan.in_order and plan.mask.causal
    last = i * query_block // key_block if causal_past else count - 1
    if causal_past and not plan.mask.window and q_where.segment is None:
        carry = visit(last, carry, True)
        if count == 1:
            return carry
        near = first(carry)
        if plan.reach is not None:
            near = jnp.clip((i * query_block + 1 - plan.reach) // key_block, 0, last)
            carry = jax.lax.fori_loop(0, near, lambda j, carry: visit(j, carry, False, True), carry)
        return jax.lax.fori_loop(near, last, lambda j, carry: visit(j, carry, False), carry)

    def look(j: Any, carry: Any) -> Any:
        visible = visible_pairs(plan.mask, q_where, block_at(k_slots, j))
        return jax.lax.cond(visible.any(), lambda carry: visit(j, carry, True), lambda carry: carry, carry)

    return look(0, carry) if count == 1 else jax.lax.fori_loop(0, last + 1, look, carry)


def block_at(tree: Any, j: Any) -> Any:
    """Block j of arrays [n, ...]. Not x[j]: the gradient of an index is a scatter, that of a slice an update."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), tree)


def first_row(plan: Plan, i: Any, j: Any, far: bool) -> Any:
    """Where tile (i, j) starts in the strips: the row of its largest distance (last query, first key)."""
    return 0 if far else (plan.query_blocks - 1 - i) * plan.query_block + j * plan.key_block


def strip_of(plan: Plan, strips: Strips | None, i: Any, j: Any, far: bool) -> Strips | None:
    """The distances that tile (i, j) meets."""
    start, length = first_row(plan, i, j, far), 1 if far else plan.query_block + plan.key_block
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1), strips)


def skipper(plan: Plan, strips: Strips | None, k: Tokens) -> Callable[..., Any]:
    """`first(i, q, floor)`: the first key block that query block i has to look at; 0 unless `plan.skip`.

    By Cauchy and Schwarz a score is at most curve + u_i - u_j + |q_i| |k_j|, and row i's log-sum-exp at least `floor`:
    what lies below log(eps / L) against it adds less than eps to the row's weights, all such keys together.

    Args: k: key vectors and potentials in blocks [n, b, g, k, d]; q: a block of queries; floor [b, h, q] in nats.
    """
    if not plan.skip:
        return lambda *_: 0
    count, query_block, key_block = k.mapped.shape[0], plan.query_block, plan.key_block
    ratio = key_block // query_block
    by_curve = _highest(plan, strips.curve, count) if strips is not None else None
    key_norms = jnp.linalg.norm(at_least_float32(k.mapped), axis=-1).max(axis=-1)
    key_norms = jnp.moveaxis(key_norms, 0, -1)[:, :, None]
    # Of the keys' potentials the lowest of each block, part by part: what they come to is no less.
    lowest = None if k.potential is None else jnp.moveaxis(k.potential.min(axis=-2), 0, -2)[:, :, None]

    def first(i: Any, q: Block, floor: jax.Array) -> Any:
        norms = jnp.linalg.norm(at_least_float32(q.tokens.mapped), axis=-1)[..., None]
        bound = norms * key_norms - floor[..., None]
        if by_curve is not None:
            near = jax.lax.dynamic_slice_in_dim(by_curve, plan.query_blocks - 1 - i, count * ratio + 1, axis=1)
            of_tile = jnp.maximum(near[:, :-1].reshape(-1, count, ratio).max(axis=-1), near[:, ratio::ratio])
            bound = bound + of_tile[None, :, None]
        if lowest is not None:
            bound = bound + (q.tokens.potential[..., None, :] - lowest).sum(axis=-1)
        bound = jnp.where((q.slots.idx < 0)[:, None, :, None], -jnp.inf, bound)  # an empty slot sees nothing
        negligible = (bound < jnp.log(jnp.finfo(bound.dtype).eps / (count * key_block))).all(axis=(0, 1, 2))
        return jnp.minimum(jnp.argmin(negligible), i * query_block // key_block)

    return first


def _highest(plan: Plan, curve: jax.Array, count: int) -> jax.Array:
    """[h, n]: highest points of the curve over every query_block distances; a tile meets one more of these stretches
    than it has query blocks."""
    highest = curve.reshape(curve.shape[0], -1, plan.query_block).max(axis=-1)
    past = count * (plan.key_block // plan.query_block)
    return jnp.pad(highest, ((0, 0), (0, past)), constant_values=-jnp.inf)
