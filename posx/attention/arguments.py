"""What `attend` is given, made fit or refused before anything runs: shapes, positions, arrival orders, empty slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.encodings.base import Encoding, check_defined

#: A NumPy array where the values are known before tracing, else a JAX one.
Known = np.ndarray | jax.Array


def check_vectors(q: Any, k: Any, v: Any) -> None:
    """Raises ValueError where q, k and v are not [b, q, h, d], [b, k, g, d], [b, k, g, d] with g dividing h."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != (*v.shape[:3], k.shape[3]) or q.shape[0] != k.shape[0]:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} must be [b, q, h, d], [b, k, g, d], [b, k, g, d]")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}: vectors must be floats. Cast them to float32")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} key/value heads do not divide {q.shape[2]} query heads")


def check_tokens(encoding: Encoding, q: Any, k: Any, x: Any, q_features: Any, k_features: Any) -> None:
    """Raises ValueError where an encoding that keeps features is given none, two kinds, or those of other tokens."""
    if not encoding.acts_on("features"):
        return
    name, given = type(encoding).__name__, (q_features is not None, k_features is not None)
    if x is None and not all(given):
        raise ValueError(f"{name} reads features: give x, or q_features and k_features")
    if x is not None and any(given):
        raise ValueError(f"{name} is given x and features too: x is for whole sequences, features out of a cache")
    if x is not None and (x.ndim != 3 or x.shape[:2] != q.shape[:2] or x.shape[:2] != k.shape[:2]):
        raise ValueError(f"x {x.shape} must be [b, t, m] of the tokens of q {q.shape}, which are those of k {k.shape}")
    for side, features, tokens in (("q", q_features, q), ("k", k_features, k)):
        for key, values in (features or {}).items():
            if values.shape[:2] != tokens.shape[:2]:
                raise ValueError(f"{side}_features[{key!r}] {values.shape} does not fit {side} {tokens.shape}")


def known(name: str, given: Any, batch: int, length: int) -> Known:
    """`given` as an array [t] or [b, t]: on the host if its values are known there, as it is if they are traced."""
    if not isinstance(given, jax.core.Tracer) and getattr(given, "is_fully_addressable", True):
        try:
            given = np.asarray(given)
        except ValueError:
            raise ValueError(f"{name} is no array of numbers: give [t] or [b, t]") from None
    if given.ndim not in (1, 2) or given.shape[-1] != length or given.shape[:-1] not in ((), (1,), (batch,)):
        raise ValueError(f"{name} has shape {given.shape}, but there are {length} tokens: give [t] or [b, t]")
    return given


def _as(x: Known, dtype: Any) -> Known:
    return x if x.dtype == dtype else x.astype(dtype)


def whole(name: str, given: Any, batch: int, length: int) -> Known:
    """Whole numbers [t] or [b, t] as int32; int64 stays where 64-bit types are on. Raises ValueError.

    Narrower and unsigned types are widened, for differences of them would wrap around. Wider ones must fit, which only
    values known on the host can be shown to.
    """
    x, widest = known(name, given, batch, length), np.dtype(jnp.result_type(int))
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be whole numbers, int32, not {x.dtype}")
    for dtype in (np.dtype(np.int32), widest):
        if np.can_cast(x.dtype, dtype):
            return _as(x, dtype)
    if not isinstance(x, np.ndarray):
        raise ValueError(f"{name} is {x.dtype}, whose values are not known here: give int32")
    if x.size and not np.iinfo(widest).min <= x.min() <= x.max() <= np.iinfo(widest).max:
        raise ValueError(f"{name} goes from {x.min()} to {x.max()}, which {widest} does not hold")
    return x.astype(widest)


def positions(name: str, given: Any, batch: int, length: int) -> Known:
    """Positions [t] or [b, t] as int32 or float32, with 64-bit types on as int64 or float64 too. Raises ValueError.

    Float64 is rounded to float32, unless that would move a whole number; float16 and bfloat16 are refused, as whole
    numbers have been rounded in them already.
    """
    x = known(name, given, batch, length)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return whole(name, x, batch, length)
    if x.dtype not in (np.float32, np.float64):
        raise ValueError(f"{name} is {x.dtype}: positions are int32 or float32")
    if not isinstance(x, np.ndarray) or x.dtype in (np.float32, jnp.result_type(float)):
        return x
    moved = (x == np.rint(x)) & (x != x.astype(np.float32))
    if moved.any():
        raise ValueError(f"{name} holds {x[moved][0]:.0f}, which float32 does not: give whole numbers as int32")
    return x.astype(np.float32)


