"""Which targets are scored: contiguous stretches of text, spread over the whole stream and all of its documents.

Target n of a stream is its token n + 1. Token 0 is context only.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from posx.errors import ConfigError
from posx.evaluation.statistics import BLOCK_LEN
from posx.layers import host

#: The number of stretches, larger if there are more documents, smaller if windows are long.
STRETCHES = 32


@dataclasses.dataclass(frozen=True)
class Targets:
    """The scored stretches in the order of the stream: starts and sizes [k] in targets, and the documents they touch.

    All sizes but the last are multiples of BLOCK_LEN, so that no block of the stored sums has parts of two stretches.
    `digest` names the targets by their places and their tokens.
    """

    starts: np.ndarray
    sizes: np.ndarray
    tokens: np.ndarray
    num_documents: int | None
    digest: str

    @property
    def count(self) -> int:
        return len(self.tokens)

    def select(self, values: np.ndarray) -> np.ndarray:
        """Return the entries of the targets [count], of values [n + 1] by place in the stream."""
        return _select(values, self.starts, self.sizes)

    def windows(self, length: int, stride: int) -> np.ndarray:
        """List the windows [n, 3] of `length` tokens that end every `stride` targets of a stretch.

        Their columns are the first token of a window, and which of its targets (from, to) are scored. These are the
        last `stride` of a window, fewer at the end of a stretch. With stride = length the windows share nothing.
        """
        found = []
        for start, size in zip(self.starts, self.sizes, strict=True):
            offsets = np.arange(0, size, stride)
            found.append(np.stack([start + offsets, 0 * offsets, np.minimum(stride, size - offsets)], axis=1))
        return np.concatenate(found) + np.array([stride - length, length - stride, length - stride])


def place(stream: np.ndarray, num_targets: int, *, longest: int = 1, first: int = 0, documents: Any = None) -> Targets:
    """Place `num_targets` targets in stretches; 0, or more than there are, gives one stretch of all from `first` on.

    A stretch is a multiple of `longest`, itself rounded up to whole blocks. It is as large as leaves STRETCHES
    stretches and one a document, and the last one takes the rest. The middles are evenly spread over the stream. If
    there are enough stretches, every document, however short, gets a share that holds one.

    documents: [d] places in the stream at which documents start, None if they are not known.
    """
    end = len(stream) - 1
    begins = _document_starts(documents, len(stream))
    count = min(num_targets or end - first, end - first)
    if count == end - first:
        starts, sizes = np.array([first]), np.array([count])
    else:
        least = -(-longest // BLOCK_LEN) * BLOCK_LEN
        size = least * max(1, count // (least * max(STRETCHES, len(begins))))
        sizes = np.full(max(1, count // size), size)
        sizes[-1] += count - sizes.sum()
        edges = np.unique(np.concatenate([[first], begins[begins > first], [end]]))
        starts = _apart(_middles(edges, len(sizes)) - sizes / 2, sizes, first, end)
    tokens = _select(stream, starts, sizes)
    touched = None if documents is None else _touched(begins, starts, sizes)
    parts = b"".join(array.astype("<i8").tobytes() for array in (starts, sizes, tokens))
    return Targets(starts, sizes, tokens, touched, hashlib.sha256(parts).hexdigest()[:16])


def _select(values: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([values[1 + at : 1 + at + n] for at, n in zip(starts, sizes, strict=True)])


def _document_starts(documents: Any, size: int) -> np.ndarray:
    """Return the first target of every document. That of the first document is 0."""
    given = host([] if documents is None else documents)
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise ConfigError("documents must be one row of whole numbers: the places in the stream where documents start.")
    if given.size and not 0 <= given.min() <= given.max() <= size:
        raise ConfigError(f"documents has places {given.min()} to {given.max()}, but the stream has 0 to {size}.")
    return np.unique(np.concatenate([[0], np.clip(given.astype(np.int64) - 1, 0, max(size - 2, 0))])).astype(np.int64)


def _middles(edges: np.ndarray, count: int) -> np.ndarray:
    """Return the middles of `count` equal shares of the documents between `edges`.

    Shares are of the documents' length, but a document shorter than a share counts as a whole share.
    """
    lengths = np.diff(edges).astype(np.float64)
    short = np.zeros(len(lengths), bool)
    weights = np.ones(len(lengths))
    while len(lengths) < count:
        share = lengths[~short].sum() / (count - short.sum())
        weights = np.where(lengths < share, share, lengths)
        if not (~short & (lengths < share)).any():
            break
        short = lengths < share
    before = np.concatenate([[0.0], np.cumsum(weights)])
    points = (np.arange(count) + 0.5) / count * before[-1]
    document = np.searchsorted(before, points, side="right") - 1
    return edges[document] + (points - before[document]) / weights[document] * lengths[document]


def _apart(starts: np.ndarray, sizes: np.ndarray, first: int, end: int) -> np.ndarray:
    """Move `starts` as little as possible, so that stretches keep their order, do not overlap, and lie in the text."""
    before = np.cumsum(sizes) - sizes
    slack = np.clip(np.floor(starts) - before, first, end - sizes.sum())
    return (np.maximum.accumulate(slack) + before).astype(np.int64)


def _touched(begins: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> int:
    """Count the documents that have a target in some stretch."""
    low = np.searchsorted(begins, starts, side="right") - 1
    high = np.searchsorted(begins, starts + sizes - 1, side="right") - 1
    unseen = np.maximum(low, np.concatenate([[0], high[:-1] + 1]))
    return int((high - unseen + 1).sum())
