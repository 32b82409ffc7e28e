"""P4: loss by how much context a token has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from posx.config import EvalConfig
from posx.evaluation.measured import Measured
from posx.evaluation.protocols.base import Protocol, Row
from posx.evaluation.protocols.nonoverlapping import Nonoverlapping
from posx.evaluation.scoring import Scored
from posx.evaluation.targets import Targets

POSITION_BINS = 1024


@dataclasses.dataclass(frozen=True)
class PerPosition(Protocol):
    """P4: one pass of P1 at the longest length for which the model is defined, its loss kept by position."""

    name: ClassVar[str] = "per_position"
    letter: ClassVar[str] = "P4"
    title: ClassVar[str] = "loss per position"
    num_targets: int = 0
    stretch: int = 0

    @classmethod
    def of_run(cls, config: EvalConfig, train_len: int, longest: int) -> PerPosition:
        return cls(config.num_targets, longest)

    @classmethod
    def lengths_of(cls, config: EvalConfig, train_len: int) -> tuple[int, ...]:
        return config.lengths  # one of them is measured: nothing is compared with the training length

    def owed(self, lengths: Sequence[int], defined: Callable[[int], bool] = lambda length: True) -> tuple[int, ...]:
        return tuple(sorted(length for length in lengths if defined(length))[-1:])

    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        return Nonoverlapping(self.num_targets, self.stretch).targets(stream, lengths, documents)

    def measure(self, model: Measured, lengths: Sequence[int]) -> Iterator[Row]:
        targets = self.targets(model.stream, lengths, model.documents)
        for length in sorted(lengths, reverse=True):
            scored = model.consecutive(length, targets)
            if scored.status != "undefined":
                by_position = _positions(scored, length) if scored.status == "ok" else {}
                yield self.row(model, length, length, targets, scored) | by_position
                return


def _positions(scored: Scored, length: int) -> Row:
    """Mean loss by position in the window, in at most POSITION_BINS bins; position p has p + 1 tokens of context."""
    edges = np.unique(np.linspace(0, length, min(length, POSITION_BINS) + 1).astype(int))
    by_position = np.bincount(scored.columns, scored.nll.astype(np.float64), length)
    sums = np.add.reduceat(by_position, edges[:-1])
    counts = np.add.reduceat(np.bincount(scored.columns, minlength=length), edges[:-1])
    return {
        "position_edges": [int(x) for x in edges],
        "position_nll": [round(float(x), 5) for x in sums / counts],
        "position_targets": [int(x) for x in counts],
    }
