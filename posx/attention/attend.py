"""`attend`: attention under an encoding, one formula with several executors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import sharding
from posx.attention.arguments import (
    Slots,
    as_slots,
    both_sides,
    check_slots,
    check_tokens,
    check_vectors,
    consecutive_offset,
    with_batch,
    without_empty,
)
from posx.attention.blockwise import blockwise
from posx.attention.cpu import operand_dtype
from posx.attention.dense import dense, dense_weights
from posx.attention.fused import fused, is_biased, is_native, refusal
from posx.attention.history import with_previous_tokens
from posx.attention.kernel import is_compiled, kernel, kernel_refusal
from posx.attention.masks import Mask, causal, require_mask
from posx.attention.pointwise import score_shapes
from posx.attention.tiles import Block, SharedArrays, TileInputs, Tokens, map_batch
from posx.contract import (
    Encoding,
    Features,
    Params,
    Tabulated,
    Tile,
    at_least_float32,
    defined_hooks,
    distance_terms,
    parts,
    require_encoding,
    require_resolved,
    wide_dtype,
)
from posx.contract.shapes import Use
from posx.contract.sizes import check_call
from posx.errors import ConfigError
from posx.machine.guard import barrier
from posx.machine.platforms import platform

Executor = Callable[..., jax.Array]
EXECUTORS: dict[str, Executor] = {"dense": dense, "blockwise": blockwise, "kernel": kernel, "fused": fused}

#: `auto` takes the dense executor up to this many query-key pairs if they are not in order: decoding, and prefill of a
#: chunk. Above it the score matrix costs more than it saves; in order, tiles of the future are saved at any length.
DENSE_PAIRS = 1024 * 1024


@jax.named_scope("attention")
def attend(
    encoding: Encoding,
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_slots: Slots | jax.Array | np.ndarray,
    k_slots: Slots | jax.Array | np.ndarray | None = None,
    *,
    mask: Mask = causal(),
    x: jax.Array | None = None,
    features: tuple[Features, Features] | None = None,
    executor: str | Executor = "auto",
    cached: bool = False,
) -> jax.Array:
    """Return attention outputs [b, q, h, d] under `encoding`.

    Values of NumPy and JAX arrays are known before tracing, also if a jitted function closes over them; a `jnp.arange`
    made inside is traced. Known positions are checked against the encoding's limit. If they count up by one they are
    served faster, from tables of distances.

    The contents of an empty slot, its position too, change no output and no gradient, even if they are NaN. A NaN in
    any other slot, of `x` too, spoils every output that reads it. It may spoil other outputs: 0 times NaN is NaN.

    The dense executor has derivatives of every kind and order. The others have gradients by reverse mode, and raise for
    all others.

    Under `jax.set_mesh(posx.machine.devices.mesh())` devices share sequences, else heads, else blocks of queries: the
    first of these whose number they divide.

    Args:
      encoding: a resolved value.
      params: the arrays of `encoding` in this layer, its own and those that layers share, in one dict. See
        `Encoding.init`.
      q: [b, q, h, d]. If `query` looks back and q are not all tokens, the windows [b, q, 1 + n, h, d] of
        `with_previous_tokens`.
      k: [b, k, g, d], g dividing h.
      v: [b, k, g, d].
      q_slots: positions of the queries, int32 or float32, [q] or [b, q], or `Slots`, with arrival orders and documents
        too. Encodings that read several `axes` have them last. A pair sees each other only within one document.
        Encodings with features or whole rows (`tiling`) read tokens slot by slot. Their documents must be one after the
        other, each in order of arrival, and each query's own key must be among the keys. Traced values are trusted.
      k_slots: the same of the keys; None if they are the same tokens.
      mask: who may see whom; a row that sees nothing returns 0. There may be no sequences, queries or keys at all.
      x: [b, q, m], the layer's normalised input, from which features of whole-sequence self-attention are computed.
      features: those of queries and of keys, arrays [b, t, ...] by name, in place of x: with a cache.
      executor: "auto" chooses by `choose_executor`. "dense" is one tile, the oracle. "blockwise" has memory linear in
        length. "kernel" is posx's own, for most encodings. "fused" is the vendor's, for encodings that fit it. A
        function with their arguments is also accepted.
      cached: k, v and features of keys come out of posx's cache: values are mapped, and keys too unless
        `encoding.reads_raw_keys`. Empty slots hold finite values at positions that the encoding is defined for. Without
        the features of `encoding.revised_by` keys are revised by the tokens before the queries; if queries lack them
        too, by these.

    Raises:
      ConfigError: the encoding has an open field, was built for other sizes, or lacks its parameters. Or it does not
        allow the mask. RoPE knows its `rotary_dim` alone: if it is less than d, the rest passes unchanged.
      UndefinedLength: known positions past the last one that the encoding is defined for.
      ValueError: shapes, types or an executor that do not fit.
    """
    if isinstance(executor, str) and executor not in (*EXECUTORS, "auto"):
        raise ValueError(f"executor {executor!r} is unknown; allowed: {', '.join(EXECUTORS)}, auto.")
    require_mask(mask)
    require_encoding(encoding, "attend: encoding")
    require_resolved(encoding)
    q_at = as_slots(q_slots)
    k_at = q_at if k_slots is None else as_slots(k_slots)
    given = TileInputs(encoding, mask, SharedArrays(params), Block(Tokens(q), q_at), Block(Tokens(k, v), k_at))
    given, in_order, offset = _validate(given, x, features, cached)
    if 0 in (*q.shape[:2], k.shape[1]):  # no row sees anything; hooks and tiles need not serve arrays without entries
        return jnp.zeros((*q.shape[:2], q.shape[-2], v.shape[-1]), q.dtype)
    pairs, q_features = _map(given, x, in_order, cached)
    o = barrier(_run(pairs, executor, in_order, offset)).swapaxes(1, 2)
    if "output" in defined_hooks(encoding):
        o = barrier(token_map(encoding, "output", pairs.tables.params, o, pairs.q.slots.pos, q_features))
    return o.astype(q.dtype)


def attention_weights(
    encoding: Encoding, params: Params, q: jax.Array, k: jax.Array, slots: Slots | jax.Array | np.ndarray, *,
    mask: Mask = causal(), x: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the weights [b, h, t, t] with which `attend` sums values in self-attention, at least float32.

    They are those of the dense executor, in memory b * h * t * t. A sink keeps its part of a row's weight.

    Args:
      encoding, params, slots, mask, x: as in `attend`, for all tokens.
      q, k: [b, t, h, d] and [b, t, g, d].

    Returns:
      The weights, 0 for invisible pairs, and whether a pair is visible, bool [b or 1, t, t].

    Raises:
      ConfigError, UndefinedLength, ValueError: as `attend`.
    """
    require_mask(mask)
    require_encoding(encoding, "attention_weights: encoding")
    require_resolved(encoding)
    at = as_slots(slots)
    given = TileInputs(encoding, mask, SharedArrays(params), Block(Tokens(q), at), Block(Tokens(k, k), at))
    given, in_order, _ = _validate(given, x, None, False)
    w, visible = dense_weights(_map(given, x, in_order, False)[0])
    return jnp.where(visible[:, None], w, 0), visible


