"""How many steps, and how many seconds, a run needs to reach the training loss at which another encoding ends.

Losses are in nats per token. The loss of a few steps depends on the text of these steps. So all losses here are means
over a window of steps, of equal length for all runs of a table.
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from posx.lab.plots import captions, look
from posx.lab.plots.curves import objectives
from posx.lab.plots.groups import Curve, Point, curves_of_runs
from posx.lab.plots.points import Log, Logged
from posx.lab.plots.tables import RowTable
from posx.lab.results.columns import FAILED, make_table
from posx.lab.results.facts import SCORED_STEP

#: How the text of a table begins.
TRAINING = "Steps to a training loss"
#: Failures: a run does not reach the loss, its log ends before its planned steps, or its last loss is NaN.
UNREACHED, UNFINISHED, DIVERGED = "unreached", "unfinished", "diverged"
_FAILED = {UNREACHED: "not reached", UNFINISHED: "not finished", DIVERGED: FAILED["diverged"]}
_WINDOWS = 20  # in a training: more would be noisier, fewer would lag behind the loss


def smooth_losses(log: Log, window: float) -> np.ndarray:
    """Return at each row [n] of a log the mean loss of the `window` steps that end there, NaN for rows before that.

    A row holds the mean of its steps. If the window begins inside a row, these steps count with that mean.
    """
    steps = np.array([0.0, *(row.step for row in log)])
    sums = np.concatenate([[0.0], np.cumsum(np.diff(steps) * [row.loss for row in log])])
    means = (sums[1:] - np.interp(steps[1:] - window, steps, sums)) / window
    return np.where(steps[1:] >= window, means, math.nan)


def first_reached(log: Log, target: float, window: float) -> Logged | None:
    """Return the first row from which the smoothed loss is at or below `target`, in all later rows too, else None.

    A loss that dips below the target for a while has not reached it: noise alone can do that.
    """
    above = np.flatnonzero(~(smooth_losses(log, window) <= target))
    row = above[-1] + 1 if len(above) else 0
    return log[row] if row < len(log) else None


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
    settings = {run: own for curve in curves for run, own in curve.runs.settings.items()}
    early = {run: logs[run] for run, own in settings.items() if _ended_early(own, logs[run])}
    solved = {run: log for run, log in early.items() if _is_solved(settings[run])}
    logs = {run: logs[run] for run in settings if run in solved or run not in early}
    window = _window([log for log in logs.values() if math.isfinite(log[-1].loss)])
    ends = {curve.label: _finals(curve, logs, window) for curve in curves}
    ranked = sorted((curve for curve in curves if ends[curve.label].values), key=lambda curve: ends[curve.label].mean)
    if len(ranked) < 2:
        return []
    reference = ranked[len(ranked) // 2]
    pairs = [
        (run, seed) for run, seed in zip(reference.runs.run, reference.runs.train_seed, strict=True) if run in logs
    ]
    targets = {seed: loss for run, seed in pairs if math.isfinite(loss := final_loss(logs[run], window))}
    name = look.one_line(reference.label)
    columns = ["smoothed training loss at the end", f"steps to the loss of {name}", "seconds of training to that loss"]
    lines = []
    for curve in [*ranked, *(curve for curve in curves if curve not in ranked)]:
        points = (ends[curve.label], *_points(curve, targets, logs, window))
        drawn = dataclasses.replace(curve, rows=make_table([]), points=points[:1])
        lines.append((drawn, dict(zip(columns, points, strict=True))))
    own = [logs[run][-1] for run, seed in pairs if seed in targets]
    trained = reference.runs.settings.iloc[0]
    source, tokenizer, text = (trained.get(f"data.{name}") for name in ("source", "tokenizer", "text"))
    facts = [
        f"{TRAINING}: that at which {name} ends, {_cell(Point(0, ends[reference.label].values))} nats per token after "
        f"{_cell(Point(0, tuple(row.step for row in own)))} steps and "
        f"{_cell(Point(0, tuple(row.seconds for row in own)))} s",
        f"trained at L = {reference.runs.train_len.iloc[0]}" + (f" on {look.one_line(source, 40)}" if source else ""),
        *([f"tokenizer {look.one_line(tokenizer, 40)}"] if tokenizer else []),
        *([f"training text {text[:12]}"] if text else []),
        f"losses are means of the last {window:,.0f} steps",
    ]
    last = [(run, "ok", int(log[-1].step), settings[run]) for run, log in solved.items()]
    ended = pd.DataFrame(last, columns=["run", "status", "step", "settings"])
    notes = [*_notes(curves, ranked, targets), *captions.unfinished_lines(ended)]
    return [RowTable(None, facts, [], columns, lines, notes, _cell)]


def _ended_early(settings: Mapping[str, Any], log: Log) -> bool:
    """Tell whether a log ends before the planned steps, and not with NaN."""
    return log[-1].step < settings.get("train.steps", 0) and math.isfinite(log[-1].loss)


def _is_solved(settings: Mapping[str, Any]) -> bool:
    """Tell whether training may end early and its last weights count as those of all steps."""
    return bool(settings.get("train.stop_check_steps")) and settings.get(SCORED_STEP) == settings["train.steps"]


def _window(logs: Sequence[Log]) -> float:
    """Return the steps of the window: a share of the shortest log, at least those between two rows of a log."""
    shortest = min((log[-1].step for log in logs), default=1.0)
    spaces = [max(np.diff([0.0, *(row.step for row in log)])) for log in logs]
    return float(min(shortest, max(1.0, shortest // _WINDOWS, *spaces)))


def _finals(curve: Curve, logs: Mapping[str, Log], window: float) -> Point:
    """Return the smoothed losses at the end of the runs of a curve without those that are NaN."""
    losses = [final_loss(logs[run], window) for run in curve.runs.run if run in logs]
    known = tuple(filter(math.isfinite, losses))
    failures = (UNFINISHED,) * (len(curve.runs) - len(losses)) + (DIVERGED,) * (len(losses) - len(known))
    return Point(0, known, failures)


def _points(curve: Curve, targets: Mapping[str, float], logs: Mapping[str, Log], window: float) -> tuple[Point, Point]:
    """Return the steps and the seconds that the runs of a curve need, each to the loss of its seed."""
    own = [(run, seed) for run, seed in zip(curve.runs.run, curve.runs.train_seed, strict=True) if seed in targets]
    reached = [first_reached(logs[run], targets[seed], window) for run, seed in own if run in logs]
    failures = (UNREACHED,) * reached.count(None) + (UNFINISHED,) * sum(run not in logs for run in curve.runs.run)
    steps, seconds = (tuple(getattr(one, name) for one in reached if one) for name in ("step", "seconds"))
    return Point(0, steps, failures), Point(0, seconds, failures)


def _notes(curves: Sequence[Curve], ranked: Sequence[Curve], seeds: Collection[str]) -> list[str]:
    """Return what the numbers mean.

    Args:
      curves: all of them.
      ranked: those that have a loss at their end. The one in the middle is the reference.
      seeds: of the runs of the reference that have one.
    """
    reference = ranked[len(ranked) // 2]
    name = look.one_line(reference.label)
    batches = {settings.get("train.batch_size") for curve in curves for settings in curve.runs.settings}
    alike = ", which saw the same batches in the same order" if len(batches) == 1 else ""
    middle = "" if len(ranked) % 2 else ", the higher of the two in the middle"
    lonely = [one.label for one in curves if not {*one.runs.train_seed} <= {*seeds} and one is not reference]
    return [
        f"{name} has the median loss at the end{middle}. Each run is compared with its run of the same seed{alike}",
        "A run reaches the loss at the first logged step from which its own stays at or below it. Parentheses: lowest "
        f"to highest seed. {name} itself needs fewer than all of its steps only by noise or a flat end",
        "Seconds are of training steps, without compiling, saving and measuring. They do not compare if runs shared a "
        "machine or had different ones",
        *captions.tokens_per_step(curves),
        *([f"Without a partner for some seeds: {captions.join_names(lonely, 'curves')}"] if lonely else []),
    ]


def _cell(point: Point) -> str:
    """Return the mean, the lowest and highest seed, and how many runs failed: "1,240 (1,200 to 1,300)"."""
    failed, total = Counter(point.failures), len(point.values) + len(point.failures)
    parts = [f"{count} of {total} {_FAILED[kind]}" for kind, count in failed.items()]
    if point.values:
        low, mean, high = map(_number, (point.low, statistics.fmean(point.values), point.high))
        parts = [mean if low == high else f"{mean} ({low} to {high})", *parts]
    elif len(failed) == 1:
        parts = [_FAILED[kind] for kind in failed]
    return ", ".join(parts) or "-"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == round(value) else f"{value:.4g}"
