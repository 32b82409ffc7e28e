"""Comparisons of pairs of curves on the same targets, and two verdicts on each.

They are of the ratio of perplexities or of R_k, or of the difference of the shares of right answers to a task.

One verdict is on these checkpoints, the other on the method (`posx.evaluation.judge`). The words, the JSON and the
report all show one `Comparison`, so that they cannot disagree.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from posx.evaluation.answers import Answers
from posx.evaluation.differences import (
    FEWEST_SEEDS,
    ROUNDING,
    SIGNIFICANCE,
    Difference,
    StandardError,
    Verdict,
    judge,
    loss_difference,
    rise_difference,
)
from posx.evaluation.protocols import chosen_stride
from posx.evaluation.statistics import is_of_answers, row_blocks, targets_key
from posx.lab.plots.captions import other_tokens
from posx.lab.plots.groups import Curve
from posx.lab.results.columns import FAILED, finite_perplexity, plain_rows
from posx.lab.results.table import PER_POSITION

#: How the runs of two curves are compared: by seed, or as independent groups.
BY_SEED, UNPAIRED = "by seed", "unpaired"
#: The seed of an imported model, and the word on its method.
IMPORTED, NO_SEEDS = "None", "no seeds (imported)"

#: The columns that comparisons read.
_COMPARED = [
    "run", "run_id", "hash", "seed", "train_len", "protocol", "eval_len", "stride", "status", "tokenizer",
    "data_digest", "nll", "ppl", "targets", "block_len", "block_nll", "num_targets", "max_targets", "num_stretches",
    "num_documents", "num_items", "exact_match", "accuracy", "block_wrong", "block_hidden",
]  # fmt: skip


class Place(NamedTuple):
    """A measurement: a protocol and a window.

    Attributes:
      protocol: its name.
      stride: tokens, None if it follows from the window.
      eval_len: the window in tokens; k L of the longer L if k is given.
      k: windows in training lengths if R_k = PPL(kL) / PPL(L) is compared, None for perplexity and answers.
    """

    protocol: str
    stride: int | None
    eval_len: int
    k: float | None = None

    @property
    def of_answers(self) -> bool:
        """Whether right answers to a task are compared, in place of losses."""
        return self.protocol == Answers.name

    @property
    def measure(self) -> str:
        return "right" if self.of_answers else "ppl" if self.k is None else "R_k"


class Comparison(NamedTuple):
    """Two curves at one place: how they differ, and two verdicts on it.

    Attributes:
      pair: the numbers of the two curves.
      place: the measurement.
      train_lens: the training length of each curve, in tokens.
      seeds: how many runs of each curve are compared.
      pairing: how these runs are paired.
      num_targets: scored tokens, or items of a task.
      text: the digest of the scored text.
      effect: the ratio of perplexities or of R_k, or the difference of the shares of right answers; None without one.
        If tokens are hidden, each is an answer.
      over_seeds: the part of the interval for other seeds on this text, None if a curve has a single run.
      checkpoints: whether these trained weights differ on other text of this kind.
      method: whether new seeds differ on other text of this kind.
      reason: why there is no interval or no difference.
    """

    pair: tuple[int, int]
    place: Place
    train_lens: tuple[int, int]
    seeds: tuple[int, int]
    pairing: str
    num_targets: int | None
    text: str | None
    effect: float | None
    over_seeds: tuple[float, float] | None
    checkpoints: Verdict
    method: Verdict
    reason: str

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the comparison as plain JSON. names: those of the curves."""
        facts = self._asdict()
        (one, other), place = facts.pop("pair"), facts.pop("place")
        verdicts = {"checkpoints": self.checkpoints._asdict(), "method": self.method._asdict()}
        values = {"one": names[one], "other": names[other], "measure": place.measure} | place._asdict()
        return values | facts | verdicts


class _Run(NamedTuple):
    """A run that is compared.

    Attributes:
      rows: by protocol, stride and window.
      seed: as text, IMPORTED for an imported model, which has none.
      train_len: tokens.
    """

    rows: Mapping[tuple[str, int | None, int], Mapping[str, Any]]
    seed: str
    train_len: int


class _Sides(NamedTuple):
    """The runs of two curves that are compared.

    Attributes:
      runs: of each side, in the order of their seeds if they are paired by seed.
      labels: of the two curves.
      pairing: BY_SEED or UNPAIRED.
    """

    runs: tuple[Sequence[_Run], Sequence[_Run]]
    labels: tuple[str, str]
    pairing: str


#: A row of the table, or None for one that a run does not have.
_Row = Mapping[str, Any] | None


