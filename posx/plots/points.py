"""Curves of stored rows against length, position and step, averaged over seeds, with 95 % intervals over text.

Positions count from 1, so that L is the last trained.
The intervals are of the mean over the runs. Sums over common blocks of text are averaged over the runs first. The
interval thus covers the change by another text of the kind, not by another seed.
"""

import dataclasses
import logging
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from posx.errors import ConfigError
from posx.evaluation.statistics import check_pair, half_width, mean_blocks, targets_key
from posx.files import lines
from posx.plots.groups import Group, Panel
from posx.plots.palette import Look
from posx.plots.rows import FAILED, Row, Run, number, perplexity, run_of_config
from posx.runs.folder import name_of, run_folders

Interval = tuple[float, float] | None
_MAX_TRAINING_POINTS = 150
_BINS_PER_OCTAVE = 6


@dataclasses.dataclass(frozen=True)
class Point:
    """The results of the runs of one curve at one abscissa: values, and failures of the other runs."""

    x: float
    values: tuple[float, ...]
    failures: tuple[str, ...] = ()
    interval: Interval = None  # 95 %, of the mean over text
    no_interval: str = ""  # why there is none

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def low(self) -> float:
        return min(self.values, default=math.nan)

    @property
    def high(self) -> float:
        return max(self.values, default=math.nan)


@dataclasses.dataclass(frozen=True)
class Curve:
    """The points at which its runs were measured. A point without values is a gap: all of its runs failed."""

    label: str
    look: Look
    points: tuple[Point, ...]

    @property
    def seeds(self) -> tuple[int, int]:
        """The fewest and most runs behind the points that have a value; (0, 0) if none has."""
        counts = [len(point.values) for point in self.points if point.values]
        return (min(counts), max(counts)) if counts else (0, 0)


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One run's training loss (nats per token) against step."""

    run: Run
    steps: Sequence[float]
    losses: Sequence[float]  # NaN last if training ended with it

    @property
    def last(self) -> tuple[float, float]:
        """The last step with a finite loss, and that loss."""
        pairs = [pair for pair in zip(self.steps, self.losses, strict=True) if math.isfinite(pair[1])]
        return pairs[-1] if pairs else (self.steps[-1], math.nan)


def ordered(curves: Iterable[Curve]) -> list[Curve]:
    """Return curves from the highest to the lowest right end, as lines stand in a figure; shorter curves come first."""

    def key(curve: Curve) -> tuple[Any, ...]:
        last = max((point for point in curve.points if point.values), key=lambda point: point.x, default=None)
        return (last.x, -last.mean, curve.label) if last else (0.0, -math.inf, curve.label)

    return sorted(curves, key=key)


def perplexity_curves(panel: Panel) -> list[Curve]:
    """Return perplexity against evaluation length in tokens, over the runs that have a value."""
    return _curves(panel, lambda row, base: perplexity(row), lambda mean, rows, bases: _factors(mean, rows))


def bits_curves(panel: Panel) -> list[Curve]:
    """Return bits per byte of text against evaluation length, over the runs that know their bytes and their separators.

    Intervals are of the loss of all targets, so there are none if separators have a visible share of it.
    """

    def bits(row: Row, base: Row | None) -> float | None:
        counted = perplexity(row) is not None and row.get("num_separators") is not None
        return number(row.get("bpb")) if counted else None

    def interval(mean: float, rows: list[Row], bases: list[Row]) -> Interval:
        half = text_half_width(rows)
        if not all(map(nearly_all_text, rows)):
            raise ConfigError("separators between documents count in the losses")
        half *= rows[0]["num_targets"] / rows[0]["num_bytes"] / math.log(2)
        return mean - half, mean + half

    return _curves(panel, bits, interval)


def nearly_all_text(row: Row) -> bool:
    """Tell whether the separators among the targets of a row are too few to be seen: at most one in a thousand."""
    separators = row.get("num_separators")
    return separators is not None and 1000 * separators <= row["num_targets"]


def ratio_curves(panel: Panel) -> list[Curve]:
    """Return R_k = ppl(kL) / ppl(L) against k >= 1: ratios within each run, of the same targets, then averaged."""

    def ratio(row: Row, base: Row | None) -> float | None:
        paired = base is not None and len({targets_key(one | {"block_len": None}) for one in (base, row)}) == 1
        value, at_train = perplexity(row), perplexity(base) if base is not None and paired else None
        return value / at_train if value is not None and at_train is not None else None

    return _curves(panel, ratio, _factors, panel.train_len)


def text_half_width(rows: Sequence[Row], bases: Sequence[Row] = ()) -> float:
    """Return half the 95 % interval over text of the mean loss of `rows`, or of its difference to `bases`, in nats.

    Raises ConfigError, in a few words, if the rows have no common blocks of text, or too few.
    """
    try:
        check_pair(*rows, *bases)
    except ConfigError:
        raise ConfigError("no losses of common blocks of text are stored") from None
    sums, counts = mean_blocks(rows)
    half = half_width(sums - mean_blocks(bases)[0] if bases else sums, counts)
    if half is None:
        raise ConfigError("too little text")
    return half


