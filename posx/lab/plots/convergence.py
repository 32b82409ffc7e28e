"""How many steps, and how many seconds, a run needs to reach the training loss at which another encoding ends.

Losses are in nats per token. The loss of a few steps depends on the text of these steps. So all losses here are means
over a window of steps, of equal length for all runs of a table.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from posx.lab.plots import captions, look
from posx.lab.plots.curves import objectives
from posx.lab.plots.groups import Curve, Panel, Point, curves_of_runs
from posx.lab.plots.points import Log
from posx.lab.plots.tables import RowTable
from posx.lab.results.columns import make_table

#: How the text of a table begins.
TRAINING = "Steps to a training loss"
#: The failure of a run that does not reach the loss.
UNREACHED = "unreached"
_WINDOWS = 20  # in a training: more would be noisier, fewer would lag behind the loss


class Reached(NamedTuple):
    """The row of a log from which its smoothed loss stays at or below a target.

    Attributes:
      step: the steps done.
      seconds: of training steps so far.
    """

    step: float
    seconds: float


def smooth_losses(log: Log, window: float) -> np.ndarray:
    """Return at each row [n] of a log the mean loss of the `window` steps that end there, NaN for rows before that.

    A row holds the mean of its steps. If the window begins inside a row, these steps count with that mean.
    """
    steps = np.array([0.0, *(row.step for row in log)])
    sums = np.concatenate([[0.0], np.cumsum(np.diff(steps) * [row.loss for row in log])])
    means = (sums[1:] - np.interp(steps[1:] - window, steps, sums)) / window
    return np.where(steps[1:] >= window, means, math.nan)


def first_reached(log: Log, target: float, window: float) -> Reached | None:
    """Return the first row from which the smoothed loss is at or below `target`, in all later rows too, else None.

    A loss that dips below the target for a while has not reached it: noise alone can do that.
    """
    above = np.flatnonzero(~(smooth_losses(log, window) <= target))
    row = above[-1] + 1 if len(above) else 0
    return Reached(log[row].step, log[row].seconds) if row < len(log) else None


def final_loss(log: Log, window: float) -> float:
    """Return the mean loss of the last `window` steps of a log, NaN if it has fewer or ended with NaN."""
    return float(smooth_losses(log, window)[-1])


def convergence_tables(runs: pd.DataFrame, logs: Mapping[str, Log]) -> list[RowTable]:
    """Return a table for each training length, text and objective at which several encodings were trained.

    Args:
      runs: the columns of runs. Runs without a log are left out.
      logs: {run: its log}.
    """
    runs = runs[runs.run.isin([*logs])]
    text = runs.settings.map(lambda settings: str(settings.get("data.text")))
    groups = [curves_of_runs(own) for _, own in runs.groupby(["train_len", text, objectives(runs)])]
    return [made for curves in groups if len(curves) > 1 for made in _tables(curves, logs)]


def _tables(curves: Sequence[Curve], logs: Mapping[str, Log]) -> list[RowTable]:
    """Return the table of curves that may be compared; none if fewer than two have a loss at their end."""
    window = _window(curves, logs)
    ends = {curve.label: _finals(curve, logs, window) for curve in curves}
    ranked = sorted((curve for curve in curves if ends[curve.label].values), key=lambda curve: ends[curve.label].mean)
    if len(ranked) < 2:
        return []
    reference = ranked[len(ranked) // 2]
    name = look.one_line(reference.label)
    seconds = "seconds to it, each on its own machine"
    columns = ["smoothed training loss at the end", f"steps to the loss of {name}", seconds]
    lines = []
    for curve in [*ranked, *(curve for curve in curves if curve not in ranked)]:
        points = (ends[curve.label], *_points(curve, reference, logs, window))
        drawn = dataclasses.replace(curve, rows=make_table([]), points=points[:1])
        lines.append((drawn, dict(zip(columns, points, strict=True))))
    own = [logs[run][-1] for run in reference.runs.run]
    source = reference.runs.settings.iloc[0].get("data.source")
    facts = [
        f"{TRAINING}: that at which {name} ends, {_cell(ends[reference.label])} nats per token after "
        f"{_cell(Point(0, tuple(row.step for row in own)))} steps and "
        f"{_cell(Point(0, tuple(row.seconds for row in own)))} s",
        f"trained at L = {reference.runs.train_len.iloc[0]}" + (f" on {look.one_line(source, 40)}" if source else ""),
        f"losses are means of the last {window:,.0f} steps",
    ]
    panel = Panel(int(reference.runs.train_len.iloc[0]), "", None, tuple(curves), make_table([]), {})
    return [RowTable(panel, facts, [], columns, lines, _notes(curves, reference, name), _cell)]


def _window(curves: Sequence[Curve], logs: Mapping[str, Log]) -> float:
    """Return the steps of the window: a share of the shortest training, at least those between two rows of a log."""
    runs = [(settings, logs[run]) for curve in curves for run, settings in curve.runs.settings.items()]
    planned = min(float(settings.get("train.steps") or log[-1].step) for settings, log in runs)
    return max(1.0, planned // _WINDOWS, *(max(np.diff([0.0, *(row.step for row in log)])) for _, log in runs))


def _finals(curve: Curve, logs: Mapping[str, Log], window: float) -> Point:
    """Return the smoothed losses at the end of the runs of a curve, without those that are NaN."""
    losses = [final_loss(logs[run], window) for run in curve.runs.run]
    return Point(0, tuple(filter(math.isfinite, losses)))


def _points(curve: Curve, reference: Curve, logs: Mapping[str, Log], window: float) -> tuple[Point, Point]:
    """Return the steps and the seconds that the runs of a curve need, each to the loss of the same seed."""
    pairs = zip(reference.runs.run, reference.runs.train_seed, strict=True)
    targets = {seed: target for run, seed in pairs if math.isfinite(target := final_loss(logs[run], window))}
    own = [(logs[run], seed) for run, seed in zip(curve.runs.run, curve.runs.train_seed, strict=True)]
    long = [(log, targets[seed]) for log, seed in own if seed in targets and log[-1].step >= window]
    reached = [first_reached(log, target, window) for log, target in long]
    failures = (UNREACHED,) * reached.count(None)
    steps, seconds = (tuple(getattr(one, name) for one in reached if one) for name in Reached._fields)
    return Point(0, steps, failures), Point(0, seconds, failures)


def _notes(curves: Sequence[Curve], reference: Curve, name: str) -> list[str]:
    batches = {settings.get("train.batch_size") for curve in curves for settings in curve.runs.settings}
    alike = ", which saw the same batches in the same order" if len(batches) == 1 else ""
    seeds = set(reference.runs.train_seed)
    lonely = [one.label for one in curves if not set(one.runs.train_seed) <= seeds]
    return [
        f"{name} has the median loss at the end, the higher of two. Each run is compared with its run of the "
        f"same seed{alike}",
        "A run reaches the loss at the first logged step from which its own stays at or below it. Parentheses: lowest "
        f"to highest seed. The row of {name} shows how early noise or a flat end reaches it",
        "Seconds are of training steps, without compiling, saving and measuring. They do not compare if runs shared a "
        "machine or had different ones",
        *captions.tokens_per_step(curves),
        *([f"Without a partner for some seeds: {captions.join_names(lonely, 'curves')}"] if lonely else []),
    ]


def _cell(point: Point) -> str:
    """Return the mean, the lowest and highest seed, and how many runs failed: "1,240 (1,200 to 1,300)"."""
    total, failed = len(point.values) + len(point.failures), len(point.failures)
    if not point.values:
        return "not reached" if failed else "-"
    low, mean, high = map(_number, (point.low, statistics.fmean(point.values), point.high))
    text = mean if low == high else f"{mean} ({low} to {high})"
    return f"{text}, {failed} of {total} not reached" if failed else text


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == round(value) else f"{value:.4g}"
