"""The targets that a run is measured on: those of the longest windows so far, so that its rows can be compared.

The longest window decides which tokens a protocol scores: a stretch is at least as long, and sliding ones need a
warm-up. That length is the anchor. Rows keep it and it can only rise. Earlier rows are then measured again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from posx.evaluation.base import Protocol, Row
from posx.evaluation.protocols import longest_window, run_protocols
from posx.evaluation.statistics import BLOCK_LEN, LEAST_PLACES
from posx.evaluation.targets import Documents, Targets, digest_arrays
from posx.lab.config import EvalConfig, RunConfig
from posx.lab.data import TextDataset
from posx.lab.runs.describe import is_defined
from posx.lab.runs.folder import RunFolder

if TYPE_CHECKING:
    from posx.lab.model import Model

#: The fields by which rows compare. A damaged row may lack some: it is measured again.
_COMPARED = frozenset({"block_len", "max_targets", "stride", "targets"})


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """The rows that are asked of one protocol.

    Attributes:
      protocol: with the settings of the run.
      anchor: the longest window so far, which places the targets, in tokens.
      lengths: requested.
      moved: lengths whose stored rows used an older set of targets.
      stored: rows on the current targets, by length.
      apart: rows with another number of targets or another stride.
    """

    protocol: Protocol
    anchor: int
    lengths: tuple[int, ...]
    moved: tuple[int, ...]
    stored: dict[int, Row]
    apart: tuple[Row, ...]


def evaluation_plans(
    config: EvalConfig,
    own: EvalConfig,
    train_len: int,
    rows: Sequence[Row],
    place: Callable[[Protocol, int], str],
    defined: Callable[[int], bool],
) -> list[EvaluationPlan]:
    """Return the rows that `config` asks of a run, for each protocol.

    Args:
      config: the requested evaluation.
      own: the run's own settings of evaluation.
      train_len: tokens.
      rows: the stored rows of one step and one text.
      place: returns the digest of the targets of a protocol at a length.
      defined: returns whether the model is defined at a length.
    """
    longest = max(longest_window(one, train_len) for one in (config, own))
    plans = []
    for first, lengths in run_protocols(config, train_len, longest):
        own_rows = (row for row in rows if row["protocol"] == first.name and _COMPARED <= row.keys())
        kin = [row for row in own_rows if row["block_len"] == BLOCK_LEN]
        same = [
            row
            for row in kin
            if row["max_targets"] == first.num_targets
            and row["stride"] == first.window_stride(row["eval_len"], lengths)
        ]
        anchor = max([longest, *map(row_anchor, same)])
        protocol = first.from_run(config, train_len, anchor)
        stored = {row["eval_len"]: row for row in same if row["targets"] == place(protocol, row["eval_len"])}
        left = {row["eval_len"] for row in same} - stored.keys()
        moved = sorted(left.intersection(protocol.required_lengths(sorted({*lengths, *left, *stored}), defined)))
        apart = tuple(row for row in kin if row not in same)
        plans.append(
            EvaluationPlan(protocol, anchor, protocol.required_lengths(lengths, defined), tuple(moved), stored, apart)
        )
    return plans


@dataclasses.dataclass(frozen=True)
class Asked:
    """A row that is asked of a run.

    Attributes:
      plan: of its protocol.
      length: of its windows, in tokens.
      targets: the scored ones.
      windows: [n, 3], as `Targets.windows`; None if the model is not defined at the length.
      begins: [n], token 0 of the stream takes the place of the first token of the window; None as `windows`.
      stored: the row, if the folder holds it.
    """

    plan: EvaluationPlan
    length: int
    targets: Targets
    windows: np.ndarray | None
    begins: np.ndarray | None
    stored: Row | None

    @property
    def key(self) -> tuple[int, str] | None:
        """The pass over the text that gives the row. Protocols may share it. None for an undefined length."""
        if self.windows is None or self.begins is None:
            return None
        return self.length, digest_arrays(self.windows, self.begins)


def few_documents(asked: Asked, num_documents: int) -> str:
    """Return that the targets lie in few of the text's documents, and how to score more; "" if they do not.

    The targets of a stretch, which holds a longest window in whole blocks, are at one place of the text.
    """
    targets, protocol = asked.targets, asked.plan.protocol
    places = max(targets.num_stretches, targets.num_documents or 0)
    if not protocol.has_whole_windows or places >= LEAST_PLACES or places >= num_documents:
        return ""
    stretch = _round_up(asked.plan.anchor, BLOCK_LEN)
    enough = _round_up(LEAST_PLACES * stretch, protocol.share[1])
    return (
        f"{targets.count:,} targets lie in {targets.num_documents} of {num_documents} documents, because each stretch "
        f"of {stretch:,} tokens is one place of the text. There are no intervals from so few places. For "
        f"{LEAST_PLACES} places, pass --num_targets={enough}"
    )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def run_stream(dataset: TextDataset) -> tuple[np.ndarray, Documents]:
    """Return the stream that a run is scored on, tokens [n + 1], and the places of its documents.

    The begin token before the text is the context of the very first target.
    """
    text = dataset.validation
    documents = Documents(1 + text.offsets[:-1], text.offsets[1:])
    return np.insert(text.tokens, 0, dataset.tokenizer.begin), documents


def asked_rows(
    run: RunConfig, config: EvalConfig, model: Model, dataset: TextDataset, folder: RunFolder, facts: Mapping[str, Any]
) -> list[Asked]:
    """Return the rows that `config` asks of a run, with those that its folder holds, in the order of measuring.

    Args:
      run: its stored settings.
      config: the requested evaluation.
      model: of the run.
      dataset: the text to score.
      folder: of the run.
      facts: the fields of its rows that name weights and text: hash, step, data_digest, weights and code.
    """
    stream, documents = run_stream(dataset)
    stored = stored_rows(folder, facts)
    defined = functools.partial(is_defined, model)
    place = functools.cache(lambda protocol, length: protocol.targets(stream, [length], documents))
    rows = []
    for one in evaluation_plans(
        config, run.eval, run.train.length, stored, lambda protocol, length: place(protocol, length).digest, defined
    ):
        for length in sorted({*one.lengths, *one.moved}):
            targets, row = place(one.protocol, length), one.stored.get(length)
            stride = one.protocol.window_stride(length, [length])
            windows = one.protocol.windows(targets, length, stride) if defined(length) else None
            begins = None if windows is None else one.protocol.begins(targets, windows)
            known = row if row and is_answer(row, config) else None
            rows.append(Asked(one, length, targets, windows, begins, known))
    return rows


def stored_rows(folder: RunFolder, facts: Mapping[str, Any]) -> list[Row]:
    """Return the rows in the folder that are of the weights, the text and the code that `facts` name."""
    here = {name: facts[name] for name in ("hash", "step", "data_digest", "weights") if name in facts}
    same = [row for row in folder.measured_rows() if here.items() <= row.items()]
    return [row for row in same if row.get("code", {}) == facts.get("code", {})]


def is_answer(row: Row, config: EvalConfig) -> bool:
    """Tell whether a stored row need not be computed again.

    A row of another precision is computed again. So is a row of another executor, if the config names one, and a row of
    status "oom", as this may be another machine.
    """
    alike = config.executor in ("auto", row.get("executor", "auto")) and config.precision == row.get("precision")
    return row.get("status") != "oom" and alike


def row_anchor(row: Row) -> int:
    """Return the longest window, in tokens, that the targets of a row serve; its own if the row is silent."""
    return int(row["anchor"] if "anchor" in row else row["eval_len"])
