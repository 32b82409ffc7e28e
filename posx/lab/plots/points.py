"""Curves of stored rows against length, position and step, averaged over seeds, with 95 % intervals over text.

Positions count from 1, so that L is the last trained. The intervals are those of the mean over the runs: sums over
common blocks of text are averaged over the runs first. An interval thus covers another text of the kind, and not
another seed.
"""

import dataclasses
import logging
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from posx.errors import ConfigError
from posx.evaluation.answers import Answers, wilson_interval
from posx.evaluation.statistics import LARGEST_NLL, check_pair, few_places, half_width, mean_blocks
from posx.lab.files.rows import drop_repeated, ends_training, number
from posx.lab.plots.groups import Curve, Panel, Point, choose_places, common_names
from posx.lab.results.columns import FAILED, RUN_COLUMNS, finite_perplexity, make_table, plain_rows
from posx.lab.results.facts import config_facts
from posx.lab.results.table import list_runs
from posx.lab.runs.finding import run_folders, run_name
from posx.lab.runs.folder import RunFolder

_MAX_TRAINING_POINTS = 150
_BINS_PER_OCTAVE = 6
#: The columns of intervals, and of losses by position.
BLOCKS = [
    "run", "run_id", "protocol", "eval_len", "status", "targets", "block_len", "block_nll", "num_targets",
    "max_targets", "num_stretches", "num_documents", "num_separators", "num_bytes",
]  # fmt: skip
_BINS = ["position_edges", "position_nll", "position_targets"]
#: A row of the table as `plain_rows` gives it.
Row = Mapping[str, Any]
#: (step, loss in nats per token).
Losses = Sequence[tuple[float, float]]
_LOG = logging.getLogger(__name__)


class Logged(NamedTuple):
    """A row of a training log.

    Attributes:
      step: the steps done.
      loss: the mean of the steps since the row before, in nats per token.
      tokens: of training text so far, 0 if the row does not say.
      seconds: of training steps so far, without compiling, saving and measuring. Steps that were repeated count once.
    """

    step: float
    loss: float
    tokens: float
    seconds: float


Log = Sequence[Logged]


def perplexity_curves(panel: Panel) -> list[Curve]:
    """Return perplexity against evaluation length in tokens, over the runs that have a value."""
    return _curves(panel, finite_perplexity(panel.rows), _factors)


def triangle_curves(panels: Sequence[Panel]) -> dict[tuple[str, int], Curve]:
    """Return {(name, training length): curve}, each with a point in all columns of the triangle of training lengths.

    Columns are at least the training lengths that were measured. Windows of L come after the curves of their weights.
    """
    names, lengths = common_names(panels), {int(n) for panel in panels for n in panel.rows.eval_len}
    trained = {panel.train_len for panel in panels}
    columns = sorted({*choose_places(lengths, min(trained)), *(trained & lengths)})
    placed = {
        (names[panel.train_len, curve.label], curve.window_of != "", panel.train_len): curve
        for panel in panels
        for curve in perplexity_curves(panel)
    }
    made = dict[tuple[str, int], Curve]()
    for (name, is_window, train_len), curve in sorted(placed.items(), key=lambda pair: pair[0]):
        known = {point.x: point for point in curve.points}
        points = tuple(known.get(n, Point(n, ())) for n in columns)
        made[curve.label if is_window else name, train_len] = dataclasses.replace(curve, points=points)
    return made


def ratio_curves(panel: Panel) -> list[Curve]:
    """Return R_k = ppl(kL) / ppl(L) against k >= 1: ratios within each run, of the same targets, then averaged.

    A task has other items at each length, so it has no ratios.
    """
    rows = panel.rows
    at_train = rows[rows.eval_len == panel.train_len].drop_duplicates("run", keep="last").set_index("run", drop=False)
    same = (rows.run.map(at_train.targets) == rows.targets) & (panel.protocol != Answers.name)
    base = rows.run.map(finite_perplexity(at_train)).where(same)
    return _curves(panel, finite_perplexity(rows) / base, _factors, at_train, panel.train_len)


def bits_curves(panel: Panel) -> list[Curve]:
    """Return bits per byte of text against evaluation length, over the runs that know their bytes and their separators.

    The intervals are those of the loss of all targets, separators included. So there are none if more than one target
    in a thousand is a separator.
    """

    def ends(mean: float, half: float, rows: Sequence[Row]) -> tuple[float, float]:
        if not all(map(nearly_all_text, rows)):
            raise ConfigError("separators between documents count in the losses")
        half *= rows[0]["num_targets"] / rows[0]["num_bytes"] / math.log(2)
        return mean - half, mean + half

    rows = panel.rows
    counted = finite_perplexity(rows).notna() & rows.num_separators.notna()
    return _curves(panel, rows.bpb.where(counted), ends)


