"""Protocols that give the very numbers of other libraries, their biases included, to compare with the literature.

Both read the text from its start: `num_targets` leaves out the end of the text. Windows at the end of a text are padded
after the scored tokens. This changes nothing for a causal model, unless its encoding is set for a length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from posx.errors import ConfigError
from posx.evaluation.base import Protocol, Row
from posx.evaluation.scoring import Measured, Scored
from posx.evaluation.settings import EvalConfig
from posx.evaluation.targets import Documents, Targets, document_starts, stretch_targets


@dataclasses.dataclass(frozen=True)
class _FromTheStart(Protocol):
    """A protocol on the first `num_targets` targets, 0 for all, of a text that may be shorter than a window."""

    num_targets: int = 0

    def needs(self, lengths: Sequence[int]) -> tuple[int, str]:
        return 1, f"{self.name} needs"


@dataclasses.dataclass(frozen=True)
class LmEvalRolling(_FromTheStart):
    """Each document by itself, in windows that share no target, the last one filled up with context on its left.

    The context of a document's first token is token 0 of the stream, not the token before the document. Windows after
    the first begin with one token of context. The last one has full length, and scores only the rest of the document.
    The separator that ends a document is not scored.

    Source: lm-evaluation-harness 0.4.13, `loglikelihood_rolling` (`get_rolling_token_windows` with context_len=1).
    `bpb` is its bits_per_byte, 2^bpb its byte_perplexity, exp(nll * num_targets / words) its word_perplexity.
    Bias: the first targets of a window have almost no context, as in non-overlapping ones. Longer windows have
    fewer of them.
    """

    name, title = "lm_eval_rolling", "rolling log-likelihood of lm-evaluation-harness"

    @classmethod
    def from_run(cls, config: EvalConfig, train_len: int, longest: int) -> LmEvalRolling:
        return cls(config.num_targets)

    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        self.check_text(len(stream) - 1, lengths, "the stream")
        starts = document_starts(documents, len(stream))
        ends = _ends(stream, documents, starts)
        sizes = np.maximum(ends - starts, 0)
        if self.num_targets:
            sizes = np.clip(self.num_targets - (np.cumsum(sizes) - sizes), 0, sizes)
        self.check_text(sizes.sum(), lengths, "the stream")
        return stretch_targets(stream, starts[sizes > 0], sizes[sizes > 0], documents)

    def windows(self, targets: Targets, length: int, stride: int) -> np.ndarray:
        windows = targets.windows(length, length, restarts=True)
        is_later = ~np.isin(windows[:, 0], targets.starts)
        return windows + np.where(is_later, length - windows[:, 2], 0)[:, None] * np.array([-1, 1, 1])

    def begins(self, targets: Targets, windows: np.ndarray) -> np.ndarray:
        return np.isin(windows[:, 0], targets.starts)


def _ends(stream: np.ndarray, documents: Any, starts: np.ndarray) -> np.ndarray:
    """Return the target after the last one of each document.

    If the ends are not given, the first token of the stream must separate the documents. Raises ConfigError.
    """
    if isinstance(documents, Documents):
        return documents.ends - 1
    wrong = starts[stream[starts] != stream[0]]
    if len(wrong):
        token = stream[wrong[0]]
        raise ConfigError(
            f"the document at place {wrong[0] + 1} of the stream follows token {token}, which may be text or a "
            f"separator: it is not the first token of the stream, {stream[0]}. Name the ids between documents, as "
            f"separators=[{token}], or pass separators=[] if there are none."
        )
    return np.append(starts[1:], len(stream) - (stream[-1] == stream[0])) - 1


@dataclasses.dataclass(frozen=True)
class HfStrided(_FromTheStart):
    """Windows that begin every `stride` tokens of the stream, and score the tokens that no window before them has.

    A window has `length` tokens, so a target has at most length - 1 tokens of context. The documents are one text. The
    first token of the stream is not scored. If `stride` is the length, nor is that of any window. A `stride` of 0 is
    half of each length, as in the recipe (512 of 1,024).

    Source: "Perplexity of fixed-length models", documentation of transformers, as it is since
    its pull request 34387 (October 2024; older versions average the means of windows).
    Bias: the recipe subtracts a token from the count of every window, as the labels are shifted. Only the first window
    loses one. So a later window with n targets weighs n - 1, and a last one with a single target nothing.
    Differs: without overlap, a last window of one token makes the recipe's number NaN. It is left out here.
    """

    name, title = "hf_strided", "strided perplexity of transformers' recipe"
    reads = "num_targets", "stride"
    stride: int = 0

    @classmethod
    def from_run(cls, config: EvalConfig, train_len: int, longest: int) -> HfStrided:
        return cls(config.num_targets, config.stride)

    @classmethod
    def problems(cls, config: EvalConfig, train_len: int) -> list[str]:
        shortest = min(cls.run_lengths(config, train_len))
        if config.stride <= shortest:
            return []
        return [f"eval.stride={config.stride} is larger than the shortest window, {shortest} tokens. Lower it."]

    @classmethod
    def chosen_stride(cls, row: Row) -> int | None:
        return None if row.get("stride") == cls().window_stride(row["eval_len"], ()) else row.get("stride")

    def window_stride(self, length: int, lengths: Sequence[int]) -> int:
        return self.stride or max(1, length // 2)

    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        """Place the targets of one length. Windows without overlap score other targets."""
        (length,) = lengths
        stride, count = self.window_stride(length, lengths), self.num_targets
        if not 1 <= stride <= length or length < 2:
            raise ConfigError(f"stride={stride} must be between 1 and the length, {length} tokens, which must be 2 up.")
        unscored = 1 if stride < length else -(-count // (length - 1))
        text = stream[: count + unscored if count else None]
        self.check_text(len(text) - 1, lengths, "the stream")
        first, low, high = _strided_windows(len(text), length, stride).T
        sizes = high - low
        if stride < length:  # one stretch
            first, low, sizes = first[:1], low[:1], sizes.sum(keepdims=True)
        return stretch_targets(stream, (first + low)[sizes > 0], sizes[sizes > 0], documents, weights=self.name)

    def windows(self, targets: Targets, length: int, stride: int) -> np.ndarray:
        return _strided_windows(targets.starts[-1] + targets.sizes[-1] + 1, length, stride)

    def measure(self, model: Measured, lengths: Sequence[int]) -> Iterator[Row]:
        for length in lengths:
            yield from super().measure(model, [length])

    def row(self, model: Measured, length: int, stride: int, targets: Targets, scored: Scored) -> Row:
        if scored.status == "ok":
            counts = scored.windows[:, 2] - scored.windows[:, 1]
            loses_one = (np.arange(len(counts)) == 0) | (stride == length)
            weights = np.repeat((counts - 1 + loses_one) / counts, counts)
            scored = dataclasses.replace(scored, nll=scored.nll * weights / weights.mean())
        return super().row(model, length, stride, targets, scored)


def _strided_windows(num_tokens: int, length: int, stride: int) -> np.ndarray:
    """List the windows [n, 3] of the recipe on a text of `num_tokens`: first token, and the scored columns from, to."""
    first = stride * np.arange(1 + -(-max(num_tokens - length, 0) // stride))
    ends = np.minimum(first + length, num_tokens)
    new = np.append(0, ends[:-1])
    return np.stack([first, np.maximum(new - first - 1, 0), ends - first - 1], axis=1)