def comparisons(
    stored: pd.DataFrame, curves: Sequence[Curve], wanted: Callable[[Place], bool] = lambda place: True
) -> tuple[list[Comparison], list[str]]:
    """Return a comparison of each pair of curves at each place that both measured on the same targets.

    A curve under windows of L is compared with the curve of the same weights alone, if that is one of `curves`.

    Args:
      stored: the table of the rows of the runs of the curves.
      curves: the curves, of which each pair is compared.
      wanted: tells which places are compared. The others do not count in Holm's correction.

    Returns:
      The comparisons, and a line on each run or place that is not compared.
    """
    rows = stored[(stored.protocol != PER_POSITION) & (stored.left_out == "")]
    rows = rows.assign(ppl=finite_perplexity(rows))
    by_run: dict[str, dict[Any, Mapping[str, Any]]] = {}
    for row in plain_rows(rows[_COMPARED]):
        by_run.setdefault(row["run"], {})[row["protocol"], chosen_stride(row), row["eval_len"]] = row
    runs = [
        [
            _Run(by_run.get(run, {}), seed or IMPORTED, length)
            for run, seed, length in zip(own.run, own.train_seed, own.train_len, strict=True)
        ]
        for own in (curve.runs for curve in curves)
    ]
    unjudged, reasons = list[tuple[Difference, Callable[..., Comparison]]](), dict[str, None]()
    for n, m in itertools.combinations(range(len(curves)), 2):
        one, other = curves[n], curves[m]
        if (one.window_of or other.window_of) and one.window_of != other.label and other.window_of != one.label:
            continue
        sides, left = _sides((one.label, other.label), (runs[n], runs[m]))
        places = _places(sides)
        if not places:
            left = [f"{one.label} and {other.label} have no protocol and window in common"]
        for place in filter(wanted, places):
            pairs = [[_find_row(run, place) for run in side] for side in sides.runs]
            rows = [row for side in pairs for pair in side for row in pair if row is not None]
            if not (reason := _unlike(rows)):
                difference = _difference(place, sides, pairs)
                unjudged.append((difference, functools.partial(_comparison, (n, m), place, sides, rows, difference)))
            else:
                left.append(f"{one.label} and {other.label} {reason}")
        reasons |= dict.fromkeys(left)
    verdicts = judge([difference for difference, _ in unjudged])
    return [make(*two) for (_, make), two in zip(unjudged, verdicts, strict=True)], list(reasons)


def _sides(labels: tuple[str, str], runs: tuple[Sequence[_Run], Sequence[_Run]]) -> tuple[_Sides, list[str]]:
    """Return the runs of two curves that are compared, and which are left out.

    Runs of equal seeds are paired if there are two or more. That is right whatever a seed decides. It is sharper if the
    seed decides the initial weights and the order of the batches of both. A single run is compared with the run of its
    seed, if there is one. A mean over other seeds would add their spread to the difference, and no interval counts that
    spread. Runs are not paired if both sides have enough seeds for a verdict on the method, and too few are shared.
    """
    seeds, left = [{run.seed: run for run in side} for side in runs], []
    shared = sorted(seeds[0].keys() & seeds[1].keys() - {IMPORTED}, key=lambda seed: (len(seed), seed))
    fewest = min(map(len, runs))
    if (len(shared) > 1 and not len(shared) < FEWEST_SEEDS <= fewest) or (shared and fewest == 1):
        for own, label, rival in zip(seeds, labels, labels[::-1], strict=True):
            if alone := ", ".join(seed for seed in own if seed not in shared):
                left.append(f"{label}, seed {alone}, as {rival} has no results of this seed")
        return _Sides(([seeds[0][seed] for seed in shared], [seeds[1][seed] for seed in shared]), labels, BY_SEED), left
    return _Sides(runs, labels, UNPAIRED), left


def _places(sides: _Sides) -> list[Place]:
    """Return the places that a run of each side measured, perplexity before R_k."""
    there = [{place for run in side for place in run.rows} for side in sides.runs]
    rises = [{_factor(run, place) for run in side for place in run.rows} for side in sides.runs]
    places = [Place(*place) for place in there[0] & there[1]]
    longest = max(run.train_len for side in sides.runs for run in side)
    for protocol, stride, k in rises[0] & rises[1]:
        if k > 1 and (protocol, stride, 1) in rises[0] & rises[1] and protocol != Answers.name:
            places.append(Place(protocol, stride, round(k * longest), k))
    return sorted(places, key=lambda place: (place.protocol, place.stride or 0, place.k or 0, place.eval_len))


def _factor(run: _Run, place: tuple[str, int | None, int]) -> tuple[str, int | None, float]:
    return *place[:2], place[2] / run.train_len


def _find_row(run: _Run, place: Place) -> list[_Row]:
    """Return the row of a run at a place; for R_k those at kL and at L. None for a row that it does not have.

    A run whose training ended with NaN has one row for every place.
    """
    rows = run.rows
    if ended := [row for row in rows.values() if row["status"] == "diverged"]:
        return list(ended)
    start = place.protocol, place.stride
    if place.k is None:
        return [rows.get((*start, place.eval_len))]
    return [rows.get((*start, round(place.k * run.train_len))), rows.get((*start, run.train_len))]


