"""What figures and tables say in words: what was scored, what bars and bands are, warnings, failures, omissions."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from posx.evaluation.statistics import targets_key
from posx.plots import look, rows
from posx.plots.groups import Group, Panel, common_settings
from posx.plots.points import Curve, Point
from posx.runs.targets import anchor_of

FAILURE_NAMES = {
    "undefined": "undefined",
    "nonfinite": "not finite",
    "oom": "out of memory",
    "diverged": "ended with NaN",
    "apart": "on other targets",
}
_MOST_NAMES = 4
Rows = Sequence[Mapping[str, Any]]


def labels(curves: Sequence[Curve], most: int | None = None) -> list[str]:
    """A curve's name over some short lines, and its number of seeds where that is not everybody's."""
    everybody = most if most is not None else max((curve.seeds[1] for curve in curves), default=0)
    found = []
    for curve in curves:
        name = look.wrapped(curve.label)
        few, many = curve.seeds
        if many and (few, many) != (everybody, everybody):
            name += f" (n = {few})" if few == many else f" (n = {few} to {many})"
        found.append(name if many else f"{name} (no value)")
    return found


def facts(panels: Sequence[Panel]) -> list[str]:
    """Subtitle lines: the protocol and what was scored; the training length, seeds and text."""
    panel_rows, protocol = [row for panel in panels for row in panel.rows], panels[0].protocol
    strides = sorted({row["stride"] for row in panel_rows if isinstance(row.get("stride"), int)})
    first = rows.PROTOCOLS.get(protocol, look.shown(protocol))
    if protocol == rows.PER_POSITION:
        first += f", windows of {_range(sorted({row['eval_len'] for row in panel_rows}))} tokens"
    if protocol == "sliding" and strides:
        first += f", stride {_range(strides)}"
    if targets := _numbers(panel_rows, "num_targets"):
        first += f" · {_range(targets)} targets scored per " + ("run" if protocol == rows.PER_POSITION else "length")
    if documents := _numbers(panel_rows, "num_documents"):
        stretches = _numbers(panel_rows, "num_stretches")
        first += f", {_range(stretches)} stretches of" if stretches and stretches[-1] > 1 else " of"
        first += f" {_range(documents)} document{'s' if documents[-1] > 1 else ''}"
    seeds = sorted({len(group.runs) for panel in panels for group in panel.groups}) or [0]
    lengths = ", ".join(f"{panel.train_len}" for panel in panels)
    second = f"trained at L = {lengths} · {_range(seeds)} seed{'s' if seeds != [1] else ''}"
    for key, word in (("tokenizer", "tokenizer"), ("data_digest", "text")):
        names = sorted({str(row[key]) for row in panel_rows if row.get(key)})
        if names:
            names = [name[:12] if key == "data_digest" else look.shown(name, 40) for name in names]
            second += f" · {word} " + ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    return [first[0].upper() + first[1:], second[0].upper() + second[1:]]


def spreads(curves: Sequence[Curve], interval: str) -> list[str]:
    """A subtitle line on what the band, the dots and the bars of a figure are; none where there are none.

    interval: of what the bars are; "" in a figure of many points, which has neither bars nor dots.
    """
    seeds = f"Line: mean over seeds, band: lowest to highest{', dots: each' if interval else ''}"
    parts = [seeds] if any(curve.seeds[1] > 1 for curve in curves) else []
    points = [point for curve in curves for point in curve.points]
    if interval:
        parts += [f"Bars: {interval}"] if any(point.interval for point in points) else []
        parts += no_intervals([("", point) for point in points])
    return [" · ".join(parts)] if parts else []


def no_intervals(points: Sequence[tuple[str, Point]]) -> list[str]:
    """Return why no point has an interval; if some have one, a line on the names of the others for each reason."""
    said: dict[str, list[str]] = {}
    for name, point in points:
        if point.no_interval:
            said.setdefault(point.no_interval, []).append(name)
    if any(point.interval for _, point in points):
        names = {why: list(filter(None, of)) for why, of in said.items()}
        return [f"No interval for {named(of)}{_others(of, 'cells')}: {why}" for why, of in names.items() if of]
    return [f"No intervals: {', '.join(said)}"] if said else []


def mixture(panel_rows: Rows) -> str:
    """A warning where numbers of different texts, tokenizers or targets stand side by side, else an empty string."""
    for key, word in (("data_digest", "corpora"), ("tokenizer", "tokenizers")):
        if len({str(row[key]) for row in panel_rows if row.get(key)}) > 1:
            return f"different {word}: not comparable"
    scored = [row for row in panel_rows if row.get("status") not in ("diverged", "apart")]
    # Losses per position in windows of other lengths are on other targets, which a note says.
    windows = {row["eval_len"] if row["protocol"] == rows.PER_POSITION else None for row in scored}
    if len({targets_key(row) for row in scored}) > len(windows):
        return "scored on different targets: evaluate all runs again to compare them"
    return ""


def _numbers(panel_rows: Rows, key: str) -> list[int]:
    return sorted({row[key] for row in panel_rows if isinstance(row.get(key), int)})


def _range(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def unlike_windows(panel: Panel) -> list[str]:
    """Of losses by position: curves of windows shorter than others, whose targets up to there are others too."""
    said: dict[int, list[str]] = {}
    for group in panel.groups:
        said.setdefault(max((row["eval_len"] for row in group.rows), default=0), []).append(group.label)
    *shorter, longest = sorted(said)
    return [
        f"In windows of {length:,} tokens, so on other targets at these positions than in those of {longest:,}: "
        f"{named(said[length])}{_others(said[length], 'curves')}"
        for length in shorter
    ]


def notes(
    panels: Sequence[Panel], curves: Sequence[Curve], missing: Mapping[str, str] | None, unit: str = "",
    on_axes: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Return the lines under the axes: settings, failures, omissions, runs without results or the end of training."""
    groups = [group for panel in panels for group in panel.groups]
    lines = unless_named(groups, on_axes) + failures(curves, unit) + fewer_runs(curves, unit)
    lines += left_out([run for panel in panels for run in panel.runs], panels[0].protocol)
    stored = [row for panel in panels for row in panel.rows]
    lines += apart(stored) + before_the_end(stored) + without_results(missing or {})
    return lines + tokens_per_step(groups)


