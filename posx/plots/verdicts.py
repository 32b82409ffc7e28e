"""Verdicts on pairs of runs: which has the lower perplexity on the same targets, with an interval."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from posx.evaluation.protocols import HfStrided, Sliding
from posx.evaluation.statistics import loss_difference, perplexity, targets_key
from posx.plots.groups import Curve
from posx.plots.rows import PER_POSITION, Row, Run
from posx.plots.rows import perplexity as perplexity_of

#: A protocol with its stride (None if it follows from the window), and a window in tokens.
Place = tuple[str, int | None, int]


class Verdict(NamedTuple):
    """The perplexity of one curve over that of another at one window, and its 95 % interval.

    pair: the numbers of the two curves. The interval is over text, and over seeds if both have several. low and high
    are None if there is too little text. word: "better" or "worse" if 1 is outside of the interval, else "not
    separated".
    """

    pair: tuple[int, int]
    train_lens: tuple[int, int]
    seeds: tuple[int, int]
    protocol: str
    stride: int | None
    eval_len: int
    num_targets: int
    ratio: float
    low: float | None
    high: float | None
    word: str


def verdicts(stored: Iterable[Row], curves: Sequence[Curve]) -> tuple[list[Verdict], list[str]]:
    """Return a verdict for each pair of curves and each window that both measured on the same targets.

    The second list says which pairs are not compared, and why.
    """
    by_run: dict[Run, dict[Place, Row]] = {}
    for row in stored:
        if row["protocol"] != PER_POSITION:
            by_run.setdefault(row.run, {})[row["protocol"], _stride(row), row["eval_len"]] = row
    found, reasons = list[Verdict](), dict[str, None]()
    for (n, one), (m, other) in itertools.combinations(enumerate(curves), 2):
        shared = set.intersection(*(set(by_run.get(run, ())) for run in (*one.runs, *other.runs)))
        for place in sorted(shared, key=lambda place: (place[0], place[1] or 0, place[2])):
            pair = [by_run[run][place] for run in one.runs], [by_run[run][place] for run in other.runs]
            if reason := _unlike(*pair):
                reasons[f"{one.label} and {other.label} {reason}"] = None
            else:
                found.append(_verdict((n, m), place, *pair))
        if not shared:
            reasons[f"{one.label} and {other.label} have no protocol and window in common"] = None
    return found, list(reasons)


def _stride(row: Row) -> int | None:
    """Return the stride of a row, None if it follows from its window."""
    own = HfStrided().stride_at(row["eval_len"], ())
    chosen = row["protocol"] == Sliding.name or (row["protocol"] == HfStrided.name and row.get("stride") != own)
    return row.get("stride") if chosen else None


def _unlike(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    """Return why rows of one window cannot be compared, "" if they can."""
    rows = [*ours, *theirs]
    if len({row.get("tokenizer") for row in rows}) > 1:
        return "have other tokenizers, so their perplexities are of other tokens"
    if len({row.get("data_digest") for row in rows}) > 1:
        return "were measured on other texts"
    if any(row.get("status") == "apart" for row in rows) or len(set(map(targets_key, rows))) > 1:
        return "scored other targets"
    if any(perplexity_of(row) is None for row in rows):
        return "have no perplexity in common"
    return "" if all(row.get("block_nll") for row in rows) else "store no losses of blocks"


def _verdict(pair: tuple[int, int], place: Place, ours: Sequence[Row], theirs: Sequence[Row]) -> Verdict:
    found, row = loss_difference(ours, theirs), ours[0]
    word = "not separated" if abs(found.mean) <= found.half else "better" if found.mean < 0 else "worse"
    low, high = (perplexity(found.mean + sign * found.half) for sign in (-1, 1))
    known = math.isfinite(found.half)
    return Verdict(
        pair, (row["train_len"], theirs[0]["train_len"]), (len(ours), len(theirs)), *place, row["num_targets"],
        perplexity(found.mean), low if known else None, high if known else None, word,
    )  # fmt: skip