class Side(NamedTuple):
    """Where and when one side's tokens stand, as given to `attend`, or as arrays [t] or [b, t]."""

    pos: Any
    idx: Any
    segment: Any


def sides(
    q_tokens: tuple[int, ...], k_tokens: tuple[int, ...], q: Side, k: Side, k_clean: bool
) -> tuple[Side, Side, bool]:
    """The sides of q_tokens = (b, q) and k_tokens = (b, k) as given, made fit, and whether they are in order.

    Raises ValueError, one line, for what is missing, of another shape or type.
    """
    for field in ("idx", "segment"):
        if (getattr(q, field) is None) != (getattr(k, field) is None):
            raise ValueError(f"give both q_{field} and k_{field}, or neither")
    in_order = q.idx is None
    if in_order and q_tokens != k_tokens:
        raise ValueError(f"{q_tokens[1]} queries but {k_tokens[1]} keys: give q_idx and k_idx, the arrival orders")
    q, k = _side("q", q_tokens, q, clean=False), _side("k", k_tokens, k, clean=k_clean)
    if jnp.issubdtype(q.pos.dtype, jnp.integer) != jnp.issubdtype(k.pos.dtype, jnp.integer):
        raise ValueError(f"q_pos is {q.pos.dtype} but k_pos {k.pos.dtype}: give both as int32 or both as float32")
    wider = jax.tree.map(lambda a, b: np.promote_types(a.dtype, b.dtype), q, k)
    return *(jax.tree.map(_as, side, wider) for side in (q, k)), in_order


def _side(side: str, tokens: tuple[int, ...], given: Side, clean: bool) -> Side:
    pos = positions(f"{side}_pos", given.pos, *tokens)
    segment = None if given.segment is None else whole(f"{side}_segment", given.segment, *tokens)
    if given.idx is None:
        return Side(pos, np.arange(tokens[1], dtype=np.int32), segment)
    idx = whole(f"{side}_idx", given.idx, *tokens)
    return Side(pos if clean else settled(pos, idx), idx, segment)


def check_positions(encoding: Encoding, pos: Known) -> None:
    """Raises UndefinedLength where positions known on the host go past what the encoding is defined for."""
    if encoding.integer_positions and not jnp.issubdtype(pos.dtype, jnp.integer):
        raise ValueError(f"{type(encoding).__name__} reads a table, so positions must be integers, not {pos.dtype}")
    if isinstance(pos, np.ndarray) and pos.size:
        check_defined(encoding, pos.min(), pos.max())


def check_slots(encoding: Encoding, q: Side, k: Side, q_recent: Any, from_x: bool) -> None:
    """Raises ValueError where slots are known not to stand as the encoding has to be given them.

    Features are made, and scores of whole rows of keys summed, from slot to slot: documents have to stand one after the
    other, each in the order of arrival, with nothing empty between for features and where neighbours are read.
    """
    name = type(encoding).__name__
    if from_x and encoding.acts_on("features"):
        if not (_in_a_row(q) and _same(q.idx, k.idx)):
            raise ValueError(
                f"{name} keeps features from token to token: give the tokens of a document one after the other, empty "
                "slots before them, the same ones as queries and as keys; or give q_features and k_features"
            )
        for field in ("pos", "segment"):
            if not _same(getattr(q, field), getattr(k, field), q.idx):
                raise ValueError(
                    f"q_{field} and k_{field} differ, but {name} computes the features of both sides from x: give one "
                    f"{field} for both, or give q_features and k_features"
                )
    if encoding.tiling == "rows" and not _in_a_row(k, gaps=not encoding.reads_neighbours):
        raise ValueError(
            f"{name} goes along the keys from slot to slot: give those of a document one after the other, in order of "
            "arrival" + (", with no empty slots between" if encoding.reads_neighbours else "")
        )
    back = encoding.history.get("query", 0)
    if back and q_recent is not None and q_recent.shape[1] != back:
        raise ValueError(f"q_recent holds {q_recent.shape[1]} tokens, but queries of {name} look back {back}")