def apart(stored: Sequence[rows.Row]) -> list[str]:
    """Return the command that measures the runs which have no value here on the targets of the others."""
    left = {row.run.path for row in stored if row.get("status") == "apart"}
    values = [row for row in stored if rows.perplexity(row) is not None]
    if not (left and values):
        return []
    lengths = sorted({n for row in stored for n in (row["eval_len"], anchor_of(row), row.run.longest) if n})
    words = [f"--protocol {stored[0]['protocol']} --lengths {','.join(map(str, lengths))}"]
    most = values[0].get("max_targets")
    words.append(f"--num_targets {max(most, lengths[-1]) if most else 0}")
    if stored[0]["protocol"] == "sliding" and values[0].get("stride"):
        words.append(f"--stride {values[0]['stride']}")
    folder = shlex.quote(stored[0].run.workdir or "FOLDER")
    return [f"To compare all runs: posx evaluate --workdir {folder} {' '.join(words)}"]


def without_results(missing: Mapping[str, str]) -> list[str]:
    """Return lines on runs without a row: those that failed, and why, and those that may still come."""
    said: dict[str, list[str]] = {}
    for name, why in sorted(missing.items(), key=lambda pair: not pair[1]):
        said.setdefault(why, []).append(name)
    every = {why: named(names) + _others(names, "runs") for why, names in said.items()}
    lines = [f"{runs} failed: {look.shown(why)}" if why else f"No results yet: {runs}" for why, runs in every.items()]
    return lines if len(lines) <= 8 else [*lines[:7], f"and {len(lines) - 7} more reasons why runs have no results"]


def unless_named(groups: Sequence[Group], on_axes: Collection[str] = ()) -> list[str]:
    """Return a line on the settings that most curves share, so that only the labels of the others name them."""
    common = common_settings([group.runs[0] for group in groups], on_axes)
    parts = [f"{name.rpartition('.')[2]}={value}" for name, value in common.items()]
    return [f"If a label does not say otherwise: {', '.join(parts)}"] if parts else []


def _runs(panel: Panel) -> list[rows.Run]:
    return [run for group in panel.groups for run in group.runs]