def _unlike(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return why rows cannot be compared, "" if they can."""
    rows = [row for row in rows if row.get("status") != "diverged"]  # it has no text and no targets
    if len({row.get("tokenizer") for row in rows}) > 1:
        return "have other tokenizers, so their perplexities are of other tokens"
    if all(len({row.get(name) for row in rows}) > 1 for name in ("data_digest", "targets")):
        return "were measured on other texts" + other_tokens(row["tokenizer"] for row in rows)
    scored = {targets_key(row) for row in rows if _problem(row) == ""}
    if all(row.get("status") == "apart" for row in rows) and rows:
        return "scored other targets than most runs"
    if any(row.get("status") == "apart" for row in rows) or len(scored) > 1:
        by_length = any(map(is_of_answers, rows)) and len({row.get("train_len") for row in rows}) > 1
        return "answered other items, which their training lengths decide" if by_length else "scored other targets"
    if all(row.get("block_nll") or is_of_answers(row) or row["ppl"] is None for row in rows):
        return ""
    return "store no losses or answers of blocks"


def _problem(row: _Row) -> str:
    """Return why a run has no loss, "" if it has one."""
    if row is None:
        return "not measured"
    if row["ppl"] is None or row["nll"] is None:
        return FAILED.get(row["status"], FAILED["nonfinite"])
    return ""


def _difference(place: Place, sides: _Sides, pairs: Sequence[Sequence[Sequence[_Row]]]) -> Difference:
    """Return the difference of two curves, NaN if a run has no loss. Its `no_interval` says why there is no interval.

    Args:
      place: the measurement.
      sides: the runs of the curves.
      pairs: per side and run, the row of a loss, or the rows at kL and at L.
    """
    problems = [
        f"{label}{'' if run.seed == IMPORTED else f', seed {run.seed}'}: {problem}"
        for label, runs, side in zip(sides.labels, sides.runs, pairs, strict=True)
        for run, rows in zip(runs, side, strict=True)
        if (problem := next(filter(None, map(_problem, rows)), ""))
    ]
    if problems:
        counts = [len(runs) for runs in sides.runs]
        unknown = tuple(StandardError(math.nan, count - 1) for count in counts if min(counts) > 1)
        return Difference(
            math.nan, None, unknown, problems[0] + (f", and {len(problems) - 1} more" * bool(problems[1:]))
        )
    known = [[[row for row in rows if row is not None] for rows in side] for side in pairs]
    (ours, theirs), paired = known, sides.pairing == BY_SEED
    if place.k is None:
        difference = loss_difference([rows[0] for rows in ours], [rows[0] for rows in theirs], paired)
    else:
        difference = rise_difference(ours, theirs, paired)
    copies = _copies(sides, known)
    return difference._replace(text=None, no_interval=copies) if copies else difference


def _comparison(
    pair: tuple[int, int], place: Place, sides: _Sides, rows: Sequence[Mapping[str, Any]], difference: Difference,
    checkpoints: Verdict, method: Verdict,
) -> Comparison:  # fmt: skip
    """Return the comparison of a pair of curves at one place, of the rows that they have there, with its verdicts."""
    count = "num_items" if place.of_answers else "num_targets"
    targets, text = (next((row[key] for row in rows if row.get(key)), None) for key in (count, "data_digest"))
    ours, theirs = sides.runs
    known, over_seeds = not math.isnan(difference.mean), difference.over_seeds
    if any(run.seed == IMPORTED for run in (*ours, *theirs)):
        method = method._replace(word=NO_SEEDS)
    return Comparison(
        pair, place, (ours[0].train_len, theirs[0].train_len), (len(ours), len(theirs)),
        sides.pairing, targets, text, difference.effect()[0] if known else None,
        difference.effect(over_seeds) if known and over_seeds is not None else None, checkpoints, method,
        difference.no_interval or _equal(difference),
    )  # fmt: skip


def _equal(difference: Difference) -> str:
    """Return that two curves are the same function, as far as a loss shows it, else an empty string.

    Different functions may have equal means by chance, but not equal losses of all blocks.
    """
    if difference.half == 0:
        return "all losses are equal"
    return "equal up to rounding" if difference.is_equal else ""


def _copies(sides: _Sides, pairs: Sequence[Sequence[Sequence[Mapping[str, Any]]]]) -> str:
    """Return that two seeds of a curve have equal losses, as one run and its copy have, else an empty string."""
    for label, runs, side in zip(sides.labels, sides.runs, pairs, strict=True):
        rows = [(run.seed, row) for run, (row, *_) in zip(runs, side, strict=True)]
        for (seed, ours), (other, theirs) in itertools.combinations(rows, 2):
            if _is_copy(ours, theirs):
                return f"seeds {seed} and {other} of {label} have equal losses: one is a copy of the other"
    return ""


def _is_copy(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether all losses of two rows are equal. Two seeds may have the same answers right, with other losses."""
    if is_of_answers(one):
        return one["nll"] == other["nll"] != 0
    gap = row_blocks(one)[0] - row_blocks(other)[0]
    return bool(np.max(np.abs(gap)) <= 10 * ROUNDING * one["block_len"])


def p_text(p: float) -> str:
    """Return a p-value with two digits, or as many as leave it on its side of 0.05."""
    texts = (f"{p:.{digits}g}" for digits in range(2, 17))
    return next((text for text in texts if (float(text) < SIGNIFICANCE) == (p < SIGNIFICANCE)), repr(p))
