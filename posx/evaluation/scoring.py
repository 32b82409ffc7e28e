"""The losses of targets under a model given as a function, and the results that are accepted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posx.errors import ConfigError, UndefinedLength
from posx.evaluation.ids import host
from posx.evaluation.targets import digest_arrays
from posx.notices import say

LogProbs = Callable[..., Any]

#: Rounding may lift a log-probability this far above 0, and the logarithm of a sum of probabilities this far from 0.
ROUNDING = 1e-3
SUM_ROUNDING = 0.05
#: The bits after the leading one of 16-bit numbers, and the fewest different values that show a rounding to them.
_HALF = {"bfloat16": 7, "float16": 10}
FEWEST_VALUES = 16


@dataclasses.dataclass(frozen=True)
class Scored:
    """The result of a pass over windows.

    Attributes:
      status: "ok", "oom", "nonfinite" or "undefined".
      windows: [n, 3], as `Targets.windows`.
      nll: [targets] nats, float32; None after "oom" and "undefined".
    """

    status: str
    windows: np.ndarray
    nll: Any = None

    @property
    def columns(self) -> np.ndarray:
        """Return the column of every target in its window."""
        columns = np.arange(self.windows[:, 2].max())
        return np.concatenate([columns[low:high] for _, low, high in self.windows])


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model as a function, the stream that it is scored on, and the passes that protocols share.

    Attributes:
      log_probs: the model, see `posx.evaluate`. A model of hidden tokens is given bool [b, t] as `hidden` too. It
        returns the log-probabilities of these tokens, in the columns of next tokens.
      stream: [n + 1] tokens, the first of which is context only.
      token_bytes: [n + 1] bytes of the text behind each token, or None.
      separators: ids that are no text, or None.
      documents: [d] places in the stream at which documents start, or None.
      batch_tokens: tokens per call of the model.
      on_windows: called before the first batch and after each one, with the length, the number of windows done and the
        number of all.
      passes: the finished passes, by length and digest of their windows.
      said: notices about the results, each once.
    """

    log_probs: LogProbs
    stream: np.ndarray
    token_bytes: np.ndarray | None
    separators: Sequence[int] | None
    documents: Any
    batch_tokens: int
    on_windows: Callable[[int, int, int], object] = lambda length, done, windows: None
    passes: dict[tuple[int, str], Scored] = dataclasses.field(default_factory=dict)
    said: list[str] = dataclasses.field(default_factory=list)

    def score_windows(
        self, windows: np.ndarray, length: int, begins: np.ndarray | None = None, hidden: np.ndarray | None = None
    ) -> Scored:
        """Score `windows` [n, 3] of `length` tokens, if that is not done yet.

        The first token of a window whose entry of `begins` [n] is true is replaced by token 0 of the stream. If some
        places of the stream [n + 1] are `hidden`, these alone are scored.
        """
        begins = np.zeros(len(windows), bool) if begins is None else begins
        key = length, digest_arrays(windows, begins, *([] if hidden is None else [hidden]))
        if key not in self.passes:
            self.passes[key] = self._score(windows, length, begins, hidden)
        return self.passes[key]

    def _score(self, windows: np.ndarray, length: int, begins: np.ndarray, hidden: np.ndarray | None) -> Scored:
        """Score the windows in order."""

        def score(batch_size: int) -> np.ndarray:
            batches = []
            self.on_windows(length, 0, len(windows))
            for n in range(0, len(windows), batch_size):
                some = slice(n, n + batch_size)
                batches.append(self._batch_nll(windows[some], length, begins[some], hidden, batch_size))
                self.on_windows(length, min(n + batch_size, len(windows)), len(windows))
            return np.concatenate(batches)

        status, nll = score_in_batches(score, max(1, self.batch_tokens // length))
        if status != "ok":
            return Scored(status, windows)
        return Scored("ok" if np.isfinite(nll).all() else "nonfinite", windows, nll)

    def _batch_nll(
        self, windows: np.ndarray, length: int, begins: np.ndarray, hidden: np.ndarray | None, batch_size: int
    ) -> np.ndarray:
        # Short batches and ragged windows are padded, so that one compiled shape serves all. The padding lies after
        # every scored target of a causal model and is not counted.
        starts = np.concatenate([windows[:, 0], np.zeros(batch_size - len(windows), windows.dtype)])
        places = np.minimum(starts[:, None] + np.arange(length + 1), len(self.stream) - 1)
        tokens = self.stream[places].astype(np.int32)
        tokens[: len(windows), 0][begins] = self.stream[0]
        model = self.log_probs if hidden is None else functools.partial(self.log_probs, hidden=hidden[places])
        result = call_log_probs(model, tokens)
        if len(result.shape) == 3:
            result = _next_entries(result, tokens[:, 1:])
        column = np.arange(length)
        scored = (column >= windows[:, 1:2]) & (column < windows[:, 2:3])
        if hidden is not None:
            scored &= hidden[places[: len(windows), 1:]]
        log_probs = host(result[: len(windows), :length]).astype(np.float32)[scored]
        refuse_logits(log_probs)
        if not self.said and (precision := _half_precision(getattr(result, "dtype", ""), log_probs)):
            error = 8 / 2 ** (1 + _HALF[precision])
            self.said.append(
                f"notice: log_probs gives {precision}, which rounds a log-probability of -8 by up to {error:.2g} nats. "
                "Cast the logits to float32 before log_softmax, not the result."
            )
            say(self.said[0])
        return -log_probs


def score_in_batches(score: Callable[[int], Any], batch_size: int) -> tuple[str, Any]:
    """Return ("ok", score(batch_size)). The batch is halved as long as memory runs out.

    If `score` raises UndefinedLength, it is ("undefined", None). If one row does not fit, it is ("oom", None).
    """
    while True:
        try:
            return "ok", score(batch_size)
        except UndefinedLength:
            return "undefined", None
        except Exception as error:
            if not out_of_memory(error):
                raise
            if batch_size == 1:
                return "oom", None
            batch_size //= 2


def out_of_memory(error: Exception) -> bool:
    """Tell whether `error` says that memory ran out."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or "resource_exhausted" in words or "out of memory" in words


def _half_precision(dtype: Any, log_probs: np.ndarray) -> str:
    """Return the 16-bit type of log-probabilities, or the one that they were rounded to before a cast, else "".

    Rounding shows in values that use the last bit of the type at several powers of 2. A fixed grid, such as whole
    numbers, does so at one power alone.
    """
    name = str(dtype).removeprefix("torch.")
    if name in _HALF:
        return name
    bits = log_probs[np.isfinite(log_probs)].astype(np.float32).view(np.uint32)
    for name, kept in _HALF.items():
        last = 23 - kept  # of the 23 bits after the leading one
        if (bits & ((1 << last) - 1)).any():
            continue
        values = np.unique(bits)
        powers = np.unique(values[(values >> last) & 1 == 1] >> 23)
        if len(values) >= FEWEST_VALUES and len(powers) > 1:
            return name
    return ""


def refuse_logits(log_probs: np.ndarray) -> None:
    """Raise ConfigError for log-probabilities above 0."""
    if (log_probs > ROUNDING).any():
        raise ConfigError(
            f"log_probs gave log-probabilities up to {np.nanmax(log_probs):.4g}, above 0. If these are logits, give "
            "log_softmax(logits) in float32."
        )


def call_log_probs(log_probs: LogProbs, tokens: np.ndarray) -> Any:
    """Call `log_probs` with tokens [b, t]. Raises ConfigError for a result of another shape than is expected."""
    result = log_probs(tokens)
    (batch, size), shape = tokens.shape, tuple(getattr(result, "shape", ()))
    if shape[:1] != (batch,) or len(shape) not in (2, 3) or shape[1] not in (size - 1, size):
        raise ConfigError(
            f"log_probs gave shape {shape} for tokens {tokens.shape}, but [b, t] or [b, t, v] is expected."
        )
    return result


def _next_entries(result: Any, targets: np.ndarray) -> Any:
    """Take from distributions [b, t, v] the entries [b, t] of the next tokens. Raises ConfigError for logits."""
    batch, length = targets.shape
    if targets.max() >= result.shape[2]:
        raise ConfigError(
            f"log_probs gave {result.shape[2]} entries a token, but the stream has token {targets.max()}. Give "
            "the whole vocabulary."
        )
    some = host(result[0, np.linspace(0, length - 1, min(length, 8)).astype(int)]).astype(np.float64)
    with np.errstate(over="ignore"):
        sums = np.exp(some).sum(axis=-1)
    wrong = np.abs(np.log(np.maximum(sums, 1e-300))) > SUM_ROUNDING
    if (wrong & ~np.isnan(sums)).any():
        raise ConfigError(
            f"log_probs gave [b, t, v] whose probabilities sum to {sums[wrong][0]:.4g}, not 1. If these are "
            "logits, give log_softmax(logits) in float32."
        )
    return result[np.arange(batch)[:, None], np.arange(length)[None, :], targets]
