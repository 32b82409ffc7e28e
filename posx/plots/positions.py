"""Loss along the window and along training, from stored rows. Positions count from 1, so that L is the last trained."""

import dataclasses
import logging
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from posx.files import lines
from posx.plots.groups import Panel
from posx.plots.points import Curve, Point, ordered
from posx.plots.rows import Row, Run, complete, number, run_of_config
from posx.runs.folder import name_of, run_folders

_MAX_TRAINING_POINTS = 150
_BINS_PER_OCTAVE = 6


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One run's training loss (nats per token) against step."""

    run: Run
    steps: tuple[float, ...]
    losses: tuple[float, ...]  # NaN last where training ended with it

    @property
    def last(self) -> tuple[float, float]:
        """The last step with a finite loss, and that loss."""
        pairs = [pair for pair in zip(self.steps, self.losses, strict=True) if math.isfinite(pair[1])]
        return pairs[-1] if pairs else (self.steps[-1], math.nan)


def _averaged(panel: Panel, kind: str) -> list[Curve]:
    """Curves over the bins: "local" is the mean nats in a bin (at its centre), "cumulative" perplexity (at its end).

    The bins are those of the longest windows; of a run with shorter ones, those that it has too.
    """
    found = []
    for group in panel.groups:
        measured = [
            dict(_cumulative(row) if kind == "cumulative" else _local(row)) for row in group.rows if complete(row)
        ]
        if measured:
            places = max(measured, key=max)
            values = {place: [one.get(place, math.nan) for one in measured] for place in sorted(places)}
            points = tuple(Point(place, tuple(filter(math.isfinite, several))) for place, several in values.items())
            found.append(Curve(group.label, group.look, points))
    return ordered(found)


def _bins(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    edges = np.asarray(row["position_edges"], np.float64)
    nll = np.array([math.nan if number(value) is None else float(value) for value in row["position_nll"]])
    return edges, nll, np.asarray(row["position_targets"], np.float64)


def _local(row: Row) -> list[tuple[float, float]]:
    """Means over bins of at least 1/_BINS_PER_OCTAVE octave: single late positions hold few targets, mostly noise.

    So does what is left over at the end, which joins its neighbour if it has less than half of its targets.
    """
    edges, nll, targets = _bins(row)
    centres = np.log2((edges[:-1] + 1) * np.maximum(edges[1:], edges[:-1] + 1)) / 2
    groups = np.floor(centres * _BINS_PER_OCTAVE).astype(int)
    last, before = groups[-1], max(groups[groups != groups[-1]], default=groups[-1])
    if last != before and 2 * targets[groups == last].sum() < targets[groups == before].sum():
        groups[groups == last] = before
    points = []
    for group in np.unique(groups):
        mine = groups == group
        weight = targets[mine] / max(targets[mine].sum(), 1.0)
        points.append((float(2 ** (centres[mine] * weight).sum()), float((nll[mine] * weight).sum())))
    return points


def _cumulative(row: Row) -> list[tuple[float, float]]:
    """Perplexity of all targets from the window's start to the end of each bin; none after the first missing bin."""
    edges, nll, targets = _bins(row)
    total = np.cumsum(np.where(targets > 0, nll * targets, 0.0)) / np.maximum(np.cumsum(targets), 1.0)
    return list(zip(edges[1:].tolist(), np.exp(np.minimum(total, 700.0)).tolist(), strict=True))


def loss_curves(panel: Panel) -> list[Curve]:
    """Mean loss in nats per token of each bin, at the geometric centre of its positions."""
    return _averaged(panel, "local")


def cumulative_curves(panel: Panel) -> list[Curve]:
    """Perplexity per token of the targets up to the end of each bin."""
    return _averaged(panel, "cumulative")


def read_training(folder: str | pathlib.Path, stored: Sequence[Row]) -> list[TrainingRun]:
    """Training loss of every run with a `metrics.jsonl`; the last row of a step wins, so a resumed run counts once."""
    known = {row.run.path: row.run for row in stored}
    found = []
    for folder_of_run in run_folders(pathlib.Path(folder), "metrics.jsonl"):
        losses: dict[float, float] = {}
        for row in lines.read(folder_of_run / "metrics.jsonl", logging.getLogger(__name__).warning):
            step = number(row.get("step"))
            if step is not None and "loss" in row:
                loss, norm = number(row["loss"]), number(row.get("grad_norm", 0.0))
                losses[step] = math.nan if loss is None or norm is None else loss
        if any(math.isfinite(loss) for loss in losses.values()):
            steps, values = _thinned(np.array(sorted(losses)), np.array([losses[step] for step in sorted(losses)]))
            path = name_of(folder_of_run, folder)
            run = known.get(path) or run_of_config(folder_of_run, path)
            found.append(TrainingRun(run, steps, values))
    return found


def _thinned(steps: np.ndarray, losses: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """At most `_MAX_TRAINING_POINTS` points, each the mean over an equal span of rows."""
    if len(steps) <= _MAX_TRAINING_POINTS:
        return tuple(steps.tolist()), tuple(losses.tolist())
    spans = np.array_split(np.arange(len(steps)), _MAX_TRAINING_POINTS)
    return tuple(float(steps[span].mean()) for span in spans), tuple(float(losses[span].mean()) for span in spans)
