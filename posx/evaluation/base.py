"""The contract of a protocol: which tokens it scores, in which windows, and the row that it stores."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from posx.errors import DataError
from posx.evaluation.scoring import Measured, Scored
from posx.evaluation.settings import EvalConfig
from posx.evaluation.statistics import BLOCK_LEN, block_sums, few_places, interval, stored_perplexity
from posx.evaluation.targets import Targets, document_starts, own_context

Row = dict[str, Any]


class Protocol(abc.ABC):
    """A frozen value; lengths, strides and targets are in tokens. Every number is a sum of NLL over a count.

    `nll` and `ppl` are per target. `bpb` is the NLL of the targets that are text, in bits, over the bytes of that text.
    Separators between documents are targets, but `bpb` leaves them out of both.
    """

    #: The name in rows, and the words in captions.
    name: ClassVar[str]
    title: ClassVar[str]
    #: The kind of its targets, a key of `posx.evaluation.settings.USUAL`.
    measures: ClassVar[str] = "text"
    #: The name of exp(nll) in tables and figures.
    quantity: ClassVar[str] = "perplexity"
    #: So many tokens (first) of so many (second) of the text are targets.
    share: ClassVar[tuple[int, int]] = (1, 1)
    #: The settings of `EvalConfig` that `from_run` reads, beside the lengths.
    reads: ClassVar[tuple[str, ...]] = ("num_targets",)
    #: All targets of a longest window are one place of the text, so few targets lie in few documents.
    has_whole_windows: ClassVar[bool] = False
    #: The number of targets to score, 0 for the whole stream: a field of every protocol.
    num_targets: int

    @property
    def text_tokens(self) -> int:
        """The tokens of text that hold the targets, 0 for the whole stream."""
        targets, tokens = self.share
        return self.num_targets // targets * tokens

    @classmethod
    @abc.abstractmethod
    def from_run(cls, config: EvalConfig, train_len: int, longest: int) -> Protocol:
        """Return the protocol of a run's settings, on the targets of windows of up to `longest` tokens."""

    @classmethod
    def run_lengths(cls, config: EvalConfig, train_len: int) -> tuple[int, ...]:
        """Return the window lengths of a run's settings, increasing, with the training length for comparison."""
        return tuple(sorted({*config.lengths, train_len}))

    @classmethod
    def problems(cls, config: EvalConfig, train_len: int) -> list[str]:
        """List the problems that a run's settings have for this protocol, one line each."""
        longest = max(cls.run_lengths(config, train_len))
        if not cls.has_whole_windows or not 0 < config.num_targets < longest:
            return []
        return [
            (
                f"eval.num_targets={config.num_targets} is less than the longest window, of {longest} tokens. Score at "
                "least as many targets, or 0 for all."
            )
        ]

    def required_lengths(
        self, lengths: Sequence[int], defined: Callable[[int], bool] = lambda length: True
    ) -> tuple[int, ...]:
        """Return the lengths that get a row. The model is `defined` at some of the lengths."""
        return tuple(lengths)

    def window_stride(self, length: int, lengths: Sequence[int]) -> int:
        """Return the distance between the starts of windows of `length` tokens: so many targets of each are scored."""
        return length

    @classmethod
    def chosen_stride(cls, row: Row) -> int | None:
        """Return the stride of a stored row, None if it follows from its window."""
        return None

    def needs(self, lengths: Sequence[int]) -> tuple[int, str]:
        """Return the least number of targets in the text, and the words that a message says before that number."""
        return max(lengths), f"a window of {max(lengths)} tokens needs"

    def check_text(self, have: int, lengths: Sequence[int], text: str) -> None:
        """Raise DataError if `text` has too few targets, `have`, for these lengths."""
        need, why = self.needs(lengths)
        if have < need:
            raise DataError(
                f"{text} has {max(have, 0)} targets, but {why} {need}. Use shorter lengths or more held-out text."
            )

    @abc.abstractmethod
    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        """Place the targets, the same at every length unless the protocol says otherwise.

        Raises DataError for a stream that is too short, ConfigError for fields that make no sense for these lengths.
        """

    def windows(self, targets: Targets, length: int, stride: int) -> np.ndarray:
        """List the windows [n, 3] in which the targets are scored, as `Targets.windows` does."""
        return targets.windows(length, stride)

    def begins(self, targets: Targets, windows: np.ndarray) -> np.ndarray:
        """Return, for windows [n, 3], whether token 0 of the stream takes the place of their first token, [n]."""
        return np.zeros(len(windows), bool)

    def measure(self, model: Measured, lengths: Sequence[int]) -> Iterator[Row]:
        """Yield a row for each length that is `required_lengths`."""
        targets = self.targets(model.stream, lengths, model.documents)
        hidden = targets.hidden_places(len(model.stream))
        for length in lengths:
            stride = self.window_stride(length, lengths)
            windows = self.windows(targets, length, stride)
            scored = model.score_windows(windows, length, self.begins(targets, windows), hidden)
            yield self.row(model, length, stride, targets, scored)

    def row(self, model: Measured, length: int, stride: int, targets: Targets, scored: Scored) -> Row:
        """Return the stored facts of one measurement."""
        known, ids = model.token_bytes, model.separators
        text = ~np.isin(targets.tokens, [] if ids is None else ids)
        num_bytes = None if known is None else int(targets.select(known).sum(dtype=np.int64))
        own = None  # hidden tokens are seen from both sides
        if model.documents is not None and targets.hidden is None:
            own = round(own_context(scored.windows, 1 + document_starts(model.documents, len(model.stream))), 4)
        row: Row = {
            "protocol": self.name, "eval_len": length, "stride": stride, "status": scored.status,
            "max_targets": self.num_targets, "num_targets": targets.count,
            "num_stretches": targets.num_stretches, "num_documents": targets.num_documents, "own_context": own,
            "num_windows": len(scored.windows), "num_bytes": num_bytes,
            "num_separators": None if ids is None else targets.count - int(text.sum()), "targets": targets.digest,
            "nll": None, "nll_interval": None, "ppl": None, "bpb": None, "block_len": BLOCK_LEN,
        }  # fmt: skip
        if scored.status == "ok":
            nll = float(scored.nll.sum(dtype=np.float64)) / targets.count
            of_text = float(scored.nll[text].sum(dtype=np.float64))
            sums, counts = block_sums(scored.nll)
            row |= {
                "nll": nll,
                "nll_interval": None if few_places(row) else interval(sums, counts),
                "ppl": stored_perplexity(nll),
                "bpb": of_text / math.log(2) / num_bytes if num_bytes else None,
                "block_nll": [round(float(x), 3) for x in sums],
            }
        return row
