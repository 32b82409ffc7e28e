"""Protocols P1, P2 and P4: which tokens are scored, and with how much context.

A stream is tokens [n + 1]: the first is context only (the end-of-document token before the text), the other n are the
targets. Every protocol scores the same targets at every length, and every number is a sum of NLL over a count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from posx.encodings import nearest
from posx.errors import ConfigError, DataError, PosxError
from posx.evaluation.statistics import block_sums, standard_error

LogProbs = Callable[[Any], Any]
Row = dict[str, Any]

#: Perplexities above e^700 overflow a float64; they are stored as the text "inf", the loss itself in nats.
LARGEST_NLL = 700.0
POSITION_BINS = 1024


class UndefinedLength(PosxError):
    """Raised by a model's function for windows longer than the model is defined for."""

    exit_code = 0


@dataclasses.dataclass(frozen=True)
class Nonoverlapping:
    """P1: consecutive windows, all targets scored, the ragged last window included. `num_targets` 0: the whole stream.

    Source: Press et al. 2022 (arXiv 2108.12409) figure 1.
    """

    name: ClassVar[str] = "nonoverlapping"
    num_targets: int = 0


@dataclasses.dataclass(frozen=True)
class Sliding:
    """P2: windows end every `stride` tokens, the last `stride` targets of each are scored, so every target has between
    length - stride and length - 1 tokens of context. The first max(lengths) targets are warm-up and never scored.

    `stride` 0 is a quarter of the shortest length. Source: Baevski and Auli 2019; Press et al. 2022, appendix B.
    """

    name: ClassVar[str] = "sliding"
    stride: int = 0
    num_targets: int = 16384


@dataclasses.dataclass(frozen=True)
class PerPosition:
    """P4: one pass of P1 at the longest length for which the model is defined, its loss kept by position."""

    name: ClassVar[str] = "per_position"
    num_targets: int = 0


Protocol = Nonoverlapping | Sliding | PerPosition
PROTOCOLS = {cls.name: cls for cls in (Nonoverlapping, Sliding, PerPosition)}


