"""Answers of a task: how many of its items a model gets right, token by token and as a whole.

An answer is right if each of its tokens is the likeliest one after the question and the tokens of the answer before it.
A model that always continues with the likeliest token then writes the same answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from posx.errors import ConfigError
from posx.evaluation.base import Protocol, Row
from posx.evaluation.settings import EvalConfig
from posx.evaluation.statistics import BLOCK_ITEMS, stored_perplexity
from posx.evaluation.targets import Targets

#: The 97.5 % point of the normal distribution.
NORMAL_QUANTILE = 1.959964


@dataclasses.dataclass(frozen=True)
class Answers(Protocol):
    """Each item of a task in a window of its own. A length is measured with the items that L fewer tokens cannot hold.

    So the items of 2L are those of more than L tokens, up to 2L, L being the training length.

    Source: Huang et al. 2025 (arXiv 2410.02140), whose lengths are 0-50, 51-100 and 101-150 symbols.

    Attributes:
      num_targets: items of each length.
    """

    name, title = "answers", "answers of a task"
    measures = "task"
    reads = ("num_items", "attention_items")
    num_targets: int = 2000

    @classmethod
    def from_run(cls, config: EvalConfig, train_len: int, longest: int) -> Answers:
        return cls(config.num_items)

    @classmethod
    def problems(cls, config: EvalConfig, train_len: int) -> list[str]:
        some, items = config.attention_items, config.num_items
        return [f"eval.attention_items={some} is more than eval.num_items={items}. Lower it."] * (some > items)

    def window_stride(self, length: int, lengths: Sequence[int]) -> int:
        return 1  # so that there are as many windows as items

    def targets(self, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
        raise ConfigError(f"protocol={self.name} measures a task, and a text has no answers. Name another protocol.")

    def make_row(
        self,
        length: int,
        name: str,
        items: tuple[Any, Any, Any],
        status: str = "undefined",
        scores: Any = (),
        hidden: bool = False,
    ) -> Row:
        """Return the stored facts of one length.

        Args:
          length: tokens.
          name: of the items of all lengths. Rows of one name can be compared.
          items: tokens [n, t + 1], whether each is of an answer, bool [n, t + 1], and the place that it is read from,
            int32 [n, t + 1], -1 for none. The places are None for a task without them.
          status: "ok", "oom", "nonfinite" or "undefined".
          scores: log-probabilities [n, t] of the tokens after the first, and whether each is the likeliest, [n, t].
          hidden: whether the tokens of the answers are hidden, and each is an answer of its own.
        """
        tokens, scored, source = items
        row: Row = {
            "protocol": self.name, "eval_len": length, "status": status, "max_targets": self.num_targets,
            "num_targets": int(scored.sum()), "num_windows": len(tokens), "num_items": len(tokens),
            "targets": name, "nll": None, "ppl": None, "exact_match": None,
            "exact_match_interval": None, "block_wrong": None, "block_hidden": None,
            "accuracy": None, "accuracy_interval": None,
            "distance_edges": None, "distance_accuracy": None, "distance_targets": None,
        }  # fmt: skip
        if status != "ok":
            return row
        distances = {} if source is None else _distances(scores[1], source[:, 1:])
        return row | _results(scores[0], scores[1], scored[:, 1:], hidden) | distances


def _results(log_probs: np.ndarray, best: np.ndarray, scored: np.ndarray, hidden: bool) -> Row:
    counts, right = scored.sum(axis=1), (best & scored).sum(axis=1)
    nll = -float(log_probs[scored].sum(dtype=np.float64)) / int(counts.sum())
    whole = int((right == counts).sum())
    starts = np.arange(0, len(counts), BLOCK_ITEMS)
    return {
        "nll": nll,
        "ppl": stored_perplexity(nll),
        "exact_match": whole / len(counts),
        "exact_match_interval": wilson_interval(whole / len(counts), len(counts)),
        "block_wrong": np.add.reduceat(counts - right if hidden else (right < counts) * 1, starts).tolist(),
        "block_hidden": np.add.reduceat(counts, starts).tolist() if hidden else None,
        "accuracy": int(right.sum()) / int(counts.sum()),
        "accuracy_interval": _interval_of_items(right, counts),
    }


def _distances(best: np.ndarray, source: np.ndarray) -> Row:
    """Return the share of right tokens by distance: how far before its query the place is that a token is read from.

    The query of a token is the token before it. Bins are 0, 1, 2 to 3, 4 to 7 and so on. An empty bin has no share.
    """
    known = source >= 0
    distance = (np.arange(source.shape[1]) - source)[known]
    edges = [0, *(2**n for n in range(int(distance.max(initial=0)).bit_length() + 1))]
    counts, right = (np.histogram(some, edges)[0].tolist() for some in (distance, distance[best[known]]))
    shares = [hit / count if count else None for hit, count in zip(right, counts, strict=True)]
    return {"distance_edges": edges, "distance_accuracy": shares, "distance_targets": counts}


def wilson_interval(p: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion. Source: Wilson 1927, J. American Statistical Association 22."""
    z = NORMAL_QUANTILE
    middle, half = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + (z / (2 * count)) ** 2)
    scale = 1 + z * z / count
    return max(0.0, min(p, (middle - half) / scale)), min(1.0, max(p, (middle + half) / scale))  # p despite rounding


def _interval_of_items(right: np.ndarray, counts: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % interval of sum(right) / sum(counts). Tokens of one item are alike, so items vary, not tokens.

    None if all items are alike, which says nothing about the next one: the interval of whole items does.
    """
    mean, n = right.sum() / counts.sum(), len(counts)
    spread = float(np.square(right - mean * counts).sum()) * n / max(n - 1, 1)
    if n < 2 or (right * counts.sum() == right.sum() * counts).all():  # in whole numbers, which do not round
        return None
    half = NORMAL_QUANTILE * math.sqrt(spread) / float(counts.sum())
    return max(0.0, float(mean) - half), min(1.0, float(mean) + half)
