"""Measure how often the verdicts on these checkpoints and on the method separate equal methods, and unequal ones.

    python -m experiments.intervals.verdicts      # a minute and a half

The loss of a run at a block of text is a sum of normal parts, in nats a token: the text, which all runs share (TEXT);
the method; the seed, of which equal seeds share a part; and the run at this block (NOISE). A call draws methods, seeds
and text anew, and compares each pair of methods, as `posx compare` does. Prints Markdown.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.intervals.coverage import row_of
from posx.evaluation.differences import (
    BETTER,
    FEWEST_SEEDS,
    SIGNIFICANCE,
    WORSE,
    Difference,
    Verdict,
    holm,
    judge,
    loss_difference,
)
from posx.evaluation.statistics import BLOCK_LEN

BLOCKS = 64
#: The standard deviations of the parts of a loss. That of the method's seeds is the unit of true differences.
TEXT, SPREAD, NOISE = 0.1, 0.005, 0.01


def draw(
    methods: Sequence[float], seeds: int, rng: np.random.Generator, paired: bool = True, shared: float = 0.0
) -> list[Difference]:
    """Return the difference of each pair of methods in one call.

    Args:
      methods: the true loss of each, in SPREAD.
      seeds: of each method.
      rng: the source of chance.
      paired: the seeds are equal.
      shared: the part of a seed's variance that equal seeds share.
    """
    text = 2.0 + TEXT * rng.standard_normal(BLOCKS)
    own, common = rng.standard_normal((len(methods), seeds, 1)), rng.standard_normal((seeds, 1))
    effects = np.reshape(methods, (-1, 1, 1)) + math.sqrt(1 - shared) * own + math.sqrt(shared) * common
    losses = text + SPREAD * effects + NOISE * rng.standard_normal((len(methods), seeds, BLOCKS))
    counts = np.full(BLOCKS, BLOCK_LEN)
    rows = [[row_of(loss, counts) for loss in method] for method in losses]
    return [loss_difference(one, other, paired) for one, other in itertools.combinations(rows, 2)]


def separated(verdicts: Sequence[tuple[Verdict, Verdict]]) -> np.ndarray:
    """Tell of each verdict [differences, 2] whether it separates: on these checkpoints, and on the method."""
    return np.array([[verdict.word in (BETTER, WORSE) for verdict in pair] for pair in verdicts])


def equal(calls: int = 1000) -> Iterator[str]:
    """Yield the lines of the table of calls that compare equal methods, by how many have a verdict that separates."""
    yield "| methods | seeds | these checkpoints | the method | the method, unpaired |"
    yield "|---:|---:|---:|---:|---:|"
    for methods, seeds in itertools.product((2, 6), (3, 5, 10)):
        rng, cells = np.random.default_rng([methods, seeds]), []
        for paired in (True, False):
            found = [separated(judge(draw([0] * methods, seeds, rng, paired))).any(axis=0) for _ in range(calls)]
            cells.append(np.mean(found, axis=0))
        (checkpoints, method), (_, unpaired) = cells
        yield f"| {methods} | {seeds} | {checkpoints:.0%} | {method:.1%} | {unpaired:.1%} |"


def unequal(calls: int = 1000) -> Iterator[str]:
    """Yield the lines of the table of true differences, by how often their p after Holm's correction is below 0.05.

    From FEWEST_SEEDS on that is a verdict on the method. In a call of 15 comparisons one method of six differs.
    """
    sizes = (1, 2, 3, 5)
    kinds = ("a pair alone", "the same, unpaired", "of 15")
    yield "| seeds | comparison | " + " | ".join(f"{size} spread{'s' * (size > 1)}" for size in sizes) + " |"
    yield "|---:|---|" + "---:|" * len(sizes)
    for seeds, kind in itertools.product((3, FEWEST_SEEDS, 10), kinds):
        rng, cells = np.random.default_rng([seeds, kinds.index(kind)]), []
        for size in sizes:
            methods = [size, 0, 0, 0, 0, 0] if kind == "of 15" else [size, 0]
            found = []
            for _ in range(calls * 2 // len(methods)):
                differences = draw(methods, seeds, rng, "unpaired" not in kind)
                adjusted = holm([one.p or 0.0 for one in differences])
                found.append(np.mean([p < SIGNIFICANCE for p in adjusted[: len(methods) - 1]]))
            cells.append(f"{np.mean(found):.0%}")
        yield f"| {seeds} | {kind} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join([*equal(), "", *unequal()]))
