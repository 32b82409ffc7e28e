"""The tiles of one call of the blockwise executor: their sizes, blocks of tokens, strips of distances, skipping."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import sharding
from posx.attention.accelerators import queries_in_rows
from posx.attention.arguments import Slots
from posx.attention.cpu import materialize
from posx.attention.masks import Mask
from posx.attention.tiles import Block, SharedArrays, TileInputs, Tokens, bias_strip, scaled_terms, sinks, visible_pairs
from posx.contract import HOOKS, ByDistance, Encoding, at_least_float32, defined_hooks
from posx.machine.platforms import is_on_cpu

#: Keys from which on an encoding that fades skips tiles, on CPUs. At shorter lengths one head after the other costs
#: more than skipping saves, and it would leave larger machines idle.
SKIP_FROM = 1024

#: Scores in a tile of whole rows on a CPU core, 512 KiB of float32, and the fewest queries of it. `score` makes arrays
#: of many times that size. DAPE's gradients took twice as long in tiles of 1 MiB.
IN_CACHE, FEWEST_QUERIES = 2**17, 64

#: Scores in a tile on an accelerator, 128 MB of float32, and the fewest and most tokens of its sides. A loop over small
#: tiles leaves the chip idle: each step launches kernels and waits for the loop's condition.
ON_CHIP, SIDES = 2**25, (128, 2048)

#: The hooks that a tile evaluates at its own positions or content.
IN_TILES = frozenset(name for name, hook in HOOKS.items() if hook.kind in ("pair", "channel", "tile"))


class Tiling(NamedTuple):
    """The requested tiles.

    Only tiles in order under a causal mask are skipped, and only if biases and the norms of vectors bound their scores.

    Attributes:
      query_block, key_block: tokens in a tile; 0 for the default, see `block_sizes`.
      skip: skip far tiles that provably weigh nothing, head by head; None if the encoding `fades` and it pays.
    """

    query_block: int = 0
    key_block: int = 0
    skip: bool | None = None


class Plan(NamedTuple):
    """The tiles of one call, known before tracing."""

    encoding: Encoding
    mask: Mask
    in_order: bool
    query_blocks: int
    key_blocks: int
    query_block: int  # tokens in a tile
    key_block: int
    #: The first query's position less the first key's if positions are consecutive, else None.
    offset: int | None
    #: Slots between a key and a query from which on the strips are constant; None if no tile is that far.
    reach: int | None
    #: Whether far tiles that provably weigh nothing are skipped.
    skip: bool
    #: Whether there are parameters, so that the strips get gradients.
    learned: bool
    #: The last tile of each row is on the diagonal, and all tiles before it need no mask.
    diagonal: bool = False
    #: The first keys, if tiles are whole rows, for which the strips are constant.
    far: int = 0


def make_plan(
    pairs: TileInputs, terms: set[str], in_order: bool, offset: int | None, tiling: Tiling, in_rows: bool, devices: int
) -> Plan:
    """Return the tiles of a call.

    Args:
      pairs: a whole call.
      terms: the terms that `by_distance` returns.
      in_order, offset, tiling: as `blockwise` is given them.
      in_rows: what `whole_rows` returns.
      devices: see `block_sizes`.
    """
    encoding, mask, (params, *_), q, k = pairs
    (b, h), groups, (num_queries, num_keys) = q.tokens.mapped.shape[:2], k.tokens.mapped.shape[1], pairs.sizes
    skip, vectors, hooks, cpu = tiling.skip, bool(terms - {"bias"}), defined_hooks(encoding), is_on_cpu()
    if skip is None:
        skip = encoding.fades and num_keys >= SKIP_FROM and cpu
    # Queries must see themselves. A `bias` of both positions has no bound.
    falls = offset is not None if "bias" in terms else "token_bias" in hooks
    bounded, plain = falls and not vectors and not hooks & IN_TILES, not mask.window and q.slots.segment is None
    skip = skip and bounded and in_order and mask.causal and plain
    rows = b * h // groups if skip else b * h
    sizes = block_sizes(num_queries, num_keys, rows, vectors, cpu, devices)
    query_block, key_block = tiling.query_block or sizes[0], tiling.key_block or sizes[1]
    if in_rows:
        key_block = num_keys
        if not tiling.query_block and (not cpu or sharding.is_one_core()):
            fitting = IN_CACHE // h // num_keys if cpu else queries_in_rows(rows, num_keys, "score" in hooks)
            query_block = _even(num_queries, max(FEWEST_QUERIES, fitting))
    in_order = in_order and (key_block % query_block == 0 or key_block >= num_keys)
    query_blocks, key_blocks = -(-num_queries // query_block), -(-num_keys // key_block)
    in_one = key_blocks == 1 and not cpu  # the condition of a loop's step would wait for the device
    plan = Plan(
        encoding, mask, in_order, query_blocks, key_blocks, query_block, key_block, offset if in_order else None,
        reach=None, skip=skip and in_order and key_block < num_keys, learned=bool(jax.tree.leaves(params)),
        diagonal=in_order and mask.causal and (in_one or plain),
    )  # fmt: skip
    if plan.offset is None or not vectors or encoding.reach is None:
        return plan
    if key_blocks == 1 and not cpu:
        return plan._replace(far=max(plan.offset - encoding.reach, 0))
    reached = encoding.reach + key_block > plan.offset + query_blocks * query_block - 1
    return plan if reached else plan._replace(reach=encoding.reach - plan.offset)


def whole_rows(pairs: TileInputs, in_order: bool, tiling: Tiling, devices: int) -> bool:
    """Return whether tiles are whole rows: `score` reads them, or an accelerator has the memory for them."""
    if pairs.encoding.tiling != "any" or is_on_cpu():
        return pairs.encoding.tiling != "any"
    (b, h), by_score = pairs.q.tokens.mapped.shape[:2], "score" in defined_hooks(pairs.encoding)
    causal = in_order and pairs.mask.causal and not pairs.mask.window
    return causal and tiling == Tiling() and devices == 1 and queries_in_rows(b * h, pairs.sizes[1], by_score) > 0


def block_sizes(
    num_queries: int, num_keys: int, rows: int, by_strips: bool, cpu: bool, devices: int = 1
) -> tuple[int, int]:
    """Return the tokens of a query block and of a key block: on CPUs the fastest that were measured.

    Blocks divide the lengths evenly, so that little is padded. In self-attention a key block is a whole number of query
    blocks, so that only the last tile of a row is on the diagonal.

    Args:
      num_queries, num_keys: tokens.
      rows: score matrices, b * h. Several cores want larger tiles if there are few rows, about 4 MB of scores.
      by_strips: products with strips cost (query_block + key_block) / key_block of those with keys: tiles are wide.
      cpu: the call is traced for CPUs.
      devices: the number of devices that query blocks are sharded over, from both ends.
    """
    size, ratio = (64, 2) if by_strips else (128, 1)
    if not cpu:
        largest = math.isqrt(ON_CHIP // rows)
        size = min(max(2 ** (largest.bit_length() - 1), SIDES[0]), SIDES[1])
    elif rows < 32 and not sharding.is_one_core():
        size, ratio = 256, 2
    query_block = _even(num_queries, size, 1 if devices == 1 else 2 * devices)
    if num_queries != num_keys:
        return query_block, _even(num_keys, size * ratio)
    return query_block, query_block * min(ratio, -(-num_keys // query_block))


def _even(num_tokens: int, block: int, multiple: int = 1) -> int:
    """Return the size of blocks of at most `block` tokens, whose number is a multiple of `multiple`."""
    blocks = -(-num_tokens // (block * multiple)) * multiple
    return -(-num_tokens // blocks)


def tabulate(plan: Plan, pairs: TileInputs, terms: set[str]) -> SharedArrays:
    """Return what tiles read: the terms by distance in strips if positions are consecutive, and params for their hooks.

    A strip has all distances that tiles meet, falling by one, heads first: bias and scaled [h, n], vectors [h, n, d].
    """
    encoding, params, strips = plan.encoding, pairs.tables.params, None
    if plan.offset is not None and terms:
        # Under a causal mask the last tile of a row reaches at most one key block beyond the diagonal.
        ahead = plan.key_block * (1 if plan.mask.causal else plan.key_blocks)
        farthest = plan.offset + plan.query_blocks * plan.query_block - 1
        r = np.arange(farthest, plan.offset - ahead - 1, -1, dtype=np.int32)  # XLA folds constants
        strips = ByDistance(bias=bias_strip(encoding, params, r))
        if terms - {"bias"}:
            _, scaled, *vectors = scaled_terms(encoding, params, jnp.asarray(r), pairs.q.tokens.vectors)
            # Made once, heads are in front in memory too: a tile reads its distances in one piece.
            heads_first = jax.tree.map(lambda x: x.swapaxes(0, 1), vectors)
            strips = materialize(ByDistance(None, scaled, *heads_first))._replace(bias=strips.bias)
    in_tiles = IN_TILES if strips is not None else IN_TILES | {"by_distance"}
    return SharedArrays(params if defined_hooks(encoding) & in_tiles else {}, strips, sinks(pairs))


def split_into_blocks(side: Block, block: int) -> Block:
    """Split every array of one side into blocks along its token axis, blocks in front: [n, ..., block, ...].

    The last block is padded with empty slots (idx -1) at the last position, for which encodings are defined.
    """
    tokens, slots = side[:2]
    padding = -slots.idx.shape[1] % block

    def split(x: jax.Array, axis: int = 2, **pad: Any) -> jax.Array:
        x = jnp.pad(x, [(0, padding if n == axis else 0) for n in range(x.ndim)], **pad) if padding else x
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]), axis, 0)

    features = jax.tree.map(functools.partial(split, axis=1), tokens.features)
    vectors = jax.tree.map(split, tokens._replace(features=None))
    segment = None if slots.segment is None else split(slots.segment, 1)
    where = Slots(split(slots.pos, 1, mode="edge"), split(slots.idx, 1, constant_values=-1), segment)
    return Block(vectors._replace(features=features), where, jnp.arange(where.idx.shape[0]))


def join_blocks(x: jax.Array) -> jax.Array:
    """Return [b, h, n * block, d] of [n, b, h, block, d]."""
    n, b, h, block, d = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(b, h, n * block, d)


def earlier_tiles(plan: Plan, i: Any, last: Any, nearest: Any) -> list[tuple[Any, Any, bool]]:
    """Return the ranges [first, end) of the key blocks before `last`, and whether their tiles are beyond `plan.reach`.

    Args:
      i: the number of a query block whose tile with key block `last` is on the diagonal.
      nearest: the first key block that may weigh anything, see `skipper`; None for the first of all.
    """
    if plan.key_blocks == 1:
        return []
    if plan.reach is None:
        return [(0 if nearest is None else nearest, last, False)]
    near = jnp.clip((i * plan.query_block + 1 - plan.reach) // plan.key_block, 0, last)
    return [(0, near, True), (near, last, False)]


def visit_visible_tiles(plan: Plan, q: Block, k_slots: Slots, visit: Callable, carry: Any) -> Any:
    """Call `visit(j, carry, masked)` for the key blocks j that show a query block any pair, in order."""

    def look(j: Any, carry: Any) -> Any:
        visible = visible_pairs(plan.mask, q.slots, take_block(k_slots, j))
        return jax.lax.cond(visible.any(), functools.partial(visit, j, masked=True), lambda carry: carry, carry)

    if plan.key_blocks == 1:
        return look(0, carry)
    causal_past = plan.in_order and plan.mask.causal
    end = q.number * plan.query_block // plan.key_block + 1 if causal_past else plan.key_blocks
    return jax.lax.fori_loop(0, end, look, carry)


def take_block(tree: Any, j: Any) -> Any:
    """Return block j of arrays [n, ...]. Not x[j]: the gradient of an index is a scatter, that of a slice an update."""
    return jax.tree.map(functools.partial(jax.lax.dynamic_index_in_dim, index=j, keepdims=False), tree)


def first_row(plan: Plan, i: Any, j: Any, far: bool) -> Any:
    """Return the first row of tile (i, j) in the strips, that of its largest distance (last query, first key)."""
    return 0 if far else (plan.query_blocks - 1 - i) * plan.query_block + (plan.far or j * plan.key_block)


def take_tile(plan: Plan, tables: SharedArrays, q: Block, k: Block, j: Any, far: bool) -> TileInputs:
    """Return the tile of a query block and key block j of all, with its part of the strips."""
    start, length = first_row(plan, q.number, j, far), 1 if far else plan.query_block + plan.key_block - plan.far
    part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=length, axis=1)
    tables, k = SharedArrays(tables.params, jax.tree.map(part, tables.strips)), take_block(k._replace(number=None), j)
    return TileInputs(plan.encoding, plan.mask, tables, q, k)


def skipper(plan: Plan, strips: ByDistance | None, k: Tokens) -> Callable[..., Any] | None:
    """Return `first(q, floor)`: the first key block that a query block must visit. None unless `plan.skip`.

    By Cauchy and Schwarz a score is at most bias_r + u_i - u_j + |q_i| |k_j|, and row i's log-sum-exp, its sink
    included, is at least `floor`. All keys whose bound is below log(eps / L) against it add less than eps to the row's
    weights together.

    Args:
      k: key vectors and token biases in blocks [n, b, g, k, d]; `first` takes one block of queries.
      strips: the bias of all distances; floor [b, h, q] in nats.
    """
    if not plan.skip:
        return None
    count, query_block, key_block = k.mapped.shape[0], plan.query_block, plan.key_block
    ratio, highest = key_block // query_block, None
    if strips is not None:  # the highest bias over every query_block distances; a tile spans ratio + 1 of these
        highest = strips.bias.reshape(strips.bias.shape[0], -1, query_block).max(axis=-1)
        highest = jnp.pad(highest, ((0, 0), (0, count * ratio)), constant_values=-jnp.inf)
    key_norms = jnp.linalg.norm(at_least_float32(k.mapped), axis=-1).max(axis=-1)
    key_norms = jnp.moveaxis(key_norms, 0, -1)[:, :, None]
    # The lowest token bias of each key block, summand by summand: their sum is no higher than any key's.
    lowest = None if k.token_bias is None else jnp.moveaxis(k.token_bias.min(axis=-2), 0, -2)[:, :, None]

    def first(q: Block, floor: jax.Array) -> Any:
        norms = jnp.linalg.norm(at_least_float32(q.tokens.mapped), axis=-1)[..., None]
        bound = norms * key_norms - floor[..., None]
        if highest is not None:
            near = jax.lax.dynamic_slice_in_dim(highest, plan.query_blocks - 1 - q.number, count * ratio + 1, axis=1)
            of_tile = jnp.maximum(near[:, :-1].reshape(-1, count, ratio).max(axis=-1), near[:, ratio::ratio])
            bound = bound + of_tile[None, :, None]
        if lowest is not None:
            bound = bound + (q.tokens.token_bias[..., None, :] - lowest).sum(axis=-1)
        bound = jnp.where((q.slots.idx < 0)[:, None, :, None], -jnp.inf, bound)  # an empty slot sees nothing
        negligible = (bound < jnp.log(jnp.finfo(bound.dtype).eps / (count * key_block))).all(axis=(0, 1, 2))
        return jnp.minimum(jnp.argmin(negligible), q.number * query_block // key_block)

    return first
