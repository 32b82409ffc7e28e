"""Which rows share axes, which runs are the seeds of one curve, and what each curve is called and looks like."""

import collections
import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from posx.lab.plots import palette
from posx.lab.plots.palette import Look
from posx.lab.plots.rows import (
    OF_ENCODINGS,
    PER_POSITION,
    SCORED_STEP,
    SCORED_TEXT,
    SEED,
    Row,
    Run,
    by_stride,
    diverged,
)

#: Settings that follow from others, or are resolved from them if they are left open.
_RESOLVED_FROM = {
    "model.mlp_dim": ("model.model_dim", "model.mlp"),
    "model.num_kv_heads": ("model.num_heads",),
    "model.head_dim": ("model.model_dim", "model.num_heads"),
    SCORED_TEXT: ("data.text",),
    SCORED_STEP: ("train.steps",),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """The results of the runs of one curve at one abscissa: values, and failures of the other runs."""

    x: float
    values: tuple[float, ...]
    failures: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None  # 95 %, of the mean over text
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
    """The runs of one curve and their results. The runs differ in nothing but the seed."""

    label: str  # "rope(base=500000)+alibi", then the settings that no other curve of the figure has
    look: Look
    runs: tuple[Run, ...]
    rows: tuple[Row, ...] = ()
    points: tuple[Point, ...] = ()  # of one measure of the rows; a point without values is a gap: all runs failed

    @property
    def seeds(self) -> tuple[int, int]:
        """The fewest and most runs behind the points that have a value; (0, 0) if none has."""
        counts = [len(point.values) for point in self.points if point.values]
        return (min(counts), max(counts)) if counts else (0, 0)


@dataclasses.dataclass(frozen=True)
class Panel:
    """The rows that may share one set of axes: one training length, one protocol, one stride rule."""

    train_len: int
    protocol: str
    stride: int | None
    curves: tuple[Curve, ...]
    runs: tuple[Run, ...]  # of this training length, also those without a row here
    missing: Mapping[str, str]  # {path of a run of the folder without results: why it failed}

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for curve in self.curves for row in curve.rows)


