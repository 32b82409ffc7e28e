"""P2: windows that overlap, so that every target has about the same context."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from posx.config import EvalConfig
from posx.errors import ConfigError
from posx.evaluation.measured import Measured, consecutive_windows
from posx.evaluation.protocols.base import Protocol, Row
from posx.evaluation.targets import Targets, place


@dataclasses.dataclass(frozen=True)
class Sliding(Protocol):
    """P2: windows end every `stride` tokens, the last `stride` targets of each are scored, so every target has between
    length - stride + 1 and length tokens of context, of the text before its stretch too. The first `warm_up` targets of
    the stream are context and never scored.

    `stride` 0 is a quarter of the shortest length, `warm_up` 0 the longest; `num_targets` 0 the whole stream. Source:
    Baevski and Auli 2019; Press et al. 2022, appendix B.
    """

    name: ClassVar[str] = "sliding"
    letter: ClassVar[str] = "P2"
    title: ClassVar[str] = "sliding window"
    stride: int = 0
    num_targets: int = 65536
    warm_up: int = 0

    @classmethod
    def of_run(cls, config: EvalConfig, train_len: int, longest: int) -> Sliding:
        return cls(_run_stride(config, train_len), config.sliding_targets, warm_up=longest)

    @classmethod
    def lengths_of(cls, config: EvalConfig, train_len: int) -> tuple[int, ...]:
        powers = tuple(train_len * 2**n for n in range(5))
        lengths = config.sliding_lengths or (n for n in powers if n <= max(config.lengths))
        return tuple(sorted({*lengths, train_len}))

    @classmethod
    def problems(cls, config: EvalConfig, train_len: int) -> list[str]:
        shortest, stride = min(cls.lengths_of(config, train_len)), _run_stride(config, train_len)
        if stride <= shortest:
            return []
        return [f"eval.stride={stride} is larger than the shortest sliding window, {shortest} tokens"]

    def stride_at(self, length: int, lengths: Sequence[int]) -> int:
        return self.stride or max(1, min(lengths) // 4)

    def why_short(self, have: int, lengths: Sequence[int]) -> str:
        stride, warm_up = self.stride_at(max(lengths), lengths), self._warm_up(lengths)
        need = warm_up + stride
        return f"sliding windows of {warm_up} tokens with stride {stride} need {need}" if have < need else ""

    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        stride, warm_up = self.stride_at(max(lengths), lengths), self._warm_up(lengths)
        if not 1 <= stride <= min(lengths):
            raise ConfigError(f"stride={stride} must be between 1 and the shortest length, {min(lengths)} tokens")
        if warm_up < max(lengths):
            raise ConfigError(f"warm_up={warm_up} must be at least the longest length, {max(lengths)} tokens")
        self.check_text(len(stream) - 1, lengths, "the stream")
        return place(stream, self.num_targets, first=warm_up, documents=documents)

    def measure(self, model: Measured, lengths: Sequence[int]) -> Iterator[Row]:
        targets = self.targets(model.stream, lengths, model.documents)
        stride = self.stride_at(max(lengths), lengths)
        for length in lengths:
            row = self.row(model, length, stride, targets, model.score(self.windows(targets, length, lengths), length))
            yield row | {"warm_up": self._warm_up(lengths)}

    def windows(self, targets: Targets, length: int, lengths: Sequence[int]) -> np.ndarray:
        stride = self.stride_at(max(lengths), lengths)
        return consecutive_windows(targets, stride) + np.array([stride - length, length - stride, length - stride])

    def _warm_up(self, lengths: Sequence[int]) -> int:
        return self.warm_up or max(lengths)


def _run_stride(config: EvalConfig, train_len: int) -> int:
    return config.stride or max(1, train_len // 4)
