"""The blockwise executor: online softmax over tiles, memory linear in length, with its own backward pass.

Forward keeps a running maximum, sum and output per query block. Backward forms each tile again from the saved maxima
and sums of the rows: the products by hand, all that position adds by pulling the gradient of the scores back through
the same tile functions, so that every encoding, learned or not, is served by the one formula.

Two walks over the tiles. In order (queries and keys are the same tokens, one after the other): tiles of the future are
never visited, those of the past need no mask, and where positions are consecutive `curve` and `relative` are tabulated
once and read as strips; tiles wholly beyond the encoding's reach have one row for all their distances, and tiles where
the curve or the potential has fallen so far that no key can matter to float precision are skipped. Otherwise every
tile is masked, and one with no visible pair is passed over.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import cut
from posx.attention.blocks import (
    Plan,
    Tables,
    block_at,
    block_sizes,
    can_skip,
    count_blocks,
    cut_into_blocks,
    first_row,
    joined,
    over_blocks,
    reads_params,
    skipper,
    strip_of,
    tabulate,
    walk,
)  # fmt: skip
from posx.attention.masks import Mask
from posx.attention.products import is_plain, mapped_products, products
from posx.attention.tiles import (
    INVISIBLE,
    Block,
    Order,
    Pairs,
    Strips,
    Tokens,
    adjusted,
    value_terms,
    visible_pairs,
    weighted,
)
from posx.encodings.base import Encoding, Params, Relative, acting, wide_dtype

#: Keys from which on an encoding that fades skips tiles, on CPUs: one head after the other costs more than that saves
#: at shorter lengths, and would leave larger machines idle.
SKIP_FROM = 1024


class Tiling(NamedTuple):
    """How the blockwise executor cuts.

    query_block, key_block: tokens in a tile; 0 for the default, see `block_sizes`. skip: whether far tiles that
    provably weigh nothing are left out, head by head; None: where the encoding `fades` and it pays. Only done in order
    and causal, where nothing but a curve and a potential adds to scores.
    """

    query_block: int = 0
    key_block: int = 0
    skip: bool | None = None


def blockwise(
    encoding: Encoding, mask: Mask, params: Params, q: Block, k: Block,
    *, order: Order = Order(), tiling: Tiling = Tiling(),
) -> jax.Array:  # fmt: skip
    """As `dense`, over tiles; lengths are filled up to whole tiles."""
    (b, _, num_queries), (groups, num_keys) = q.tokens.mapped.shape[:3], k.tokens.mapped.shape[1:3]
    devices = cut.block_devices(b, groups) if min(num_queries, num_keys) > 1 else 1
    plan = _plan(encoding, mask, q, k, order, tiling, devices)._replace(learned=bool(jax.tree.leaves(params)))
    strips = _strips(plan, params, q, num_keys)
    tables = Tables(params if reads_params(encoding, strips) else {}, strips)
    q, k = cut_into_blocks(q, plan.query_block), cut_into_blocks(k, plan.key_block)
    attend = _by_key_head if plan.skip else _attend
    if devices > 1 and plan.query_blocks % (2 * devices) == 0:
        o = cut.over_blocks(lambda keys, numbers, q: attend(plan, keys[0], q, keys[1], numbers), (tables, k), q)
    else:
        o = attend(plan, tables, q, k, None)
    return joined(o)[:, :, :num_queries]


def _plan(encoding: Encoding, mask: Mask, q: Block, k: Block, order: Order, tiling: Tiling, devices: int) -> Plan:
    """The tiles of such a call, before anything is known of params and strips."""
    (b, h, num_queries), (groups, num_keys) = q.tokens.mapped.shape[:3], k.tokens.mapped.shape[1:3]
    offset, skip = order.offset if order.in_order else None, tiling.skip
    if skip is None:
        skip = encoding.fades and num_keys >= SKIP_FROM and jax.default_backend() == "cpu"
    tabulated = offset is not None or not encoding.acts_on("curve")
    skip = skip and order.in_order and tabulated and can_skip(encoding, mask, q.slots)
    rows = b * h // groups if skip else b * h
    sizes = block_sizes(num_queries, num_keys, rows, encoding.acts_on("relative"), devices)
    query_block, key_block = tiling.query_block or sizes[0], tiling.key_block or sizes[1]
    if encoding.tiling == "rows":
        key_block = num_keys
    in_order = order.in_order and (key_block % query_block == 0 or key_block >= num_keys)
    plan = Plan(
        encoding, mask, in_order, count_blocks(num_queries, query_block), query_block, key_block,
        offset if in_order else None, skip=skip and in_order and key_block < num_keys,
    )  # fmt: skip
    if plan.offset is None or not encoding.acts_on("relative") or encoding.reach is None:
        return plan
    return plan._replace(reach=encoding.reach - plan.offset) if encoding.reach + key_block <= plan.farthest else plan


def _strips(plan: Plan, params: Params, q: Block, num_keys: int) -> Strips | None:
    """`curve` and `relative` at all distances that tiles meet, where these are consecutive."""
    encoding, key_block = plan.encoding, plan.key_block
    if plan.offset is None or not acting(encoding, ("curve", "relative")):
        return None
    # Under a causal mask the last tile of a row reaches at most one key block beyond the diagonal.
    ahead = key_block if plan.mask.causal else count_blocks(num_keys, key_block) * key_block
    distances = np.arange(plan.farthest, plan.offset - ahead - 1, -1, dtype=np.int32)
    return tabulate(encoding, params, distances, q.tokens.vectors)


def _by_key_head(plan: Plan, tables: Tables, q: Block, k: Block, numbers: Any) -> jax.Array:
    """`_attend` for one key head after the other, with the queries it serves: each head skips tiles of its own."""
    (b, heads), groups = q.tokens.mapped.shape[1:3], k.tokens.mapped.shape[2]

    def split(x: jax.Array, axis: int) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :]), axis, 0)

    curve = None if tables.strips is None else tables.strips.curve
    if curve is not None:
        curve = split(jnp.broadcast_to(curve, (heads, curve.shape[1])), 0)
    of_heads = (_over_heads(tokens, heads) for tokens in (q.tokens, k.tokens))
    tokens = jax.tree.map(lambda x: split(x, 2), tuple(of_heads))

    def each(where: Any, heads: tuple[Any, tuple[Tokens, Tokens]]) -> jax.Array:
        q_slots, k_slots, numbers = where

        def one(head: tuple[Any, tuple[Tokens, Tokens]]) -> jax.Array:
            curve, (q, k) = head
            tables = Tables({}, None if curve is None else Strips(curve, Relative()))
            return _attend(plan, tables, Block(q, q_slots), Block(k, k_slots), numbers)

        return jax.lax.map(one, heads)

    axis = cut.head_axis(b, groups)
    call = functools.partial(cut.over_sequences, each, axis=axis) if axis else each
    o = jnp.moveaxis(call((q.slots, k.slots, numbers), (curve, tokens)), 0, 2)
    return o.reshape(*o.shape[:2], heads, *o.shape[4:])


def _over_heads(tokens: Tokens, heads: int) -> Tokens:
    """Blocks of tokens with a potential for each query head."""
    if (shared := tokens.potential) is None:
        return tokens
    return tokens._replace(potential=jnp.broadcast_to(shared, (*shared.shape[:2], heads, *shared.shape[3:])))


def _hidden(s: jax.Array, visible: jax.Array, masked: bool) -> jax.Array:
    return jnp.where(visible[:, None], s, INVISIBLE) if masked else s


def _shift(top: jax.Array) -> jax.Array:
    """What is taken off a row's scores before they are exponentiated: their maximum, or 0 where the row has seen
    nothing, so that its weights are 0 and not NaN."""
    return jnp.where(top > INVISIBLE, top, 0)


def _forward(plan: Plan, tables: Tables, q: Block, k: Block, numbers: Any):
    """Outputs [n, b, h, block, d], and of each row the sum of its weights (1 where it sees nothing) and what was taken
    off its scores first, both [n, b, h, block]."""
    encoding, params = plan.encoding, tables.params
    first_tile = skipper(plan, tables.strips, k.tokens)

    def query_block(i: Any, q: Block):
        def visit(j: Any, carry: Any, masked: bool, far: bool = False) -> Any:
            o, top, total = carry
            pairs = Pairs(q, block_at(k, j), strip_of(plan, tables.strips, i, j, far))
            visible = visible_pairs(plan.mask, q.slots, pairs.k.slots)
            s = mapped_products(encoding, params, pairs.pos, q.tokens.mapped, pairs.k.tokens.mapped)
            s = _hidden(adjusted(encoding, params, s, pairs, visible), visible, masked)
            # Constant to derivatives: what is taken off scores cancels.
            new_top = jnp.maximum(top, jax.lax.stop_gradient(s.max(axis=-1)))
            shift = _shift(new_top)
            p = jnp.exp(s - shift[..., None])
            shrink = jnp.exp(top - shift)
            o = o * shrink[..., None] + weighted(p, pairs.k.tokens.values)
            extra = value_terms(encoding, params, p, pairs)
            return o if extra is None else o + extra, new_top, total * shrink + p.sum(axis=-1)

        rows, dtype = q.tokens.mapped.shape[:3], wide_dtype(q.tokens.mapped.dtype)
        nothing = (
            jnp.zeros((*rows, k.tokens.values.shape[-1]), dtype),
            jnp.full(rows, INVISIBLE, dtype),
            jnp.zeros(rows, dtype),
        )
        o, top, total = walk(plan, i, q.slots, k.slots, visit, nothing, lambda carry: first_tile(i, q, carry[1]))
        total = jnp.where(total > 0, total, 1)
        return o / total[..., None], total, _shift(top)

    return over_blocks(plan, lambda _, numbered: (_, query_block(*numbered)), None, numbers, q)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, tables: Tables, q: Block, k: Block, numbers: Any):
    return _forward(plan, tables, q, k, numbers)[0]


def _attend_forward(plan: Plan, tables: Tables, q: Block, k: Block, numbers: Any):
    o, total, shift = _forward(plan, tables, q, k, numbers)
    return o, (tables, q, k, numbers, o, total, shift)


class Sums(NamedTuple):
    """Gradients summed over tiles, at least float32.

    Those of mapped keys and of values lie transposed, [n, b, g, d, block]: then every product contracts the minor axis
    of its left side, which XLA's CPU backend takes about twice as fast.
    """

    tables: Tables
    mapped: jax.Array
    values: jax.Array
    keys: Tokens  # all else of the key side


class Back(NamedTuple):
    """What comes back to a block of queries, and what its rows kept of the pass forward."""

    o_grad: jax.Array  # [b, h, q, d] over the rows' totals
    shift: jax.Array  # [b, h, q]
    delta: jax.Array  # [b, h, q]


def _attend_backward(plan: Plan, saved: Any, o_grad: jax.Array):
    tables, q, k, numbers, o, total, shift = saved
    encoding, groups = plan.encoding, k.tokens.mapped.shape[2]
    first_tile = skipper(plan, tables.strips, k.tokens)
    # With w = p / total, p = exp(s - shift): dL/ds = w * (dL/dw - delta), delta_i = o_i . dL/do_i. What comes back is
    # divided by the total, not p; and p is not exp(s - log-sum-exp), which large scores would round.
    o_grad = o_grad / total[..., None]
    back, floor = Back(o_grad, shift, (o * o_grad).sum(axis=-1)), shift + jnp.log(total)

    def query_block(sums: Sums, numbered: Any):
        i, (q, back, floor) = numbered
        # Without the barrier XLA folds these small transposes into the products with the large score matrices.
        of_q = _turned(q.tokens.mapped, groups) if is_plain(encoding) else None
        turned = jax.lax.optimization_barrier((of_q, _turned(back.o_grad, groups)))

        def visit(j: Any, carry: Any, masked: bool, far: bool = False) -> Any:
            sums, q_grads = carry
            pairs = Pairs(q, block_at(k, j), strip_of(plan, tables.strips, i, j, far))
            grads, q_grad = _tile_gradients(plan, tables.params, pairs, back, turned, masked)
            first, strips = first_row(plan, i, j, far), sums.tables.strips
            if plan.learned:
                strips = jax.tree.map(lambda x, g: _add_slice(x, g, first, axis=1), strips, grads.tables.strips)
            params = _add(sums.tables.params, grads.tables.params)
            per_block = jax.tree.map(lambda x, g: _add_slice(x, g[None], j, axis=0), sums[1:], grads[1:])
            return Sums(Tables(params, strips), *per_block), _add(q_grads, q_grad)

        nothing = sums, _zeros(q.tokens)
        return walk(plan, i, q.slots, k.slots, visit, nothing, lambda _: first_tile(i, q, floor))

    rest = k.tokens._replace(mapped=None, values=None)
    start = Sums(_zeros(tables), _zeros(k.tokens.mapped.mT), _zeros(k.tokens.values.mT), _zeros(rest))
    sums, q_grad = over_blocks(plan, query_block, start, numbers, (q, back, floor))
    mapped, values = jax.lax.optimization_barrier((sums.mapped, sums.values))
    grads = (sums.tables, q_grad, sums.keys._replace(mapped=mapped.mT, values=values.mT))
    of_tables, of_q, of_k = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, (tables, q.tokens, k.tokens))
    return of_tables, Block(of_q, None), Block(of_k, None), None  # type: ignore[arg-type]


_attend.defvjp(_attend_forward, _attend_backward)


def _tile_gradients(plan: Plan, params: Params, pairs: Pairs, back: Back, turned: Any, masked: bool):
    """One tile's part of `Sums` (strips: of the tile's strip), and of the gradient of q."""
    q, k = pairs.q.tokens, pairs.k.tokens
    visible = visible_pairs(plan.mask, pairs.q.slots, pairs.k.slots)
    strip = pairs.strips if plan.learned else jax.lax.stop_gradient(pairs.strips)

    def scores(params: Params, strip: Any, s: jax.Array, q: Tokens, k: Tokens) -> jax.Array:
        tile = Pairs(Block(q, pairs.q.slots), Block(k, pairs.k.slots), strip)
        return adjusted(plan.encoding, params, s, tile, visible)

    def mixed(params: Params, strip: Any, p: jax.Array) -> jax.Array | None:
        return value_terms(plan.encoding, params, p, pairs._replace(strips=strip))

    s = mapped_products(plan.encoding, params, pairs.pos, q.mapped, k.mapped)
    s, pull_scores = jax.vjp(scores, params, strip, s, q, k)
    p = jnp.exp(_hidden(s, visible, masked) - back.shift[..., None])
    p_grad = products(back.o_grad, k.values)
    added, pull_mixed = jax.vjp(mixed, params, strip, p)
    mixed_grads = None
    if added is not None:
        *mixed_grads, mixed_p_grad = pull_mixed(back.o_grad)
        p_grad = p_grad + mixed_p_grad
    params_grad, strip_grad, s_grad, q_grad, k_grad = pull_scores(p * (p_grad - back.delta[..., None]))
    if mixed_grads is not None:
        params_grad, strip_grad = _add((params_grad, strip_grad), tuple(mixed_grads))
    q_turned, o_turned = turned
    by_q, by_k, by_params = _products_gradient(plan, params, pairs, q_turned, s_grad)
    if by_params is not None:
        params_grad = _add(params_grad, by_params)
    sums = Sums(
        Tables(params_grad, strip_grad),
        k_grad.mapped.mT + by_k,
        _turned_products(o_turned, p),
        k_grad._replace(mapped=None, values=None),
    )
    return sums, q_grad._replace(mapped=q_grad.mapped + by_q)


def _products_gradient(plan: Plan, params: Params, pairs: Pairs, q_turned: Any, s_grad: jax.Array):
    """Of the tile's mapped queries; of its mapped keys, transposed as in `Sums`; and of params, where products read
    them."""
    q, k = pairs.q.tokens.mapped, pairs.k.tokens.mapped
    if is_plain(plan.encoding):
        return weighted(s_grad, k), _turned_products(q_turned, s_grad), None
    _, pull = jax.vjp(lambda *args: mapped_products(plan.encoding, args[0], pairs.pos, *args[1:]), params, q, k)
    by_params, by_q, by_k = pull(s_grad)
    return by_q, by_k.mT, by_params


def _turned(x: jax.Array, groups: int) -> jax.Array:
    """[b, h, q, d] as [b, g, d, h/g * q]: the queries that a key head serves, side by side."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1]).mT


def _turned_products(x: jax.Array, w: jax.Array) -> jax.Array:
    """sum over queries of x [b, g, d, h/g * q] times w [b, h, q, k]: [b, g, d, k], at least float32."""
    w = w.reshape(*x.shape[:2], -1, w.shape[-1]).astype(x.dtype)
    return jnp.einsum("bgdq,bgqk->bgdk", x, w, preferred_element_type=wide_dtype(x.dtype))


def _add_slice(total: jax.Array, part: jax.Array, first: Any, axis: int) -> jax.Array:
    """`part` added to `total` from place `first` of an axis on."""
    there = jax.lax.dynamic_slice_in_dim(total, first, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, there + part.astype(total.dtype), first, axis)


def _zeros(tree: Any) -> Any:
    """Where gradients are summed: at least float32, whatever the operands are."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), tree)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)