def panels(rows: Iterable[Row], missing: Mapping[str, str] | None = None) -> list[Panel]:
    """Return the rows by training length and protocol, and by stride if one length was slid with several.

    Rows by position without losses are left out. missing: {path of a run without results: why it failed}.
    """
    rows = [row for row in rows if row["protocol"] != PER_POSITION or row.get("position_nll")]
    seeds = seeds_of_curves(row.run for row in rows)
    drawn = _looks(seeds)
    split: dict[tuple[int, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        split[row["train_len"], row["protocol"]].append(row)
    found = []
    for (train_len, protocol), members in sorted(split.items()):
        runs = tuple(dict.fromkeys(row.run for row in rows if row["train_len"] == train_len))
        gone = dict(missing or {})
        if protocol == PER_POSITION:  # the other figures have a place for these runs
            gone |= diverged(rows)
        for stride, chosen in sorted(by_stride(members).items(), key=lambda pair: pair[0] or 0):
            there = {row.run for row in chosen}
            kept = {n: own for n, curve in enumerate(seeds) if (own := [run for run in curve if run in there])}
            curves = _curves(list(kept.values()), [drawn[n] for n in kept], chosen)
            found.append(Panel(train_len, protocol, stride, curves, runs, gone))
    return found


def curves_of_runs(runs: Iterable[Run]) -> tuple[Curve, ...]:
    """Return all runs of a folder as the curves of one figure, whatever lengths they were trained at."""
    seeds = seeds_of_curves(runs)
    return _curves(seeds, _looks(seeds, one_figure=True))


def _curves(seeds: Sequence[Sequence[Run]], drawn: Sequence[Look], rows: Sequence[Row] = ()) -> tuple[Curve, ...]:
    return tuple(
        Curve(label, how, tuple(own), tuple(row for row in rows if row.run in own))
        for label, how, own in zip(labels(seeds), drawn, seeds, strict=True)
    )


def _looks(seeds: Sequence[Sequence[Run]], one_figure: bool = False) -> list[Look]:
    """Return a look for each curve, the same at all training lengths unless one figure shows them all."""
    counts: collections.Counter[Any] = collections.Counter()
    places: list[tuple[str, Any]] = []
    for run, *_ in seeds:
        others = (run.around, run.train_len if one_figure else 0)
        alike = (run.text, *others, run.train_len)
        places.append((run.text, (*others, counts[alike])))
        counts[alike] += 1
    found = palette.looks(places)
    return [found[place] for place in places]


def seeds_of_curves(runs: Iterable[Run]) -> list[list[Run]]:
    """Return the runs of each curve, which differ in nothing but the seed.

    They were measured on one text at one step. A run without results is a seed of the largest such group of its
    settings. If runs at two paths have the same seed too, each folder of runs is a curve of its own, or else each run.
    """
    alike: dict[Any, dict[Any, list[Run]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in dict.fromkeys(runs):
        alike[run.text, run.kind][run.scored].append(run)
    for groups in alike.values():
        without = groups.pop((None, None), [])
        most = max(groups, key=lambda scored: len(groups[scored]), default=None)
        groups[most] += without
    found = []
    for members in itertools.chain(*(groups.values() for groups in alike.values())):
        by_folder: dict[str, list[Run]] = collections.defaultdict(list)
        for run in members:
            by_folder[os.path.dirname(run.path)].append(run)
        for curves in ([members], list(by_folder.values()), [[run] for run in members]):
            if all(len({str(run.settings.get("train.seed")) for run in runs}) == len(runs) for runs in curves):
                found += curves
                break
    return sorted(found, key=lambda runs: (runs[0].text, runs[0].kind, runs[0].path))


def labels(seeds: Sequence[Sequence[Run]], on_axes: Collection[str] = ()) -> list[str]:
    """Return a label for each curve: the encoding, then the settings in which curves differ but for those `on_axes`."""
    runs = [own[0] for own in seeds]
    differ, common = _differing(runs, on_axes), common_settings(runs, on_axes)
    found = []
    for run in runs:
        own = _differing([one for one in runs if one.text == run.text], on_axes)
        unlike = {n for n in differ if common.get(n) != _value(run, n) and not n.startswith(OF_ENCODINGS)}
        named = [name for name in differ if name in run.settings and name in unlike.union(own)]
        found.append(", ".join([run.text, *(f"{_short(name, differ)}={_value(run, name)}" for name in named)]))
    for path in (lambda own: os.path.commonpath([run.path for run in own]) or own[0].path, lambda own: own[0].path):
        shared = collections.Counter(zip(found, (run.train_len for run in runs), strict=True))
        pairs = zip(found, seeds, strict=True)
        found = [f"{label}, {path(own)}" if shared[label, own[0].train_len] > 1 else label for label, own in pairs]
    return found


def common_settings(runs: Sequence[Run], on_axes: Collection[str] = ()) -> dict[str, str]:
    """Return {setting: value} of the settings in which a few of the curves differ from most of them.

    A label names the setting if its value is another one, or differs among the curves of its encoding.
    """
    names = [name for name in _differing(runs, on_axes) if not name.startswith(OF_ENCODINGS)]
    counts = {name: collections.Counter(_value(run, name) for run in runs if name in run.settings) for name in names}
    most = {name: count.most_common(1)[0] for name, count in counts.items()}
    return {name: value for name, (value, n) in most.items() if n > max(1, len(runs) / 2)}


def settings_by_length(runs: Sequence[Run]) -> dict[str, dict[int, str]]:
    """Return {setting: {training length: value}} of the settings that follow from the training length of a run."""
    names = [name for name in _differing(runs, ("train.length",)) if not name.startswith(OF_ENCODINGS)]
    pairs = {name: {(run.train_len, _value(run, name)) for run in runs} for name in names}
    lengths = {run.train_len for run in runs}
    return {name: dict(values) for name, values in pairs.items() if len(values) == len(lengths)}


def _differing(runs: Sequence[Run], on_axes: Collection[str]) -> list[str]:
    """Return the settings in which runs differ, but for those that follow from others.

    Texts differ if the settings of the data differ. If these are equal, or not known of all runs, the digests decide.
    """
    names = {name for run in runs for name in run.settings} - {*SEED, *on_axes}
    found = [name for name in sorted(names) if _differs(name, runs)]
    named = {name for name in names if name.startswith("data.")} - {"data.text"}
    telling = named.intersection(found)
    by_name = "data.text" in found and telling and all(telling <= run.settings.keys() for run in runs)
    return [name for name in found if name not in ({"data.text"} if by_name else named)]


def _differs(name: str, runs: Sequence[Run]) -> bool:
    """Tell whether runs differ in a setting although they agree in all settings that it may be resolved from."""
    alike: dict[Any, set[str]] = collections.defaultdict(set)
    for run in runs:
        if name == "train.position_lr_multiplier":  # an encoding has one unless the user sets another
            alike[run.text].add(_value(run, name))
        elif name.startswith(OF_ENCODINGS):
            alike[run.text, run.around, run.train_len].add(_value(run, name))
        elif name in run.settings:
            alike[tuple(_value(run, other) for other in _RESOLVED_FROM.get(name, ()))].add(_value(run, name))
    return any(len(values) > 1 for values in alike.values())


def _value(run: Run, name: str) -> str:
    value = run.settings.get(name)
    text = str(tuple(value) if isinstance(value, list) else value)
    return " ".join(word[:12] for word in text.split()) if name in ("data.text", SCORED_TEXT) else text


def _short(name: str, names: Iterable[str]) -> str:
    """Return the last word of a setting if no other of `names` ends so, else its path. `text` is that of training."""
    if name == SCORED_TEXT:
        return name
    last = "code" if name.startswith(("code.", "trained.code.")) else name.rpartition(".")[2]
    return name if sum(one.rpartition(".")[2] == last for one in names) > 1 else last
