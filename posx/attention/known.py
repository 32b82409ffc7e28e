"""Checks of slots whose values are known before tracing: mistakes that would let tokens read what they must not.

Without `idx` every slot is a token, and without `segment` all tokens are one document. Positions that contradict this
are refused, because attention would read padding, or one document another, in silence. With `idx` they are taken as
they are. Traced values are trusted, and cost nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: The farthest step in tokens from one slot to the next that is not taken for a mark of padding.
FARTHEST_STEP = 2**24
_MARK = "Mark padding by an idx of -1: posx.Slots({}, idx)."


def check_known_positions(name: str, pos: Any, idx: Any, segment: Any) -> None:
    """Raise ValueError if positions are known to be of packed documents or of padding that nothing marks.

    Args:
      name: of the positions, for the message.
      pos: positions [t] or [b, t] in tokens; those of empty slots are replaced by others of their row.
      idx: arrival orders; None if every slot is a token, in order.
      segment: document numbers; None for one document.
    """
    check_range(name, pos)
    if not isinstance(pos, np.ndarray) or not pos.size or idx is not None or not isinstance(segment, np.ndarray | None):
        return
    mark = _MARK.format(name)
    if (least := pos.min()) < 0:
        raise ValueError(
            f"{name} is {least:g} in a slot, but without idx every slot is a token that others read. {mark} If the "
            "position is meant, give idx, the arrival orders."
        )
    rows, inside = np.atleast_2d(pos), True
    if segment is not None:
        rows, inside = _documents(rows, segment)
    steps = rows[:, 1:] - rows[:, :-1]
    if not steps.size or (steps.min() >= 0 and steps.max() <= rows.shape[1]):
        return  # they grow, as nearly always
    falls = inside & (steps < 0) & (inside & (steps > 0)).any(axis=-1, keepdims=True)  # a row may run backwards
    if falls.any():
        raise ValueError(
            f"{name} starts again{'' if segment is None else ' within a segment'}, {_step(rows, falls)}, so one "
            "document would read another. Number packed documents: posx.Slots(pos, segment=...). If it is one "
            "document, give idx, the arrival orders."
        )
    if (jumps := inside & ((steps > FARTHEST_STEP) | _enters_plateau(steps))).any():
        raise ValueError(
            f"{name} jumps {_step(rows, jumps)}, as padding does, but without idx every slot is a token that others "
            f"read. {mark} If the jump is meant, give idx, the arrival orders."
        )


def check_range(name: str, pos: Any) -> None:
    """Raise ValueError if positions of any shape are known to be NaN, infinite, or beyond those of int32."""
    if isinstance(pos, np.ndarray) and pos.dtype.kind == "f" and (bad := pos[~(np.abs(pos) < 2.0**31)]).size:
        raise ValueError(
            f"{name} is {bad[0]:g} in the slot of a token, but positions must be below 2**31. {_MARK.format(name)}"
        )


def check_orders(name: str, idx: Any, segment: Any) -> None:
    """Raise ValueError if two keys of one document are known to have one arrival order: they would see each other.

    name: of the orders, for the message. idx, segment: [t] or [b, t], as in `check_known_positions`.
    """
    if not isinstance(idx, np.ndarray) or not isinstance(segment, np.ndarray | None) or not idx.size:
        return
    keys = np.atleast_2d(idx if segment is None else (segment.astype(np.int64) << 32) + idx)
    filled = np.broadcast_to(idx >= 0, keys.shape)
    if ((keys[:, 1:] > np.maximum.accumulate(keys, axis=-1)[:, :-1]) | ~filled[:, 1:]).all():
        return  # they grow, as nearly always
    for row, tokens in zip(keys, filled, strict=True):
        orders, counts = np.unique(row[tokens], return_counts=True)
        if (counts > 1).any():
            number = int(orders[counts.argmax()]) & (2**32 - 1)
            raise ValueError(
                f"{name} is {number} in {counts.max()} slots of one document, which would see each other. Number the "
                "tokens of a document 0, 1, 2, ... in order of arrival. Number packed documents: "
                "posx.Slots(pos, idx, segment)."
            )


def _documents(pos: np.ndarray, segment: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return positions [b, t] with the tokens of a document side by side, and which steps [b, t - 1] are inside one."""
    pos, segment = np.broadcast_arrays(pos, segment)
    if (segment[:, 1:] < segment[:, :-1]).any():
        order = np.argsort(segment, axis=-1, kind="stable")
        pos, segment = (np.take_along_axis(a, order, axis=-1) for a in (pos, segment))
    return pos, segment[:, 1:] == segment[:, :-1]


def _enters_plateau(steps: np.ndarray) -> np.ndarray:
    """Return which of steps [b, t - 1] leads over more tokens than the row has to one position until its end."""
    stays = np.logical_and.accumulate(steps[:, ::-1] == 0, axis=-1)[:, ::-1]
    enters = steps > steps.shape[1] + 1
    enters[:, -1:] = False
    enters[:, :-1] &= stays[:, 1:]
    return enters


def _step(rows: np.ndarray, steps: np.ndarray) -> str:
    """Return the first of the `steps` [b, t - 1] of `rows` [b, t] in words."""
    row, place = np.argwhere(steps)[0]
    return f"from {rows[row, place]:g} to {rows[row, place + 1]:g}{f' in row {row}' if len(rows) > 1 else ''}"
