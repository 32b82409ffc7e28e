"""Protocols of evaluation: which tokens are scored, and with how much context.

A stream is tokens [n + 1]: the first is context only (the end-of-document token before the text), the other n are the
targets. A new protocol is one class, its line in PROTOCOLS, and its name in the help of `posx evaluate --protocol`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from posx.errors import ConfigError, nearest
from posx.evaluation.answers import Answers
from posx.evaluation.base import Protocol, Row
from posx.evaluation.masked import PseudoPerplexity
from posx.evaluation.published import HfStrided, LmEvalRolling
from posx.evaluation.scoring import Measured, Scored
from posx.evaluation.settings import EvalConfig
from posx.evaluation.targets import Targets, place

#: The largest number of bins of a loss by position.
POSITION_BINS = 1024


@dataclasses.dataclass(frozen=True)
class _Consecutive(Protocol):
    """A protocol on the targets of `nonoverlapping`."""

    has_whole_windows = True
    num_targets: int = 0
    stretch: int = 0

    @classmethod
    def from_run(cls, config: EvalConfig, train_len: int, longest: int) -> Protocol:
        return cls(config.num_targets, longest)

    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        longest = max(lengths)
        self.check_text(len(stream) - 1, lengths, "the stream")
        if 0 < self.num_targets < longest:
            raise ConfigError(
                f"num_targets={self.num_targets} is less than one window of {longest} tokens. Score at least "
                f"{longest} targets, or 0 for all of the stream."
            )
        return place(stream, self.num_targets, longest=max(self.stretch, longest), documents=documents)


@dataclasses.dataclass(frozen=True)
class Nonoverlapping(_Consecutive):
    """All targets in consecutive windows. If a length does not divide a stretch, the next stretch continues its window.

    The part of that window before the next stretch is the preceding text. The numbers of targets at any two places of a
    window differ by at most one.

    Source: Press et al. 2022 (arXiv 2108.12409) figure 1.

    Attributes:
      num_targets: 0 for the whole stream, in one stretch.
      stretch: the least length of a stretch in tokens. 0 stands for the longest of the lengths.
    """

    name, title = "nonoverlapping", "non-overlapping windows"
    reads: ClassVar[tuple[str, ...]] = ("num_targets", "attention_items")


@dataclasses.dataclass(frozen=True)
class BeginEveryWindow(Nonoverlapping):
    """The windows and targets of `nonoverlapping`, each window after the begin token, as texts are in training.

    NLL(x_1 .. x_n) = -sum over i of log p(x_i | begin, x_1 .. x_i-1), for the n <= length targets of a window.

    Token 0 of the stream is the begin token. It takes the place of the one token of context that a window has without
    it, before its targets. The model therefore reads the begin token and length - 1 tokens of text, `length` in all, at
    positions 0 to length - 1. Inside a window, documents and separators follow each other as without it.
    Use: models that were trained with such a token before every text, such as Gemma, and fail without it.
    """

    name, title = "begin_every_window", "non-overlapping windows after the begin token"
    reads = ("num_targets",)

    def begins(self, targets: Targets, windows: np.ndarray) -> np.ndarray:
        return np.ones(len(windows), bool)


@dataclasses.dataclass(frozen=True)
class PerPosition(_Consecutive):
    """One pass of `nonoverlapping` at the longest length for which the model is defined, with the loss by position."""

    name, title = "per_position", "loss per position"

    @classmethod
    def run_lengths(cls, config: EvalConfig, train_len: int) -> tuple[int, ...]:
        return config.lengths  # one of them is measured: nothing is compared with the training length

    def required_lengths(
        self, lengths: Sequence[int], defined: Callable[[int], bool] = lambda length: True
    ) -> tuple[int, ...]:
        return tuple(sorted(length for length in lengths if defined(length))[-1:])

    def measure(self, model: Measured, lengths: Sequence[int]) -> Iterator[Row]:
        targets = self.targets(model.stream, lengths, model.documents)
        for length in sorted(lengths, reverse=True):
            scored = model.score_windows(self.windows(targets, length, length), length)
            if scored.status != "undefined":
                by_position = _positions(scored, length) if scored.status == "ok" else {}
                yield self.row(model, length, length, targets, scored) | by_position
                return


def _positions(scored: Scored, length: int) -> Row:
    """Return the mean loss by position in the window, in bins; position p has p + 1 tokens of context."""
    edges = np.unique(np.linspace(0, length, min(length, POSITION_BINS) + 1).astype(int))
    by_position = np.bincount(scored.columns, scored.nll.astype(np.float64), length)
    sums = np.add.reduceat(by_position, edges[:-1])
    counts = np.add.reduceat(np.bincount(scored.columns, minlength=length), edges[:-1])
    return {
        "position_edges": [int(x) for x in edges],
        "position_nll": [round(float(x), 5) for x in sums / counts],
        "position_targets": [int(x) for x in counts],
    }


@dataclasses.dataclass(frozen=True)
class Sliding(Protocol):
    """Windows that end every `stride` tokens, of which the last `stride` targets are scored.

    Every target has between length - stride + 1 and length tokens of context, of the text before its stretch too.

    Source: Baevski and Auli 2019; Press et al. 2022, appendix B.

    Attributes:
      stride: tokens, 0 for a quarter of the shortest length.
      num_targets: scored tokens, 0 for the whole stream.
      warm_up: the first targets of the stream, which are context and never scored; 0 for the longest length.
    """

    name, title = "sliding", "sliding window"
    reads = "sliding_targets", "stride"
    stride: int = 0
    num_targets: int = 65536
    warm_up: int = 0

    @classmethod
    def from_run(cls, config: EvalConfig, train_len: int, longest: int) -> Sliding:
        return cls(config.stride or max(1, train_len // 4), config.sliding_targets, warm_up=longest)

    @classmethod
    def run_lengths(cls, config: EvalConfig, train_len: int) -> tuple[int, ...]:
        powers = tuple(train_len * 2**n for n in range(5))
        lengths = config.sliding_lengths or (n for n in powers if n <= max(config.lengths))
        return tuple(sorted({*lengths, train_len}))

    @classmethod
    def problems(cls, config: EvalConfig, train_len: int) -> list[str]:
        shortest, stride = min(cls.run_lengths(config, train_len)), cls.from_run(config, train_len, 0).stride
        if stride <= shortest:
            return []
        return [f"eval.stride={stride} is larger than the shortest sliding window, {shortest} tokens. Lower it."]

    def window_stride(self, length: int, lengths: Sequence[int]) -> int:
        return self.stride or max(1, min(lengths) // 4)

    @classmethod
    def chosen_stride(cls, row: Row) -> int | None:
        return row.get("stride")

    def needs(self, lengths: Sequence[int]) -> tuple[int, str]:
        stride, warm_up = self.window_stride(max(lengths), lengths), self.warm_up or max(lengths)
        return warm_up + stride, f"sliding windows of {warm_up} tokens with stride {stride} need"

    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        stride, warm_up = self.window_stride(max(lengths), lengths), self.warm_up or max(lengths)
        if not 1 <= stride <= min(lengths):
            raise ConfigError(f"stride={stride} must be between 1 and the shortest length, {min(lengths)} tokens.")
        if warm_up < max(lengths):
            raise ConfigError(f"warm_up={warm_up} must be at least the longest length, {max(lengths)} tokens.")
        self.check_text(len(stream) - 1, lengths, "the stream")
        return place(stream, self.num_targets, first=warm_up, documents=documents)


#: Protocols by their names in rows and settings.
PROTOCOLS: dict[str, type[Protocol]] = {
    cls.name: cls
    for cls in (
        Nonoverlapping, Sliding, PerPosition, LmEvalRolling, HfStrided, BeginEveryWindow, Answers, PseudoPerplexity
    )
}  # fmt: skip


def protocol_class(name: str) -> type[Protocol]:
    """Return the protocol of a name. Raises ConfigError for an unknown one."""
    if name not in PROTOCOLS:
        known = ", ".join(PROTOCOLS)
        raise ConfigError(f"protocol {name!r} is unknown. {nearest(name, PROTOCOLS)}The protocols are: {known}.")
    return PROTOCOLS[name]


def chosen_stride(row: Row) -> int | None:
    """Return the stride of a stored row, None if it follows from its window as the protocol, if known, has it."""
    return PROTOCOLS[row["protocol"]].chosen_stride(row) if row["protocol"] in PROTOCOLS else row.get("stride")


def run_protocols(config: EvalConfig, train_len: int, longest: int = 0) -> list[tuple[Protocol, tuple[int, ...]]]:
    """Return each protocol of a run's settings with its lengths.

    Targets are those of windows of up to `longest` tokens, and of at least the longest that the settings name.
    """
    longest = max(longest, longest_window(config, train_len))
    protocols = map(protocol_class, config.protocols)
    return [(cls.from_run(config, train_len, longest), cls.run_lengths(config, train_len)) for cls in protocols]


def longest_window(config: EvalConfig, train_len: int) -> int:
    """Return the longest window that a run's settings name for any protocol, whether they ask for it or not."""
    return max(n for cls in PROTOCOLS.values() for n in cls.run_lengths(config, train_len))


def problems(config: EvalConfig, train_len: int) -> list[str]:
    """List the problems of a run's settings with the protocols that they name, one line each."""
    try:
        classes = [protocol_class(name) for name in config.protocols]
    except ConfigError as error:
        return [f"eval.protocols: {error}"]
    twice = [cls.name for cls in dict.fromkeys(classes) if classes.count(cls) > 1]
    lines = [f"eval.protocols={','.join(config.protocols)} names {name} twice. Name it once." for name in twice]
    if config.problems():
        return lines
    return lines + list(dict.fromkeys(why for cls in classes for why in cls.problems(config, train_len)))
