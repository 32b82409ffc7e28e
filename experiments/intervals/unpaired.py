"""Measure how often verdicts on equal runs of unpaired seeds are wrong, by method, and the difference that is detected.

    python experiments/intervals/unpaired.py      # without an error over text: 10 seconds
    python experiments/intervals/unpaired.py 1    # with an error over text that equals the error over seeds

Losses over seeds are normal. The standard error over text has 8 degrees of freedom. A family is 30 differences that are
independent, the worst case. After Holm's correction it has a verdict if a p-value is below 0.05 / 30. Prints Markdown.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtrit

from posx.evaluation.differences import SIGNIFICANCE
from posx.evaluation.statistics import COSINES

SEEDS = ((2, 2), (2, 3), (2, 5), (3, 3), (3, 5), (5, 5))
#: The standard deviation over seeds of the first run, over that of the second.
SPREADS = {"1:1": 1.0, "3:1": 3.0, "1:3": 1 / 3, "10:1": 10.0}
FAMILY = 30
#: posx adds the squares of two half widths. The others give the standard error over all seeds one quantile.
METHODS = ("posx", "Welch", "Cochran and Cox", "smaller freedom")


def drawn(
    seeds: Sequence[int], spread: float, text: float, draws: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return differences of means over seeds whose true value is 0, and estimates of their variances.

    Args:
      seeds: the number of seeds of each run.
      spread: the standard deviation over seeds of the first run. That of the second is 1.
      text: the standard error over text, over that over seeds.
      draws: how many differences.
      rng: the source of chance.

    Returns:
      Differences [draws], and variances [3, draws]: over text, and over the seeds of each run.
    """
    over_seeds = spread**2 / seeds[0], 1 / seeds[1]
    true = np.array([text**2 * sum(over_seeds), *over_seeds])[:, None]
    freedom = np.array([COSINES, seeds[0] - 1, seeds[1] - 1])[:, None]
    found = math.sqrt(true.sum()) * rng.standard_normal(draws)
    return found, true * rng.chisquare(freedom, (3, draws)) / freedom


def half_widths(seeds: Sequence[int], variances: np.ndarray, level: float) -> dict[str, np.ndarray]:
    """Return half the intervals [draws] that miss with probability `level`, by method."""
    over_text, first, second = variances
    total, freedom = first + second, np.array(seeds) - 1
    t_first, t_second = -stdtrit(freedom, level / 2)
    welch = total**2 / (first**2 / freedom[0] + second**2 / freedom[1])
    squares = (
        first * t_first**2 + second * t_second**2,
        total * stdtrit(welch, level / 2) ** 2,
        (first * t_first + second * t_second) ** 2 / total,
        total * max(t_first, t_second) ** 2,
    )
    text = over_text * stdtrit(COSINES, level / 2) ** 2
    return {name: np.sqrt(text + one) for name, one in zip(METHODS, squares, strict=True)}


def wrong(text: float = 0.0, calls: int = 8000) -> Iterator[str]:
    """Yield the lines of the table of wrong verdicts: on single differences, and on families of 30."""
    yield "| seeds | spreads | " + " | ".join(f"{name} | of 30" for name in METHODS) + " |"
    yield "|---|---|" + "---:|" * 2 * len(METHODS)
    rng = np.random.default_rng(0)
    for seeds, spread in itertools.product(SEEDS, SPREADS):
        found, variances = drawn(seeds, SPREADS[spread], text, calls * FAMILY, rng)
        alone, many = (half_widths(seeds, variances, SIGNIFICANCE / count) for count in (1, FAMILY))
        cells = []
        for name in METHODS:
            missed = (np.abs(found) > many[name]).reshape(calls, FAMILY).any(axis=1)
            cells += [f"{(np.abs(found) > alone[name]).mean():.1%}", f"{missed.mean():.1%}"]
        yield f"| {seeds[0]}, {seeds[1]} | {spread} | " + " | ".join(cells) + " |"


def detected(text: float = 0.0, draws: int = 100000) -> Iterator[str]:
    """Yield the lines of the table of differences that have a verdict with probability 0.8, alone and as one of 30.

    Both runs have the same spread over seeds, which is the unit.
    """
    yield "| seeds | " + " | ".join(f"{name} | of 30" for name in METHODS) + " |"
    yield "|---|" + "---:|" * 2 * len(METHODS)
    for seeds in SEEDS:
        found, variances = drawn(seeds, 1.0, text, draws, np.random.default_rng(1))
        halves = [half_widths(seeds, variances, SIGNIFICANCE / count) for count in (1, FAMILY)]
        cells = (f"{_reached(found, half[name]):.3g}" for name in METHODS for half in halves)
        yield f"| {seeds[0]}, {seeds[1]} | " + " | ".join(cells) + " |"


def _reached(found: np.ndarray, half: np.ndarray) -> float:
    """Return the true difference that is detected with probability 0.8."""
    return brentq(lambda true: (np.abs(true + found) > half).mean() - 0.8, 0, 1e4, xtol=1e-4)


if __name__ == "__main__":
    text = float((sys.argv[1:] or ["0"])[0])
    print("\n".join([*wrong(text), "", *detected(text)]))
