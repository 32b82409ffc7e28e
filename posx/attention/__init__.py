"""`attend`: one formula, several executors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.blockwise import blockwise
from posx.attention.dense import dense
from posx.attention.masks import Mask, causal, full, window
from posx.attention.tiles import Slots, Tokens
from posx.encodings.base import Encoding, Features, Params
from posx.errors import UndefinedLength

EXECUTORS = {"dense": dense, "blockwise": blockwise}

#: `auto` takes the dense executor up to this many query-key pairs, above it the score matrix costs more than it saves.
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
    q_idx: jax.Array | None = None,
    k_idx: jax.Array | None = None,
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
      executor: "dense" (one tile, the oracle), "blockwise" (memory linear in length) or "auto".
      keys_mapped: k and v come out of a cache that holds them mapped.

    Raises:
      ConfigError: an encoding with an open field. UndefinedLength: positions, known on the host, past the last one
      the encoding is defined for. ValueError: shapes, position types or an executor that do not fit.
    """
    encoding.require_resolved()
    _check(encoding, q, k, v, q_pos, k_pos, executor)
    if q_idx is None and k_idx is None:
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"{q.shape[1]} queries but {k.shape[1]} keys: give q_idx and k_idx, the arrival orders")
        q_idx = k_idx = jnp.arange(q.shape[1], dtype=jnp.int32)
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
    run = EXECUTORS[choose_executor(executor, q.shape[1], k.shape[1])]

    def one_sequence(q, k, v, q_slots, k_slots, q_features, k_features):
        mapped_q = encoding.query(params, q, q_slots.pos, q_features)
        mapped_k = k if keys_mapped else encoding.key(params, k, k_slots.pos, k_features)
        values = v if keys_mapped else encoding.value(params, v, k_slots.pos, k_features)
        o = run(
            encoding, mask, params,
            Tokens(q, mapped_q, None, q_features), Tokens(k, mapped_k, values, k_features), q_slots, k_slots,
        )  # fmt: skip
        return encoding.output(params, o, q_slots.pos, q_features).astype(q.dtype)

    q_slots, k_slots = Slots(q_pos, q_idx, q_segment), Slots(k_pos, k_idx, k_segment)
    batched = (0, 0, 0, _axes(q_slots, 2), _axes(k_slots, 2), 0, 0)
    return jax.vmap(one_sequence, in_axes=batched)(q, k, v, q_slots, k_slots, q_features or {}, k_features or {})


def batch_features(
    encoding: Encoding, params: Params, x: jax.Array, pos: Any, carry: Any = None
) -> tuple[Features, Any]:
    """`encoding.features` over a batch: x [b, t, m], pos [t] or [b, t], carry [b, ...] or None at the start."""
    return jax.vmap(encoding.features, in_axes=(None, 0, _axes(pos, 2), None if carry is None else 0))(
        params, x, pos, carry
    )


def choose_executor(executor: str, num_queries: int, num_keys: int) -> str:
    """The executor's name behind "auto" for these lengths."""
    if executor != "auto":
        return executor
    return "dense" if num_queries * num_keys <= DENSE_PAIRS else "blockwise"


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


def _axes(tree: Any, batched_ndim: int) -> Any:
    """vmap axes: 0 for arrays with a batch axis, None for those all sequences share."""
    return jax.tree.map(lambda x: 0 if x.ndim == batched_ndim else None, tree)


__all__ = [
    "EXECUTORS", "Mask", "attend", "batch_features", "causal", "check_positions", "choose_executor", "full", "window",
]  # fmt: skip
