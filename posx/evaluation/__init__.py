"""Perplexity at any length under a stated protocol, for any model given as a function.

`evaluate` is the public call, and `protocols` say which tokens are scored with how much context, as `base` demands it.
`published` has the protocols of other libraries. `scoring` places the scored tokens over the documents and runs the
model, and `probe` checks a user's function first. `statistics` turns sums over blocks of text into intervals and paired
ratios. `posx.lab.runs.evaluate` evaluates trained runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posx.errors import ConfigError, UndefinedLength
from posx.evaluation.base import Protocol, Row
from posx.evaluation.differences import (
    Difference,
    StandardError,
    Verdict,
    holm,
    judge,
    loss_difference,
    rise_difference,
)
from posx.evaluation.ids import host, token_ids
from posx.evaluation.probe import check_first_windows
from posx.evaluation.protocols import BeginEveryWindow, Nonoverlapping, PerPosition, Sliding, protocol_class
from posx.evaluation.published import HfStrided, LmEvalRolling
from posx.evaluation.scoring import LogProbs, Measured
from posx.evaluation.statistics import interval
from posx.evaluation.targets import with_ends
from posx.lazy import module_getter
from posx.notices import say

__all__ = [
    "BeginEveryWindow", "Difference", "HfStrided", "LmEvalRolling", "Nonoverlapping", "PerPosition", "Sliding",
    "StandardError", "UndefinedLength", "Verdict", "evaluate", "holm", "interval", "judge", "loss_difference",
    "rise_difference",
]  # fmt: skip

__getattr__ = module_getter(__name__)


def evaluate(
    log_probs: LogProbs,
    stream: Any,
    protocol: str | Protocol | Sequence[str | Protocol],
    lengths: Sequence[int],
    *,
    token_bytes: Any = None,
    separators: Sequence[int] | None = None,
    documents: Any = None,
    batch_tokens: int = 16384,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Return rows of losses and perplexities of any model, with the same scored tokens at every length.

    `hf_strided` without overlap is the exception: see `HfStrided`.

    Args:
      log_probs: tokens int32 [b, t] (NumPy) -> log-probabilities (nats) of the next tokens [b, t], as a NumPy, JAX or
        torch array. Entry (b, i) is that of tokens[b, i + 1] given tokens[b, : i + 1]. The last column has no next
        token: it is not read and may be left out. The whole distribution, [b, t, v] or [b, t - 1, v], is accepted as
        well. May raise UndefinedLength.
      stream: tokens [n + 1], the first of which is context only: the token with which the model begins a text.
      protocol: a name out of `posx.evaluation.protocols.PROTOCOLS`, such as "sliding", a protocol's value, or several
        of these.
      lengths: window lengths in tokens, each once.
      token_bytes: [n + 1] bytes of the text behind each token of the stream, for bits per byte; None if they are not
        known. A table by token id is not enough for most tokenizers: take them from offsets into the text.
      separators: ids of tokens that are no text, such as those between documents. They are targets like others in nll
        and ppl. Bits per byte leave them out. Required with `token_bytes`, which must be 0 there; [] for a stream
        without any. A notice names ids that the stream does not have.
      documents: [d] places in `stream` at which documents start: the targets are spread over all documents. If they
        are not known (None), targets are spread over the stream.
      batch_tokens: tokens per call of the model; halved as long as memory runs out.
      on_row: called with each row as soon as it is there.

    Returns:
      One row for each protocol and length, a dict with these fields. Numbers that are not known are None.

      * protocol, eval_len and stride in tokens, targets (a name of the set of scored tokens).
      * num_targets, num_stretches, num_documents, num_windows, num_bytes, num_separators.
      * own_context: the share of the tokens before the targets, in their windows, that are of the same document.
      * nll in nats a token, nll_interval (95 % over text), ppl, bpb (over the targets that are text).
      * block_len in targets, block_nll (the sum over each block, in nats).
      * status: "ok", "oom", "nonfinite" or "undefined".

    Raises:
      ConfigError: for protocols and lengths that make no sense, and for results that cannot be log-probabilities of
        the next token (see `posx.conformance.check_log_probs`, which runs first).
      DataError: for a stream that is too short.
    """
    try:
        lengths = [operator.index(length) for length in lengths]
    except TypeError:
        raise ConfigError(f"lengths={lengths}: give a list of whole numbers, such as lengths=[64, 128].") from None
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"lengths={lengths}: at least one window length of 1 token or more is needed.")
    names = [protocol] if isinstance(protocol, str | Protocol) else protocol
    protocols = [protocol_class(one)() if isinstance(one, str) else one for one in names]
    for what, values in (("lengths", lengths), ("protocol", protocols)):
        if twice := [one for n, one in enumerate(values) if one in values[:n]]:
            raise ConfigError(f"{what} names {twice[0]} twice. Name each once.")
    if other := next((one for one in protocols if one.measures == "hidden tokens"), None):
        raise ConfigError(f"protocol={other.name} measures runs of train.objective=masked: see `posx evaluate`.")
    tokens = np.asarray(token_ids(stream, "[n + 1]", name="stream"))
    sizes = None if token_bytes is None else _sizes(token_bytes, separators, len(tokens))
    separators = None if separators is None else _separators(separators, tokens, sizes)
    check_first_windows(log_probs, tokens, lengths, batch_tokens)
    model = Measured(log_probs, tokens, sizes, separators, with_ends(documents, tokens, separators), batch_tokens)
    rows = []
    for value in protocols:
        for row in value.measure(model, lengths):
            rows.append(row)
            on_row(row)
    return rows


def _sizes(token_bytes: Any, separators: Sequence[int] | None, size: int) -> np.ndarray:
    """Return the bytes of every token, [n + 1]. Raises ConfigError for anything else."""
    sizes = host(token_bytes)
    if sizes.shape != (size,) or not np.issubdtype(sizes.dtype, np.integer) or sizes.min() < 0:
        raise ConfigError(
            f"token_bytes has shape {sizes.shape} and type {sizes.dtype}, but the stream has {size} tokens. "
            "Give the bytes of text of each token of the stream, whole numbers [n + 1], such as table[stream]."
        )
    if separators is None:
        raise ConfigError(
            "token_bytes needs separators. Name the ids that are no text, such as separators=[eos], or "
            "separators=[] if the stream has none."
        )
    return sizes


def _separators(given: Any, tokens: np.ndarray, sizes: np.ndarray | None) -> Any:
    """Return the ids of separators [n], with a notice of absent ones. Raises ConfigError if they have bytes."""
    ids = host(given)
    ids = token_ids(ids, "[n]", name="separators") if ids.size else ids
    if sizes is not None and (sizes[1:][np.isin(tokens[1:], ids)] > 0).any():
        raise ConfigError(f"separators={ids.tolist()} have bytes of text in token_bytes. Set these to 0.")
    if missing := np.setdiff1d(ids, tokens).tolist():
        say(
            f"notice: separators={missing} are not in the stream, so bits per byte count its other tokens as "
            "text. Name the ids between its documents, or pass separators=[]."
        )
    return ids
