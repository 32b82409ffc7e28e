"""Check that a user's function gives log-probabilities of the next token, by changing the ends of a window.

Entry i of a window must be of token i + 1, and depend on tokens 0 .. i + 1 alone. A model may ignore its tokens, as a
uniform one does, and its arithmetic need not be repeatable. Distributions that depend on the token before the last one,
and never on the last one, are taken for distributions of the wrong token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from posx.errors import ConfigError, UndefinedLength
from posx.evaluation.ids import host, token_ids
from posx.evaluation.scoring import ROUNDING, SUM_ROUNDING, LogProbs, call_log_probs, out_of_memory, refuse_logits

#: Windows with another last token, and with another end, if a call takes as many rows.
MOST_CHANGES = 4
#: Ends that are tried before a function is called not shifted.
MORE_CHANGES = 32
#: Repeated calls, and rows of each, that tell a real dependence from chance.
REPEATS, ROWS = 4, 8
#: Calls in which all ids of the windows may be tried as the target of one place.
MOST_CALLS = 4
#: Changes of a log-probability x, in nats, that may be rounding, of bfloat16 too: ROUGH + ROUGH * |x|. Smaller than
#: QUIET are none.
ROUGH, QUIET = 0.02, 1e-6


@dataclasses.dataclass(frozen=True)
class _Change:
    """The change of a model's log-probabilities if all tokens from a position on are replaced.

    Attributes:
      position: the first replaced token.
      places: [p], the entries that were read.
      moved: [p] nats, 0 for a change that repeating the call makes too.
      excess: [p] nats, 0 also for a change that rounding may make.
    """

    position: int
    places: np.ndarray
    moved: np.ndarray
    excess: np.ndarray

    def entry_change(self, place: int) -> float:
        """Return the change of the entry at `place`, 0 if it was not read."""
        return float(self.moved[self.places == place].max(initial=0.0))


def check_log_probs(log_probs: LogProbs, tokens: Any, rough: float = ROUGH) -> None:
    """Raise ConfigError if a function cannot give log-probabilities of the next token; see `posx.evaluate`.

    Finds functions that see later tokens, other windows of the batch, or the token that they predict. Finds those whose
    entry i is of token i (not shifted). Finds logarithms to base 2, if `tokens` hold at most 4 b different ids, which
    have nearly all of the probability. Calls `log_probs` with the windows, and with copies of the first one that end
    otherwise, in the shape of `tokens`.

    Args:
      log_probs: any model as a function, as `posx.evaluate` takes it.
      tokens: windows [b, t], or one [t]. A b of 10 or more takes two calls, and up to 4 more for logarithms.
      rough: changes of a log-probability x up to rough + rough * |x| nats count as rounding.

    Raises:
      ConfigError: with the fault.
      UndefinedLength: from `log_probs`, if the model is not defined for such windows.
    """
    tokens = np.atleast_2d(np.asarray(token_ids(tokens, "[b, t]", "[t]"))).astype(np.int32)
    window, known = tokens[0], np.unique(tokens)
    if len(window) < 2 or len(known) < 2:
        return
    last, others = len(window) - 1, len(known) - 1
    count = min(max(len(tokens) // 2 - 1, 1), MOST_CHANGES)
    inner = [(int(at), n) for n, at in enumerate(np.linspace(0, last, count + 2)[1:-1].round()) if 0 < at < last]
    of_last = [(last, n) for n in range(min(count, others))]
    values, changes = _try_changes(log_probs, tokens, known, [*of_last, *inner], rough)
    whole = values[0].ndim == 2
    if len(tokens) > 1:
        _check_rows(log_probs, tokens, changes[0].places, values[1], rough)
    _check_causal(changes, whole)
    if _is_shifted(changes, last, whole):
        tries = min(MOST_CHANGES if whole else MORE_CHANGES, (last - 1) * others)
        more = [(1 + n % (last - 1), n // (last - 1)) for n in range(tries)]
        if _is_shifted(_try_changes(log_probs, tokens, known, more, rough)[1], last, whole):
            raise ConfigError(
                "log_probs is not shifted: its entries (b, i) are of tokens[b, i], not of the next token, "
                "tokens[b, i + 1]. Leave out the first column of its result."
            )
    if not whole:
        some = np.array([values[n][last - 1] for n in (0, *range(2, 2 + len(of_last)))])
        refuse_logits(some)
        all_known = len(known) <= MOST_CALLS * len(tokens)
        some = _target_entries(log_probs, tokens, known, last) if all_known else some
        _check_sum(some)
        if all_known and last >= 2 * REPEATS:
            _check_nats(_target_entries(log_probs, tokens, known, last - n) if n else some for n in range(REPEATS))


def check_first_windows(log_probs: LogProbs, stream: np.ndarray, lengths: Sequence[int], batch_tokens: int) -> None:
    """Check `log_probs` on the first windows of `stream`, of the shortest length that it is defined for."""
    for length in sorted(lengths):
        rows = max(1, batch_tokens // length)
        while rows and length < len(stream):
            places = np.minimum(length * np.arange(rows)[:, None] + np.arange(length + 1), len(stream) - 1)
            try:
                return check_log_probs(log_probs, stream[places])
            except UndefinedLength:
                break
            except Exception as error:
                if not out_of_memory(error):
                    raise
                rows //= 2


def _try_changes(
    log_probs: LogProbs, tokens: np.ndarray, known: np.ndarray, ends: Sequence[tuple[int, int]], rough: float
) -> tuple[list[np.ndarray], list[_Change]]:
    """Replace each end of the first window, given as (position, n), by the n-th other tokens of `known`.

    Returns the entries [p] or [p, v] of the window itself, twice, then of each changed window. The second result is the
    changes. Distributions are large, so only those around the changed positions are read.
    """
    batch, last = len(tokens), tokens.shape[1] - 1
    rows, positions = [tokens[0], tokens[0]], np.array([position for position, _ in ends], int)
    for position, nth in ends:
        other = known[(np.searchsorted(known, tokens[0, position:]) + 1 + nth % (len(known) - 1)) % len(known)]
        rows.append(np.concatenate([tokens[0, :position], other]))
    places, values = np.arange(last), list[np.ndarray]()
    filled = np.stack([*rows, *[rows[0]] * (-len(rows) % batch)])
    for part in np.split(filled, len(filled) // batch):
        result = call_log_probs(log_probs, part)
        if len(result.shape) == 3:
            around = [np.zeros(1, int), positions // 2, positions - 1, positions, positions + 1]
            places = np.unique(np.clip(np.concatenate(around), 0, last - 1))
        values += [_read(result, row, places) for row in range(min(batch, len(rows) - len(values)))]
    noise = float(_distance(values[0], values[1]).max())
    pairs = zip(positions, values[2:], strict=True)
    return values, [_change(int(position), places, values[0], after, noise, rough) for position, after in pairs]


def _read(result: Any, row: int, places: np.ndarray) -> np.ndarray:
    return host(result[row, places]).astype(np.float32)


def _change(
    position: int, places: np.ndarray, before: np.ndarray, after: np.ndarray, noise: float, rough: float
) -> _Change:
    """Compare the entries of a window before and after a change. Repeating a call moves them by `noise`."""
    moved = _distance(before, after)
    most = rough + rough * np.abs(np.where(np.isfinite(before), before, 0.0)) + 4 * noise
    per_place = [
        np.where(moved > least, moved, 0.0).reshape(len(places), -1).max(axis=1) for least in (QUIET + noise, most)
    ]
    return _Change(position, places, *per_place)


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b|, 0 unless both are finite."""
    both = np.isfinite(a) & np.isfinite(b)
    return np.abs(np.where(both, a, 0.0) - np.where(both, b, 0.0))


