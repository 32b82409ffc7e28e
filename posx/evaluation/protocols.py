"""Protocols P1, P2 and P4: which tokens are scored, and with how much context.

A stream is tokens [n + 1]: the first is context only (the end-of-document token before the text), the other n are the
targets. Every protocol scores the same targets at every length, and every number is a sum of NLL over a count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from posx.errors import ConfigError, DataError, nearest
from posx.evaluation.scoring import LogProbs, Scored, host, score, token_ids
from posx.evaluation.statistics import BLOCK_LEN, LARGEST_NLL, block_sums, interval
from posx.evaluation.targets import Targets, place

Row = dict[str, Any]

POSITION_BINS = 1024


@dataclasses.dataclass(frozen=True)
class Nonoverlapping:
    """P1: each stretch of targets in consecutive windows from its start, the ragged last one included.

    num_targets: 0 for the whole stream, in one stretch. stretch: its least length; 0 for the longest of the lengths,
    so that every length has whole windows in every stretch. Source: Press et al. 2022 (arXiv 2108.12409) figure 1.
    """

    name: ClassVar[str] = "nonoverlapping"
    num_targets: int = 0
    stretch: int = 0


@dataclasses.dataclass(frozen=True)
class Sliding:
    """P2: windows end every `stride` tokens, the last `stride` targets of each are scored, so every target has between
    length - stride + 1 and length tokens of context, of the text before its stretch too. The first `warm_up` targets of
    the stream are context and never scored.

    `stride` 0 is a quarter of the shortest length, `warm_up` 0 the longest; `num_targets` 0 the whole stream. Source:
    Baevski and Auli 2019; Press et al. 2022, appendix B.
    """

    name: ClassVar[str] = "sliding"
    stride: int = 0
    num_targets: int = 65536
    warm_up: int = 0


@dataclasses.dataclass(frozen=True)
class PerPosition:
    """P4: one pass of P1 at the longest length for which the model is defined, its loss kept by position."""

    name: ClassVar[str] = "per_position"
    num_targets: int = 0
    stretch: int = 0


Protocol = Nonoverlapping | Sliding | PerPosition
PROTOCOLS = {cls.name: cls for cls in (Nonoverlapping, Sliding, PerPosition)}
#: Names by the letters of the literature, which mean the same.
ALIASES = {"P1": "nonoverlapping", "P2": "sliding", "P4": "per_position"}


def evaluate(
    log_probs: LogProbs,
    stream: Any,
    protocol: str | Protocol | Sequence[str | Protocol],
    lengths: Sequence[int],
    *,
    token_bytes: Any = None,
    documents: Any = None,
    batch_tokens: int = 16384,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Rows of losses and perplexities of any model, the same scored tokens at every length.

    Args:
      log_probs: tokens int32 [b, t] (NumPy) -> log-probabilities (nats) of the next tokens [b, t], as a NumPy, JAX or
        torch array: entry (b, i) is that of tokens[b, i + 1] given tokens[b, : i + 1]. The last column has no next
        token: it is not read and may be left out. The whole distribution, [b, t, v] or [b, t - 1, v], is accepted as
        well. May raise UndefinedLength.
      stream: tokens [n + 1], the first of which is context only.
      protocol: "nonoverlapping" ("P1"), "sliding" ("P2"), "per_position" ("P4"), a protocol value, or several of them.
      lengths: window lengths in tokens.
      token_bytes: [v] bytes of text behind each token, for bits per byte; None where that is not known.
      documents: [d] places in `stream` where documents start: the targets are spread over all documents. None where
        they are not known: over the stream.
      batch_tokens: tokens per call of the model; halved as long as memory runs out.
      on_row: called with each row as soon as it is there.

    Returns one row a protocol and length: protocol, eval_len, stride, num_targets, num_stretches, num_documents,
    num_windows, num_bytes, targets (names which were scored), nll (nats/token), nll_interval (95 % over text, or None),
    ppl, bpb, block_len, block_nll (sums, nats), status ("ok", "oom", "nonfinite", "undefined").
    Raises ConfigError for protocols and lengths that make no sense and for what cannot be log-probabilities, DataError
    for a stream that is too short.
    """
    lengths = [int(length) for length in lengths]
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"lengths={lengths} must name at least one window length of 1 token or more")
    protocols = [protocol] if isinstance(protocol, str | Nonoverlapping | Sliding | PerPosition) else protocol
    model = _Model(log_probs, token_ids(stream, "stream"), token_bytes, documents, batch_tokens, {})
    rows = []
    for one in map(_protocol, protocols):
        for row in MEASURES[type(one)](model, one, lengths):
            rows.append(row)
            on_row(row)
    return rows


