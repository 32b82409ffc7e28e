"""Pseudo-perplexity: hidden tokens of a text, each predicted from all other tokens of its window."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from posx.errors import ConfigError
from posx.evaluation.base import Protocol, Row
from posx.evaluation.scoring import Measured, Scored
from posx.evaluation.settings import EvalConfig
from posx.evaluation.targets import Targets, place


@dataclasses.dataclass(frozen=True)
class PseudoPerplexity(Protocol):
    """Non-overlapping windows of a text in which 3 of every 20 tokens are hidden and scored.

    Stretches of text are those of `nonoverlapping`. Their tokens, one stretch after the other, make groups of 20. A
    keyed random number of each token decides which 3 of its group are hidden. So the same tokens are hidden in windows
    of all lengths, for every model. A model reads <mask> at each of them. The loss is -log p(token | the tokens of the
    window that are not hidden), at positions from 0, and pseudo-perplexity is exp of its mean.

    A window that would pass the end of its stretch ends there instead. It then begins with text that others score.

    Source: Salazar et al. 2020 (arXiv 1910.14659). Differs: they hide one token at a time, so that a text takes as many
    passes as it has tokens. Here the 15 % that are hidden together tell each other nothing, as in training.

    Attributes:
      num_targets: hidden tokens that are scored, 3 of every 20 of the text read; 0 for those of the whole stream.
      stretch: the least length of a stretch in tokens, 0 for the longest of the lengths.
    """

    name, title = "pseudo_perplexity", "pseudo-perplexity of hidden tokens"
    measures, quantity = "hidden tokens", "pseudo-perplexity"
    has_whole_windows = True
    share = 3, 20
    num_targets: int = 0
    stretch: int = 0

    @classmethod
    def problems(cls, config: EvalConfig, train_len: int) -> list[str]:
        if not 0 < config.num_targets < cls.share[1]:
            return super().problems(config, train_len)
        return [
            (
                f"eval.num_targets={config.num_targets}: {cls.share[0]} of every {cls.share[1]} tokens are scored. "
                f"Give at least {cls.share[1]} tokens of text, or 0 for all."
            )
        ]

    @classmethod
    def from_run(cls, config: EvalConfig, train_len: int, longest: int) -> PseudoPerplexity:
        hidden, group = cls.share
        return cls(config.num_targets // group * hidden, longest)

    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        longest = max(lengths)
        self.check_text(len(stream) - 1, lengths, "the stream")
        if 0 < self.num_targets < self.share[0]:
            raise ConfigError(f"num_targets={self.num_targets}: at least {self.share[0]} are hidden. Give 0 for all.")
        read = place(stream, self.text_tokens, longest=max(self.stretch, longest), documents=documents)
        hidden = _choose_hidden(read.count, *self.share)
        tokens, digest = read.tokens[hidden], f"{read.digest}-hidden"
        return dataclasses.replace(read, tokens=tokens, hidden=hidden, digest=digest)

    def windows(self, targets: Targets, length: int, stride: int) -> np.ndarray:
        """List the windows [n, 3], each with `length` tokens of the text: a model reads those after a target too."""
        windows = targets.windows(length, stride, restarts=True)
        missing = np.minimum(length - windows[:, 2], windows[:, 0])
        return windows + np.stack([-missing, missing, missing], axis=1)

    def row(self, model: Measured, length: int, stride: int, targets: Targets, scored: Scored) -> Row:
        """Return the stored facts of one measurement. Losses of single tokens make no bits of a whole text."""
        return super().row(model, length, stride, targets, scored) | {"bpb": None}


def _choose_hidden(count: int, hidden: int, group: int) -> np.ndarray:
    """Return which of `count` tokens are hidden, bool [count]: `hidden` of each whole group."""
    key = hashlib.sha256(b"posx hidden targets 1").digest()[:16]
    numbers = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(count // group * group).reshape(-1, group)
    chosen = np.zeros(numbers.shape, bool)
    np.put_along_axis(chosen, np.argsort(numbers, axis=1)[:, :hidden], True, axis=1)
    return np.pad(chosen.ravel(), (0, count % group))
