"""Differences between runs of several seeds, with 95 % intervals and p-values over text and over seeds.

A difference is of mean losses on the same targets, so exp of it is a ratio of perplexities (of geometric means over
seeds). Two sources of chance are kept apart: another text of the kind, and other seeds. An interval over both is for a
new training on new text. It holds for one comparison: a family of them needs a correction, see `holm`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posx.evaluation.statistics import COSINES, T_QUANTILE, check_pair, few_places, half_width, no_interval, row_blocks

#: Intervals miss, and verdicts are wrong, with this probability at most.
SIGNIFICANCE = 0.05
#: Differences of mean losses up to this, in nats a token, are rounding: of float32 and of the stored sums.
ROUNDING = 1e-6
#: Smaller p-values are 0: scipy's quantiles are NaN from 1e-200 on.
LEAST_P = 1e-50

_Row = Mapping[str, Any]
#: The loss of a run in nats a token, and its sums over blocks [n] in nats.
_Loss = tuple[float, np.ndarray]


class Difference(NamedTuple):
    """The mean loss of some runs less that of others, in nats a token, and its standard errors.

    text_error: over text, None if the text is too short, as `no_interval` then says. seeds_error: over seeds, with
    `freedom` degrees of freedom; None if there is a single run on a side.
    """

    mean: float
    text_error: float | None
    seeds_error: float | None
    freedom: float
    no_interval: str

    @property
    def over_text(self) -> float | None:
        """Half the 95 % interval over text, for these trained runs; None if the text is too short."""
        return None if self.text_error is None else self.text_error * student(SIGNIFICANCE, COSINES)

    @property
    def over_seeds(self) -> float | None:
        """Half the 95 % interval over seeds, for this text; None if there is a single run on a side."""
        return None if self.seeds_error is None else self.seeds_error * student(SIGNIFICANCE, self.freedom)

    @property
    def half(self) -> float:
        """Half the 95 % interval over text and, if there are several runs, over seeds; infinite if there is none."""
        return self.half_at(SIGNIFICANCE)

    def half_at(self, level: float) -> float:
        """Return half the interval that misses with probability `level`: the squares of both parts add.

        Source: Zou and Donner 2008 (Statistics in Medicine 27), intervals of sums of independent estimates.
        """
        if self.text_error is None:
            return math.inf
        text = self.text_error * student(level, COSINES)
        seeds = self.seeds_error * student(level, self.freedom) if self.seeds_error else 0.0
        return max(math.hypot(text, seeds), ROUNDING if self.mean else 0.0)

    @property
    def p(self) -> float | None:
        """The level at which the interval just reaches 0, 1 if the losses are equal; None if there is no interval."""
        if self.text_error is None:
            return None
        if abs(self.mean) <= ROUNDING:
            return 1.0
        if not self.seeds_error:
            from scipy.special import stdtr

            return 2 * float(stdtr(COSINES, -abs(self.mean) / self.text_error)) if self.text_error else 0.0
        from scipy.optimize import brentq

        if self.half_at(LEAST_P) < abs(self.mean):
            return 0.0

        def room(log_p: float) -> float:
            return self.half_at(math.exp(log_p)) - abs(self.mean)

        return math.exp(brentq(room, math.log(LEAST_P), 0.0, xtol=1e-10))


def loss_difference(ours: Sequence[_Row], theirs: Sequence[_Row], paired: bool = False) -> Difference:
    """Return the mean loss of `ours` less that of `theirs`, rows of several seeds of two runs on the same targets.

    The interval over text is of the paired losses of blocks. That over seeds is Student's t of the differences by seed
    if `paired`, else Welch's (1947, Biometrika 34).

    Args:
      ours, theirs: a row of each seed.
      paired: the rows are of the same seeds, in the same order.

    Raises:
      ConfigError: for rows that `check_pair` refuses.
    """
    check_pair(*ours, *theirs)
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
      ConfigError: for rows that `check_pair` refuses.
    """
    every = list(itertools.chain(*ours, *theirs))
    check_pair(*every)
    our_rises, their_rises = ([_rise(*map(_losses, rows)) for rows in side] for side in (ours, theirs))
    return _difference(our_rises, their_rises, every, paired)


def _rise(far: _Loss, near: _Loss) -> _Loss:
    return far[0] - near[0], far[1] - near[1]


def _losses(row: _Row) -> _Loss:
    return row["nll"], row_blocks(row)[0]


def _difference(ours: Sequence[_Loss], theirs: Sequence[_Loss], rows: Sequence[_Row], paired: bool) -> Difference:
    """Return the difference of two sides, a loss for each seed. rows: all of theirs, on the same targets."""
    counts = row_blocks(rows[0])[1]
    seeds: list[list[float]] = [[nll for nll, _ in side] for side in (ours, theirs)]
    blocks = [np.mean([sums for _, sums in side], axis=0) for side in (ours, theirs)]
    mean, gap = statistics.fmean(seeds[0]) - statistics.fmean(seeds[1]), blocks[0] - blocks[1]
    if paired:
        seeds = [[a - b for a, b in zip(*seeds, strict=True)]]
    few = [few_places(row) for row in rows]  # one row may tell that these targets are the whole text
    reason = (few[0] if all(few) else "") or no_interval(gap, counts)
    half = None if reason else half_width(gap, counts)
    over_text = None if half is None else half / T_QUANTILE
    return Difference(mean, over_text, *_seeds_error(seeds), reason)


def half_width_over_seeds(*groups: Sequence[float]) -> float | None:
    """Return half the 95 % interval of a mean over seeds, or Welch's of a difference; None for a single seed."""
    error, freedom = _seeds_error(groups)
    return None if error is None else error * student(SIGNIFICANCE, freedom)


def _seeds_error(groups: Sequence[Sequence[float]]) -> tuple[float | None, float]:
    """Return the standard error of a mean, or of Welch's difference, and its degrees of freedom; None for a single."""
    if min(map(len, groups)) < 2:
        return None, math.nan
    parts = [statistics.variance(values) / len(values) for values in groups]
    if sum(parts) == 0:
        return 0.0, float(min(map(len, groups)) - 1)
    shares = [part / sum(parts) for part in parts]  # squares of small variances would underflow
    freedom = 1 / sum(share**2 / (len(values) - 1) for share, values in zip(shares, groups, strict=True))
    return math.sqrt(sum(parts)), freedom


def student(level: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t: it exceeds this in absolute value with probability `level`."""
    from scipy.special import stdtrit  # a fifth of a second

    return -float(stdtrit(freedom, level / 2))


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number: a family of true nulls has one below 0.05 with probability 0.05.

    Source: Holm 1979 (Scandinavian Journal of Statistics 6). It needs no independence.
    """
    order = sorted(range(len(chances)), key=chances.__getitem__)
    steps = [min(1.0, chances[n] * (len(chances) - rank)) for rank, n in enumerate(order)]
    adjusted = dict(zip(order, itertools.accumulate(steps, max), strict=True))
    return [adjusted[n] for n in range(len(chances))]
