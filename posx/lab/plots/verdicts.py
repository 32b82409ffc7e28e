"""Verdicts on pairs of curves: which has the lower perplexity or R_k on the same targets, or why that is not known.

The words, the JSON and the report all show one `Verdict`, so that they cannot disagree. Its interval holds for one
comparison. Its word follows from the p-value after Holm's correction for all verdicts of the call.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from posx.evaluation.differences import ROUNDING, SIGNIFICANCE, Difference, holm, loss_difference, rise_difference
from posx.evaluation.protocols import PROTOCOLS
from posx.evaluation.statistics import perplexity, row_blocks, targets_key
from posx.lab.plots.captions import other_tokens
from posx.lab.plots.groups import Curve
from posx.lab.results.columns import FAILED, finite_perplexity, plain_rows
from posx.lab.results.table import PER_POSITION

#: The words of verdicts.
BETTER, WORSE, NOT_SEPARATED, NO_INTERVAL = "better", "worse", "not separated", "no interval"
#: How the seeds of two curves are compared: by seed, as independent groups, or not at all (one run on a side).
BY_SEED, UNPAIRED, ONE_SEED = "by seed", "unpaired", "one seed"
#: The population that the interval of each pairing is for.
HOLDS_FOR = {
    **dict.fromkeys((BY_SEED, UNPAIRED), "new seeds, on other text of this kind"),
    ONE_SEED: "these trained runs, on other text of this kind",
}


#: The columns that verdicts read.
_COMPARED = [
    "run", "run_id", "hash", "seed", "protocol", "eval_len", "stride", "status", "tokenizer", "data_digest", "nll",
    "ppl", "targets", "block_len", "block_nll", "num_targets", "max_targets", "num_stretches", "num_documents",
]  # fmt: skip


class Place(NamedTuple):
    """A measurement: a protocol and a window.

    Attributes:
      protocol: its name.
      stride: tokens, None if it follows from the window.
      eval_len: the window in tokens; k L if k is given.
      k: windows in training lengths if R_k = PPL(kL) / PPL(L) is compared, None for perplexity.
    """

    protocol: str
    stride: int | None
    eval_len: int
    k: float | None = None


class Verdict(NamedTuple):
    """The perplexity (or R_k) of one curve over that of another, its 95 % interval, and the word for it.

    Attributes:
      pair: the numbers of the two curves.
      place: the measurement.
      train_lens: the training length of each curve, in tokens.
      seeds: how many runs of each curve are compared.
      pairing: how these runs are paired.
      num_targets: scored tokens.
      text: the digest of the scored text.
      ratio: None if there is none.
      low, high: the ends of the interval, None if there is none.
      over_seeds: the part of the interval for other seeds on this text.
      over_text: the part of the interval for these runs on other text.
      p: of this comparison alone.
      adjusted_p: of it among the `family`.
      family: the number of comparisons that have a p.
      word: "better" or "worse" if `adjusted_p` is below 0.05, else "not separated" or "no interval".
      reason: why there is no interval or no difference.
    """

    pair: tuple[int, int]
    place: Place
    train_lens: tuple[int, int]
    seeds: tuple[int, int]
    pairing: str
    num_targets: int | None
    text: str | None
    ratio: float | None
    low: float | None = None
    high: float | None = None
    over_seeds: tuple[float, float] | None = None
    over_text: tuple[float, float] | None = None
    p: float | None = None
    adjusted_p: float | None = None
    family: int = 0
    word: str = NO_INTERVAL
    reason: str = ""

    @property
    def words(self) -> str:
        """The word with its reason, for tables."""
        seed = " (one seed)" if self.pairing == ONE_SEED and self.word != NO_INTERVAL else ""
        return f"{self.word}{seed}" + (f": {self.reason}" if self.reason else "")

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the verdict as plain JSON. names: those of the curves."""
        facts = self._asdict()
        (one, other), place = facts.pop("pair"), facts.pop("place")
        measure = "ppl" if place.k is None else "R_k"
        values = {"one": names[one], "other": names[other], "measure": measure} | place._asdict() | facts
        return values | {"holds_for": HOLDS_FOR[self.pairing]}


class _Run(NamedTuple):
    """A run that is compared.

    Attributes:
      rows: by protocol, stride and window.
      seed: as text, "None" for an imported model, which has none.
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
      pairing: a key of HOLDS_FOR.
    """

    runs: tuple[Sequence[_Run], Sequence[_Run]]
    labels: tuple[str, str]
    pairing: str


#: A row of the table, or None for one that a run does not have.
_Row = Mapping[str, Any] | None


