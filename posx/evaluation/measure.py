"""Losses and perplexities of any model that is given as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posx.errors import ConfigError
from posx.evaluation.measured import Measured
from posx.evaluation.protocols import Protocol, Row, protocol_class
from posx.evaluation.scoring import LogProbs, token_ids


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
    protocols = [protocol] if isinstance(protocol, str | Protocol) else protocol
    model = Measured(log_probs, token_ids(stream, "stream"), token_bytes, documents, batch_tokens)
    rows = []
    for one in protocols:
        value = protocol_class(one)() if isinstance(one, str) else one
        for row in value.measure(model, lengths):
            rows.append(row)
            on_row(row)
    return rows
