"""P1: text cut into windows that share nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from posx.config import EvalConfig
from posx.errors import ConfigError
from posx.evaluation.measured import Measured
from posx.evaluation.protocols.base import Protocol, Row
from posx.evaluation.targets import Targets, place


@dataclasses.dataclass(frozen=True)
class Nonoverlapping(Protocol):
    """P1: each stretch of targets in consecutive windows from its start, the ragged last one included.

    num_targets: 0 for the whole stream, in one stretch. stretch: its least length; 0 for the longest of the lengths,
    so that every length has whole windows in every stretch. Source: Press et al. 2022 (arXiv 2108.12409) figure 1.
    """

    name: ClassVar[str] = "nonoverlapping"
    letter: ClassVar[str] = "P1"
    title: ClassVar[str] = "non-overlapping windows"
    num_targets: int = 0
    stretch: int = 0

    @classmethod
    def of_run(cls, config: EvalConfig, train_len: int, longest: int) -> Nonoverlapping:
        return cls(config.num_targets, longest)

    @classmethod
    def problems(cls, config: EvalConfig, train_len: int) -> list[str]:
        if not 0 < config.num_targets < train_len:
            return []
        return [
            f"eval.num_targets={config.num_targets} is less than one window of the training length, {train_len} "
            "tokens: score at least as many targets, or 0 for all"
        ]

    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        longest = max(lengths)
        self.check_text(len(stream) - 1, lengths, "the stream")
        if 0 < self.num_targets < longest:
            raise ConfigError(
                f"num_targets={self.num_targets} is less than one window of {longest} tokens: score at least {longest} "
                "targets, or 0 for all of the stream"
            )
        return place(stream, self.num_targets, longest=max(self.stretch, longest), documents=documents)

    def measure(self, model: Measured, lengths: Sequence[int]) -> Iterator[Row]:
        targets = self.targets(model.stream, lengths, model.documents)
        for length in lengths:
            yield self.row(model, length, length, targets, model.consecutive(length, targets))
