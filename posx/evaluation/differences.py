"""Differences between runs of several seeds, with 95 % intervals, p-values and verdicts over text and over seeds.

A difference is of mean losses on the same targets, so exp of it is a ratio of perplexities (of geometric means over
seeds). On a task it is of the shares of wrong answers to the same items, which stand in place of losses and of text.
Two sources of chance are kept apart: another text of the kind, and other seeds. Over text alone it is a fact about
these checkpoints. Over both it is one about the method, for a new training on new text. An interval holds for one
comparison: a family of them needs a correction, see `judge`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posx.errors import ConfigError
from posx.evaluation.statistics import (
    BLOCK_ITEMS,
    COSINES,
    LEAST_BLOCKS,
    T_QUANTILE,
    check_pair,
    check_rises,
    few_places,
    half_width,
    is_of_answers,
    no_interval,
    perplexity,
    row_blocks,
)

#: Intervals miss, and verdicts are wrong, with this probability at most.
SIGNIFICANCE = 0.05
#: Differences of means up to this, in nats a token, are rounding: of float32 and of the stored sums.
ROUNDING = 1e-6
#: Smaller p-values are 0: scipy's quantiles are NaN from 1e-200 on.
LEAST_P = 1e-50
#: Fewer seeds than this, on either side, give no verdict on a method. Take a difference of three times the spread over
#: seeds: three seeds show it in half of all comparisons, and five in 92 % (experiments/intervals).
FEWEST_SEEDS = 5
#: The words of verdicts. With fewer seeds the word on a method is "too few seeds (3)".
BETTER, WORSE, NOT_SEPARATED, NO_INTERVAL = "better", "worse", "not separated", "no interval"

_Row = Mapping[str, Any]
#: The loss of a run in nats a token, and its sums over blocks [n] in nats. On a task: the share of wrong answers, and
#: their number in each block.
_Loss = tuple[float, np.ndarray]


class StandardError(NamedTuple):
    """The standard error of a mean, in nats a token, and the degrees of freedom of its estimate."""

    size: float
    freedom: int


class Difference(NamedTuple):
    """The mean loss of some runs less that of others, in nats a token, and its independent standard errors.

    Attributes:
      mean: nats a token.
      text: the error over text, None if the text is too short.
      seeds: the errors over seeds: one for all pairs, or one for each side. None are there if a side has a single run.
      no_interval: why `text` is None, "" if it is not.
      of_answers: whether it is of shares of wrong answers, in place of nats a token.
    """

    mean: float
    text: StandardError | None
    seeds: tuple[StandardError, ...]
    no_interval: str
    of_answers: bool = False

    def effect(self, half: float = 0.0) -> tuple[float, float]:
        """Return what is shown of it, as ends that lie `half` to both sides of the mean.

        It is the ratio of perplexities, exp of the difference, or the difference of the shares of right answers.
        """
        low, high = self.mean - half, self.mean + half
        return (max(-high, -1.0), min(-low, 1.0)) if self.of_answers else (perplexity(low), perplexity(high))

    @property
    def num_seeds(self) -> int:
        """The number of seeds of the side that has fewer; 1 if a side has a single run."""
        return 1 + min((error.freedom for error in self.seeds), default=0)

    @property
    def of_checkpoints(self) -> Difference:
        """The difference of these trained weights: its chance is that of the text alone."""
        return self._replace(seeds=())

    @property
    def over_text(self) -> float | None:
        """Half the 95 % interval over text, for these trained runs; None if the text is too short."""
        return None if self.text is None else _half_width(SIGNIFICANCE, self.text)

    @property
    def over_seeds(self) -> float | None:
        """Half the 95 % interval over seeds, for this text; None if there is a single run on a side."""
        return _half_width(SIGNIFICANCE, *self.seeds) if self.seeds else None

    @property
    def half(self) -> float:
        """Half the 95 % interval over text and, if there are several runs, over seeds; infinite if there is none."""
        return self.half_at(SIGNIFICANCE)

    def half_at(self, level: float) -> float:
        """Return half the interval that misses with probability `level` at most."""
        if self.text is None:
            return math.inf
        return max(_half_width(level, self.text, *self.seeds), ROUNDING if self.mean else 0.0)

    @property
    def is_equal(self) -> bool:
        """Whether all losses are equal up to rounding, as those of one function are. Equal means do not suffice."""
        return max(abs(self.mean), self.half / 10) <= ROUNDING

    @property
    def p(self) -> float | None:
        """The level at which the interval just reaches 0, 1 if the losses are equal; None if there is no interval."""
        if self.text is None:
            return None
        if abs(self.mean) <= ROUNDING:
            return 1.0
        if self.half_at(LEAST_P) < abs(self.mean):
            return 0.0
        from scipy.optimize import brentq

        def room(log_p: float) -> float:
            return self.half_at(math.exp(log_p)) - abs(self.mean)

        return math.exp(brentq(room, math.log(LEAST_P), 0.0, xtol=1e-10))


class Verdict(NamedTuple):
    """The answer to one question on a difference.

    Attributes:
      low, high: the ends of the 95 % interval of `Difference.effect`. None without one.
      p: of this comparison alone, None without an interval.
      adjusted_p: of it among the `family`, None if it is not of the family.
      family: the number of comparisons of the call that answer this question. Equal losses do not.
      word: "better" or "worse" if `adjusted_p` is below 0.05, else "not separated", "no interval", "too few seeds (3)".
    """

    low: float | None
    high: float | None
    p: float | None
    adjusted_p: float | None
    family: int
    word: str


def loss_difference(ours: Sequence[_Row], theirs: Sequence[_Row], paired: bool = False) -> Difference:
    """Return the mean loss of `ours` less that of `theirs`, rows of several seeds of two runs on the same targets.

    For answers to a task it is the share of wrong ones, of the same items.
    The interval over text is of the paired losses of blocks. That over seeds is Student's t of the differences by seed
    if `paired`. Otherwise each side has its own t, and the squares of their half widths add.

    Args:
      ours, theirs: a row of each seed.
      paired: the rows are of the same seeds, in the same order.

    Raises:
      ConfigError: for rows that `check_pair` refuses, no rows, and pairs of other seeds.
    """
    check_pair(*ours, *theirs)
    _check_seeds(ours, theirs, paired)
    return _difference([_losses(row) for row in ours], [_losses(row) for row in theirs], [*ours, *theirs], paired)


def rise_difference(
    ours: Sequence[Sequence[_Row]], theirs: Sequence[Sequence[_Row]], paired: bool = False
) -> Difference:
    """Return ln R_k of `ours` less that of `theirs`, means over seeds, R_k = PPL(kL) / PPL(L).

    The intervals are those of `loss_difference`, for the rise from L to kL of each run and block in place of the loss.

    Args:
      ours, theirs: the two rows of each seed, at kL and at L tokens. All rows must have scored the same targets.
      paired: the rows are of the same seeds, in the same order.

    Raises:
      ConfigError: for rows that `check_pair` refuses, no rows, pairs of other seeds, and windows of other k.
    """
    every = list(itertools.chain(*ours, *theirs))
    check_pair(*every)
    check_rises(*ours, *theirs)
    _check_seeds([far for far, _ in ours], [far for far, _ in theirs], paired)
    our_rises, their_rises = ([_rise(*map(_losses, rows)) for rows in side] for side in (ours, theirs))
    return _difference(our_rises, their_rises, every, paired)


def _check_seeds(ours: Sequence[_Row], theirs: Sequence[_Row], paired: bool) -> None:
    """Raise ConfigError for a side without rows, and for pairs that are not of the same seeds."""
    if not ours or not theirs:
        raise ConfigError("a difference needs a row of each side.")
    seeds = [[row.get("seed") for row in side] for side in (ours, theirs)]
    pairs = list(itertools.zip_longest(*seeds))
    if paired and (len(ours) != len(theirs) or any(a != b for a, b in pairs if a is not None and b is not None)):
        raise ConfigError(
            f"paired=True: the seeds are {seeds[0]} and {seeds[1]}. Give the rows of the seeds that both have, in one "
            "order, or leave paired out."
        )


def _rise(far: _Loss, near: _Loss) -> _Loss:
    return far[0] - near[0], far[1] - near[1]


def _losses(row: _Row) -> _Loss:
    right = "accuracy" if row.get("block_hidden") else "exact_match"
    return (1 - row[right] if is_of_answers(row) else row["nll"]), row_blocks(row)[0]


def _difference(ours: Sequence[_Loss], theirs: Sequence[_Loss], rows: Sequence[_Row], paired: bool) -> Difference:
    """Return the difference of two sides, a loss for each seed. rows: all of theirs, on the same targets."""
    counts = row_blocks(rows[0])[1]
    seeds: list[list[float]] = [[nll for nll, _ in side] for side in (ours, theirs)]
    blocks = [np.mean([sums for _, sums in side], axis=0) for side in (ours, theirs)]
    mean, gap = statistics.fmean(seeds[0]) - statistics.fmean(seeds[1]), blocks[0] - blocks[1]
    if paired:
        seeds = [[a - b for a, b in zip(*seeds, strict=True)]]
    errors = errors_over_seeds(*seeds)
    if is_of_answers(rows[0]):
        least, items = LEAST_BLOCKS * BLOCK_ITEMS, rows[0]["num_items"]
        reason = f"too few items ({items} of at least {least})" if items < least else ""
        error = None if reason else error_over_items(gap, int(counts.sum()), items)
        if error and not gap.any() and _are_alike(rows[: len(ours)], rows[len(ours) :]):
            error = error._replace(size=0.0)
        return Difference(mean, error, errors, reason, of_answers=True)
    reason = few_places(*rows) or no_interval(gap, counts)
    return Difference(mean, None if reason else error_over_text(gap, counts), errors, reason)


def _are_alike(ours: Sequence[_Row], theirs: Sequence[_Row]) -> bool:
    """Tell whether rows of two sides have equal losses, as those of one function have. Equal answers do not suffice."""
    gaps = [a["nll"] - b["nll"] if "nll" in a and "nll" in b else math.inf for a, b in zip(ours, theirs, strict=False)]
    return len(ours) == len(theirs) and max(map(abs, gaps)) <= ROUNDING


def error_over_text(sums: np.ndarray, counts: np.ndarray) -> StandardError | None:
    """Return the standard error of a mean over text, of sums [n] over blocks of `counts` targets; None if too short."""
    half = half_width(sums, counts)
    return None if half is None else StandardError(half / T_QUANTILE, COSINES)


def error_over_items(wrong: np.ndarray, answers: int, items: int) -> StandardError:
    """Return the standard error of a difference of shares over items, which are independent of each other.

    One item on which the two disagree is added, half of it for either. So a few such items give no verdict.

    Source: Agresti and Min 2005 (Statistics in Medicine 24), section 3: 1/2 added to each count of pairs.

    Args:
      wrong: [n], wrong answers of one less those of the other in each block.
      answers: all of them. An item is one, or has one for each of its hidden tokens.
      items: their number.
    """
    squares = float(np.var(wrong, ddof=1)) * len(wrong) + (answers / items) ** 2
    return StandardError(math.sqrt(squares) / answers, len(wrong) - 1)


def errors_over_seeds(*groups: Sequence[float]) -> tuple[StandardError, ...]:
    """Return the standard error of the mean of each group of seeds; none if a group has a single seed."""
    if min(map(len, groups)) < 2:
        return ()
    return tuple(StandardError(statistics.stdev(one) / math.sqrt(len(one)), len(one) - 1) for one in groups)


def _half_width(level: float, *errors: StandardError) -> float:
    """Return half the interval of a sum of independent estimates, which misses with probability `level` at most.

    The squares of the half widths of all estimates add, each with Student's t of its own freedom. For normal estimates
    no ratio of the errors makes it miss more often. Welch's t does, if a few seeds are compared with more.

    Source: Banerjee 1960 (Sankhya 22); Zou and Donner 2008 (Statistics in Medicine 27).
    """
    return math.hypot(*(error.size * student(level, error.freedom) for error in errors))


def student(level: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t: it exceeds this in absolute value with probability `level`."""
    from scipy.special import stdtrit  # a fifth of a second

    return -float(stdtrit(freedom, level / 2))


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number: a family of true nulls has one below 0.05 with probability 0.05.

    Source: Holm 1979 (Scandinavian Journal of Statistics 6). It needs no independence.

    Raises ConfigError for a p-value that is None, which a `Difference` without an interval has, or not from 0 to 1.
    """
    if wrong := [p for p in chances if p is None or not 0 <= p <= 1]:
        raise ConfigError(f"{wrong[0]} is no p-value. Leave comparisons without an interval out of the family.")
    order = sorted(range(len(chances)), key=chances.__getitem__)
    steps = [min(1.0, chances[n] * (len(chances) - rank)) for rank, n in enumerate(order)]
    adjusted = dict(zip(order, itertools.accumulate(steps, max), strict=True))
    return [adjusted[n] for n in range(len(chances))]


def judge(differences: Sequence[Difference]) -> list[tuple[Verdict, Verdict]]:
    """Return two verdicts on each difference: on these checkpoints, and on the method.

    The first answers whether these trained weights differ on other text of this kind, by the interval over text. The
    second answers whether new seeds would differ on other text, by that over text and seeds. Below FEWEST_SEEDS on a
    side its word is "too few seeds", whatever its p. Each question has a family of its own for Holm's correction: the
    comparisons that can answer it. If all losses of two sides are equal, there is no question: they are not separated,
    and do not count in the family.
    """
    methods = [one if one.seeds else one._replace(text=None) for one in differences]
    checkpoints = [one.of_checkpoints for one in differences]
    return list(zip(_verdicts(checkpoints, 1), _verdicts(methods, FEWEST_SEEDS), strict=True))


def _verdicts(differences: Sequence[Difference], fewest: int) -> list[Verdict]:
    """Return the verdicts of one question, which differences of fewer seeds cannot answer."""
    chances = [one.p for one in differences]
    asked = [one.num_seeds >= fewest and not one.is_equal for one in differences]
    able = {n: p for n, p in enumerate(chances) if p is not None and asked[n]}
    adjusted = dict(zip(able, holm(list(able.values())), strict=True))
    made = []
    for n, one in enumerate(differences):
        low, high = one.effect(one.half) if math.isfinite(one.half) else (None, None)
        if one.num_seeds < fewest:
            word = f"too few seeds ({one.num_seeds})"
        elif chances[n] is None:
            word = NO_INTERVAL
        else:
            word = (BETTER if one.mean < 0 else WORSE) if adjusted.get(n, 1.0) < SIGNIFICANCE else NOT_SEPARATED
        made.append(Verdict(low, high, chances[n], adjusted.get(n), len(able), word))
    return made
