"""The orders of the study of sizes: tau between cells, the slopes of R_k over size, and the verdicts on the claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from experiments.scaling.cells import (
    FACTORS,
    LEADERBOARD,
    Cell,
    align,
    draws,
    groups,
    named_cells,
    pick,
    score,
    slope,
    swaps,
    tau,
    tau_of_single_seeds,
)
from experiments.scaling.measured import table
from experiments.tables import Run, markdown

#: An encoding is level if R_4 is below the first, and fails if it is above the second. Above the third the level rose.
LEVEL, FAILING, RISEN = 1.02, 1.5, 1.10
#: Tau holds if its whole interval is above this.
HOLDS = 0.6
#: The cell to compare with others of another text and of other tokens, and these.
TEXTS = ("64, L = 64", "64, stdlib", "64, bpe")
#: The encodings that fail at L = 64 at both widths.
SIX = ("sinusoidal", "rope", "rope(frequencies=whole_turns)", "darope", "cope", "nope")


def orders(pairs: Iterable[tuple[Cell, Cell]]) -> str:
    """Return tau between the orders of two cells at L, of R_4 and of R_8, as Markdown.

    Beside it are tau between single seeds, and tau within groups of encodings that are close.
    """
    body = []
    for one, other in pairs:
        for factor, what in ((1, "PPL at L"), (4, "R_4"), (8, "R_8")):
            own = (tau_of_single_seeds(each, each, factor) for each in (one, other))
            inside = [
                f"{title} ({len(names)}): {tau(pick(one, names), pick(other, names), factor)[0]:.2f}"
                for title, names in groups(one, other, factor).items() if len(names) > 2
            ]  # fmt: skip
            body.append([
                f"{one.name} and {other.name}", what, with_interval(tau(one, other, factor)),
                f"{tau_of_single_seeds(one, other, factor):.2f}",
                ", ".join("-" if math.isnan(each) else f"{each:.2f}" for each in own),
                ", ".join(inside) or "-", "; ".join(swaps(one, other, factor)) or "none",
            ])  # fmt: skip
    head = ["cells", "order of", "tau", "single seeds", "in each cell", "within groups", "change places"]
    return markdown(head, body)


def failing(pairs: Iterable[tuple[Cell, Cell]]) -> str:
    """Return tau between the orders that two cells have of the six at 2, 4 and 8 L, by R_k, as Markdown."""
    body = []
    for one, other in pairs:
        here, there = pick(one, SIX), pick(other, SIX)
        body.append([f"{one.name} and {other.name}", *(with_interval(tau(here, there, k)) for k in FACTORS[1:])])
    return markdown(["cells", *(f"R_{factor}" for factor in FACTORS[1:])], body)


def texts(runs: Sequence[Run]) -> list[str]:
    """Return the orders and the numbers of other texts and tokens."""
    first, *others = found = named_cells(runs, TEXTS)
    return [orders((first, one) for one in others), table(found)]


def slopes(cells: Sequence[Cell]) -> str:
    """Return the slopes of ln R_4 over ln parameters of each encoding at L = 64, with intervals, as Markdown.

    The first is over the sizes of the design, and beside it that of ln R_8. The others are of R_4 from one width to the
    next at equal steps. A slope takes as many seeds as the cell that has fewest. That of a single seed has no interval.
    """
    cells = align(*(one for one in cells if one.train_len == 64))
    sizes = [one for one in cells if not one.is_control]
    equal = [one for one in cells if one.is_control or one.part == LEADERBOARD]
    head = ["encoding", *(f"R_4, {one.name}" for one in cells), "slope of ln R_4", "of ln R_8"]
    body = [
        [f"`{name}`", *(f"{math.exp(score(one.values, 4)[place]):.3f}" for one in cells)]
        for place, name in enumerate(cells[0].encodings)
    ]
    for chosen, factor in ((sizes, 4), (sizes, 8), *((pair, 4) for pair in itertools.pairwise(equal))):
        if chosen is not sizes:
            head.append(f"{chosen[0].width} to {chosen[1].width} at equal steps")
        count = min(one.values.shape[1] for one in chosen)
        chosen = [one._replace(values=one.values[:, :count]) for one in chosen]
        low, high = np.quantile(slope(chosen, [draws(one) for one in chosen], factor), [0.025, 0.975], axis=0)
        middle = slope(chosen, [one.values for one in chosen], factor)
        for line, *ends in zip(body, middle, low, high, strict=True):
            line.append("{:+.3f} ({:+.3f} to {:+.3f})".format(*ends) if count > 1 else f"{ends[0]:+.3f}")
    return markdown(head, body)


def claims(cells: Sequence[Cell]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the claims in the order of the page: the claim, the two cells, what was measured, and the verdict."""
    found = {(one.width, one.train_len): one for one in cells}

    def pair(text: str, one: tuple[int, int], other: tuple[int, int], factor: int) -> tuple[str, str, str, str]:
        places = f"{one[0]} x {one[1]}, {other[0]} x {other[1]}"
        if one not in found or other not in found:
            return (text, places, "-", "not run")
        changed = swaps(found[one], found[other], factor)
        here = (_, low, _) = tau(found[one], found[other], factor)
        verdict = "refuted" if changed else "confirmed" if low > HOLDS else "open"
        return (text, places, f"tau {with_interval(here)}", "too few seeds" if math.isnan(low) else verdict)

    for text, factor in (("the order at L holds", 1), ("the order beyond L holds", 4)):
        for one, other in ((64, 128), (128, 256), (64, 256)):
            yield pair(text, (one, 64), (other, 64), factor)
    for text, holds, is_refuted in (
        ("who is level stays level", lambda r: r < LEVEL, lambda r: r > RISEN),
        ("who fails stays failing", lambda r: r > FAILING, lambda r: r < RISEN),
    ):
        if (64, 64) not in found or (256, 64) not in found:
            yield (text, "64 x 64, 256 x 64", "-", "not run")
            continue
        small, large = (np.exp(score(one.values, 4)) for one in align(found[64, 64], found[256, 64]))
        meant = large[holds(small)]
        if not meant.size:
            yield (text, "64 x 64, 256 x 64", "no encoding", "open")
            continue
        verdict = "refuted" if is_refuted(meant).any() else "confirmed" if holds(meant).all() else "open"
        here = f"{len(meant)} encodings, R_4 {meant.min():.3f} to {meant.max():.3f}"
        yield (text, "64 x 64, 256 x 64", here, verdict)
    for width in (64, 128, 256):
        yield pair("longer training lengths keep the order", (width, 64), (width, 256), 1)


def with_interval(found: tuple[float, float, float]) -> str:
    """Return tau and its interval as text, or tau alone if a cell has a single seed."""
    middle, low, high = found
    return f"{middle:.2f}" + ("" if math.isnan(low) else f" ({low:.2f} to {high:.2f})")
