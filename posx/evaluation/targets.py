"""Which targets are scored.

Targets are contiguous stretches of text, spread over the whole stream and all of its documents. Target n of a stream is
its token n + 1. Token 0 is context only.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, NamedTuple

import numpy as np

from posx.errors import ConfigError
from posx.evaluation.ids import host
from posx.evaluation.statistics import BLOCK_LEN

#: The number of stretches, larger if there are more documents, smaller if windows are long.
STRETCHES = 32


class Documents(NamedTuple):
    """The places [d] in a stream at which documents start and end, the token at the end not included."""

    starts: np.ndarray
    ends: np.ndarray


@dataclasses.dataclass(frozen=True)
class Targets:
    """The scored stretches, in the order of the stream.

    If all sizes but the last are multiples of BLOCK_LEN, no block of the stored sums has parts of two stretches.

    Attributes:
      starts: [k], the place of each stretch in the stream.
      sizes: [k], in targets.
      tokens: [count], the targets themselves.
      hidden: which tokens of the stretches are targets, bool [sum of sizes]; None for all of them.
      num_documents: the documents that the stretches touch, None if they are not known.
      digest: a name of the targets: of their places, their tokens, and the rule of their weights if these are not all
        equal.
    """

    starts: np.ndarray
    sizes: np.ndarray
    tokens: np.ndarray
    num_documents: int | None
    digest: str
    hidden: np.ndarray | None = None

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def num_stretches(self) -> int:
        """The places of the text. Stretches with at most one token between them, which is not scored, are one place."""
        return 1 + int((self.starts[1:] > (self.starts + self.sizes)[:-1] + 1).sum())

    def select(self, values: np.ndarray) -> np.ndarray:
        """Return the entries of the targets [count], of values [n + 1] by place in the stream."""
        values = _select(values, self.starts, self.sizes)
        return values if self.hidden is None else values[self.hidden]

    def hidden_places(self, size: int) -> np.ndarray | None:
        """Return which tokens of a stream [n + 1] of `size` tokens a model must not read; None if it reads all."""
        if self.hidden is None:
            return None
        places = np.zeros(size, bool)
        each = np.split(self.hidden, np.cumsum(self.sizes)[:-1])
        for start, hidden in zip(self.starts, each, strict=True):
            places[1 + start : 1 + start + len(hidden)] = hidden
        return places

    def windows(self, length: int, stride: int, restarts: bool = False) -> np.ndarray:
        """List the windows [n, 3] of `length` tokens that end every `stride` targets of a stretch.

        Their columns are the first token of a window, and which of its targets (from, to) are scored. These are the
        last `stride` of a window, fewer at the ends of a stretch. With stride = length the windows share no target.

        A stretch continues the last window of the previous stretch. Its first window may therefore begin before the
        stretch. The numbers of targets in any two of the last `stride` columns differ by at most one. If it `restarts`,
        a stretch begins with a window.
        """
        windows = []
        done = (np.cumsum(self.sizes) - self.sizes) % stride * (not restarts)
        for start, size, begun in zip(self.starts, self.sizes, done, strict=True):
            offsets = np.arange(-begun, size, stride)
            scored = np.maximum(-offsets, 0), np.minimum(stride, size - offsets)
            windows.append(np.stack([start + offsets, *scored], axis=1))
        return np.concatenate(windows) + np.array([stride - length, length - stride, length - stride])


def place(stream: np.ndarray, num_targets: int, *, longest: int = 1, first: int = 0, documents: Any = None) -> Targets:
    """Place `num_targets` targets in stretches of the stream.

    A stretch is a multiple of `longest`, itself rounded up to whole blocks. It is as large as leaves STRETCHES
    stretches and one a document. The last one takes the rest. If windows are as long as a block, a rest of half a
    stretch or more is a stretch of its own. The middles are evenly spread over the stream. If there are enough
    stretches, every document, however short, gets a share that holds one.

    Args:
      stream: tokens [n + 1].
      num_targets: 0, or more than there are, gives one stretch of all targets from `first` on.
      longest: the longest window, in tokens.
      first: the first target that may be scored.
      documents: [d] places in the stream at which documents start, None if they are not known.
    """
    end = len(stream) - 1
    begins = document_starts(documents, len(stream))
    count = min(num_targets or end - first, end - first)
    if count == end - first:
        starts, sizes = np.array([first]), np.array([count])
    else:
        least = -(-longest // BLOCK_LEN) * BLOCK_LEN
        size = least * max(1, count // (least * max(STRETCHES, len(begins))))
        alone = size // 2 if longest >= BLOCK_LEN else 0
        sizes = np.full(max(1, (count + alone) // size), size)
        sizes[-1] += count - sizes.sum()
        edges = np.unique(np.concatenate([[first], begins[begins > first], [end]]))
        starts = _separate_starts(_middles(edges, len(sizes)) - sizes / 2, sizes, first, end)
    return stretch_targets(stream, starts, sizes, documents)


def stretch_targets(
    stream: np.ndarray, starts: np.ndarray, sizes: np.ndarray, documents: Any, weights: str = ""
) -> Targets:
    """Return the targets of stretches [k] of a stream. `weights` names the rule of their weights, "" for equal ones."""
    tokens = _select(stream, starts, sizes)
    touched = None if documents is None else _count_touched(document_starts(documents, len(stream)), starts, sizes)
    digest = digest_arrays(starts, sizes, tokens)
    return Targets(starts, sizes, tokens, touched, f"{digest}-{weights}" if weights else digest)


def _select(values: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([values[1 + at : 1 + at + n] for at, n in zip(starts, sizes, strict=True)])


def document_starts(documents: Any, size: int) -> np.ndarray:
    """Return the first target of every document. That of the first document is 0.

    documents: `Documents`, [d] places in the stream at which documents start, or None.
    """
    documents = documents.starts if isinstance(documents, Documents) else documents
    given = host([] if documents is None else documents)
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise ConfigError(
            "documents must be one row of whole numbers: the places in the stream at which documents start."
        )
    if given.size and not 0 <= given.min() <= given.max() <= size:
        raise ConfigError(f"documents has places {given.min()} to {given.max()}, but the stream has 0 to {size}.")
    inside = given[given < size].astype(np.int64)  # one at the end of the stream would hold no token
    return np.unique(np.append(np.maximum(inside - 1, 0), 0))


def with_ends(documents: Any, stream: np.ndarray, separators: Any) -> Any:
    """Return `Documents` of [d] places at which documents start, if these and the ids of separators are known.

    A document ends before the next one, and before the separator that it ends with.
    """
    if documents is None or separators is None:
        return documents
    starts = 1 + document_starts(documents, len(stream))
    ends = np.append(starts[1:], len(stream))
    return Documents(starts, ends - np.isin(stream[ends - 1], separators))


def own_context(windows: np.ndarray, starts: np.ndarray) -> float:
    """Return the share of the tokens before the targets, in their windows, that are of the document of the target.

    Args:
      windows: [n, 3], as `Targets.windows`.
      starts: [d] places in the stream at which documents start, increasing. No target is before the first.
    """
    own = seen = 0
    for window, low, high in windows:
        columns = np.arange(low, high)
        places = window + 1 + columns
        since = places - starts[np.searchsorted(starts, places, side="right") - 1]
        own, seen = own + int(np.minimum(columns + 1, since).sum()), seen + int((columns + 1).sum())
    return own / seen


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


def _separate_starts(starts: np.ndarray, sizes: np.ndarray, first: int, end: int) -> np.ndarray:
    """Move `starts` as little as possible, so that stretches keep their order, do not overlap, and lie in the text."""
    before = np.cumsum(sizes) - sizes
    slack = np.clip(np.floor(starts) - before, first, end - sizes.sum())
    return (np.maximum.accumulate(slack) + before).astype(np.int64)


def _count_touched(begins: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> int:
    """Count the documents that have a target in some stretch."""
    low = np.searchsorted(begins, starts, side="right") - 1
    high = np.searchsorted(begins, starts + sizes - 1, side="right") - 1
    unseen = np.maximum(low, np.concatenate([[0], high[:-1] + 1]))
    return int((high - unseen + 1).sum())


def digest_arrays(*arrays: np.ndarray) -> str:
    """Return the digest of arrays of whole numbers."""
    return hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in arrays)).hexdigest()[:16]