def named(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    """Join names, which hold commas themselves, with semicolons if any of these does."""
    short = [look.shown(name) for name in names[:most]]
    return ("; " if any(", " in name for name in short) else ", ").join(short)


def _others(names: Sequence[Any], word: str) -> str:
    return f" and {len(names) - _MOST_NAMES} more {word}" if len(names) > _MOST_NAMES else ""


def left_out(runs: Sequence[rows.Run], protocol: str) -> list[str]:
    """What was measured and is not drawn, and why; runs of which the same is to be said share a line."""
    said: dict[str, list[str]] = {}
    for run in dict.fromkeys(runs):
        for _, words in (pair for pair in run.left_out if pair[0] == protocol):
            said.setdefault(words, []).append(run.path)
    return [
        f"{named(paths)}{_others(paths, 'runs')}{', each' if len(paths) > 1 else ''}: {words}"
        for words, paths in said.items()
    ]


def before_the_end(stored: Sequence[rows.Row]) -> list[str]:
    """Return lines on runs that were measured before the end of training, and on those that ended with NaN."""
    last = {row.run: (row.get("step"), row.run.settings.get("train.steps"), row.get("status")) for row in stored}
    early: dict[str, list[str]] = {"Measured before the end of training": [], "Training ended with NaN": []}
    for run, (step, steps, status) in last.items():
        name = look.shown(run.path)
        if status == "diverged":
            early["Training ended with NaN"].append(f"{name} at step {step:,}")
        elif isinstance(step, int) and isinstance(steps, int) and step < steps:
            early["Measured before the end of training"].append(f"{name} (step {step:,} of {steps:,})")
    return [f"{said}: {', '.join(of[:_MOST_NAMES])}{_others(of, 'runs')}" for said, of in early.items() if of]


def tokens_per_step(groups: Sequence[Group]) -> list[str]:
    """Tokens of training text a step, where curves differ in it: a fair comparison has as many."""
    said: dict[int, list[str]] = {}
    several = len({group.runs[0].train_len for group in groups}) > 1
    for group in groups:
        run = group.runs[0]
        batch = run.settings.get("train.batch_size")
        if isinstance(batch, int) and run.train_len:
            said.setdefault(batch * run.train_len, []).append(f"L = {run.train_len}" if several else group.label)
    if len(said) < 2:
        return []
    distinct = {tokens: list(dict.fromkeys(names)) for tokens, names in sorted(said.items())}
    parts = [f"{tokens:,} ({named(names)}{_others(names, 'curves')})" for tokens, names in distinct.items()]
    return [f"Tokens per training step differ: {', '.join(parts)}"]


def failures(curves: Sequence[Curve], unit: str) -> list[str]:
    """One line per curve and kind of failure: where, and for how many runs where some succeeded."""
    lines = []
    for curve in curves:
        for kind in [kind for kind in rows.FAILED if kind != "diverged"]:  # these runs are named with their step
            points = [point for point in curve.points if kind in point.failures]
            if not points:
                continue
            places = _places([look.length_name(point.x) + _share(point, kind) for point in points])
            lines.append(f"{look.shown(curve.label)}: {FAILURE_NAMES[kind]} at {unit}{places}")
    return lines if len(lines) <= 8 else [*lines[:7], f"and {len(lines) - 7} more failures (see the table)"]


def fewer_runs(curves: Sequence[Curve], unit: str) -> list[str]:
    """Where a curve is the mean of fewer runs than elsewhere, as not all were measured there: it may jump for that."""
    lines = []
    for curve in curves:
        runs = [len(point.values) + len(point.failures) for point in curve.points]
        for few in sorted(set(runs) - {0, max(runs, default=0)}):
            names = [look.length_name(point.x) for point, n in zip(curve.points, runs, strict=True) if n == few]
            lines.append(f"{look.shown(curve.label)}: {few} of {max(runs)} runs measured at {unit}{_places(names)}")
    return lines if len(lines) <= 6 else [*lines[:5], f"and {len(lines) - 5} more curves of fewer runs at some lengths"]


def _places(names: list[str]) -> str:
    return ", ".join([*names[:3], f"… {names[-1]} ({len(names)} places)"] if len(names) > 6 else names)


def _share(point: Point, kind: str) -> str:
    """ " (1 of 3 runs)" where only some runs failed."""
    runs = len(point.values) + len(point.failures)
    failed = point.failures.count(kind)
    return f" ({failed} of {runs} runs)" if failed < runs else ""
