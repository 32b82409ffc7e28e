"""95 % intervals over text, from stored sums over short blocks of it.

The losses of neighbouring blocks are alike, over distances that differ from text to text. So blocks are not taken as
independent. The variance of a mean is read off the slow part of the series that is judged, however long its
correlations are. For a ratio, that is the series of differences. The interval is None if the text is too short to tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posx.errors import ConfigError

#: Targets in a block of the stored sums, the same everywhere, so that any two rows of the same targets can be paired.
BLOCK_LEN = 256
#: Items of a task in a block of the stored counts of wrong answers.
BLOCK_ITEMS = 16
#: The number of slowest cosines of the series, whose mean square is its long-run variance. It is small because
#: correlations may be long.
COSINES = 8
#: The 97.5 % point of Student's t with as many degrees of freedom as there are cosines.
T_QUANTILE = 2.306004
#: Less text than this, in blocks and in correlation lengths, gives no interval.
LEAST_BLOCKS, LEAST_LENGTHS = 32, 16
#: Targets that were chosen from a text, at fewer places and in fewer documents than this, give no interval. Let
#: documents differ by half the deviation of a block. Intervals of 8 places of 32 blocks then cover the true value in
#: 92 % of simulated texts. For 4 places of 64 blocks it is 75 %, and for one place 42 %.
LEAST_PLACES = 8
#: Perplexities above e^700 overflow a float64.
LARGEST_NLL = 700.0

_Row = Mapping[str, Any]


def half_width(sums: Any, counts: Any) -> float | None:
    """Return half the width of the 95 % interval of sum(sums) / sum(counts), None if the text is too short for one.

    sums, counts: [n], per block, in the order of the text. There may be gaps between stretches of text. The part of a
    block that repeats the block before it is taken out first and put back at the end. So long correlations bias
    nothing.

    Source: Lazarus, Lewis, Stock and Watson 2018, J. Business & Economic Statistics 36, for cosines with Student's t.
    Andrews and Monahan 1992, Econometrica 60, for prewhitening. Marriott and Pope 1954, Biometrika 41, for the bias of
    the lag-1 correlation. experiments/intervals measures how often the interval covers the true value.
    """
    counts = np.asarray(counts, np.float64)
    if no_interval(sums, counts):
        return None
    residuals, lag1 = _residuals(sums, counts)
    n, lag1 = len(residuals), max(lag1, 0.0)
    innovations = (residuals[1:] - lag1 * residuals[:-1]) / (1 - lag1)
    phases = np.pi * (np.arange(n - 1) + 0.5) / (n - 1)
    waves = np.sqrt(2 / (n - 1)) * np.cos(np.arange(1, COSINES + 1)[:, None] * phases)
    long_run_variance = float(np.mean((waves @ innovations) ** 2))
    return T_QUANTILE * math.sqrt(n * long_run_variance) / float(counts.sum())


def no_interval(sums: Any, counts: Any) -> str:
    """Return why `half_width` gives no interval, "" if it gives one."""
    residuals, lag1 = _residuals(sums, counts)
    n = len(residuals)
    if n < LEAST_BLOCKS:
        return f"too few blocks of text ({n} of at least {LEAST_BLOCKS})"
    if n * (1 - lag1) >= LEAST_LENGTHS:
        return ""
    least = f"{n} of at least {math.ceil(LEAST_LENGTHS / (1 - lag1)):,}" if lag1 < 0.999 else f"all {n}"
    return f"too few blocks of text ({least}, as neighbouring blocks are alike)"


def few_places(*rows: _Row) -> str:
    """Return that the targets of rows lie at too few places of their text for an interval, "" if they do not.

    The whole text is never too few places, as no other targets could be chosen. All rows have the same targets, so one
    row is enough to know that they are the whole text.
    """
    reasons = list(map(_few_places, rows))
    return reasons[0] if all(reasons) else ""


def _few_places(row: _Row) -> str:
    stretches, documents = row.get("num_stretches"), row.get("num_documents")
    if not stretches or not documents or row.get("num_targets", 0) < (row.get("max_targets") or math.inf):
        return ""
    if max(stretches, documents) >= LEAST_PLACES:
        return ""
    places = f"{stretches} stretch{'es' * (stretches > 1)} of {documents} document{'s' * (documents > 1)}"
    return f"too few places of the text ({places}, of at least {LEAST_PLACES})"


def _residuals(sums: Any, counts: Any) -> tuple[np.ndarray, float]:
    """Return the sums less their mean [n], and the correlation of neighbours without its bias; 0 if all are equal."""
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    residuals = sums - sums.sum() / counts.sum() * counts
    power = float(residuals @ residuals)
    if power == 0:
        return residuals, 0.0
    lag1 = float(residuals[1:] @ residuals[:-1]) / power
    return residuals, lag1 + (1 + 4 * lag1) / len(residuals)


def interval(sums: Any, counts: Any) -> tuple[float, float] | None:
    """Return the 95 % interval of sum(sums) / sum(counts) over text, or None: see `half_width`."""
    half = half_width(sums, counts)
    mean = float(np.sum(sums) / np.sum(counts))
    return None if half is None else (mean - half, mean + half)


def horizon(ratios: Mapping[float, float]) -> float:
    """Return the last length, in training lengths, up to which perplexity is at most 1.01 times that at L.

    ratios: R_k = PPL(kL) / PPL(L) of one run by k. NaN, for a length that failed, is not within. A run that holds to
    the end gets the longest length measured, and may hold longer.
    """
    within = 1.0
    for k in sorted(k for k in ratios if k > 1):
        if not ratios[k] <= 1.01:
            break
        within = k
    return within


def perplexity(nll: float) -> float:
    """Return exp(nll), infinite if that overflows."""
    return math.exp(nll) if nll < LARGEST_NLL else math.inf


def stored_perplexity(nll: float) -> float | str:
    """Return exp(nll) as rows hold it, "inf" if it overflows."""
    ppl = perplexity(nll)
    return ppl if math.isfinite(ppl) else "inf"


def block_sums(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sums and counts of `values` [n] over consecutive blocks. The last block may be shorter."""
    starts = np.arange(0, len(values), BLOCK_LEN)
    return np.add.reduceat(values.astype(np.float64), starts), np.minimum(BLOCK_LEN, len(values) - starts)


