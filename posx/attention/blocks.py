"""Parts of the blockwise executor: tile sizes, blocks of tokens, the walk over tiles, strips of distances, skipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import sharding
from posx.attention.arguments import Slots
from posx.attention.cpu import made_once
from posx.attention.masks import Mask
from posx.attention.tiles import Block, Tokens, finite, scaled_terms, visible_pairs
from posx.contract import ByDistance, Encoding, Params, at_least_float32, of_kinds


class Plan(NamedTuple):
    """The tiles of one call, known before tracing."""

    encoding: Encoding
    mask: Mask
    in_order: bool
    query_blocks: int
    query_block: int  # tokens in a tile
    key_block: int
    #: The first query's position less the first key's if positions are consecutive, else None.
    offset: int | None = None
    #: Slots between a key and a query from which on the strips are constant; None if no tile is that far.
    reach: int | None = None
    #: Whether far tiles that provably weigh nothing are skipped.
    skip: bool = False
    #: Whether there are parameters, so that the strips get gradients.
    learned: bool = False

    @property
    def farthest(self) -> int:
        """The largest distance of a tile."""
        return self.offset + self.query_blocks * self.query_block - 1  # type: ignore[operator]


class Tables(NamedTuple):
    """Arrays that all tiles share: params, {} if no hook reads them in a tile, and the strips of all distances."""

    params: Params
    strips: ByDistance | None


def block_sizes(num_queries: int, num_keys: int, rows: int, by_strips: bool, devices: int = 1) -> tuple[int, int]:
    """Return the tokens of a query block and of a key block, the fastest that were measured on CPUs.

    Blocks divide the lengths evenly, so that little is padded. In self-attention a key block is a whole number of query
    blocks, so that only the last tile of a row is on the diagonal.

    Args:
      num_queries, num_keys: tokens.
      rows: score matrices, b * h. Several cores want larger tiles if there are few rows, about 4 MB of scores.
      by_strips: products with strips cost (query_block + key_block) / key_block of those with keys: tiles are wide.
      devices: the number of devices that query blocks are sharded over, from both ends.
    """
    size, ratio = (64, 2) if by_strips else (128, 1)
    if rows < 32 and not sharding.is_one_core():
        size, ratio = 256, 2
    query_block = _even(num_queries, size, 1 if devices == 1 else 2 * devices)
    if num_queries != num_keys:
        return query_block, _even(num_keys, size * ratio)
    return query_block, query_block * min(ratio, count_blocks(num_keys, query_block))


def _even(num_tokens: int, block: int, multiple: int = 1) -> int:
    """Return the size of blocks of at most `block` tokens, whose number is a multiple of `multiple`."""
    return count_blocks(num_tokens, count_blocks(count_blocks(num_tokens, block), multiple) * multiple)


def tabulate(encoding: Encoding, params: Params, distances: np.ndarray, queries: jax.Array | None) -> ByDistance:
    """Return `by_distance` at distances [n], falling by one, heads first: bias and scaled [h, n], vectors [h, n, d].

    queries: [b, h, q, d] as projected, None if there is nothing but a bias.
    """
    r = jnp.asarray(distances)
    bias = finite(encoding.by_distance(params, r).bias)
    if queries is None:
        return ByDistance(bias=bias)
    found = scaled_terms(encoding, params, r, queries)
    heads_first = ByDistance(None, found.scaled, *jax.tree.map(lambda x: x.swapaxes(0, 1), tuple(found[2:])))
    # Made once, heads are in front in memory too: a tile reads its distances in one piece.
    return made_once(heads_first)._replace(bias=bias)


def reads_params(encoding: Encoding, strips: ByDistance | None) -> bool:
    """Return whether a hook is called inside tiles, where it reads the parameters."""
    at_positions = encoding.acts_on("by_distance") and strips is None
    return at_positions or bool(of_kinds(encoding, "pair", "channel", "tile"))


def can_skip(encoding: Encoding, terms: set[str], mask: Mask, slots: Slots) -> bool:
    """Return whether the bias by distance, the token bias and the norms of vectors bound the scores of a tile.

    terms: those of `by_distance`. Queries must also see themselves. A `bias` of both positions has no bound.
    """
    falls = "bias" in terms or encoding.acts_on("token_bias")
    bounded = terms <= {"bias"} and not of_kinds(encoding, "pair", "channel", "tile")
    return falls and bounded and mask.causal and not mask.window and slots.segment is None


def split_into_blocks(side: Block, block: int) -> Block:
    """Split every array of one side into blocks along its token axis, blocks in front: [n, ..., block, ...].

    The last block is padded with empty slots (idx -1) at the last position, for which encodings are defined.
    """
    tokens, slots = side
    padding = -slots.idx.shape[1] % block

    def split(x: jax.Array, axis: int, **pad: Any) -> jax.Array:
        x = jnp.pad(x, [(0, padding if n == axis else 0) for n in range(x.ndim)], **pad) if padding else x
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]), axis, 0)

    features = jax.tree.map(lambda x: split(x, 1), tokens.features)
    vectors = jax.tree.map(lambda x: split(x, 2), tokens._replace(features={}))
    segment = None if slots.segment is None else split(slots.segment, 1)
    where = Slots(split(slots.pos, 1, mode="edge"), split(slots.idx, 1, constant_values=-1), segment)
    return Block(vectors._replace(features=features), where)


def count_blocks(num_tokens: int, block: int) -> int:
    return -(-num_tokens // block)


def joined(x: jax.Array) -> jax.Array:
    """Return [b, h, n * block, d] of [n, b, h, block, d]."""
    n, b, h, block, d = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(b, h, n * block, d)


def over_blocks(plan: Plan, step: Callable, carry: Any, numbers: jax.Array | None, blocks: Any) -> Any:
    """Scan step(carry, (i, block i)) over the query blocks, without a loop if there is one.

    numbers: the numbers of these blocks among all; None for all.
    """
    if plan.query_blocks > 1:
        return jax.lax.scan(step, carry, (jnp.arange(plan.query_blocks) if numbers is None else numbers, blocks))
    carry, found = step(carry, (0, block_at(blocks, 0)))
    return carry, jax.tree.map(lambda x: x[None], found)


def walk(
    plan: Plan, i: Any, q_where: Slots, k_slots: Slots, visit: Callable, carry: Any, first: Callable[[Any], Any]
) -> Any:
    """Call `visit(j, carry, masked, far)` for the key blocks j that query block i may see, the diagonal one first.

    Args:
      far: given to visit; all pairs of the tile are beyond `plan.reach`.
      first: maps the carry after the diagonal tile to the first key block that may weigh anything.
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
    """Return block j of arrays [n, ...]. Not x[j]: the gradient of an index is a scatter, that of a slice an update."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), tree)


def first_row(plan: Plan, i: Any, j: Any, far: bool) -> Any:
    """Return the first row of tile (i, j) in the strips, that of its largest distance (last query, first key)."""
    return 0 if far else (plan.query_blocks - 1 - i) * plan.query_block + j * plan.key_block


def strip_of(plan: Plan, strips: ByDistance | None, i: Any, j: Any, far: bool) -> ByDistance | None:
    """Return the strips of tile (i, j)."""
    start, length = first_row(plan, i, j, far), 1 if far else plan.query_block + plan.key_block
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1), strips)


def skipper(plan: Plan, strips: ByDistance | None, k: Tokens) -> Callable[..., Any]:
    """Return `first(i, q, floor)`: the first key block that query block i must visit; 0 unless `plan.skip`.

    By Cauchy and Schwarz a score is at most bias_r + u_i - u_j + |q_i| |k_j|, and row i's log-sum-exp is at least
    `floor`. All keys whose bound is below log(eps / L) against it add less than eps to the row's weights together.

    Args:
      k: key vectors and token biases in blocks [n, b, g, k, d]; `first` takes one block of queries.
      strips: the bias of all distances; floor [b, h, q] in nats.
    """
    if not plan.skip:
        return lambda *_: 0
    count, query_block, key_block = k.mapped.shape[0], plan.query_block, plan.key_block
    ratio = key_block // query_block
    by_distance = _highest(plan, strips.bias, count) if strips is not None else None
    key_norms = jnp.linalg.norm(at_least_float32(k.mapped), axis=-1).max(axis=-1)
    key_norms = jnp.moveaxis(key_norms, 0, -1)[:, :, None]
    # The lowest token bias of each key block, summand by summand: their sum is no higher than any key's.
    lowest = None if k.token_bias is None else jnp.moveaxis(k.token_bias.min(axis=-2), 0, -2)[:, :, None]

    def first(i: Any, q: Block, floor: jax.Array) -> Any:
        norms = jnp.linalg.norm(at_least_float32(q.tokens.mapped), axis=-1)[..., None]
        bound = norms * key_norms - floor[..., None]
        if by_distance is not None:
            near = jax.lax.dynamic_slice_in_dim(by_distance, plan.query_blocks - 1 - i, count * ratio + 1, axis=1)
            of_tile = jnp.maximum(near[:, :-1].reshape(-1, count, ratio).max(axis=-1), near[:, ratio::ratio])
            bound = bound + of_tile[None, :, None]
        if lowest is not None:
            bound = bound + (q.tokens.token_bias[..., None, :] - lowest).sum(axis=-1)
        bound = jnp.where((q.slots.idx < 0)[:, None, :, None], -jnp.inf, bound)  # an empty slot sees nothing
        negligible = (bound < jnp.log(jnp.finfo(bound.dtype).eps / (count * key_block))).all(axis=(0, 1, 2))
        return jnp.minimum(jnp.argmin(negligible), i * query_block // key_block)

    return first


def _highest(plan: Plan, bias: jax.Array, count: int) -> jax.Array:
    """Return the highest bias over every query_block distances [h, n].

    A tile spans one more of these stretches than it has query blocks.
    """
    highest = bias.reshape(bias.shape[0], -1, plan.query_block).max(axis=-1)
    past = count * (plan.key_block // plan.query_block)
    return jnp.pad(highest, ((0, 0), (0, past)), constant_values=-jnp.inf)