def evaluate(
    log_probs: LogProbs,
    stream: Any,
    protocol: str | Protocol | Sequence[str | Protocol],
    lengths: Sequence[int],
    *,
    token_bytes: Any = None,
    batch_tokens: int = 16384,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Rows of losses and perplexities of any model, the same scored tokens at every length.

    Args:
      log_probs: tokens int32 [b, t] -> log-probabilities (nats) of the next tokens [b, t]: entry (b, i) is that of
        tokens[b, i + 1] given tokens[b, : i + 1]. The last column has no next token: it is not read and may be left
        out. The whole distribution, [b, t, v] or [b, t - 1, v], is accepted as well. May raise UndefinedLength.
      stream: tokens [n + 1], the first of which is context only.
      protocol: "nonoverlapping", "sliding", "per_position", a protocol value, or several of them.
      lengths: window lengths in tokens.
      token_bytes: [v] bytes of text behind each token, for bits per byte; None where that is not known.
      batch_tokens: tokens per call of the model; halved as long as memory runs out.
      on_row: called with each row as soon as it is there.

    Returns one row a protocol and length: protocol, eval_len, stride, num_targets, num_windows, num_bytes, nll
    (nats/token), nll_se, ppl, bpb, block_len, block_nll (sums, nats), status ("ok", "oom", "nonfinite", "undefined").
    Raises ConfigError for protocols and lengths that make no sense, DataError for a stream that is too short.
    """
    stream = np.asarray(stream)
    lengths = [int(length) for length in lengths]
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"lengths={lengths} must name at least one window length of 1 token or more")
    protocols = [protocol] if isinstance(protocol, str | Nonoverlapping | Sliding | PerPosition) else protocol
    passes: dict[tuple[int, int], _Scored] = {}
    rows = []
    for one in protocols:
        for row in _rows(log_probs, stream, _protocol(one), lengths, token_bytes, batch_tokens, passes):
            rows.append(row)
            on_row(row)
    return rows


def _protocol(protocol: str | Protocol) -> Protocol:
    if not isinstance(protocol, str):
        return protocol
    if protocol not in PROTOCOLS:
        raise ConfigError(
            f"unknown protocol {protocol!r}; {nearest(protocol, list(PROTOCOLS))}known: {', '.join(PROTOCOLS)}"
        )
    return PROTOCOLS[protocol]()


@dataclasses.dataclass(frozen=True)
class _Scored:
    """NLL (nats, float32) of every target, or why there is none."""

    nll: np.ndarray
    status: str


def _rows(log_probs, stream, protocol, lengths, token_bytes, batch_tokens, passes) -> Iterator[Row]:
    if isinstance(protocol, Sliding):
        yield from _sliding(log_probs, stream, protocol, lengths, token_bytes, batch_tokens)
        return
    num_targets = min(protocol.num_targets or len(stream) - 1, len(stream) - 1)
    if num_targets < 1:
        raise DataError(f"the stream has {len(stream)} tokens: at least one of context and one target are needed")
    longest_first = isinstance(protocol, PerPosition)
    for length in sorted(lengths, reverse=True) if longest_first else lengths:
        key = (length, num_targets)
        if key not in passes:
            passes[key] = _score(log_probs, stream, _consecutive(num_targets, length), length, batch_tokens)
        scored = passes[key]
        if longest_first and scored.status == "undefined":
            continue
        row = _row(protocol, length, length, stream[1 : num_targets + 1], scored, token_bytes, max(lengths))
        row["num_windows"] = -(-num_targets // length)
        if longest_first:
            yield row | (_positions(scored.nll, length) if scored.status == "ok" else {})
            return
        yield row


def _consecutive(num_targets: int, length: int) -> np.ndarray:
    """[n, 3]: first token of each window, and which of its targets (from, to) are scored."""
    starts = np.arange(0, num_targets, length)
    return np.stack([starts, np.zeros_like(starts), np.minimum(length, num_targets - starts)], axis=1)


def _sliding(log_probs, stream, protocol: Sliding, lengths, token_bytes, batch_tokens) -> Iterator[Row]:
    stride = protocol.stride or max(1, min(lengths) // 4)
    if not 1 <= stride <= min(lengths):
        raise ConfigError(f"stride={stride} must be between 1 and the shortest length, {min(lengths)} tokens")
    warm_up = max(lengths)
    num_windows = min(protocol.num_targets, len(stream) - 1 - warm_up) // stride
    if num_windows < 1:
        raise DataError(
            f"the stream has {len(stream) - 1} targets; sliding windows of {warm_up} tokens with stride {stride} need "
            f"{warm_up + stride}: use shorter lengths or more held-out text"
        )
    num_targets = num_windows * stride
    for length in lengths:
        starts = warm_up + stride * np.arange(1, num_windows + 1) - length
        windows = np.stack([starts, np.full_like(starts, length - stride), np.full_like(starts, length)], axis=1)
        scored = _score(log_probs, stream, windows, length, batch_tokens)
        targets = stream[1 + warm_up : 1 + warm_up + num_targets]
        row = _row(protocol, length, stride, targets, scored, token_bytes, warm_up)
        yield row | {"num_windows": num_windows}


def _score(log_probs: LogProbs, stream: np.ndarray, windows: np.ndarray, length: int, batch_tokens: int) -> _Scored:
    """NLL of the scored targets of all windows, in order; the batch is halved while memory runs out."""
    batch_size = max(1, batch_tokens // length)
    while True:
        try:
            batches = [
                _batch_nll(log_probs, stream, windows[n : n + batch_size], length, batch_size)
                for n in range(0, len(windows), batch_size)
            ]
        except UndefinedLength:
            return _Scored(np.zeros(0), "undefined")
        except Exception as error:
            if not _out_of_memory(error):
                raise
            if batch_size == 1:
                return _Scored(np.zeros(0), "oom")
            batch_size //= 2
            continue
        nll = np.concatenate(batches)
        return _Scored(nll, "ok" if np.isfinite(nll).all() else "nonfinite")


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _batch_nll(log_probs, stream, windows: np.ndarray, length: int, batch_size: int) -> np.ndarray:
    # Short batches and the ragged last window are filled up, so that one compiled shape serves all; what is filled in
    # lies after every scored target of a causal model and is not counted.
    starts = np.concatenate([windows[:, 0], np.zeros(batch_size - len(windows), windows.dtype)])
    places = np.minimum(starts[:, None] + np.arange(length + 1), len(stream) - 1)
    tokens = stream[places].astype(np.int32)
    result = log_probs(tokens)
    if result.shape[:1] != (batch_size,) or result.ndim not in (2, 3) or result.shape[1] not in (length, length + 1):
        raise ValueError(f"log_probs gave shape {result.shape} for tokens {tokens.shape}: [b, t] or [b, t, v] expected")
    result = result[:, :length]
    if result.ndim == 3:
        result = jnp.take_along_axis(result, jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    nll = -np.asarray(result, np.float32)
    column = np.arange(length)
    scored = (column >= windows[:, 1:2]) & (column < windows[:, 2:3])
    return nll[: len(windows)][scored]


def _row(protocol: Protocol, length: int, stride: int, targets, scored: _Scored, token_bytes, block_len: int) -> Row:
    row: Row = {
        "protocol": protocol.name, "eval_len": length, "stride": stride, "status": scored.status,
        "max_targets": protocol.num_targets, "num_targets": len(targets),
        "num_bytes": None if token_bytes is None else int(np.asarray(token_bytes)[targets].sum()),
        "nll": None, "nll_se": None, "ppl": None, "bpb": None,
    }  # fmt: skip
    if scored.status == "ok":
        total = float(scored.nll.sum(dtype=np.float64))
        nll = total / len(targets)
        sums, counts = block_sums(scored.nll, block_len)
        row |= {
            "nll": nll,
            "nll_se": standard_error(sums, counts),
            "ppl": math.exp(nll) if nll < LARGEST_NLL else "inf",
            "bpb": total / math.log(2) / row["num_bytes"] if row["num_bytes"] else None,
            "block_len": block_len,
            "block_nll": [round(float(x), 3) for x in sums],
        }
    return row


def _positions(nll: np.ndarray, length: int) -> Row:
    """Mean loss by position in the window, in at most POSITION_BINS bins; position p has p + 1 tokens of context."""
    padded = np.full(-(-len(nll) // length) * length, np.nan)
    padded[: len(nll)] = nll
    by_position = padded.reshape(-1, length)
    edges = np.unique(np.linspace(0, length, min(length, POSITION_BINS) + 1).astype(int))
    sums = np.add.reduceat(np.nansum(by_position, axis=0), edges[:-1])
    counts = np.add.reduceat((~np.isnan(by_position)).sum(axis=0), edges[:-1])
    kept = counts > 0
    return {
        "position_edges": [*map(int, edges[:-1][kept]), int(edges[1:][kept][-1])],
        "position_nll": [round(float(x), 5) for x in sums[kept] / counts[kept]],
        "position_targets": [int(x) for x in counts[kept]],
    }