def _check_causal(changes: Sequence[_Change], whole: bool) -> None:
    for change in changes:
        early = change.places < (change.position if whole else change.position - 1)
        if (change.excess[early] > 0).any():
            place = int(change.places[early][change.excess[early].argmax()])
            raise ConfigError(
                f"log_probs sees later tokens. Changing tokens from position {change.position} on changes entry "
                f"{place} by {change.excess[early].max():.3g} nats. Entry (b, i) must be the log-probability of "
                "tokens[b, i + 1] given tokens[b, : i + 1] alone. Use a causal mask."
            )


def _is_shifted(changes: Sequence[_Change], last: int, whole: bool) -> bool:
    """Return whether entry i is the log-probability of token i instead of token i + 1.

    Single entries [p] are of token i if replacing token i + 1 never changes entry i, and replacing token i does. Whole
    distributions [p, v] are of token i if replacing token i never changes distribution i, and replacing token i - 1
    does.
    """
    inner = [change for change in changes if change.position < last]
    if whole:
        needed, others = (
            [one.entry_change(one.position) for one in inner],
            [one.entry_change(one.position + 1) for one in inner],
        )
    else:
        needed, others = (
            [one.entry_change(one.position - 1) for one in changes],
            [one.entry_change(one.position) for one in inner],
        )
    return not any(needed) and any(others)