def _validate(
    given: TileInputs, x: jax.Array | None, features: tuple[Features, Features] | None, cached: bool
) -> tuple[TileInputs, bool, int | None]:
    """Check a call. Its q and k, not mapped yet, are in the fields `mapped`, its v in `values`.

    Returns:
      The call, with sharded arrays, without contents of empty slots. Whether queries and keys are the same tokens, in
      order of arrival. If so, the `offset` of `blockwise`, else None.
    """
    encoding, mask, tables, (tokens, q_at, *_), ((k, v, *_), k_at, *_) = given
    q = tokens.mapped
    if not mask.causal and (refused := [part for part in parts(encoding) if part.causal_only]):
        raise ConfigError(
            f"{refused[-1]} is for causal masks: it does not support keys after the query. Give mask=posx.causal()."
        )
    windows = check_vectors(encoding, q, k, v, q_at, k_at)
    q_at, k_at, in_order = both_sides(encoding, q.shape[:2], k.shape[:2], q_at, k_at, k_clean=cached)
    check_tokens(encoding, q, k, x, features)
    check_slots(encoding, q_at, k_at, x is not None, windows)
    if axis := sharding.head_axis(*k.shape[0::2]):
        q, k, v = (sharding.shard(x, axis=x.ndim - 2, over=axis) for x in (q, k, v))
    q_features, k_features = features or ({}, {})
    if not in_order:
        q, q_features = without_empty((q, q_features), q_at.idx)
        if not cached:
            k, v, k_features = without_empty((k, v, k_features), k_at.idx)
    params = _read_params(encoding, tables.params)
    offset = consecutive_offset(q_at.pos, k_at.pos) if in_order else None
    keys_mapped, queries = cached and not encoding.reads_raw_keys, q[:, :, 0] if windows else q
    check_call(encoding, params, Use(queries, k, v, q_at.pos.dtype, x, q_features, k_features, keys_mapped, cached))
    sides = Block(Tokens(q, features=q_features), q_at), Block(Tokens(k, v, features=k_features), k_at)
    return TileInputs(encoding, mask, SharedArrays(params), *sides), in_order, offset