def _same(a: Known | None, b: Known | None, idx: Known | None = None) -> bool:
    """Whether both are equal, in the slots that `idx` says are filled, unless that is not known."""
    if a is None or b is None:
        return a is b
    if a.shape[-1] != b.shape[-1]:
        return False
    if not all(isinstance(x, np.ndarray | None) for x in (a, b, idx)):
        return True
    return bool(((np.atleast_2d(a) == b) | (False if idx is None else idx < 0)).all())


def _in_a_row(side: Side, gaps: bool = False) -> bool:
    """Whether documents stand one after the other, and the filled slots of each in order of arrival, without empty ones
    between them unless `gaps` do no harm; True where that is not known."""
    if not isinstance(side.idx, np.ndarray) or not isinstance(side.segment, np.ndarray | None):
        return True
    idx = np.atleast_2d(side.idx)
    segment = np.zeros_like(idx) if side.segment is None else np.atleast_2d(side.segment)
    for order, document in zip(*np.broadcast_arrays(idx, segment), strict=True):
        filled = np.flatnonzero(order >= 0)
        alike = document[filled[1:]] == document[filled[:-1]]
        falls, apart = np.diff(order[filled]) < 0, np.diff(filled) > 1
        mixed = filled.size and 1 + (~alike).sum() > len(np.unique(document[filled]))
        if mixed or (alike & (falls | (apart & (not gaps)))).any():
            return False
    return True


def without_empty(values: Any, idx: Known | None) -> Any:
    """Arrays [b, t, ...] with zeros in the slots that are empty (idx -1): what stands there, NaN too, is nobody's."""
    if idx is None or (isinstance(idx, np.ndarray) and (idx >= 0).all()):
        return values
    filled = jnp.atleast_2d(jnp.asarray(idx) >= 0)

    def one(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(filled, tuple(range(2, x.ndim))), x, jnp.zeros((), x.dtype))

    return jax.tree.map(one, values)


def settled(pos: Known, idx: Known) -> Known:
    """Positions, with the least one of its row in slots that are empty for all who share the row; 0 in an empty row.

    Encodings are defined there, and it lies no further from the others than they do from each other.
    """
    if isinstance(idx, np.ndarray) and (idx >= 0).all():
        return pos
    xp: Any = np if isinstance(pos, np.ndarray) and isinstance(idx, np.ndarray) else jnp
    empty = xp.atleast_2d(xp.asarray(idx) < 0)
    rows = xp.atleast_2d(xp.asarray(pos))
    if rows.shape[0] == 1:
        empty = empty.all(axis=0, keepdims=True)
    highest = np.inf if jnp.issubdtype(pos.dtype, jnp.floating) else np.iinfo(pos.dtype).max
    least = xp.where(empty, xp.asarray(highest, pos.dtype), rows).min(axis=1, keepdims=True)
    least = xp.where(empty.all(axis=1, keepdims=True), xp.zeros((), pos.dtype), least)
    return xp.where(empty, least, rows).reshape(pos.shape)


def consecutive_offset(q_pos: Known, k_pos: Known) -> int | None:
    """The first query's position less the first key's, if both sides are known to be whole numbers counting up by 1.

    None if they are so far apart that floats do not hold their distances: `curve` is tabulated at floats.
    """
    if not all(isinstance(pos, np.ndarray) and pos.ndim == 1 and pos.dtype.kind == "i" for pos in (q_pos, k_pos)):
        return None
    if not all((np.diff(pos) == 1).all() for pos in (q_pos, k_pos)):
        return None
    offset = int(q_pos[0]) - int(k_pos[0])
    farthest = abs(offset) + max(len(q_pos), len(k_pos))
    return offset if farthest <= 2 ** (np.finfo(jnp.result_type(float)).nmant + 1) else None
