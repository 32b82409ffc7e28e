"""Checks of what `attend` is given, before anything runs: shapes, positions, arrival orders, empty slots."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posx.attention.known import check_known_positions, check_orders, check_range
from posx.attention.masks import MASKS
from posx.contract import Encoding, Features, check_defined, defined_hooks, position_shape

#: A NumPy array if the values are known before tracing, else a JAX one.
Known = np.ndarray | jax.Array


class Slots(NamedTuple):
    """The slots of one side's tokens, each array [t] or [b, t], with t the slots of q or of k.

    Positions of n > 1 axes are [t, n] or [b, t, n], for an encoding whose fact `axes` is n.

    Without idx every slot is a token. Known positions that fall, are below 0 or jump far are then refused.

    Attributes:
      pos: positions in tokens, int32 or float32, on each axis.
      idx: arrival orders, int32, -1 for an empty slot; None if queries and keys are the same tokens, in order.
      segment: document numbers, int32; None for one document.
    """

    pos: Any
    idx: Any = None
    segment: Any = None


def as_slots(given: Any) -> Slots:
    """Return `given`, or positions alone, as Slots."""
    return given if isinstance(given, Slots) else Slots(given)


def check_vectors(encoding: Encoding, q: Any, k: Any, v: Any, q_slots: Slots, k_slots: Slots) -> bool:
    """Return whether q are windows [b, q, 1 + n, h, d] of tokens, for an encoding whose `query` looks back n tokens.

    Raises ValueError unless q, k and v are [b, q, h, d], [b, k, g, d], [b, k, g, d] with g dividing h. So it does if
    the positions are as many as the heads, and not as many as the tokens.
    """
    back = encoding.history.get("query", 0)
    windows = back > 0 and q.ndim == 5 and q.shape[2] == 1 + back
    q = q[:, :, 0] if windows else q
    if q.ndim != 4 or k.ndim != 4 or k.shape != (*v.shape[:3], k.shape[3]) or q.shape[0] != k.shape[0]:
        remedy = " Add the axis of the batch: q[None], k[None], v[None]." if {q.ndim, k.ndim, v.ndim} == {3} else ""
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape} must have the shapes [b, q, h, d], [b, k, g, d], "
            f"[b, k, g, d].{remedy}"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}: vectors must be floats. Cast them to float32.")
    for name, x, slots in (("q", q, q_slots), ("k", k, k_slots)):
        shape: tuple[int, ...] = getattr(slots.pos, "shape", ())
        tokens = (shape[:-1] if encoding.axes > 1 else shape)[-1:]
        if tokens == x.shape[2:3] and x.shape[1] not in shape:
            raise ValueError(
                f"{name} {x.shape} has the {tokens[0]} tokens of its positions on the axis of heads. Vectors are "
                f"[b, t, h, d]: give {name}.swapaxes(1, 2)."
            )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{k.shape[2]} key/value heads do not divide {q.shape[2]} query heads. Choose a number that divides it: q "
            f"{q.shape} and k {k.shape} are [b, t, heads, d]."
        )
    return windows


def check_tokens(encoding: Encoding, q: Any, k: Any, x: Any, features: tuple[Features, Features] | None) -> None:
    """Raise ValueError if an encoding that keeps features is given none, two kinds, or those of other tokens."""
    if "features" not in defined_hooks(encoding):
        return
    name = type(encoding).__name__
    if x is None and features is None:
        raise ValueError(f"{name} reads features. Give x, or features=(q_features, k_features).")
    if x is not None and features is not None:
        raise ValueError(
            f"{name} is given both x and features. Give x for whole sequences, or features that a cache holds."
        )
    if x is not None and (x.ndim != 3 or x.shape[:2] != q.shape[:2] or x.shape[:2] != k.shape[:2]):
        raise ValueError(f"x {x.shape} must be [b, t, m], with the tokens of q {q.shape} and k {k.shape}.")
    for side, given, tokens in zip("qk", features or ({}, {}), (q, k), strict=True):
        for key, values in given.items():
            if values.shape[:2] != tokens.shape[:2]:
                raise ValueError(
                    f"{side}_features[{key!r}] {values.shape} does not fit {side} {tokens.shape}. Give the features of "
                    "these tokens."
                )


def host_array(
    name: str, given: Any, tokens: tuple[int, ...], kinds: tuple[str, ...] = ("int32",), of_token: tuple[int, ...] = ()
) -> Known:
    """Return `given`, an array [t] or [b, t] for `tokens` = (b, t), as a NumPy array unless it is traced.

    of_token: the shape of one token's entry, see `position_shape`. Raises ValueError for another shape, and for a type
    that is none of `kinds`.
    """
    if not isinstance(given, Known):
        raise ValueError(f"{name} is no array: give {_forms(of_token)} of {' or '.join(kinds)}.")
    if given.dtype == np.bool_:
        remedy = f"Write np.where({name}, order, -1)." if name.endswith("idx") else f"If it is a mask: {MASKS}"
        raise ValueError(f"{name} is bool: it must be {' or '.join(kinds)}. {remedy}")
    one = (tokens[1], *of_token)
    if given.shape not in (one, (1, *one), (tokens[0], *one)):
        n = len(of_token) and of_token[0]
        axes = f" and the encoding reads positions with {n} axes" if n else ""
        equal = n and given.shape[-1] == tokens[1]
        remedy = f" If all axes are equal, write np.stack([{name}] * {n}, axis=-1)." if equal else ""
        raise ValueError(
            f"{name} has shape {given.shape}, but vectors [b, t, h, d] have {tokens[1]} tokens{axes}: give "
            f"{_forms(of_token)}.{remedy}"
        )
    if given.dtype.name not in kinds:
        kind = kinds[-1] if jnp.issubdtype(given.dtype, jnp.floating) else kinds[0]
        raise ValueError(f"{name} is {given.dtype}: it must be {' or '.join(kinds)}. Write {name}.astype(np.{kind}).")
    is_known = not isinstance(given, jax.core.Tracer) and getattr(given, "is_fully_addressable", True)
    return np.asarray(given) if is_known else given


def _forms(of_token: tuple[int, ...]) -> str:
    return " or ".join(f"[{', '.join(map(str, (*axes, *of_token)))}]" for axes in ("t", "bt"))


def both_sides(
    encoding: Encoding, q_tokens: tuple[int, ...], k_tokens: tuple[int, ...], q: Slots, k: Slots, k_clean: bool
) -> tuple[Slots, Slots, bool]:
    """Return the checked slots of q_tokens = (b, q) and k_tokens = (b, k), and whether they are in order.

    Raises ValueError, one line, if an array is missing or has another shape or type. Raises UndefinedLength if known
    positions go past the last one that the encoding is defined for.
    """
    for field in ("idx", "segment"):
        if (getattr(q, field) is None) != (getattr(k, field) is None):
            raise ValueError(f"{field} is given on one side only: give it for both queries and keys, or for neither.")
    in_order = q.idx is None
    if in_order and q_tokens != k_tokens:
        raise ValueError(f"{q_tokens[1]} queries attend to {k_tokens[1]} keys: give idx, the arrival orders, of both.")
    one_side = all(map(operator.is_, q, k))
    q = _side(encoding, "q", q_tokens, q, clean=False)
    k = _side(encoding, "k", k_tokens, k, clean=k_clean)
    for name, side in (("q_pos", q), *([] if one_side else [("k_pos", k)])):
        if encoding.axes <= 1:
            check_known_positions(name, side.pos, None if in_order else side.idx, side.segment)
        else:  # each axis may start again, as columns do in every row of an image
            check_range(name, side.pos)
    if q.pos.dtype != k.pos.dtype:
        raise ValueError(
            f"positions are {q.pos.dtype} for queries but {k.pos.dtype} for keys: give both the same type."
        )
    if encoding.integer_positions and q.pos.dtype != np.int32:
        raise ValueError(f"{type(encoding).__name__} reads a table, so positions must be integers, not {q.pos.dtype}.")
    ends: list[Any] = []
    for pos in (q.pos,) if k.pos is q.pos else (q.pos, k.pos):
        if isinstance(pos, np.ndarray) and pos.size:
            ends += [pos.min(), pos.max()]
            check_defined(encoding, *ends[-2:])
    if ends and q.pos.dtype == np.int32 and int(max(ends)) - int(min(ends)) >= 2**31:
        raise ValueError(f"positions go from {min(ends)} to {max(ends)}: distances must be below 2**31 tokens.")
    return q, k, in_order


def _side(encoding: Encoding, side: str, tokens: tuple[int, ...], given: Slots, clean: bool) -> Slots:
    pos = given.pos if encoding.axes else drop_axes(given.pos, tokens)
    pos = host_array(f"{side}_pos", pos, tokens, ("int32", "float32"), position_shape(encoding))
    segment = None if given.segment is None else host_array(f"{side}_segment", given.segment, tokens)
    idx = None if given.idx is None else host_array(f"{side}_idx", given.idx, tokens)
    if idx is not None and side == "k":
        check_orders("k_idx", idx, segment)
    if not clean and idx is not None:
        filled = [_fill_positions(own, idx) for own in split_axes(encoding, pos)]
        pos = filled[0] if encoding.axes <= 1 else (np if isinstance(filled[0], np.ndarray) else jnp).stack(filled, -1)
    return Slots(pos, np.arange(tokens[1], dtype=np.int32) if idx is None else idx, segment)


def split_axes(encoding: Encoding, pos: Any) -> list[Any]:
    """Return positions along each axis, each without an axis of axes."""
    return [pos] if encoding.axes <= 1 else [pos[..., axis] for axis in range(encoding.axes)]


def drop_axes(pos: Any, tokens: tuple[int, ...] = ()) -> Any:
    """Return positions [t] or [b, t] for an encoding that reads none, of some that may have axes.

    tokens: (b, t), () if an array with two axes is known to be [b, t].
    """
    shape = getattr(pos, "shape", ())
    rows = [tokens, (1, *tokens[1:])]
    has_axes = shape[:-1] in [tokens[1:], *rows] and shape not in rows if tokens else len(shape) == 3
    return pos[..., 0] if has_axes else pos


def with_batch(encoding: Encoding, slots: Slots) -> Slots:
    """Return slots whose arrays all have an axis of the batch, b or 1."""
    pos, idx, segment = slots
    pos = pos if encoding.axes or pos.ndim < 3 else drop_axes(pos)
    pos = jnp.asarray(pos if pos.ndim == 2 + (encoding.axes > 1) else pos[None])
    idx, segment = jax.tree.map(jnp.atleast_2d, (idx, segment))
    return Slots(pos, idx, segment)


def _fill_positions(pos: Known, idx: Known) -> Known:
    """Return positions with the least one of its row in slots that are empty for all who share the row, 0 if all are.

    Encodings are defined there, and it is no further from the others than they are from each other.
    """
    if not idx.size or (isinstance(idx, np.ndarray) and (idx >= 0).all()):
        return pos
    xp: Any = np if isinstance(pos, np.ndarray) and isinstance(idx, np.ndarray) else jnp
    empty, rows = xp.atleast_2d(xp.asarray(idx) < 0), xp.atleast_2d(xp.asarray(pos))
    if rows.shape[0] == 1:
        empty = empty.all(axis=0, keepdims=True)
    highest = np.inf if jnp.issubdtype(pos.dtype, jnp.floating) else np.iinfo(pos.dtype).max
    least = xp.where(empty, xp.asarray(highest, pos.dtype), rows).min(axis=1, keepdims=True)
    least = xp.where(empty.all(axis=1, keepdims=True), xp.zeros((), pos.dtype), least)
    return xp.where(empty, least, rows).reshape(pos.shape)


def check_slots(encoding: Encoding, q: Slots, k: Slots, from_x: bool, windows: bool) -> None:
    """Raise ValueError if slots are known not to be in the order that the encoding needs.

    Features are made, and scores of whole rows of keys summed, from slot to slot. So documents must be one after the
    other, each in the order of arrival. No empty slots may be in between if features are made or neighbours are read.
    Queries that look back need `windows` unless they are all tokens.
    """
    name = type(encoding).__name__
    if (back := encoding.history.get("query", 0)) and not (windows or _same(q.idx, k.idx)):
        raise ValueError(
            f"{name} maps a query together with the {back} tokens before it. Give windows [b, q, {1 + back}, h, d] of "
            'these queries, out of posx.attention.with_previous_tokens(encoding, "query", q, idx)[0] of all tokens.'
        )
    if from_x and "features" in defined_hooks(encoding):
        if not (_are_in_order(q) and _same(q.idx, k.idx)):
            raise ValueError(
                f"{name} carries features from token to token. Give the tokens of a document one after the other, "
                "with empty slots only before them, and the same tokens as queries and as keys. Or give "
                "features=(q_features, k_features)."
            )
        pairs = [("pos", *axes) for axes in zip(split_axes(encoding, q.pos), split_axes(encoding, k.pos), strict=True)]
        for field, of_q, of_k in (*pairs, ("segment", q.segment, k.segment)):
            if not _same(of_q, of_k, q.idx):
                raise ValueError(
                    f"{field} differs between queries and keys, but {name} computes the features of both sides from x. "
                    f"Give one {field} for both, or give features=(q_features, k_features)."
                )
    neighbours = encoding.tiling == "neighbours"
    if encoding.tiling != "any" and not _are_in_order(k, gaps=not neighbours):
        raise ValueError(
            (
                f"{name} visits the keys from slot to slot: give the keys of a document one after the other, in "
                "order of arrival"
            )
            + (", with no empty slots between" if neighbours else "")
        )


def _same(a: Known | None, b: Known | None, idx: Known | None = None) -> bool:
    """Return whether both are equal in the slots that `idx` says are filled; True if that is not known."""
    if a is None or b is None or a.shape[-1] != b.shape[-1]:
        return a is b
    if not all(isinstance(x, np.ndarray | None) for x in (a, b, idx)):
        return True
    return bool(((np.atleast_2d(a) == b) | (False if idx is None else idx < 0)).all())


def _are_in_order(side: Slots, gaps: bool = False) -> bool:
    """Return whether documents are one after the other, each in order of arrival; True if that is not known.

    gaps: whether empty slots between the tokens of a document do no harm.
    """
    if not isinstance(side.idx, np.ndarray) or not isinstance(side.segment, np.ndarray | None):
        return True
    idx = np.atleast_2d(side.idx)
    segment = np.zeros_like(idx) if side.segment is None else np.atleast_2d(side.segment)
    for order, document in zip(*np.broadcast_arrays(idx, segment), strict=True):
        filled = np.flatnonzero(order >= 0)
        alike = document[filled[1:]] == document[filled[:-1]]
        falls, gap = np.diff(order[filled]) < 0, np.diff(filled) > 1
        mixed = filled.size and 1 + (~alike).sum() > len(np.unique(document[filled]))
        if mixed or (alike & (falls | (gap & (not gaps)))).any():
            return False
    return True


def without_empty(values: Any, idx: Known | None) -> Any:
    """Return arrays [b, t, ...] with zeros in empty slots (idx -1), whose contents, NaN too, then reach nothing."""
    if idx is None or (isinstance(idx, np.ndarray) and (idx >= 0).all()):
        return values
    filled = jnp.atleast_2d(jnp.asarray(idx) >= 0)
    return jax.tree.map(lambda x: zero_outside(x, filled), values)


def zero_outside(x: jax.Array, slots: jax.Array) -> jax.Array:
    """Return x [b, t, ...] with zeros outside of `slots`, bool [b or 1, t]."""
    return jnp.where(jnp.expand_dims(slots, tuple(range(2, x.ndim))), x, jnp.zeros((), x.dtype))


def consecutive_offset(q_pos: Known, k_pos: Known) -> int | None:
    """Return the first query's position less the first key's, if both sides are known integers that count up by 1."""
    if not q_pos.size:
        return None
    for pos in (q_pos, k_pos):
        if not (isinstance(pos, np.ndarray) and pos.ndim == 1 and pos.dtype.kind == "i" and (np.diff(pos) == 1).all()):
            return None
    offset = int(q_pos[0]) - int(k_pos[0])
    return offset if abs(offset) + 2 * max(len(q_pos), len(k_pos)) < 2**31 else None
