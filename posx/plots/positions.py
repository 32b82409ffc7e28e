"""Loss along the window and along training, from stored rows. Positions count from 1, so that L is the last trained."""

import dataclasses
import logging
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from posx.files import lines
from posx.plots.groups import Panel
from posx.plots.points import Curve, Point, ordered
from posx.plots.rows import Row, Run, number, run_of_config
from posx.runs.folder import name_of, run_folders

_MAX_TRAINING_POINTS = 150
_BINS_PER_OCTAVE = 6


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One run's training loss (nats per token) against step."""

    run: Run
    steps: Sequence[float]
    losses: Sequence[float]  # NaN last where training ended with it

    @property
    def last(self) -> tuple[float, float]:
        """The last step with a finite loss, and that loss."""
        pairs = [pair for pair in zip(self.steps, self.losses, strict=True) if math.isfinite(pair[1])]
        return pairs[-1] if pairs else (self.steps[-1], math.nan)


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
    """Return the edges [n + 1], losses [n] (NaN for a bin without one) and numbers of targets [n] of the bins."""
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
    """Return the training loss of every run with a `metrics.jsonl`.

    The last row of a step wins, so that a resumed run counts once. Logs of more than _MAX_TRAINING_POINTS steps are
    averaged over as many equal spans.
    """
    known = {row.run.path: row.run for row in stored}
    found = []
    for folder_of_run in run_folders(pathlib.Path(folder), "metrics.jsonl"):
        losses: dict[float, float] = {}
        for row in lines.read(folder_of_run / "metrics.jsonl", logging.getLogger(__name__).warning):
            step = number(row.get("step"))
            if step is not None and "loss" in row:
                loss, norm = number(row["loss"]), number(row.get("grad_norm", 0.0))
                losses[step] = math.nan if loss is None or norm is None else loss
        if any(map(math.isfinite, losses.values())):
            spans = np.array_split(sorted(losses.items()), min(len(losses), _MAX_TRAINING_POINTS))
            steps, values = np.array([span.mean(axis=0) for span in spans]).T.tolist()
            path = name_of(folder_of_run, folder)
            found.append(TrainingRun(known.get(path) or run_of_config(folder_of_run, path), steps, values))
    return found