def protocol_name(name: str) -> str:
    """The name that a protocol has in rows. Raises ConfigError for one that is not known."""
    found = ALIASES.get(name.upper(), name)
    if found not in PROTOCOLS:
        known = [*PROTOCOLS, *ALIASES]
        raise ConfigError(f"protocol {name!r} is unknown; {nearest(name, known)}known: {', '.join(known)}")
    return found


def _protocol(protocol: str | Protocol) -> Protocol:
    return PROTOCOLS[protocol_name(protocol)]() if isinstance(protocol, str) else protocol


@dataclasses.dataclass(frozen=True)
class _Model:
    """The model under measurement, and how it is measured; `passes` keeps the P1 pass that P4 reads as well."""

    log_probs: LogProbs
    stream: np.ndarray
    token_bytes: Any
    documents: Any
    batch_tokens: int
    passes: dict[tuple[int, str], Scored]

    def consecutive(self, length: int, targets: Targets) -> Scored:
        """Every stretch in consecutive windows from its start, the ragged last one of each included."""
        key = length, targets.digest
        if key not in self.passes:
            self.passes[key] = self.score(_windows(targets, length), length)
        return self.passes[key]

    def score(self, windows: np.ndarray, length: int) -> Scored:
        return score(self.log_probs, self.stream, windows, length, self.batch_tokens)

    def row(self, protocol: Protocol, length: int, stride: int, targets: Targets, scored: Scored) -> Row:
        """The stored facts of one measurement."""
        row: Row = {
            "protocol": protocol.name, "eval_len": length, "stride": stride, "status": scored.status,
            "max_targets": protocol.num_targets, "num_targets": targets.count,
            "num_stretches": len(targets.sizes), "num_documents": targets.num_documents,
            "num_windows": int((-(-targets.sizes // stride)).sum()),
            "num_bytes": self.num_bytes(targets), "targets": targets.digest,
            "nll": None, "nll_interval": None, "ppl": None, "bpb": None, "block_len": BLOCK_LEN,
        }  # fmt: skip
        if scored.status == "ok":
            total = float(scored.nll.sum(dtype=np.float64))
            nll = total / targets.count
            sums, counts = block_sums(scored.nll)
            row |= {
                "nll": nll,
                "nll_interval": interval(sums, counts),
                "ppl": math.exp(nll) if nll < LARGEST_NLL else "inf",
                "bpb": total / math.log(2) / row["num_bytes"] if row["num_bytes"] else None,
                "block_nll": [round(float(x), 3) for x in sums],
            }
        return row

    def num_bytes(self, targets: Targets) -> int | None:
        if self.token_bytes is None:
            return None
        sizes, last = host(self.token_bytes), targets.tokens.max()
        if last >= len(sizes):
            raise ConfigError(f"token_bytes has {len(sizes)} entries, the stream has token {last}")
        return int(sizes[targets.tokens].sum())


def targets_of(protocol: Protocol, stream: np.ndarray, lengths: Sequence[int], documents: Any) -> Targets:
    """What a protocol scores. Raises DataError where the stream is too short for the longest length, ConfigError where
    `num_targets` is, and for a stride or warm-up that makes no sense."""
    have, longest = len(stream) - 1, max(lengths)
    if isinstance(protocol, Sliding):
        stride, warm_up = _stride(protocol, lengths), _warm_up(protocol, lengths)
        if not 1 <= stride <= min(lengths):
            raise ConfigError(f"stride={stride} must be between 1 and the shortest length, {min(lengths)} tokens")
        if warm_up < longest:
            raise ConfigError(f"warm_up={warm_up} must be at least the longest length, {longest} tokens")
        if have < warm_up + stride:
            raise DataError(
                f"the stream has {max(have, 0)} targets; sliding windows of {warm_up} tokens with stride {stride} need "
                f"{warm_up + stride}: use shorter lengths or more held-out text"
            )
        return place(stream, protocol.num_targets, first=warm_up, documents=documents)
    if have < longest:
        raise DataError(f"the stream has {max(have, 0)} targets, a window of {longest} tokens needs {longest}")
    if 0 < protocol.num_targets < longest:
        raise ConfigError(
            f"num_targets={protocol.num_targets} is less than one window of {longest} tokens: score at least {longest} "
            "targets, or 0 for all of the stream"
        )
    return place(stream, protocol.num_targets, longest=max(protocol.stretch, longest), documents=documents)


def _stride(protocol: Sliding, lengths: Sequence[int]) -> int:
    return protocol.stride or max(1, min(lengths) // 4)


def _warm_up(protocol: Sliding, lengths: Sequence[int]) -> int:
    return protocol.warm_up or max(lengths)


def _nonoverlapping(model: _Model, protocol: Nonoverlapping, lengths: Sequence[int]) -> Iterator[Row]:
    targets = targets_of(protocol, model.stream, lengths, model.documents)
    for length in lengths:
        yield model.row(protocol, length, length, targets, model.consecutive(length, targets))


def _per_position(model: _Model, protocol: PerPosition, lengths: Sequence[int]) -> Iterator[Row]:
    targets = targets_of(protocol, model.stream, lengths, model.documents)
    for length in sorted(lengths, reverse=True):
        scored = model.consecutive(length, targets)
        if scored.status != "undefined":
            by_position = _positions(scored, length) if scored.status == "ok" else {}
            yield model.row(protocol, length, length, targets, scored) | by_position
            return


def _sliding(model: _Model, protocol: Sliding, lengths: Sequence[int]) -> Iterator[Row]:
    targets = targets_of(protocol, model.stream, lengths, model.documents)
    stride = _stride(protocol, lengths)
    steps = _windows(targets, stride)
    for length in lengths:
        windows = steps + np.array([stride - length, length - stride, length - stride])
        row = model.row(protocol, length, stride, targets, model.score(windows, length))
        yield row | {"warm_up": _warm_up(protocol, lengths)}


MEASURES: dict[type, Callable[..., Iterator[Row]]] = {
    Nonoverlapping: _nonoverlapping, Sliding: _sliding, PerPosition: _per_position,
}  # fmt: skip


def _windows(targets: Targets, length: int) -> np.ndarray:
    """[n, 3]: consecutive windows over every stretch: where each starts, and which of its targets (from, to) count."""
    found = []
    for start, size in zip(targets.starts, targets.sizes, strict=True):
        offsets = np.arange(0, size, length)
        found.append(np.stack([start + offsets, np.zeros_like(offsets), np.minimum(length, size - offsets)], axis=1))
    return np.concatenate(found)


def _positions(scored: Scored, length: int) -> Row:
    """Mean loss by position in the window, in at most POSITION_BINS bins; position p has p + 1 tokens of context."""
    edges = np.unique(np.linspace(0, length, min(length, POSITION_BINS) + 1).astype(int))
    by_position = np.bincount(scored.columns, scored.nll.astype(np.float64), length)
    sums = np.add.reduceat(by_position, edges[:-1])
    counts = np.add.reduceat(np.bincount(scored.columns, minlength=length), edges[:-1])
    return {
        "position_edges": [int(x) for x in edges],
        "position_nll": [round(float(x), 5) for x in sums / counts],
        "position_targets": [int(x) for x in counts],
    }
