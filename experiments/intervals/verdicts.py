"""Measure how often the verdicts on these checkpoints and on the method separate equal methods, and unequal ones.

    python -m experiments.intervals.verdicts      # a minute and a half

The loss of a run at a block of text is a sum of normal parts, in nats a token: the text, which all runs share (TEXT);
the method; the seed, of which equal seeds share a part; and the run at this block (NOISE). A call draws methods, seeds
and text anew, and compares each pair of methods, as `posx compare` does. Prints Markdown.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from experiments.intervals import coverage
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

#: Effects of a seed, with mean 0 and variance 1, from without tails to rare, large failures.
EFFECTS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": coverage.EFFECTS["normal"],
    "exponential": coverage.EFFECTS["skewed"],
    "log-normal": lambda rng, shape: (rng.lognormal(0, 1, shape) - math.exp(0.5)) / math.sqrt(math.e * (math.e - 1)),
    "one run in ten fails": lambda rng, shape: (
        (rng.standard_normal(shape) + 10 * ((rng.random(shape) < 0.1) - 0.1)) / math.sqrt(10)
    ),
}
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
    return compared(text + SPREAD * effects, rng, paired)


def compared(losses: np.ndarray, rng: np.random.Generator, paired: bool) -> list[Difference]:
    """Return the difference of each pair of methods, of losses [method, seed, block] with noise of each run added."""
    losses = losses + NOISE * rng.standard_normal(losses.shape)
    counts = np.full(BLOCKS, BLOCK_LEN)
    rows = [[coverage.row_of(loss, counts) for loss in method] for method in losses]
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


def erratic(calls: int = 1000) -> Iterator[str]:
    """Yield how often a pair of equal methods has a wrong verdict on the method, if the seeds of one hardly differ.

    The standard deviation over seeds is ten times SPREAD for one, and a twentieth of that for the other.
    """
    yield "| effects of seeds | seeds | wrong | unpaired | for the erratic one |"
    yield "|---|---:|---:|---:|---:|"
    for number, (name, kind) in enumerate(EFFECTS.items()):
        for seeds in (FEWEST_SEEDS, 10):
            rng, words = np.random.default_rng([number, seeds]), dict[bool, list[str]]()
            for paired in (True, False):
                effects = np.array([10, 0.5])[:, None, None] * kind(rng, (calls, 2, seeds, 1))
                texts = 2.0 + SPREAD * effects + TEXT * rng.standard_normal((calls, 1, 1, BLOCKS))
                words[paired] = [judge(compared(losses, rng, paired))[0][1].word for losses in texts]
            wrong = {paired: np.isin(own, (BETTER, WORSE)) for paired, own in words.items()}
            better = sum(word == BETTER for own in words.values() for word in own) / sum(map(sum, wrong.values()))
            yield f"| {name} | {seeds} | {wrong[True].mean():.1%} | {wrong[False].mean():.1%} | {better:.0%} |"


if __name__ == "__main__":
    print("\n".join([*equal(), "", *unequal(), "", *erratic()]))