def verdicts(
    stored: pd.DataFrame, curves: Sequence[Curve], wanted: Callable[[Place], bool] = lambda place: True
) -> tuple[list[Verdict], list[str]]:
    """Return a verdict for each pair of curves and each place that both measured on the same targets.

    Args:
      stored: the table of the rows of the runs of the curves.
      curves: the curves, of which each pair is compared.
      wanted: tells which places are compared. The others do not count in Holm's correction.

    Returns:
      The verdicts, and a line on each run or place that is not compared.
    """
    rows = stored[(stored.protocol != PER_POSITION) & (stored.left_out == "")]
    rows = rows.assign(ppl=finite_perplexity(rows))
    by_run: dict[str, dict[Any, Mapping[str, Any]]] = {}
    for row in plain_rows(rows[_COMPARED]):
        by_run.setdefault(row["run"], {})[row["protocol"], _stride(row), row["eval_len"]] = row
    runs = [
        [
            _Run(by_run.get(run, {}), seed or "None", length)
            for run, seed, length in zip(own.run, own.train_seed, own.train_len, strict=True)
        ]
        for own in (curve.runs for curve in curves)
    ]
    judged, reasons = list[Verdict](), dict[str, None]()
    for n, m in itertools.combinations(range(len(curves)), 2):
        one, other = curves[n], curves[m]
        sides, left = _sides((one.label, other.label), (runs[n], runs[m]))
        places = _places(sides)
        if not places:
            left = [f"{one.label} and {other.label} have no protocol and window in common"]
        for place in filter(wanted, places):
            pairs = [[_find_row(run, place) for run in side] for side in sides.runs]
            rows = [row for side in pairs for pair in side for row in pair if row is not None]
            if not (reason := _unlike(rows)):
                judged.append(_verdict((n, m), place, sides, pairs))
            else:
                left.append(f"{one.label} and {other.label} {reason}")
        reasons |= dict.fromkeys(left)
    return _correct(judged), list(reasons)


def _stride(row: dict[str, Any]) -> int | None:
    """Return the stride of a row, None if it follows from its window."""
    return PROTOCOLS[row["protocol"]].chosen_stride(row) if row["protocol"] in PROTOCOLS else None


def _sides(labels: tuple[str, str], runs: tuple[Sequence[_Run], Sequence[_Run]]) -> tuple[_Sides, list[str]]:
    """Return the runs of two curves that are compared, and which are left out.

    Runs of equal seeds are paired if there are two or more. That is right whatever a seed decides. It is sharper if the
    seed decides the initial weights and the order of the batches of both. A single run is compared with the run of its
    seed, if there is one. A mean over other seeds would add their spread to the difference, and no interval counts that
    spread.
    """
    seeds, left = [{run.seed: run for run in side} for side in runs], []
    shared = sorted(seeds[0].keys() & seeds[1].keys() - {"None"}, key=lambda seed: (len(seed), seed))
    single = min(map(len, runs)) == 1
    if len(shared) > 1 or (shared and single):
        for own, label, rival in zip(seeds, labels, labels[::-1], strict=True):
            if alone := ", ".join(seed for seed in own if seed not in shared):
                left.append(f"{label}, seed {alone}, as {rival} has no results of this seed")
        return _Sides(
            ([seeds[0][seed] for seed in shared], [seeds[1][seed] for seed in shared]),
            labels,
            ONE_SEED if single else BY_SEED,
        ), left
    return _Sides(runs, labels, ONE_SEED if single else UNPAIRED), left


def _places(sides: _Sides) -> list[Place]:
    """Return the places that a run of each side measured, perplexity before R_k."""
    there = [{place for run in side for place in run.rows} for side in sides.runs]
    rises = [{_factor(run, place) for run in side for place in run.rows} for side in sides.runs]
    places = [Place(*place) for place in there[0] & there[1]]
    train_len = sides.runs[0][0].train_len
    for protocol, stride, k in rises[0] & rises[1]:
        if k > 1 and (protocol, stride, 1) in rises[0] & rises[1]:
            places.append(Place(protocol, stride, round(k * train_len), k))
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
    if len({row.get("data_digest") for row in rows}) > 1:
        return "were measured on other texts" + other_tokens(row["tokenizer"] for row in rows)
    scored = {(*targets_key(row), row.get("num_targets")) for row in rows if _problem(row) == ""}
    if all(row.get("status") == "apart" for row in rows) and rows:
        return "scored other targets than most runs"
    if any(row.get("status") == "apart" for row in rows) or len(scored) > 1:
        return "scored other targets"
    return "" if all(row.get("block_nll") or row["ppl"] is None for row in rows) else "store no losses of blocks"


def _problem(row: _Row) -> str:
    """Return why a run has no loss, "" if it has one."""
    if row is None:
        return "not measured"
    if row["ppl"] is None or row["nll"] is None:
        return FAILED.get(row["status"], FAILED["nonfinite"])
    return ""