def _map(given: TileInputs, x: jax.Array | None, in_order: bool, cached: bool) -> tuple[TileInputs, Features]:
    """Return what executors read, the token maps applied, and the features of the queries."""
    encoding, mask, tables, (q, q_at, *_), (k, k_at, *_) = given
    params, hooks, q_features, k_features = tables.params, defined_hooks(encoding), q.features, k.features
    if "features" in hooks and x is not None:
        slots = q_at._replace(idx=None) if in_order else q_at
        q_features = k_features = batch_features(encoding, params, x, slots)[0]
    q_at, k_at = with_batch(encoding, q_at), with_batch(encoding, k_at)

    def map_tokens(hook: str, vectors: jax.Array, at: Slots, features: Features) -> jax.Array:
        if vectors.ndim < 5:  # no windows yet
            vectors = with_previous_tokens(encoding, hook, vectors, None if in_order else at.idx, at.segment)[0]
        return token_map(encoding, hook, params, vectors, at.pos, features)

    mapped_q = map_tokens("query", q.mapped, q_at, q_features) if "query" in hooks else q.mapped
    own_keys = cached and not encoding.reads_raw_keys
    mapped_k = map_tokens("key", k.mapped, k_at, k_features) if "key" in hooks and not own_keys else k.mapped
    values = map_tokens("value", k.values, k_at, k_features) if "value" in hooks and not cached else k.values
    reads_vectors = "score" in hooks or bool(distance_terms(encoding, params, q_at.pos.dtype).keys() - {"bias"})
    vectors = q.mapped[:, :, 0] if q.mapped.ndim == 5 else q.mapped
    wide, factor, unscaled = wide_dtype(vectors.dtype), None, mapped_q.swapaxes(1, 2)
    scaled = unscaled.astype(wide) * (1 / math.sqrt(vectors.shape[-1]))
    if "logit_scale" in hooks:
        scale = map_batch(functools.partial(encoding.logit_scale, params), q_at.pos, q_features)
        scaled = scaled * (factor := scale[..., None].astype(wide))
    of_q = Tokens(scaled, None, vectors, unscaled, factor, features=q_features)
    queries = _read_tokens(encoding, params, of_q, q_at, reads_vectors)
    of_k = Tokens(mapped_k.swapaxes(1, 2), values, k.mapped, features=k_features)
    keys = _read_tokens(encoding, params, of_k, k_at, reads_vectors, stored=cached and mapped_k is k.mapped)
    return TileInputs(encoding, mask, tables, queries, keys), q_features


def _run(pairs: TileInputs, executor: str | Executor, in_order: bool, offset: int | None) -> jax.Array:
    """Return outputs [b, h, q, d] by the executor, on each device those of its sequences if devices share them."""
    encoding, mask, (params, *_), q, k = pairs
    if executor == "auto":
        segments = q.slots.segment is not None
        tile = score_shapes(pairs) if platform() == "cuda" else None  # tracing it takes a while, and no other asks
        executor = choose_executor(encoding, params, mask, pairs.sizes, in_order, segments, tile, offset)
    function = EXECUTORS[executor] if isinstance(executor, str) else executor

    def run_shard(params: Params, q: Block, k: Block) -> jax.Array:
        return function(TileInputs(encoding, mask, SharedArrays(params), q, k), in_order=in_order, offset=offset)

    try:
        if sharding.shards_sequences(q.tokens.mapped.shape[0]):
            return sharding.map_sequences(run_shard, params, q, k)
        return function(pairs, in_order=in_order, offset=offset)
    except (TypeError, NotImplementedError) as error:
        if not any(word in str(error) for word in ("custom_vjp", "custom_lin")):
            raise
        raise TypeError(f"executor {executor!r} has no forward-mode derivative: give executor='dense'.") from None


