"""`attend`: one formula, several executors."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention import cut
from posx.attention.arguments import (
    Side,
    check_positions,
    check_slots,
    check_tokens,
    check_vectors,
    consecutive_offset,
    known,
    sides,
    without_empty,
)
from posx.attention.blockwise import blockwise
from posx.attention.dense import dense
from posx.attention.fused import fused, is_native, refusal
from posx.attention.history import seen_by
from posx.attention.masks import Mask, causal, full, window
from posx.attention.sizes import check_sizes
from posx.attention.tiles import Block, Order, Slots, Tokens, times
from posx.encodings.base import Encoding, Features, Params, at_least_float32, parts, require_encoding, wide_dtype
from posx.encodings.shapes import Call
from posx.errors import ConfigError
from posx.lazy import modules_of
from posx.machine.compiler import apart

__getattr__ = modules_of(__name__)

Executor = Callable[..., jax.Array]
EXECUTORS: dict[str, Executor] = {"dense": dense, "blockwise": blockwise, "fused": fused}

#: `auto` takes the dense executor up to this many query-key pairs if they are not in order: decoding, and prefill of a
#: chunk. Above it the score matrix costs more than it saves; in order, tiles of the future are saved at any length.
DENSE_PAIRS = 1024 * 1024


def attend(
    encoding: Encoding,
    params: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_pos: jax.Array | np.ndarray,
    k_pos: jax.Array | np.ndarray,
    q_idx: jax.Array | np.ndarray | None = None,
    k_idx: jax.Array | np.ndarray | None = None,
    q_segment: jax.Array | None = None,
    k_segment: jax.Array | None = None,
    mask: Mask = causal(),
    x: jax.Array | None = None,
    q_features: Features | None = None,
    k_features: Features | None = None,
    q_recent: jax.Array | None = None,
    executor: str | Executor = "auto",
    keys_mapped: bool = False,
    slots_clean: bool = False,
) -> jax.Array:
    """Attention outputs [b, q, h, d] under `encoding`.

    Positions are int32 or float32; with 64-bit types on, int64 and float64 too. Narrower and unsigned integers are
    widened; lists, wider integers and float64 are converted where their values are known and fit; bool, float16 and
    bfloat16 are refused, and traced values of wider types. Values of NumPy and JAX arrays are known, also where a
    jitted function closes over them (a `jnp.arange` made inside is traced): those are checked against the encoding's
    limit, and where they count up by one they are served faster, from tables of distances.

    What stands in an empty slot, its position too, changes no output and no gradient, even NaN. A NaN or infinity in
    any other slot, of `x` too, spoils every output that reads it. It may spoil other outputs: 0 times NaN is NaN.

    The dense executor has derivatives of every kind and order. The others have gradients by reverse mode; what else
    they lack raises, as "can't apply forward-mode autodiff (jvp) to a custom_vjp function" or as reverse mode through a
    loop.

    Under `jax.set_mesh(posx.machine.devices.mesh())` sequences are cut over devices; where these do not divide the
    batch, heads; where they do not divide the key heads either, in the blockwise executor, blocks of queries.

    Args:
      encoding: a resolved value; params: its merged dict for this layer, see `Encoding.init`.
      q: [b, q, h, d]; k, v: [b, k, g, d], g dividing h.
      q_pos, k_pos: positions [q], [k] or [b, q], [b, k], both whole numbers or neither.
      q_idx, k_idx: arrival orders of the same shapes, -1 for an empty slot. May be left out only where queries and
        keys are the same tokens, in order.
      q_segment, k_segment: document numbers; a pair sees each other only within one. Encodings with features, and those
        whose `tiling` is "rows", go from slot to slot: documents stand one after the other, each in order of arrival
        and with each query's own key among the keys. That is refused where it is known not to be so; traced values are
        taken at their word.
      mask: who may see whom; a row that sees nothing returns 0.
      x: [b, q, m], the layer's normalised input, from which features of whole-sequence self-attention are computed;
        with a cache `q_features` and `k_features` ([b, t, ...] each) are given instead.
      q_recent: [b, n, h, d], where queries look back n tokens: those before the first query, see `history.seen_by`;
        left out where there are none.
      executor: "dense" (one tile, the oracle), "blockwise" (memory linear in length), "fused" (the vendor's kernel,
        for encodings that fit it), "auto", see `choose_executor`, or a function called as these three are.
      keys_mapped: k and v come out of a cache that holds them mapped.
      slots_clean: empty slots of k, v and k_features hold finite values, at positions the encoding is defined for, as
        those of posx's cache do; they are then not zeroed first, which copies k and v.

    Raises:
      ConfigError: an encoding with an open field, made for other sizes than q, k and v have, without its parameters, or
      under a mask it is not for. UndefinedLength: positions, known on the host, past the last one the encoding is
      defined for. ValueError: shapes, position types or an executor that do not fit.
    """
    if isinstance(executor, str) and executor not in (*EXECUTORS, "auto"):
        raise ValueError(f"executor {executor!r} is unknown; allowed: {', '.join(EXECUTORS)}, auto")
    require_encoding(encoding, "attend: encoding")
    _check_use(encoding, mask, keys_mapped)
    check_vectors(q, k, v)
    q_side, k_side, in_order = sides(
        q.shape[:2], k.shape[:2], Side(q_pos, q_idx, q_segment), Side(k_pos, k_idx, k_segment), slots_clean
    )
    check_positions(encoding, q_side.pos)
    check_positions(encoding, k_side.pos)
    check_tokens(encoding, q, k, x, q_features, k_features)
    check_slots(encoding, q_side, k_side, q_recent, from_x=x is not None)
    q, k, v = (cut.spread(x, axis=2, over=cut.head_axis(q.shape[0], k.shape[2])) for x in (q, k, v))
    if not in_order:
        q, x, q_features = without_empty((q, x, q_features), q_side.idx)
    if not (in_order or slots_clean):
        k, v, k_features = without_empty((k, v, k_features), k_side.idx)
    params, has_features = apart(jax.tree.map(jnp.asarray, params)), encoding.acts_on("features")
    call = Call(q, k, v, q_side.pos.dtype, x, q_features or {}, k_features or {}, keys_mapped)
    check_sizes(encoding, params, call)
    if has_features and x is not None:
        order = None if in_order else q_side.idx
        q_features = k_features = batch_features(encoding, params, x, q_side.pos, None, order, q_segment)[0]
    q_features, k_features = q_features or {}, k_features or {}
    q_slots, k_slots, segments = _slots(q_side), _slots(k_side), q_segment is not None
    if isinstance(executor, str):
        executor = choose_executor(executor, encoding, mask, q.shape[1], k.shape[1], in_order, segments, q.dtype)

    def mapped(hook: str, x: jax.Array, slots: Slots, features: Features, recent: jax.Array | None = None):
        seen, _ = seen_by(encoding, hook, x, None if in_order else slots.idx, slots.segment, recent)
        return token_map(encoding, hook, params, seen, slots.pos, features)

    mapped_q = mapped("query", q, q_slots, q_features, q_recent)
    mapped_kv = (k, v) if keys_mapped else tuple(mapped(*x, k_slots, k_features) for x in (("key", k), ("value", v)))
    queries = Block(apart(_queries(encoding, params, q, mapped_q, q_slots.pos, q_features)), q_slots)
    keys = Block(apart(_keys(encoding, params, k, mapped_kv, k_slots.pos, k_features)), k_slots)
    run = functools.partial(
        EXECUTORS[executor] if isinstance(executor, str) else executor,
        encoding, mask, order=Order(in_order, consecutive_offset(q_side.pos, k_side.pos)),
    )  # fmt: skip
    with _forward_mode_needs_dense(executor):
        each = functools.partial(cut.over_sequences, run) if cut.cuts_sequences(q.shape[0]) else run
        o = each(params, queries, keys)
    return token_map(encoding, "output", params, apart(o).swapaxes(1, 2), q_slots.pos, q_features).astype(q.dtype)


def _check_use(encoding: Encoding, mask: Mask, keys_mapped: bool) -> None:
    encoding.require_resolved()
    if not mask.causal and (refused := [part for part in parts(encoding) if part.causal_only]):
        raise ConfigError(f"{refused[-1]} is for causal masks: keys after the query have no place in it")
    if keys_mapped and not encoding.caches_mapped_keys:
        raise ValueError(f"{type(encoding).__name__} maps keys on every read: keys_mapped must be False")


@contextlib.contextmanager
def _forward_mode_needs_dense(executor: str | Executor) -> Iterator[None]:
    """Where JAX refuses forward mode while it calls the executor, rather than later, the error says what to do."""
    try:
        yield
    except (TypeError, NotImplementedError) as error:
        if not any(word in str(error) for word in ("custom_vjp", "custom_lin")):
            raise
        raise TypeError(f"executor {executor!r} has no forward-mode derivative: give executor='dense'") from None


def _queries(
    encoding: Encoding, params: Params, q: jax.Array, mapped: jax.Array, pos: jax.Array, features: Features
) -> Tokens:
    """The query side, heads first, with what the formula multiplies products by."""
    head_dim, dtype = q.shape[-1], wide_dtype(q.dtype)
    factor, scale = None, 1 / math.sqrt(head_dim)
    if encoding.acts_on("temperature"):
        temperature = _of_tokens(encoding, "temperature", params, pos, features)
        factor = (temperature if temperature.ndim == 3 else temperature[:, None])[..., None].astype(dtype)
    mapped = mapped.swapaxes(1, 2)
    by_content = encoding.acts_on("score")
    of_maps = None if factor is None else jnp.expand_dims(factor, tuple(range(4, mapped.ndim)))
    return Tokens(
        mapped=times(mapped.astype(dtype) * scale, of_maps).astype(_operand_dtype(q.dtype)),
        values=None,
        vectors=q.swapaxes(1, 2) if by_content or encoding.acts_on("relative") else None,
        unscaled=mapped if by_content else None,
        factor=factor if by_content or encoding.acts_on("relative") else None,
        potential=_potential(encoding, params, pos, features),
        features=features if by_content else {},
    )


def _keys(
    encoding: Encoding, params: Params, k: jax.Array, mapped: tuple[jax.Array, ...], pos: jax.Array, features: Features
) -> Tokens:
    """The key side, heads first; mapped: keys and values."""
    dtype, by_content = _operand_dtype(k.dtype), encoding.acts_on("score")
    keys, values = (x.swapaxes(1, 2).astype(dtype) for x in mapped)
    return Tokens(
        mapped=keys,
        values=values,
        vectors=k.swapaxes(1, 2) if by_content or encoding.acts_on("relative") else None,
        unscaled=None,
        factor=None,
        potential=_potential(encoding, params, pos, features),
        features=features if by_content else {},
    )


def _of_tokens(encoding: Encoding, hook: str, params: Params, pos: jax.Array, features: Features) -> jax.Array:
    """The hook `temperature` or `potential` over a batch: pos [b or 1, t], result [b or 1, ...]."""
    shared = bool(features) and pos.shape[0] == 1  # positions alone are, what tokens keep is not
    by_row = jax.vmap(getattr(encoding, hook), in_axes=(None, None if shared else 0, 0))
    return by_row(params, pos[0] if shared else pos, features)


def _potential(encoding: Encoding, params: Params, pos: jax.Array, features: Features) -> jax.Array | None:
    """[b or 1, h or 1, t, n], where there is one."""
    if not encoding.acts_on("potential"):
        return None
    return at_least_float32(_of_tokens(encoding, "potential", params, pos, features).swapaxes(1, 2))


def _operand_dtype(dtype: Any) -> Any:
    """The type of the operands of attention's products.

    On CPUs bfloat16 becomes float32: these narrow batched products run slower in bfloat16 there, and some of their
    forms not at all.
    """
    return wide_dtype(dtype) if jax.default_backend() == "cpu" else dtype


def token_map(
    encoding: Encoding, hook: str, params: Params, vectors: jax.Array, pos: jax.Array, features: Features
) -> jax.Array:
    """The hook `query`, `key`, `value` or `output` over a batch: vectors [b, t, h, d], pos [b or 1, t] or [t].

    Where the hook looks back, vectors are what `history.seen_by` makes of them. Of n regimes come [b, t, h, n, d'].
    """
    require_encoding(encoding, "token_map: encoding")
    if not encoding.acts_on(hook):
        return vectors
    pos, axis = _by_row(pos)
    one = functools.partial(getattr(encoding, hook), params)
    found = jax.vmap(one, in_axes=(0, axis, 0))(vectors, pos, features)
    return jnp.stack(found, axis=-2) if isinstance(found, tuple) else found


def _by_row(pos: Any) -> tuple[jax.Array, int | None]:
    """Positions [b, t] and the axis of sequences; those that all sequences share as [t], which has none."""
    pos = jnp.atleast_2d(pos)
    return (pos[0], None) if pos.shape[0] == 1 else (pos, 0)


def _slots(side: Side) -> Slots:
    """With a first axis of b, or of 1 for what all sequences share."""
    return Slots(*jax.tree.map(lambda x: jnp.atleast_2d(jnp.asarray(x)), tuple(side)))


def batch_features(
    encoding: Encoding, params: Params, x: jax.Array, pos: Any, carry: Any = None, idx: Any = None, segment: Any = None
) -> tuple[Features, Any]:
    """`encoding.features` over a batch: x [b, t, m], pos [t] or [b, t].

    Args:
      carry: what the call for the tokens before these gave (arrays [b, ...]); None at the start.
      idx, segment: arrival orders and document numbers [t] or [b, t]; None where slots stand in order, in one document.
    """
    require_encoding(encoding, "batch_features: encoding")
    recent, carry = (None, None) if carry is None else carry
    seen, recent = seen_by(encoding, "features", x, idx, segment, recent)
    pos, axis = _by_row(pos)
    each = jax.vmap(encoding.features, in_axes=(None, 0, axis, None if carry is None else 0))
    features, carry = each(params, seen, pos, carry)
    return features, None if recent is None and carry is None else (recent, carry)


def choose_executor(
    executor: str,
    encoding: Encoding,
    mask: Mask,
    num_queries: int,
    num_keys: int,
    in_order: bool,
    segments: bool = False,
    dtype: Any = np.float32,
) -> str:
    """The executor's name behind "auto" for such a call; `in_order` as in `Order`, dtype that of q."""
    if executor != "auto":
        return executor
    if is_native(dtype) and not refusal(encoding, mask, in_order, segments):
        return "fused"
    return "dense" if num_queries * num_keys <= DENSE_PAIRS and not in_order else "blockwise"


__all__ = [
    "EXECUTORS", "Mask", "attend", "batch_features", "causal", "check_positions", "choose_executor", "full", "known",
    "refusal", "seen_by", "token_map", "window", "without_empty",
]  # fmt: skip