def _verdict(pair: tuple[int, int], place: Place, sides: _Sides, pairs: Sequence[Sequence[Sequence[_Row]]]) -> Verdict:
    """Return a verdict without its correction.

    Args:
      pair: the numbers of the two curves.
      place: the measurement.
      sides: the runs of the curves.
      pairs: per side and run, the row of a loss, or the rows at kL and at L.
    """
    there = [row for side in pairs for rows in side for row in rows if row is not None]
    targets, text = (next((row[key] for row in there if row.get(key)), None) for key in ("num_targets", "data_digest"))
    train_lens, (ours, theirs) = (sides.runs[0][0].train_len, sides.runs[1][0].train_len), sides.runs
    bare = Verdict(pair, place, train_lens, (len(ours), len(theirs)), sides.pairing, targets, text, None)
    problems = [
        f"{label}{'' if run.seed == 'None' else f', seed {run.seed}'}: {problem}"
        for label, runs, side in zip(sides.labels, sides.runs, pairs, strict=True)
        for run, rows in zip(runs, side, strict=True)
        if (problem := next(filter(None, map(_problem, rows)), ""))
    ]
    if problems:
        return bare._replace(reason=problems[0] + (f", and {len(problems) - 1} more" if problems[1:] else ""))
    known = [[[row for row in rows if row is not None] for rows in side] for side in pairs]
    ours_known, theirs_known = known
    paired = sides.pairing == BY_SEED
    if place.k is None:
        difference = loss_difference([rows[0] for rows in ours_known], [rows[0] for rows in theirs_known], paired)
    else:
        difference = rise_difference(ours_known, theirs_known, paired)
    made = bare._replace(
        ratio=perplexity(difference.mean),
        over_seeds=_ends(difference.mean, difference.over_seeds),
        over_text=_ends(difference.mean, difference.over_text),
    )
    if reason := _copies(sides, known) or difference.no_interval:
        return made._replace(reason=reason)
    low, high = _ends(difference.mean, difference.half) or (None, None)
    return made._replace(low=low, high=high, p=difference.p, reason=_equal(difference))


def _ends(mean: float, half: float | None) -> tuple[float, float] | None:
    """Return the ends of an interval of a ratio, from nats."""
    return None if half is None else (perplexity(mean - half), perplexity(mean + half))


def _equal(difference: Difference) -> str:
    """Return that two curves are the same function, as far as a loss shows it, else an empty string.

    Different functions may have equal means by chance, but not equal losses of all blocks.
    """
    if difference.half == 0:
        return "all losses are equal"
    return "equal up to rounding" if max(abs(difference.mean), difference.half / 10) <= ROUNDING else ""


def _copies(sides: _Sides, pairs: Sequence[Sequence[Sequence[Mapping[str, Any]]]]) -> str:
    """Return that two seeds of a curve have equal losses, as one run and its copy have, else an empty string."""
    for label, runs, side in zip(sides.labels, sides.runs, pairs, strict=True):
        losses = [(run.seed, row_blocks(row)[0] / row["block_len"]) for run, (row, *_) in zip(runs, side, strict=True)]
        for (seed, ours), (other, theirs) in itertools.combinations(losses, 2):
            if np.max(np.abs(ours - theirs)) <= 10 * ROUNDING:
                return f"seeds {seed} and {other} of {label} have equal losses: one is a copy of the other"
    return ""


def p_text(p: float) -> str:
    """Return a p-value with two digits, or as many as leave it on its side of 0.05."""
    texts = (f"{p:.{digits}g}" for digits in range(2, 17))
    return next((text for text in texts if (float(text) < SIGNIFICANCE) == (p < SIGNIFICANCE)), repr(p))


def _correct(judged_verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return verdicts with their words: Holm's correction is for all of them that have a p-value."""
    judged = [n for n, verdict in enumerate(judged_verdicts) if verdict.p is not None]
    adjusted = dict(zip(judged, holm([judged_verdicts[n].p or 0.0 for n in judged]), strict=True))
    return [
        _word_verdict(verdict._replace(adjusted_p=adjusted.get(n), family=len(judged)))
        for n, verdict in enumerate(judged_verdicts)
    ]


def _word_verdict(verdict: Verdict) -> Verdict:
    if verdict.p is None or verdict.adjusted_p is None or verdict.ratio is None:
        return verdict
    if verdict.adjusted_p < SIGNIFICANCE:
        return verdict._replace(word=BETTER if verdict.ratio < 1 else WORSE)
    alone = f"p = {p_text(verdict.p)} alone, before Holm's correction" if verdict.p < SIGNIFICANCE else ""
    return verdict._replace(word=NOT_SEPARATED, reason=verdict.reason or alone)
