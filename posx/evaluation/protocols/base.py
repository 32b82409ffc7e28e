"""What a protocol of evaluation is: which tokens are scored, with how much context, and what settings say so.

A protocol is a frozen value. Everything that is its own stands in its file; whoever adds one adds a line to PROTOCOLS.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from posx.config import EvalConfig
from posx.errors import DataError
from posx.evaluation.measured import Measured, consecutive_windows
from posx.evaluation.scoring import Scored
from posx.evaluation.statistics import BLOCK_LEN, LARGEST_NLL, block_sums, interval
from posx.evaluation.targets import Targets

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Protocol(abc.ABC):
    """Lengths, strides and targets in tokens; every number is a sum of NLL over a count.

    `nll` and `ppl` are per target. `bpb` is the NLL of the targets that are text, in bits, over the bytes of that text:
    separators between documents are targets, and neither side of `bpb` counts them.
    """

    #: What rows call it, the letter that the literature has for it, and what captions say.
    name: ClassVar[str]
    letter: ClassVar[str]
    title: ClassVar[str]

    @property
    @abc.abstractmethod
    def num_targets(self) -> int:
        """How many targets are asked for; 0 for the whole stream. A field of every protocol."""

    @classmethod
    @abc.abstractmethod
    def of_run(cls, config: EvalConfig, train_len: int, longest: int) -> Protocol:
        """The protocol as a run's settings have it, on the targets of windows of up to `longest` tokens."""

    @classmethod
    def lengths_of(cls, config: EvalConfig, train_len: int) -> tuple[int, ...]:
        """The window lengths that a run's settings name for it, increasing, and its training length among them.

        What becomes of other lengths is told by how they compare with that one.
        """
        return tuple(sorted({*config.lengths, train_len}))

    @classmethod
    def problems(cls, config: EvalConfig, train_len: int) -> list[str]:
        """What of a run's settings does not make sense for it, one line each."""
        return []

    def windows(self, targets: Targets, length: int, lengths: Sequence[int]) -> np.ndarray:
        """[n, 3]: where each window of `length` tokens starts, and which of its targets (from, to) are scored."""
        return consecutive_windows(targets, length)

    def owed(self, lengths: Sequence[int], defined: Callable[[int], bool] = lambda length: True) -> tuple[int, ...]:
        """Of the lengths asked for, those that a row is due for, where the model is `defined` at some of them."""
        return tuple(lengths)

    def stride_at(self, length: int, lengths: Sequence[int]) -> int:
        """How far apart windows of `length` tokens start."""
        return length

    def why_short(self, have: int, lengths: Sequence[int]) -> str:
        """Why a text of `have` targets is too short for these lengths; "" if it is not."""
        longest = max(lengths)
        return f"a window of {longest} tokens needs {longest}" if have < longest else ""

    def check_text(self, have: int, lengths: Sequence[int], what: str) -> None:
        """Raises DataError where `what`, a text of `have` targets, is too short for these lengths."""
        if why := self.why_short(have, lengths):
            raise DataError(f"{what} has {max(have, 0)} targets, {why}: use shorter lengths or more held-out text")

    @abc.abstractmethod
    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        """Which tokens of the stream are scored, the same at every length.

        Raises DataError for a stream that is too short, ConfigError for fields that make no sense for these lengths.
        """

    @abc.abstractmethod
    def measure(self, model: Measured, lengths: Sequence[int]) -> Iterator[Row]:
        """A row each for the lengths that are `owed` one."""

    def row(self, model: Measured, length: int, stride: int, targets: Targets, scored: Scored) -> Row:
        """The stored facts of one measurement."""
        row: Row = {
            "protocol": self.name, "eval_len": length, "stride": stride, "status": scored.status,
            "max_targets": self.num_targets, "num_targets": targets.count,
            "num_stretches": len(targets.sizes), "num_documents": targets.num_documents,
            "num_windows": int((-(-targets.sizes // stride)).sum()),
            "num_bytes": model.num_bytes(targets), "num_separators": None, "targets": targets.digest,
            "nll": None, "nll_interval": None, "ppl": None, "bpb": None, "block_len": BLOCK_LEN,
        }  # fmt: skip
        text = model.are_text(targets)
        if model.separators is not None:
            row["num_separators"] = targets.count - int(text.sum())
        if scored.status == "ok":
            total = float(scored.nll.sum(dtype=np.float64))
            of_text = float(scored.nll[text].sum(dtype=np.float64))
            nll = total / targets.count
            sums, counts = block_sums(scored.nll)
            row |= {
                "nll": nll,
                "nll_interval": interval(sums, counts),
                "ppl": math.exp(nll) if nll < LARGEST_NLL else "inf",
                "bpb": of_text / math.log(2) / row["num_bytes"] if row["num_bytes"] else None,
                "block_nll": [round(float(x), 3) for x in sums],
            }
        return row
