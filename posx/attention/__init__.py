"""`attend`: one formula, several executors."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.blockwise import blockwise
from posx.attention.dense import dense
from posx.attention.fused import fused, is_native, refusal
from posx.attention.masks import Mask, causal, full, window
from posx.attention.tiles import Slots, Tokens
from posx.encodings.base import Encoding, Features, Params, wide_dtype
from posx.errors import UndefinedLength

EXECUTORS = {"dense": dense, "blockwise": blockwise, "fused": fused}

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
    executor: str = "auto",
    keys_mapped: bool = False,
) -> jax.Array:
    """Attention outputs [b, q, h, d] under `encoding`.

    Args:
      encoding: a resolved value; params: its merged dict for this layer, see `Encoding.init`.
      q: [b, q, h, d]; k, v: [b, k, g, d], g dividing h.
      q_pos, k_pos: positions [q], [k] or [b, q], [b, k]; int32, or float32 where the encoding allows.
      q_idx, k_idx: arrival orders of the same shapes, -1 for an empty slot. May be left out only where queries and
        keys are the same tokens, in order.
      q_segment, k_segment: document numbers; a pair sees each other only within one.
      mask: who may see whom; a row that sees nothing returns 0.
      x: [b, q, m], the layer's normalised input, from which features of whole-sequence self-attention are computed;
        with a cache `q_features` and `k_features` ([b, t, ...] each) are given instead.
      executor: "dense" (one tile, the oracle), "blockwise" (memory linear in length), "fused" (the vendor's kernel,
        for encodings that fit it) or "auto", see `choose_executor`.
      keys_mapped: k and v come out of a cache that holds them mapped.

    Raises:
      ConfigError: an encoding with an open field. UndefinedLength: positions, known on the host, past the last one
      the encoding is defined for. ValueError: shapes, position types or an executor that do not fit.
    """
    encoding.require_resolved()
    _check(encoding, q, k, v, q_pos, k_pos, executor)
    in_order = q_idx is None and k_idx is None
    if in_order and q.shape[1] != k.shape[1]:
        raise ValueError(f"{q.shape[1]} queries but {k.shape[1]} keys: give q_idx and k_idx, the arrival orders")
    if in_order:
        q_idx = k_idx = np.arange(q.shape[1], dtype=np.int32)
    elif q_idx is None or k_idx is None:
        raise ValueError("give both q_idx and k_idx, or neither")
    if (q_segment is None) != (k_segment is None):
        raise ValueError("give both q_segment and k_segment, or neither")
    if keys_mapped and not encoding.caches_mapped_keys:
        raise ValueError(f"{type(encoding).__name__} maps keys on every read: keys_mapped must be False")
    params = jax.tree.map(jnp.asarray, params)
    if x is not None and encoding.acts_on("features"):
        q_features = k_features = batch_features(encoding, params, x, q_pos)[0]
    elif encoding.acts_on("features") and (q_features is None or k_features is None):
        raise ValueError(f"{type(encoding).__name__} reads features: give x, or q_features and k_features")
    q_features, k_features = q_features or {}, k_features or {}
    q_slots, k_slots = _slots(q_pos, q_idx, q_segment), _slots(k_pos, k_idx, k_segment)
    segments = q_segment is not None
    run = EXECUTORS[choose_executor(executor, encoding, mask, q.shape[1], k.shape[1], in_order, segments, q.dtype)]
    o = run(
        encoding, mask, params,
        _queries(encoding, params, q, q_slots.pos, q_features),
        _keys(encoding, params, k, v, k_slots.pos, k_features, keys_mapped),
        q_slots, k_slots, in_order=in_order, offset=consecutive_offset(q_pos, k_pos),
    )  # fmt: skip
    return token_map(encoding, "output", params, o.swapaxes(1, 2), q_slots.pos, q_features).astype(q.dtype)


def _queries(encoding: Encoding, params: Params, q: jax.Array, pos: jax.Array, features: Features) -> Tokens:
    """The query side, heads first, with what the formula multiplies products by."""
    head_dim, dtype = q.shape[-1], wide_dtype(q.dtype)
    temperature = None
    if encoding.acts_on("temperature"):
        temperature = jax.vmap(encoding.temperature, in_axes=(None, 0))(params, pos)
    # [b or 1, h or 1, q, 1]
    factor = jnp.full((1, 1, q.shape[1], 1), 1 / math.sqrt(head_dim), dtype)
    if temperature is not None:
        factor = factor * (temperature if temperature.ndim == 3 else temperature[:, None])[..., None].astype(dtype)
    mapped = token_map(encoding, "query", params, q, pos, features).swapaxes(1, 2)
    by_content = encoding.acts_on("score")
    return Tokens(
        mapped=(mapped.astype(dtype) * factor).astype(_operand_dtype(q.dtype)),
        values=None,
        vectors=q.swapaxes(1, 2) if by_content or encoding.acts_on("relative") else None,
        unscaled=mapped if by_content else None,
        factor=factor if encoding.acts_on("relative") else None,
        features=features if by_content else {},
    )


def _keys(
    encoding: Encoding, params: Params, k: jax.Array, v: jax.Array, pos: jax.Array, features: Features, mapped: bool
) -> Tokens:
    """The key side, heads first; k and v come out of the cache mapped already if `mapped`."""
    dtype, by_content = _operand_dtype(k.dtype), encoding.acts_on("score")
    keys = k if mapped else token_map(encoding, "key", params, k, pos, features)
    values = v if mapped else token_map(encoding, "value", params, v, pos, features)
    return Tokens(
        mapped=keys.swapaxes(1, 2).astype(dtype),
        values=values.swapaxes(1, 2).astype(dtype),
        vectors=k.swapaxes(1, 2) if by_content or encoding.acts_on("relative") else None,
        unscaled=None,
        factor=None,
        features=features if by_content else {},
    )


def _operand_dtype(dtype: Any) -> Any:
    """The type of the operands of attention's products.

    On CPUs bfloat16 becomes float32: these narrow batched products run slower in bfloat16 there, and some of their
    forms not at all.
    """
    return wide_dtype(dtype) if jax.default_backend() == "cpu" else dtype


def token_map(
    encoding: Encoding, hook: str, params: Params, vectors: jax.Array, pos: jax.Array, features: Features
) -> jax.Array:
    """The hook `query`, `key`, `value` or `output` over a batch: vectors [b, t, h, d], pos [b or 1, t] or [t]."""
    if not encoding.acts_on(hook):
        return vectors
    pos = jnp.atleast_2d(pos)
    shared = pos.shape[0] == 1
    one = functools.partial(getattr(encoding, hook), params)
    return jax.vmap(one, in_axes=(0, None if shared else 0, 0))(vectors, pos[0] if shared else pos, features)


def consecutive_offset(q_pos: Any, k_pos: Any) -> int | None:
    """The first query's position less the first key's, if both sides are known to be whole numbers counting up by 1."""
    if not all(isinstance(pos, np.ndarray) and pos.ndim == 1 and pos.dtype.kind == "i" for pos in (q_pos, k_pos)):
        return None
    if not all((np.diff(pos) == 1).all() for pos in (q_pos, k_pos)):
        return None
    return int(q_pos[0]) - int(k_pos[0])


def _slots(pos: Any, idx: Any, segment: Any) -> Slots:
    """With a first axis of b, or of 1 for what all sequences share."""
    rows = lambda x: jnp.atleast_2d(jnp.asarray(x))  # noqa: E731
    return Slots(rows(pos), rows(idx), None if segment is None else rows(segment))


def batch_features(
    encoding: Encoding, params: Params, x: jax.Array, pos: Any, carry: Any = None
) -> tuple[Features, Any]:
    """`encoding.features` over a batch: x [b, t, m], pos [t] or [b, t], carry [b, ...] or None at the start."""
    by_row = 0 if pos.ndim == 2 else None
    return jax.vmap(encoding.features, in_axes=(None, 0, by_row, None if carry is None else 0))(params, x, pos, carry)


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
    """The executor's name behind "auto" for such a call; `in_order` as in `blockwise`, dtype that of q."""
    if executor != "auto":
        return executor
    if is_native(dtype) and not refusal(encoding, mask, in_order, segments):
        return "fused"
    return "dense" if num_queries * num_keys <= DENSE_PAIRS and not in_order else "blockwise"


