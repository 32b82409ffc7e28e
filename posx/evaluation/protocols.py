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

from posx.errors import ConfigError, DataError, UndefinedLength, nearest
from posx.evaluation.statistics import block_sums, standard_error

LogProbs = Callable[[Any], Any]
Row = dict[str, Any]

#: Perplexities above e^700 overflow a float64; they are stored as the text "inf", the loss itself in nats.
LARGEST_NLL = 700.0
POSITION_BINS = 1024


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
    length - stride and length - 1 tokens of context. The first `warm_up` targets are context and never scored.

    `stride` 0 is a quarter of the shortest length, `warm_up` 0 the longest. Source: Baevski and Auli 2019; Press et al.
    2022, appendix B.
    """

    name: ClassVar[str] = "sliding"
    stride: int = 0
    num_targets: int = 16384
    warm_up: int = 0


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
    block_len: int = 1024,
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
      block_len: targets in a block of text; blocks are taken as independent in standard errors and paired intervals, so
        they are long, and the same in every call whose rows are to be compared.
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
    model = _Model(log_probs, stream, token_bytes, batch_tokens, block_len, {})
    rows = []
    for one in map(_protocol, protocols):
        for row in MEASURES[type(one)](model, one, lengths):
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


@dataclasses.dataclass(frozen=True)
class _Model:
    """The model under measurement, and how it is measured; `passes` keeps the P1 pass that P4 reads as well."""

    log_probs: LogProbs
    stream: np.ndarray
    token_bytes: Any
    batch_tokens: int
    block_len: int
    passes: dict[tuple[int, int], _Scored]

    def consecutive(self, length: int, num_targets: int) -> _Scored:
        """All of the first `num_targets` targets in consecutive windows, the ragged last one included."""
        if (length, num_targets) not in self.passes:
            starts = np.arange(0, num_targets, length)
            windows = np.stack([starts, np.zeros_like(starts), np.minimum(length, num_targets - starts)], axis=1)
            self.passes[length, num_targets] = self.score(windows, length)
        return self.passes[length, num_targets]

    def score(self, windows: np.ndarray, length: int) -> _Scored:
        """NLL of the scored targets of all windows, in order; the batch is halved while memory runs out.

        windows: [n, 3], the first token of each window, and which of its targets (from, to) are scored.
        """
        batch_size = max(1, self.batch_tokens // length)
        while True:
            try:
                batches = [
                    _batch_nll(self.log_probs, self.stream, windows[n : n + batch_size], length, batch_size)
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

    def row(self, protocol: Protocol, length: int, stride: int, first: int, num_targets: int, scored: _Scored) -> Row:
        """The stored facts of one measurement of targets first .. first + num_targets - 1."""
        targets = self.stream[1 + first : 1 + first + num_targets]
        row: Row = {
            "protocol": protocol.name, "eval_len": length, "stride": stride, "status": scored.status,
            "max_targets": protocol.num_targets, "num_targets": num_targets,
            "num_bytes": None if self.token_bytes is None else int(np.asarray(self.token_bytes)[targets].sum()),
            "nll": None, "nll_se": None, "ppl": None, "bpb": None,
        }  # fmt: skip
        if scored.status == "ok":
            total = float(scored.nll.sum(dtype=np.float64))
            nll = total / num_targets
            sums, counts = block_sums(scored.nll, self.block_len)
            row |= {
                "nll": nll,
                "nll_se": standard_error(sums, counts),
                "ppl": math.exp(nll) if nll < LARGEST_NLL else "inf",
                "bpb": total / math.log(2) / row["num_bytes"] if row["num_bytes"] else None,
                "block_len": self.block_len,
                "block_nll": [round(float(x), 3) for x in sums],
            }
        return row


def _num_targets(model: _Model, protocol: Nonoverlapping | PerPosition) -> int:
    have = len(model.stream) - 1
    if have < 1:
        raise DataError(f"the stream has {have + 1} tokens: at least one of context and one target are needed")
    return min(protocol.num_targets or have, have)


def _nonoverlapping(model: _Model, protocol: Nonoverlapping, lengths: Sequence[int]) -> Iterator[Row]:
    num_targets = _num_targets(model, protocol)
    for length in lengths:
        row = model.row(protocol, length, length, 0, num_targets, model.consecutive(length, num_targets))
        yield row | {"num_windows": -(-num_targets // length)}


def _per_position(model: _Model, protocol: PerPosition, lengths: Sequence[int]) -> Iterator[Row]:
    num_targets = _num_targets(model, protocol)
    for length in sorted(lengths, reverse=True):
        scored = model.consecutive(length, num_targets)
        if scored.status != "undefined":
            row = model.row(protocol, length, length, 0, num_targets, scored)
            by_position = _positions(scored.nll, length) if scored.status == "ok" else {}
            yield row | {"num_windows": -(-num_targets // length)} | by_position
            return


def _sliding(model: _Model, protocol: Sliding, lengths: Sequence[int]) -> Iterator[Row]:
    stride = protocol.stride or max(1, min(lengths) // 4)
    if not 1 <= stride <= min(lengths):
        raise ConfigError(f"stride={stride} must be between 1 and the shortest length, {min(lengths)} tokens")
    warm_up = protocol.warm_up or max(lengths)
    if warm_up < max(lengths):
        raise ConfigError(f"warm_up={warm_up} must be at least the longest length, {max(lengths)} tokens")
    num_windows = min(protocol.num_targets, len(model.stream) - 1 - warm_up) // stride
    if num_windows < 1:
        raise DataError(
            f"the stream has {len(model.stream) - 1} targets; sliding windows of {warm_up} tokens with stride {stride} "
            f"need {warm_up + stride}: use shorter lengths or more held-out text"
        )
    for length in lengths:
        starts = warm_up + stride * np.arange(1, num_windows + 1) - length
        windows = np.stack([starts, np.full_like(starts, length - stride), np.full_like(starts, length)], axis=1)
        scored = model.score(windows, length)
        row = model.row(protocol, length, stride, warm_up, num_windows * stride, scored)
        yield row | {"num_windows": num_windows, "warm_up": warm_up}


MEASURES: dict[type, Callable[..., Iterator[Row]]] = {
    Nonoverlapping: _nonoverlapping, Sliding: _sliding, PerPosition: _per_position,
}  # fmt: skip


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
