"""Losses of chosen targets under a model given as a function, batch by batch, and what a user's function may return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from posx.errors import ConfigError, UndefinedLength
from posx.layers import host

LogProbs = Callable[[Any], Any]

#: Rounding may lift a log-probability this far above 0, and the logarithm of a sum of probabilities this far from 0.
ROUNDING = 1e-3
SUM_ROUNDING = 0.05


@dataclasses.dataclass(frozen=True)
class Scored:
    """NLL (nats, float32) of every target and its column in its window, or why there is none."""

    nll: np.ndarray
    columns: np.ndarray
    status: str


def score(
    log_probs: LogProbs,
    stream: np.ndarray,
    windows: np.ndarray,
    length: int,
    batch_tokens: int,
    on_windows: Callable[[int, int], object] = lambda length, done: None,
) -> Scored:
    """The scored targets of all windows, in order; the batch is halved while memory runs out.

    windows: [n, 3], the first token of each window, and which of its targets (from, to) are scored. on_windows: told
    the length and how many of the windows are done, before the first batch and after each.
    """
    batch_size = max(1, batch_tokens // length)
    column = np.arange(length)
    while True:
        try:
            batches = []
            on_windows(length, 0)
            for n in range(0, len(windows), batch_size):
                some = windows[n : n + batch_size]
                batches.append(_batch_nll(log_probs, stream, some, length, batch_size))
                on_windows(length, n + len(some))
        except UndefinedLength:
            return Scored(np.zeros(0), np.zeros(0, int), "undefined")
        except Exception as error:
            if not out_of_memory(error):
                raise
            if batch_size == 1:
                return Scored(np.zeros(0), np.zeros(0, int), "oom")
            batch_size //= 2
            continue
        nll = np.concatenate(batches)
        columns = np.concatenate([column[low:high] for _, low, high in windows])
        return Scored(nll, columns, "ok" if np.isfinite(nll).all() else "nonfinite")


def out_of_memory(error: Exception) -> bool:
    """Whether `error` says that memory ran out."""
    return isinstance(error, MemoryError) or any(
        word in str(error).lower() for word in ("resource_exhausted", "out of memory")
    )


def _batch_nll(log_probs, stream, windows: np.ndarray, length: int, batch_size: int) -> np.ndarray:
    # Short batches and ragged windows are filled up, so that one compiled shape serves all; what is filled in lies
    # after every scored target of a causal model and is not counted.
    starts = np.concatenate([windows[:, 0], np.zeros(batch_size - len(windows), windows.dtype)])
    places = np.minimum(starts[:, None] + np.arange(length + 1), len(stream) - 1)
    tokens = stream[places].astype(np.int32)
    result = called(log_probs, tokens)
    if len(result.shape) == 3:
        result = _of_next(result, tokens[:, 1:])
    column = np.arange(length)
    scored = (column >= windows[:, 1:2]) & (column < windows[:, 2:3])
    found = host(result[: len(windows), :length]).astype(np.float32)[scored]
    refuse_logits(found)
    return -found


def refuse_logits(found: np.ndarray) -> None:
    """Raise ConfigError for log-probabilities above 0."""
    if (found > ROUNDING).any():
        raise ConfigError(
            f"log_probs gave log-probabilities up to {np.nanmax(found):.4g}, above 0: are these logits? "
            "Give log_softmax(logits), in float32"
        )


def called(log_probs: LogProbs, tokens: np.ndarray) -> Any:
    """Return what `log_probs` gives for tokens [b, t]; ConfigError for another shape than is expected."""
    result = log_probs(tokens)
    (batch, size), shape = tokens.shape, tuple(getattr(result, "shape", ()))
    if shape[:1] != (batch,) or len(shape) not in (2, 3) or shape[1] not in (size - 1, size):
        raise ConfigError(f"log_probs gave shape {shape} for tokens {tokens.shape}: [b, t] or [b, t, v] is expected")
    return result


def _of_next(result: Any, targets: np.ndarray) -> Any:
    """The entries [b, t] of distributions [b, t, v] at the next tokens; ConfigError if they are no distributions."""
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