def is_of_answers(row: _Row) -> bool:
    """Return whether a row is judged by its wrong answers to a task. Any other is judged by its losses on a text."""
    return row.get("block_wrong") is not None


def row_blocks(row: _Row) -> tuple[np.ndarray, np.ndarray]:
    """Return sums and counts of a row's blocks, in the order of the text or the items.

    They are losses in nats and targets, or wrong answers and items, or wrong hidden tokens and hidden tokens.
    """
    if row.get("block_hidden"):
        return np.asarray(row["block_wrong"], np.float64), np.asarray(row["block_hidden"])
    wrong = is_of_answers(row)
    name, block, total = (
        ("wrong", BLOCK_ITEMS, row["num_items"]) if wrong else ("nll", row["block_len"], row["num_targets"])
    )
    sums = np.asarray(row[f"block_{name}"], np.float64)
    return sums, np.minimum(block, total - block * np.arange(len(sums)))


def mean_blocks(rows: Sequence[_Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums averaged over rows of the same targets, such as those of several seeds, and the counts."""
    check_pair(*rows)
    blocks = [row_blocks(row) for row in rows]
    return np.mean([sums for sums, _ in blocks], axis=0), blocks[0][1]


def targets_key(row: _Row) -> tuple[Any, ...]:
    """Return the targets that a row scored, their number, and the size of its blocks. Rows of one key can be paired."""
    unit = "hidden tokens" if row.get("block_hidden") else row.get("block_len")
    return row.get("targets"), row.get("num_items") or row.get("num_targets"), unit


def check_pair(*rows: _Row) -> None:
    """Raise ConfigError unless all rows have losses or answers, of the same targets, summed over the same blocks."""
    names = [f"{row.get('run_id', 'a row')} ({row.get('protocol')} at {row.get('eval_len')})" for row in rows]
    for name, row in zip(names, rows, strict=True):
        if not row.get("block_nll") and not is_of_answers(row):
            raise ConfigError(f"{name} has no losses to pair: its status is {row.get('status')}.")
        if targets_key(row) != targets_key(rows[0]):
            raise ConfigError(
                f"{names[0]} and {name} scored different targets. Evaluate both with the same settings, on the same "
                "text."
            )


def check_rises(*pairs: Sequence[_Row]) -> None:
    """Raise ConfigError unless each pair of rows, at kL and at L tokens, is of one run, and all have one k above 1."""
    for far, near in pairs:
        if far.get("hash") != near.get("hash"):
            names = " and ".join(str(row.get("run_id", row.get("hash"))) for row in (far, near))
            raise ConfigError(f"R_k needs two rows of one run, but these are of {names}.")
    windows = [(far["eval_len"], near["eval_len"]) for far, near in pairs if "eval_len" in far and "eval_len" in near]
    factors = {far / near for far, near in windows}
    if len(factors) > 1 or any(k <= 1 for k in factors):
        pairs_text = ", ".join(f"{far} and {near}" for far, near in dict.fromkeys(windows))
        raise ConfigError(f"R_k needs rows at kL and L tokens, in this order, with one k. These are at {pairs_text}.")
