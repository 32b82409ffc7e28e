"""Published orders of encodings beside those of the study of sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from configs.scaling import ENCODINGS
from experiments.anchors import Anchor, nearest
from experiments.scaling.cells import Cell, score
from experiments.tables import markdown


def stated(anchor: Anchor, name: str, factor: int) -> float:
    """Return the published perplexity of an encoding at L, or its R_k at the k nearest to `factor`; nan if none is."""
    if factor == 1:
        return anchor.perplexity[name][anchor.lengths.index(anchor.train_len)]
    ratios = anchor.ratios(name)
    near = nearest(ratios, factor)
    return math.nan if near is None else ratios[near]


def published(cells: Sequence[Cell], anchors: Sequence[Anchor]) -> str:
    """Return published orders of the twelve at L and of R_4, and how many of their pairs have it here, as Markdown.

    R_k of an anchor is that of the k nearest to 4. Pairs that the source states as equal are left out. The last lines
    have the sums, and those of all orders of the encodings.
    """
    body, pairs_of_factor = [], dict[int, list[tuple[str, str]]]()
    for anchor in anchors:
        for factor, what in ((1, "PPL at L"), (4, "R_4")):
            found = {name: stated(anchor, name, factor) for name in anchor.perplexity if name in ENCODINGS}
            found = {name: value for name, value in found.items() if math.isfinite(value)}
            order = sorted(found, key=found.__getitem__)
            pairs = [pair for pair in itertools.combinations(order, 2) if found[pair[0]] < found[pair[1]]]
            if not pairs:
                continue
            pairs_of_factor.setdefault(factor, []).extend(pairs)
            never = [f"`{a}` < `{b}`" for a, b in pairs if not any(alike([(a, b)], one, factor) for one in cells)]
            body.append([
                anchor.name, what, ", ".join(f"`{name}` {found[name]:.4g}" for name in order),
                *(f"{alike(pairs, one, factor)} of {len(pairs)}" for one in cells), "; ".join(never) or "none",
                anchor.same,
            ])  # fmt: skip
    for (factor, every), without in itertools.product(pairs_of_factor.items(), ("", "alibi")):
        pairs = [pair for pair in every if without not in pair]
        names = sorted({name for pair in pairs for name in pair})
        chance = [sum(order.index(a) < order.index(b) for a, b in pairs) for order in itertools.permutations(names)]
        null = f"random orders: {np.mean(chance):.0f} ± {np.std(chance):.0f}, at most {max(chance)}"
        totals = [f"{alike(pairs, one, factor)} of {len(pairs)}" for one in cells]
        what = "PPL at L" if factor == 1 else f"R_{factor}"
        body.append([f"all without `{without}`" if without else "all", what, null, *totals, "", ""])
    head = ["source", "order of", "published", *(one.name for one in cells), "in no cell", "same protocol"]
    return markdown(head, body)


def alike(pairs: Iterable[tuple[str, str]], cell: Cell, factor: int) -> int:
    """Return how many pairs of encodings have this order in a cell, the lower first."""
    here = dict(zip(cell.encodings, score(cell.values, factor), strict=True))
    return sum(bool(here[a] < here[b]) for a, b in pairs)
