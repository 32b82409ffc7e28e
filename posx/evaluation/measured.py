"""A model under measurement: the stream that it is scored on, and the passes over it that protocols share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posx.evaluation.scoring import LogProbs, Scored, score
from posx.evaluation.targets import Targets


@dataclasses.dataclass(frozen=True)
class Measured:
    """The model as a function, and how it is measured; `passes` keeps those in consecutive windows for who needs them
    again.

    stream: tokens [n + 1], the first of which is context only. token_bytes: bytes of text behind each, [n + 1], or
    None. separators: ids that are no text, or None. documents: [d], or None. batch_tokens: tokens per call of the
    model. on_windows: told how far a pass is, see `score`.
    """

    log_probs: LogProbs
    stream: np.ndarray
    token_bytes: np.ndarray | None
    separators: Sequence[int] | None
    documents: Any
    batch_tokens: int
    on_windows: Callable[[int, int], object] = lambda length, done: None
    passes: dict[tuple[int, str], Scored] = dataclasses.field(default_factory=dict)

    def consecutive(self, length: int, targets: Targets) -> Scored:
        """Every stretch in consecutive windows from its start, the ragged last one of each included."""
        key = length, targets.digest
        if key not in self.passes:
            self.passes[key] = self.score(consecutive_windows(targets, length), length)
        return self.passes[key]

    def score(self, windows: np.ndarray, length: int) -> Scored:
        """The losses of the targets that windows [n, 3] of `length` tokens score."""
        return score(self.log_probs, self.stream, windows, length, self.batch_tokens, self.on_windows)

    def num_bytes(self, targets: Targets) -> int | None:
        """Return the bytes of text behind the targets, None if they are not known."""
        if self.token_bytes is None:
            return None
        sizes = self.token_bytes[1:].astype(np.int64)
        return sum(int(sizes[at : at + n].sum()) for at, n in zip(targets.starts, targets.sizes, strict=True))

    def are_text(self, targets: Targets) -> np.ndarray:
        """Tell which targets are text, bool [num_targets]: all but separators."""
        return ~np.isin(targets.tokens, [] if self.separators is None else self.separators)


def consecutive_windows(targets: Targets, length: int) -> np.ndarray:
    """[n, 3]: consecutive windows over every stretch: where each starts, and which of its targets (from, to) count."""
    found = []
    for start, size in zip(targets.starts, targets.sizes, strict=True):
        offsets = np.arange(0, size, length)
        found.append(np.stack([start + offsets, np.zeros_like(offsets), np.minimum(length, size - offsets)], axis=1))
    return np.concatenate(found)