def _factors(mean: float, rows: Sequence[Row], bases: Sequence[Row] = ()) -> Interval:
    """Return the interval of a perplexity, or of a ratio to `bases`, from that of its logarithm."""
    half = text_half_width(rows, bases)
    return mean * math.exp(-half), mean * math.exp(half)


def _curves(
    panel: Panel,
    measure: Callable[[Row, Row | None], float | None],
    interval: Callable[[float, list[Row], list[Row]], Interval],
    unit: int = 1,
) -> list[Curve]:
    """Return a curve per group over the lengths it was measured at, in `unit`s, from one unit on.

    measure: (row, the same run's row at the training length) -> value.
    interval: (mean of the values, their rows, these runs' rows at the training length) -> interval.
    """

    def point(length: int, group: Group, at_train: Mapping[Run, Row]) -> Point:
        pairs = [(row, at_train.get(row.run)) for row in group.rows if row["eval_len"] == length]
        measured = [(value, row, base) for row, base in pairs if (value := measure(row, base)) is not None]
        values = tuple(value for value, _, _ in measured)
        failed = [row.get("status") for row, _ in pairs if perplexity(row) is None]
        failures = tuple(status if status in FAILED else "nonfinite" for status in failed)
        rows, bases = [row for _, row, _ in measured], [base for _, _, base in measured if base]
        try:
            over_text = interval(statistics.fmean(values), rows, bases) if values else None
        except ConfigError as error:
            return Point(length / unit, values, failures, None, str(error))
        return Point(length / unit, values, failures, over_text)

    found = []
    for group in panel.groups:
        at_train = {row.run: row for row in group.rows if row["eval_len"] == panel.train_len}
        lengths = sorted({row["eval_len"] for row in group.rows if row["eval_len"] >= unit})
        found.append(Curve(group.label, group.look, tuple(point(n, group, at_train) for n in lengths)))
    return ordered(found)


def averaged(panel: Panel, values_of: Callable[[Row], dict[float, float]]) -> list[Curve]:
    """Return curves over the bins of the longest windows. A run with shorter windows lacks the last bins."""
    found = []
    for group in panel.groups:
        measured = [values_of(row) for row in group.rows if row.get("position_nll")]
        if measured:
            values = {place: [one.get(place, math.nan) for one in measured] for place in sorted(max(measured, key=max))}
            points = tuple(Point(place, tuple(filter(math.isfinite, several))) for place, several in values.items())
            found.append(Curve(group.label, group.look, points))
    return ordered(found)


def _bins(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the edges [n + 1], losses [n] (NaN if a bin has none) and numbers of targets [n] of the bins."""
    nll = np.array([math.nan if number(value) is None else float(value) for value in row["position_nll"]])
    return np.asarray(row["position_edges"], np.float64), nll, np.asarray(row["position_targets"], np.float64)


def local(row: Row) -> dict[float, float]:
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
    found = {}
    for mine in (groups == group for group in np.unique(groups)):
        weight = targets[mine] / max(targets[mine].sum(), 1.0)
        found[float(2 ** (centres[mine] * weight).sum())] = float((nll[mine] * weight).sum())
    return found


def cumulative(row: Row) -> dict[float, float]:
    """Return the perplexity of all targets up to the end of each bin; NaN from the first missing bin on."""
    edges, nll, targets = _bins(row)
    total = np.cumsum(np.where(targets > 0, nll * targets, 0.0)) / np.maximum(np.cumsum(targets), 1.0)
    return dict(zip(edges[1:].tolist(), np.exp(np.minimum(total, 700.0)).tolist(), strict=True))


def read_training(folder: str | pathlib.Path, stored: Sequence[Row]) -> list[TrainingRun]:
    """Return the training loss of every run with a log, averaged over at most _MAX_TRAINING_POINTS equal spans."""
    known = {row.run.path: row.run for row in stored}
    found = []
    for folder_of_run in run_folders(pathlib.Path(folder), "metrics.jsonl"):
        losses: dict[float, float] = {}
        for row in lines.read(folder_of_run / "metrics.jsonl", logging.getLogger(__name__).warning):
            step = number(row.get("step"))
            if step is not None and "loss" in row:
                loss, norm = number(row["loss"]), number(row.get("grad_norm", 0.0))
                losses[step] = math.nan if loss is None or norm is None else loss  # a resumed run repeats steps
        if any(map(math.isfinite, losses.values())):
            spans = np.array_split(sorted(losses.items()), min(len(losses), _MAX_TRAINING_POINTS))
            steps, values = np.array([span.mean(axis=0) for span in spans]).T.tolist()
            path = name_of(folder_of_run, folder)
            found.append(TrainingRun(known.get(path) or run_of_config(folder_of_run, path), steps, values))
    return found
