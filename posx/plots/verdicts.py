"""Verdicts on pairs of runs: which has the lower perplexity on the same targets, with an interval."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from posx.errors import ConfigError
from posx.evaluation.protocols import HfStrided, Sliding
from posx.evaluation.statistics import loss_difference, perplexity, targets_key
from posx.plots.groups import labels, seeds_of_curves
from posx.plots.rows import PER_POSITION, Row, Run
from posx.plots.rows import perplexity as perplexity_of

#: A protocol with its stride, and a window in tokens.
Place = tuple[str, int | None, int]


class Verdict(NamedTuple):
    """The perplexity of one curve over that of another at one window, and its 95 % interval.

    The interval is over text, and over seeds if both have several. low and high are None if there is too little text.
    word: "better" or "worse" if 1 is outside of the interval, else "not separated".
    """

    one: str
    other: str
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


def verdicts(stored: Iterable[Row]) -> list[Verdict]:
    """Return a verdict for each pair of curves and each window that both measured on the same targets.

    Raises ConfigError, with the reason, if no two curves can be compared.
    """
    by_run: dict[Run, dict[Place, Row]] = {}
    for row in stored:
        if row["protocol"] != PER_POSITION:
            by_run.setdefault(row.run, {})[row["protocol"], row.get("stride"), row["eval_len"]] = row
    curves = seeds_of_curves(by_run)
    if len(curves) < 2:
        raise ConfigError(f"{len(curves)} kind of run has results, and two are needed. Seeds of one kind count once.")
    named = list(zip(labels(curves), curves, strict=True))
    found, reasons = list[Verdict](), list[str]()
    for (one, ours), (other, theirs) in itertools.combinations(named, 2):
        shared = set.intersection(*(set(by_run[run]) for run in (*ours, *theirs)))
        for place in sorted(shared, key=lambda place: (place[0], place[2], place[1] or 0)):
            pair = [by_run[run][place] for run in ours], [by_run[run][place] for run in theirs]
            reason = _unlike(*pair)
            reasons += [f"{one} and {other} {reason}"] if reason else []
            found += [] if reason else [_verdict(one, other, *pair)]
        reasons += [] if shared else [f"{one} and {other} have no protocol and window in common"]
    if not found:
        raise ConfigError(f"{reasons[0]}. Evaluate all with one command, on one text, at the same lengths.")
    return found


def _unlike(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    """Return why rows of one window cannot be compared, "" if they can."""
    rows = [*ours, *theirs]
    if len({row.get("tokenizer") for row in rows}) > 1:
        return "have other tokenizers, so their perplexities are of other tokens"
    if len({row.get("data_digest") for row in rows}) > 1:
        return "were measured on other texts"
    if any(row.get("status") == "apart" for row in rows) or len(set(map(targets_key, rows))) > 1:
        return "scored other targets"
    return "have no perplexity in common" if any(perplexity_of(row) is None for row in rows) else ""


def _verdict(one: str, other: str, ours: Sequence[Row], theirs: Sequence[Row]) -> Verdict:
    found, row = loss_difference(ours, theirs), ours[0]
    word = "not separated" if abs(found.mean) <= found.half else "better" if found.mean < 0 else "worse"
    low, high = (perplexity(found.mean + sign * found.half) for sign in (-1, 1))
    known = math.isfinite(found.half)
    return Verdict(
        one, other, (row["train_len"], theirs[0]["train_len"]), (len(ours), len(theirs)), row["protocol"],
        row.get("stride") if row["protocol"] in (Sliding.name, HfStrided.name) else None, row["eval_len"],
        row["num_targets"],
        perplexity(found.mean), low if known else None, high if known else None, word,
    )  # fmt: skip