def answer_curves(panel: Panel) -> list[Curve]:
    """Return the share of items of a task whose whole answer is right, against evaluation length in tokens.

    All seeds answer the same items, so the intervals are those of the mean share over the items of one run. They cover
    other items, and not other seeds. If tokens are hidden, it is the share of them that is right, with the mean of the
    intervals of the runs. Then there is none if a run has none, since all of its tokens are right, or all are wrong.
    """
    name = "accuracy" if hides_tokens(panel) else "exact_match"

    def point(length: int, own: pd.DataFrame) -> Point:
        failed = tuple(own.status[own[name].isna()].where(lambda status: status.isin([*FAILED]), "nonfinite"))
        known, ends = own[own[name].notna()], None
        if name == "exact_match" and len(known):
            ends = wilson_interval(float(known.exact_match.mean()), int(known.num_items.min()))
        elif len(known) and known.accuracy_interval.notna().all():
            ends = tuple(np.mean(known.accuracy_interval.tolist(), axis=0).tolist())
        return Point(length, tuple(known[name]), failed, ends, is_share=True)

    curves = []
    for curve in panel.curves:
        lengths = curve.rows.groupby("eval_len")
        points = tuple(point(int(length), own) for length, own in lengths)
        curves.append(dataclasses.replace(curve, points=points))
    return _order_curves(curves)


def hides_tokens(panel: Panel) -> bool:
    """Tell whether the runs of a task predict hidden tokens, each of which is an answer of its own."""
    objectives = (settings.get("train.objective") for curve in panel.curves for settings in curve.runs.settings)
    return {*objectives} == {"masked"}


def weight_curves(panel: Panel, name: str) -> list[Curve]:
    """Return a number of the attention weights, a column of the rows, against evaluation length in tokens."""
    curves, is_share = [], name != "attention_entropy"
    for curve in panel.curves:
        known = curve.rows[curve.rows[name].notna()].groupby("eval_len")[name]
        points = tuple(Point(int(length), tuple(map(float, own)), is_share=is_share) for length, own in known)
        curves.append(dataclasses.replace(curve, points=points))
    return _order_curves(curves)


def nearly_all_text(row: Row) -> bool:
    """Tell whether the separators among the targets of a row are too few to be seen: at most one in a thousand."""
    separators = row["num_separators"]
    return separators is not None and 1000 * separators <= row["num_targets"]


def _factors(mean: float, half: float, rows: Sequence[Row]) -> tuple[float, float]:
    return mean * math.exp(-half), mean * math.exp(min(half, LARGEST_NLL))


def _curves(
    panel: Panel,
    values: pd.Series,
    ends: Callable[[float, float, Sequence[Row]], tuple[float, float]],
    bases: pd.DataFrame | None = None,
    unit: int = 1,
) -> list[Curve]:
    """Return the curves of a panel over the lengths they were measured at, in `unit`s, from one unit on.

    Args:
      panel: the rows.
      values: of the rows, NaN for a row without one.
      ends: (mean of the values, half the interval of the mean loss in nats, the rows) -> interval of the mean.
      bases: a row of each run, whose losses are subtracted from those of the same run, for the interval. If it failed,
        so does the run at all lengths.
      unit: tokens.
    """
    rows = panel.rows
    failed = _failures(rows)
    if bases is not None:
        failed = failed.where(failed != "", _failures(bases).reindex(rows.run, fill_value="").to_numpy())
    plain = dict(zip(rows.index, plain_rows(rows[BLOCKS].assign(value=values, failed=failed)), strict=True))
    at_train = {} if bases is None else {row["run"]: row for row in plain_rows(bases[BLOCKS])}

    def point(length: int, own: Sequence[Row]) -> Point:
        rows, failures = [row for row in own if row["value"] is not None], [row["failed"] for row in own]
        made = Point(length / unit, tuple(row["value"] for row in rows), tuple(filter(None, failures)))
        try:
            half = _half_width(rows, [at_train[row["run"]] for row in rows if at_train]) if rows else None
            return made if half is None else dataclasses.replace(made, interval=ends(made.mean, half, rows))
        except ConfigError as error:
            return dataclasses.replace(made, no_interval=str(error))

    curves = []
    for curve in panel.curves:
        lengths = curve.rows.index.groupby(curve.rows.eval_len)
        points = tuple(point(n, [plain[row] for row in own]) for n, own in sorted(lengths.items()) if n >= unit)
        curves.append(dataclasses.replace(curve, points=points))
    return _order_curves(curves)


def _failures(rows: pd.DataFrame) -> pd.Series:
    """Return why each row has no finite perplexity, a key of FAILED, "" if it has one."""
    return rows.status.where(rows.status.isin([*FAILED]), "nonfinite").where(finite_perplexity(rows).isna(), "")


def _half_width(rows: Sequence[Row], bases: Sequence[Row]) -> float:
    """Return half the 95 % interval over text of the mean loss of `rows`, or of its difference to `bases`, in nats.

    Raises ConfigError, in a few words, if the rows have no common blocks of text, or too few.
    """
    try:
        check_pair(*rows, *bases)
    except ConfigError:
        raise ConfigError("no losses of common blocks of text are stored") from None
    sums, counts = mean_blocks(rows)
    half = half_width(sums - mean_blocks(bases)[0] if bases else sums, counts)
    if half is None or few_places(*rows, *bases):
        raise ConfigError("too little text")
    return half