def _check_rows(log_probs: LogProbs, tokens: np.ndarray, places: np.ndarray, before: np.ndarray, rough: float) -> None:
    """Refuse entries of the first window that change when the other rows are not copies of it, but other windows."""
    noise, entries = 0.0, list[np.ndarray]()
    for _ in range(1 + REPEATS):
        result = call_log_probs(log_probs, np.roll(tokens, 1, axis=0))
        entries.append(np.stack([_read(result, n, places) for n in range(min(len(tokens), ROWS))]))
        noise = max(noise, float(_distance(entries[0], entries[-1]).max()))
        most = _change(0, places, before, entries[0][1], noise, rough).excess.max()
        if not most:
            return
    raise ConfigError(
        f"log_probs sees other rows of the batch: their tokens change entries of a row by {most:.3g} nats. "
        "Entry (b, i) must depend on tokens[b] alone. batch_tokens=1 evaluates one window at a time."
    )


def _target_entries(log_probs: LogProbs, tokens: np.ndarray, ids: np.ndarray, position: int) -> np.ndarray:
    """Return the entries [n] of `ids` [n] as the token at `position` of the first window."""
    rows = np.repeat(tokens[:1], -(-len(ids) // len(tokens)) * len(tokens), axis=0)
    rows[: len(ids), position] = ids
    entries = [
        host(call_log_probs(log_probs, some)[:, position - 1]) for some in np.split(rows, len(rows) // len(tokens))
    ]
    return np.concatenate(entries)[: len(ids)].astype(np.float64)


def _check_sum(of_targets: np.ndarray) -> None:
    """Refuse log-probabilities of different tokens at one place whose probabilities sum to more than 1."""
    total = np.exp(of_targets[np.isfinite(of_targets)]).sum()
    if total > 1 + SUM_ROUNDING:
        raise ConfigError(
            f"log_probs gave no distribution: the probabilities of {len(of_targets)} different tokens in one "
            f"place sum to {total:.3g}. It sees the token that it predicts, or is not normalised. Entry (b, i) "
            "must be the log-probability of tokens[b, i + 1] given tokens[b, : i + 1] alone."
        )


def _check_nats(places: Iterable[np.ndarray]) -> None:
    """Refuse logarithms to base 2. `places` holds the values x of all known tokens at several places.

    They are to base 2 if 2**x sums to 1 at every place, and e**x to less. Sums of e**x that are equal at all places are
    no evidence.
    """
    sums = []
    for x in places:
        sums.append(np.exp(x).sum())
        if not (sums[-1] < 1 - SUM_ROUNDING and abs(np.exp2(x).sum() - 1) < SUM_ROUNDING / 2):
            return
    if np.ptp(sums) > ROUNDING:
        raise ConfigError(
            f"log_probs gave bits: over the {len(x)} known tokens in one place, 2**x sums to 1, e**x to {sums[0]:.3g}. "
            "Give nats: multiply them by log(2)."
        )