def _read_params(encoding: Encoding, params: Params) -> Params:
    """Return the parameters behind a barrier, except for the large tables of decoding, which it would copy."""
    params = jax.tree.map(jnp.asarray, params)
    if not isinstance(encoding, Tabulated):
        return barrier(params)
    tables = {name: x for name, x in params.items() if name.startswith("by_distance.")}
    return barrier({name: x for name, x in params.items() if name not in tables}) | tables


def _read_tokens(
    encoding: Encoding, params: Params, tokens: Tokens, slots: Slots, reads_vectors: bool, stored: bool = False
) -> Block:
    """Return one side as [b, heads, tokens, ...], with its token bias and without the arrays that no hook reads.

    Values and vectors are still [b, tokens, heads, d]. If they are `stored`, a cache's, a barrier would copy them, and
    none is constant in the eyes of the compiler.
    """
    hooks, token_bias, dtype = defined_hooks(encoding), None, operand_dtype(tokens.vectors.dtype)
    if "token_bias" in hooks:
        summands = map_batch(functools.partial(encoding.token_bias, params), slots.pos, tokens.features)
        token_bias = at_least_float32(summands.swapaxes(1, 2))
    values = None if tokens.values is None else tokens.values.swapaxes(1, 2)
    vectors = tokens.vectors.swapaxes(1, 2) if reads_vectors else None
    read = Tokens(
        mapped=tokens.mapped.astype(dtype),
        values=None if values is None else values.astype(dtype),
        vectors=vectors,
        unscaled=tokens.unscaled if "score" in hooks else None,
        factor=tokens.factor if reads_vectors else None,
        token_bias=token_bias,
        features=tokens.features if "score" in hooks else None,
    )
    return Block(read if stored else barrier(read), slots)


def token_map(
    encoding: Encoding, hook: str, params: Params, vectors: jax.Array, pos: jax.Array, features: Features
) -> jax.Array:
    """Return a hook that maps vectors over a batch: vectors [b, t, h, d], pos as in `Slots`.

    If the hook looks back, vectors are what `history.with_previous_tokens` makes of them.
    """
    require_encoding(encoding, "token_map: encoding")
    if hook not in defined_hooks(encoding):
        return vectors
    function, pos = functools.partial(getattr(encoding, hook), params), with_batch(encoding, Slots(pos)).pos
    return map_batch(function, vectors, pos, features)


def batch_features(
    encoding: Encoding, params: Params, x: jax.Array, slots: Any, carry: Any = None
) -> tuple[Features, Any]:
    """Return `encoding.features` over a batch, x [b, t, m], and the carry for the tokens that follow.

    Args:
      encoding, params, x: as in `attend`. The contents of empty slots reach nothing.
      slots: positions, or `Slots`; idx None if the tokens are in order.
      carry: the carry of the call for the tokens before these (arrays [b, ...]); None at the start.
    """
    require_encoding(encoding, "batch_features: encoding")
    slots, (recent, carry) = with_batch(encoding, as_slots(slots)), (None, None) if carry is None else carry
    x = without_empty(x, slots.idx)
    seen, recent = with_previous_tokens(encoding, "features", x, slots.idx, slots.segment, recent)
    features, carry = map_batch(functools.partial(encoding.features, params), seen, slots.pos, carry)
    return features, None if recent is None and carry is None else (recent, carry)


def choose_executor(
    encoding: Encoding,
    params: Params,
    mask: Mask,
    sizes: tuple[int, int],
    in_order: bool,
    segments: bool = False,
    tile: Tile | None = None,
    offset: int | None = 0,
) -> str:
    """Return the name of the executor behind "auto": on an NVIDIA GPU the fastest kernel that serves the call.

    Args:
      encoding, params, mask: those of the call.
      sizes: queries and keys.
      in_order, segments: see `refusal`.
      tile: the arrays that `score` is given, or their shapes, mapped_q alone if it does not act. None for no kernel.
      offset: see `blockwise`.
    """
    if tile is not None and platform() == "cuda":
        fits = is_native(tile.mapped_q) and not refusal(encoding, params, mask, in_order, segments, native=True)
        # The vendor's kernel reads the biases of all pairs, posx's own those of a strip.
        if fits and not is_biased(encoding):
            return "fused"
        if is_compiled(tile.mapped_q) and not kernel_refusal(encoding, params, mask, in_order, offset, tile):
            return "kernel"
        if fits:
            return "fused"
    return "dense" if math.prod(sizes) <= DENSE_PAIRS and not in_order else "blockwise"
