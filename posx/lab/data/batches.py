"""Batches as a pure function of (data digest, seed, step, batch size, length): resuming needs no iterator state.

An epoch divides the token stream into windows of `length` + 1 tokens, so that targets are inputs shifted by one. The
windows start at an offset of the epoch's own. An epoch visits every window once, in an order given by a keyed
permutation of [0, windows). The permutation is a small Feistel network, so one batch costs O(batch size) whatever the
corpus size.
"""

import abc
import hashlib
from typing import Any, NamedTuple

import numpy as np

from posx.errors import DataError
from posx.lab.data.tokenizers import Tokenizer

_ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


class Weighted(NamedTuple):
    """A batch whose targets do not all count alike, or several batches.

    Attributes:
      tokens: int32 [..., b, t + 1].
      weights: of the targets, float32 [..., b, t], whose mean over a batch is 1. So the loss of a batch is the mean of
        the losses of its parts, however it is divided.
    """

    tokens: Any
    weights: Any


class Dataset(abc.ABC):
    """A source of tokens: a text, or the items of a task.

    Attributes:
      tokenizer: of all its tokens.
      digest: identifies its content.
      held_out_digest: identifies the part that is measured.
      source: a description.
      warnings: reasons to doubt results on it, also logged at each start.
    """

    tokenizer: Tokenizer
    digest: str
    held_out_digest: str
    source: str
    warnings: tuple[str, ...] = ()

    @abc.abstractmethod
    def batch(self, *, seed: int, step: int, batch_size: int, length: int, rows: slice = slice(None)) -> Any:
        """Return `rows` of batch number `step`: tokens [b, length + 1], or `Weighted`. See `batch`."""

    @abc.abstractmethod
    def check_length(self, length: int) -> None:
        """Raise DataError if it has no batch of windows of `length` tokens."""

    @abc.abstractmethod
    def summary(self) -> str:
        """Describe it in one line."""


def num_windows(num_tokens: int, length: int) -> int:
    """Return the number of windows of `length` + 1 tokens in an epoch at any offset; 0 if the stream is too short.

    The last fraction of a window is given up so that every epoch has the same number. Consecutive windows share one
    token: the last target of a window is the first input of the next. So no target is seen twice in an epoch.
    """
    return max(1, (num_tokens - length) // length) if num_tokens > length else 0


def check_length(num_tokens: int, length: int, what: str = "the corpus") -> None:
    """Raise DataError unless `num_tokens` hold at least one window of `length` tokens; `what` names the split."""
    if num_windows(num_tokens, length) == 0:
        raise DataError(
            f"{what} has {num_tokens} tokens, too few for one window of length {length}, which needs "
            f"{length + 1}. The largest usable length is {max(0, num_tokens - 1)}. Use more text or a shorter "
            "length."
        )


def batch(
    tokens: np.ndarray, *, digest: str, seed: int, step: int, batch_size: int, length: int, rows: slice = slice(None)
) -> np.ndarray:
    """Return batch number `step`: int32 [batch_size, length + 1]; inputs are [:, :-1], targets [:, 1:].

    Args:
      tokens: the stream [n].
      digest: identifies the data, so that an edited corpus gets another order.
      seed: that of the run.
      step: from 0. Batches continue across epoch borders.
      batch_size: rows of the batch.
      length: tokens of a window.
      rows: the rows of the batch to return; no token of other rows is read.

    Raises:
      DataError: if the stream holds no window of this length.
    """
    check_length(len(tokens), length)
    windows = num_windows(len(tokens), length)
    # A stream shorter than two windows allows fewer offsets than `length`.
    offsets = min(length, len(tokens) - windows * length)
    numbers = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)[rows]
    epochs = numbers // windows
    starts = np.empty(len(numbers), np.int64)
    for epoch in np.unique(epochs):
        mine = epochs == epoch
        key = hashlib.shake_256(f"posx batches 1\n{digest}\n{seed}\n{epoch}".encode()).digest(8 * (_ROUNDS + 1))
        offset, *keys = (int(word) for word in np.frombuffer(key, "<u8"))
        starts[mine] = offset % offsets + length * _permute(numbers[mine] % windows, windows, keys)
    # int32 here, on the host: unsigned tokens minus one would wrap around on the device.
    return tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def _permute(index: np.ndarray, windows: int, keys: list[int]) -> np.ndarray:
    """Map `index` (int64, in [0, windows)) by the permutation of [0, windows) that `keys` choose.

    The network permutes [0, 4**half_bits), at most four times too many numbers. Following the cycle until the image
    lies below `windows` restricts it to a permutation of [0, windows).
    """
    half_bits = max(1, ((windows - 1).bit_length() + 1) // 2)
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)

    def network(index: np.ndarray) -> np.ndarray:
        left, right = index >> bits, index & mask
        for key in keys:
            mixed = (right + np.uint64(key)) * _MIX
            mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << bits) | right

    image = network(index.astype(np.uint64))
    while (outside := image >= windows).any():
        image[outside] = network(image[outside])
    return image.astype(np.int64)
