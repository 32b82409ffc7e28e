"""Losses of chosen targets under a model given as a function, batch by batch, and the results that are accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posx.errors import ConfigError, UndefinedLength
from posx.evaluation.targets import Targets
from posx.layers import host

LogProbs = Callable[[Any], Any]

#: Rounding may lift a log-probability this far above 0, and the logarithm of a sum of probabilities this far from 0.
ROUNDING = 1e-3
SUM_ROUNDING = 0.05


@dataclasses.dataclass(frozen=True)
class Scored:
    """The NLL (nats, float32) of every target and its column in its window, None if `status` tells why not."""

    status: str
    nll: Any = None
    columns: Any = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model as a function, the stream that it is scored on, and its passes over that stream, which protocols share.

    stream: tokens [n + 1], the first of which is context only. token_bytes: bytes of text behind each, [n + 1], or
    None. separators: ids that are no text, or None. documents: [d], or None. batch_tokens: tokens per call of the
    model. on_windows: called with the length and the number of windows done, before the first batch and after each.
    """

    log_probs: LogProbs
    stream: np.ndarray
    token_bytes: np.ndarray | None
    separators: Sequence[int] | None
    documents: Any
    batch_tokens: int
    on_windows: Callable[[int, int], object] = lambda length, done: None
    passes: dict[tuple[int, int, str], Scored] = dataclasses.field(default_factory=dict)

    def scored(self, targets: Targets, length: int, stride: int) -> Scored:
        """Score `targets` in windows of `length` tokens that end every `stride` of them, if that is not done yet."""
        key = length, stride, targets.digest
        if key not in self.passes:
            self.passes[key] = self._score(targets.windows(length, stride), length)
        return self.passes[key]

    def _score(self, windows: np.ndarray, length: int) -> Scored:
        """Score the windows in order. The batch is halved as long as memory runs out."""
        batch_size, batches = max(1, self.batch_tokens // length), list[np.ndarray]()
        while not batches:
            try:
                self.on_windows(length, 0)
                for n in range(0, len(windows), batch_size):
                    batches.append(self._batch_nll(windows[n : n + batch_size], length, batch_size))
                    self.on_windows(length, min(n + batch_size, len(windows)))
            except UndefinedLength:
                return Scored("undefined")
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if batch_size == 1:
                    return Scored("oom")
                batch_size, batches = batch_size // 2, []
        nll, column = np.concatenate(batches), np.arange(length)
        columns = np.concatenate([column[low:high] for _, low, high in windows])
        return Scored("ok" if np.isfinite(nll).all() else "nonfinite", nll, columns)

    def _batch_nll(self, windows: np.ndarray, length: int, batch_size: int) -> np.ndarray:
        # Short batches and ragged windows are padded, so that one compiled shape serves all. The padding lies after
        # every scored target of a causal model and is not counted.
        starts = np.concatenate([windows[:, 0], np.zeros(batch_size - len(windows), windows.dtype)])
        places = np.minimum(starts[:, None] + np.arange(length + 1), len(self.stream) - 1)
        tokens = self.stream[places].astype(np.int32)
        result = called(self.log_probs, tokens)
        if len(result.shape) == 3:
            result = _of_next(result, tokens[:, 1:])
        column = np.arange(length)
        scored = (column >= windows[:, 1:2]) & (column < windows[:, 2:3])
        found = host(result[: len(windows), :length]).astype(np.float32)[scored]
        refuse_logits(found)
        return -found


def out_of_memory(error: Exception) -> bool:
    """Tell whether `error` says that memory ran out."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or "resource_exhausted" in words or "out of memory" in words


def refuse_logits(found: np.ndarray) -> None:
    """Raise ConfigError for log-probabilities above 0."""
    if (found > ROUNDING).any():
        raise ConfigError(
            f"log_probs gave log-probabilities up to {np.nanmax(found):.4g}, above 0: are these logits? "
            "Give log_softmax(logits), in float32"
        )


def called(log_probs: LogProbs, tokens: np.ndarray) -> Any:
    """Call `log_probs` with tokens [b, t]. Raises ConfigError for a result of another shape than is expected."""
    result = log_probs(tokens)
    (batch, size), shape = tokens.shape, tuple(getattr(result, "shape", ()))
    if shape[:1] != (batch,) or len(shape) not in (2, 3) or shape[1] not in (size - 1, size):
        raise ConfigError(f"log_probs gave shape {shape} for tokens {tokens.shape}: [b, t] or [b, t, v] is expected")
    return result


def _of_next(result: Any, targets: np.ndarray) -> Any:
    """Take from distributions [b, t, v] the entries [b, t] of the next tokens. Raises ConfigError for logits."""
    batch, length = targets.shape
    if targets.max() >= result.shape[2]:
        raise ConfigError(f"log_probs gave {result.shape[2]} entries a token, the stream has token {targets.max()}")
    some = host(result[0, np.linspace(0, length - 1, min(length, 8)).astype(int)]).astype(np.float64)
    with np.errstate(over="ignore"):
        sums = np.exp(some).sum(axis=-1)
    wrong = np.abs(np.log(np.maximum(sums, 1e-300))) > SUM_ROUNDING
    if (wrong & ~np.isnan(sums)).any():
        raise ConfigError(
            f"log_probs gave [b, t, v] whose probabilities sum to {sums[wrong][0]:.4g}, not 1: are these logits? "
            "Give log_softmax(logits), in float32"
        )
    return result[np.arange(batch)[:, None], np.arange(length)[None, :], targets]
