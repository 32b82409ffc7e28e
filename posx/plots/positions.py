"""Loss along the window and along training, from stored rows. Positions count from 1, so that L is the last trained."""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from posx.plots import rows
from posx.plots.points import Curve, Point, ordered
from posx.plots.rows import Panel, Row, number

_MAX_TRAINING_POINTS = 150
_BINS_PER_OCTAVE = 6


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One run's training loss (nats per token) against step."""

    name: str
    encoding: str
    steps: tuple[float, ...]
    losses: tuple[float, ...]


def complete(row: Row) -> bool:
    """Whether a row holds per-position results: edges [n + 1], nll [n], targets [n], n >= 1."""
    edges, nll, targets = (row.get(key) for key in ("position_edges", "position_nll", "position_targets"))
    if not (isinstance(edges, list) and isinstance(nll, list) and isinstance(targets, list) and nll):
        return False
    whole = all(number(value) is not None for value in [*edges, *targets])
    return whole and len(edges) == len(nll) + 1 == len(targets) + 1


def _averaged(panel: Panel, kind: str) -> list[Curve]:
    """Curves over the bins: "local" is the mean nats in a bin (at its centre), "cumulative" perplexity (at its end)."""
    found = []
    for name, detail, variant, members in rows.by_encoding([row for row in panel.rows if complete(row)]):
        values: dict[float, list[float]] = collections.defaultdict(list)
        for row in members:
            for place, value in _cumulative(row) if kind == "cumulative" else _local(row):
                values[place].extend([value] if math.isfinite(value) else [])
        points = tuple(Point(place, tuple(values[place])) for place in sorted(values))
        found.append(Curve(name, detail, variant, points))
    return ordered(found)


def _bins(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    edges = np.asarray(row["position_edges"], np.float64)
    nll = np.array([math.nan if number(value) is None else float(value) for value in row["position_nll"]])
    return edges, nll, np.asarray(row["position_targets"], np.float64)


def _local(row: Row) -> list[tuple[float, float]]:
    """Means over bins of at least 1/_BINS_PER_OCTAVE octave: single late positions hold few targets, mostly noise."""
    edges, nll, targets = _bins(row)
    centres = np.log2((edges[:-1] + 1) * np.maximum(edges[1:], edges[:-1] + 1)) / 2
    groups = np.floor(centres * _BINS_PER_OCTAVE).astype(int)
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
    names = {str(row["run_id"]): row["encoding"] for row in stored}
    found = []
    for run in rows.run_folders(pathlib.Path(folder), "metrics.jsonl"):
        losses: dict[float, float] = {}
        for row in rows.read_jsonl(run / "metrics.jsonl"):
            step = number(row.get("step"))
            if step is not None and "loss" in row:
                loss = number(row["loss"])
                losses[step] = math.nan if loss is None else loss
        if any(math.isfinite(loss) for loss in losses.values()):
            steps, values = _thinned(np.array(sorted(losses)), np.array([losses[step] for step in sorted(losses)]))
            found.append(TrainingRun(run.name, _encoding_of(run, names), steps, values))
    return found


def _encoding_of(run: pathlib.Path, names: dict[str, str]) -> str:
    """The registry name of a run: from its results, else from its config.json, else the folder's name."""
    if run.name in names:
        return names[run.name]
    for file, key in (("eval.jsonl", None), ("config.json", "encoding")):
        if (run / file).is_file():
            for row in rows.read_jsonl(run / file) or _whole(run / file):
                value = row.get("encoding") if key is None else row.get(key)
                value = value.get("name") if isinstance(value, dict) else value
                if isinstance(value, str):
                    return value
    return run.name


def _whole(path: pathlib.Path) -> list[Row]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        return []
    return [value] if isinstance(value, dict) else []


def _thinned(steps: np.ndarray, losses: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """At most `_MAX_TRAINING_POINTS` points, each the mean over an equal span of rows."""
    if len(steps) <= _MAX_TRAINING_POINTS:
        return tuple(steps.tolist()), tuple(losses.tolist())
    spans = np.array_split(np.arange(len(steps)), _MAX_TRAINING_POINTS)
    return tuple(float(steps[span].mean()) for span in spans), tuple(float(losses[span].mean()) for span in spans)