def _order_curves(curves: Iterable[Curve]) -> list[Curve]:
    """Return curves from the highest to the lowest right end, as in a legend. Shorter curves are before longer ones."""

    def key(curve: Curve) -> tuple[Any, ...]:
        last = max((point for point in curve.points if point.values), key=lambda point: point.x, default=None)
        return (last.x, -last.mean, curve.label) if last else (0.0, -math.inf, curve.label)

    return sorted(curves, key=key)


def average_bins(panel: Panel, values_of: Callable[[Row], dict[float, float]]) -> list[Curve]:
    """Return curves over the bins of the longest windows. A run with shorter windows lacks the last bins."""
    curves = []
    for curve in panel.curves:
        measured = [values_of(row) for row in plain_rows(curve.rows[_BINS])]
        values = {place: [one.get(place, math.nan) for one in measured] for place in sorted(max(measured, key=max))}
        points = tuple(Point(place, tuple(filter(math.isfinite, several))) for place, several in values.items())
        curves.append(dataclasses.replace(curve, points=points))
    return _order_curves(curves)


def _bins(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the edges [n + 1], losses [n] (NaN if a bin has none) and numbers of targets [n] of the bins."""
    nll = np.array([math.nan if number(value) is None else float(value) for value in row["position_nll"]])
    return np.asarray(row["position_edges"], np.float64), nll, np.asarray(row["position_targets"], np.float64)


def local_loss(row: Row) -> dict[float, float]:
    """Return the mean loss in nats per token of bins of at least 1/_BINS_PER_OCTAVE octave, at their geometric centres.

    Single late positions hold few targets, mostly noise. The last bin joins its neighbour if it has less than half of
    the neighbour's targets.
    """
    edges, nll, targets = _bins(row)
    centres = np.log2((edges[:-1] + 1) * np.maximum(edges[1:], edges[:-1] + 1)) / 2
    groups = np.floor(centres * _BINS_PER_OCTAVE).astype(int)
    last, before = groups[-1], max(groups[groups != groups[-1]], default=groups[-1])
    if last != before and 2 * targets[groups == last].sum() < targets[groups == before].sum():
        groups[groups == last] = before
    losses = {}
    for mine in (groups == group for group in np.unique(groups)):
        weight = targets[mine] / max(targets[mine].sum(), 1.0)
        losses[float(2 ** (centres[mine] * weight).sum())] = float((nll[mine] * weight).sum())
    return losses


def cumulative_perplexity(row: Row) -> dict[float, float]:
    """Return the perplexity of all targets up to the end of each bin; NaN from the first missing bin on."""
    edges, nll, targets = _bins(row)
    total = np.cumsum(np.where(targets > 0, nll * targets, 0.0)) / np.maximum(np.cumsum(targets), 1.0)
    return dict(zip(edges[1:].tolist(), np.exp(np.minimum(total, LARGEST_NLL)).tolist(), strict=True))


def read_training(
    folder: str | pathlib.Path, table: pd.DataFrame, notice: Callable[[str], object] = _LOG.warning
) -> tuple[pd.DataFrame, dict[str, Log]]:
    """Return the columns of every run with a log, and {run: its log}. `notice` is told of rows that are not whole."""
    logs = {path: log for path in run_folders(pathlib.Path(folder), "metrics.jsonl") if (log := read_log(path, notice))}
    names = {path: run_name(path, folder) for path in logs}
    known = list_runs(table[table.left_out == ""])
    others = [config_facts(path, name) for path, name in names.items() if name not in known.index]
    return pd.concat([known, list_runs(make_table(others, RUN_COLUMNS))]).loc[[*names.values()]], {
        names[path]: logs[path] for path in logs
    }


def read_log(folder: pathlib.Path, notice: Callable[[str], object] = lambda words: None) -> Log:
    """Return the log of a run, empty if no loss in it is finite. The last loss is NaN if training ended with it."""
    log, seconds, before = list[Logged](), 0.0, 0.0
    for row in drop_repeated(row for row in RunFolder(folder).logged_rows(notice) if "loss" in row):
        tokens, speed = (number(row.get(name, 0.0)) for name in ("tokens", "tokens_per_second"))
        if tokens:
            seconds, before = seconds + ((tokens - before) / speed if speed else 0.0), tokens
        loss = math.nan if ends_training(row) else float(row["loss"])
        log.append(Logged(row["step"], loss, tokens or 0.0, seconds))
    return log if any(math.isfinite(row.loss) for row in log) else []


def average_log(log: Log) -> Log:
    """Return the means of at most _MAX_TRAINING_POINTS equal spans of rows."""
    spans = np.array_split(log, min(len(log), _MAX_TRAINING_POINTS))
    return [Logged(*span.mean(axis=0).tolist()) for span in spans]