def check_positions(encoding: Encoding, pos: Any) -> None:
    """Raises UndefinedLength where positions known on the host go past what the encoding is defined for."""
    if encoding.integer_positions and not jnp.issubdtype(pos.dtype, jnp.integer):
        raise ValueError(f"{type(encoding).__name__} reads a table, so positions must be integers, not {pos.dtype}")
    last = encoding.max_position
    if last is None or isinstance(pos, jax.core.Tracer):
        return
    known = np.asarray(pos)
    if known.max(initial=0) > last or known.min(initial=0) < 0:
        got = f"{known.min()} to {known.max()}"
        raise UndefinedLength(f"{encoding} is defined for positions 0 to {last}, but got {got}")


def _check(encoding: Encoding, q, k, v, q_pos, k_pos, executor: str) -> None:
    if executor not in (*EXECUTORS, "auto"):
        raise ValueError(f"executor {executor!r} is unknown; allowed: {', '.join(EXECUTORS)}, auto")
    if q.ndim != 4 or k.ndim != 4 or k.shape != (*v.shape[:3], k.shape[3]) or q.shape[0] != k.shape[0]:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} must be [b, q, h, d], [b, k, g, d], [b, k, g, d]")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} key/value heads do not divide {q.shape[2]} query heads")
    for name, pos, length in (("q_pos", q_pos, q.shape[1]), ("k_pos", k_pos, k.shape[1])):
        if pos.ndim not in (1, 2) or pos.shape[-1] != length:
            raise ValueError(f"{name} has shape {pos.shape}, but there are {length} tokens: give [t] or [b, t]")
        check_positions(encoding, pos)


__all__ = [
    "EXECUTORS", "Mask", "attend", "batch_features", "causal", "check_positions", "choose_executor", "full", "refusal",
    "token_map", "window",
]  # fmt: skip
