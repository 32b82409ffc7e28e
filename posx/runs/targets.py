"""The targets that a run is measured on: those of its longest windows ever, so that its rows compare.

The longest window decides which tokens a protocol scores: a stretch holds whole windows, and sliding ones need a
warm-up. That length is the anchor. Rows keep it and it can only rise. Earlier rows are then measured again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from posx.config import EvalConfig
from posx.evaluation.base import Protocol, Row
from posx.evaluation.protocols import longest_window, run_protocols
from posx.evaluation.statistics import BLOCK_LEN

#: The fields by which rows compare. A damaged row may lack some: it is measured again.
_COMPARED = frozenset({"block_len", "max_targets", "stride", "targets"})


@dataclasses.dataclass(frozen=True)
class Question:
    """The rows that are asked of one `protocol`.

    lengths: requested. moved: lengths whose stored rows used an older set of targets. stored: rows on the current
    targets, by length. apart: rows with another number of targets or another stride.
    """

    protocol: Protocol
    anchor: int
    lengths: tuple[int, ...]
    moved: tuple[int, ...]
    stored: dict[int, Row]
    apart: tuple[Row, ...]


def questions(
    config: EvalConfig,
    own: EvalConfig,
    train_len: int,
    rows: Sequence[Row],
    place: Callable[[Protocol, int], str],
    defined: Callable[[int], bool],
) -> list[Question]:
    """Return what `config` asks of a run whose own settings are `own`, for each protocol.

    rows: the stored rows of one step and one text. place: the digest of the targets of a protocol at a length.
    """
    longest = max(longest_window(one, train_len) for one in (config, own))
    found = []
    for first, lengths in run_protocols(config, train_len, longest):
        own_rows = (row for row in rows if row["protocol"] == first.name and _COMPARED <= row.keys())
        kin = [row for row in own_rows if row["block_len"] == BLOCK_LEN]
        same = [row for row in kin if _settings(row) == (first.num_targets, first.stride_at(row["eval_len"], lengths))]
        anchor = max(longest, *map(anchor_of, same)) if same else longest
        protocol = first.of_run(config, train_len, anchor)
        stored = {row["eval_len"]: row for row in same if row["targets"] == place(protocol, row["eval_len"])}
        left = {row["eval_len"] for row in same} - stored.keys()
        moved = sorted(left.intersection(protocol.required(sorted({*lengths, *left, *stored}), defined)))
        apart = tuple(row for row in kin if row not in same)
        found.append(Question(protocol, anchor, protocol.required(lengths, defined), tuple(moved), stored, apart))
    return found


def _settings(row: Row) -> tuple[int, int]:
    return row["max_targets"], row["stride"]


def anchor_of(row: Row) -> int:
    """Return the longest window, in tokens, that the targets of a row serve; at least its own if the row is silent."""
    return int(row.get("anchor", max(row["eval_len"], row.get("warm_up", 0))))
