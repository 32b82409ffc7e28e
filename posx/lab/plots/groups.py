"""Which rows share axes, which runs are the seeds of one curve, and what each curve is called and looks like."""

import dataclasses
import functools
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from posx.attention.masks import window
from posx.lab.config.mask_texts import mask_text
from posx.lab.plots import palette
from posx.lab.plots.palette import Look
from posx.lab.results.columns import FAILED, make_table
from posx.lab.results.facts import OF_ENCODINGS, SCORED_STEP, SCORED_TEXT, SEED
from posx.lab.results.table import PER_POSITION, chosen_strides, diverged_runs, list_runs, stride_rule

#: Settings that follow from others, or are resolved from them if they are left open.
_RESOLVED_FROM = {
    "model.mlp_dim": ("model.model_dim", "model.mlp"),
    "model.num_kv_heads": ("model.num_heads",),
    "model.head_dim": ("model.model_dim", "model.num_heads"),
    SCORED_TEXT: ("data.text",),
    SCORED_STEP: ("train.steps",),
}
#: The most columns of a table that show all lengths.
MOST_FACTORS = 8
#: The setting of masks.
_MASKS = "model.mask_policy"


@dataclasses.dataclass(frozen=True)
class Point:
    """The results of the runs of one curve at one abscissa: values, and failures of the other runs."""

    x: float
    values: tuple[float, ...]
    failures: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None  # 95 %, of the mean over text
    no_interval: str = ""  # why there is none
    is_share: bool = False  # from 0 to 1

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def low(self) -> float:
        return min(self.values, default=math.nan)

    @property
    def high(self) -> float:
        return max(self.values, default=math.nan)


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """The runs of one curve and their results. The runs differ in nothing but the seed.

    Attributes:
      label: "rope(base=500000)+alibi", then the settings that no other curve of the figure has.
      look: its color, marker and dashes.
      runs: the columns of runs, a row for each run.
      rows: the rows of the table that it is drawn from.
      points: of one measure of the rows; a point without values is a gap: all runs failed.
      window_of: the label of the curve of the same weights under causal masks, if this one sees the last L tokens
        alone; "" for any other curve.
    """

    label: str
    look: Look
    runs: pd.DataFrame
    rows: pd.DataFrame
    points: tuple[Point, ...] = ()
    window_of: str = ""

    @property
    def seeds(self) -> tuple[int, int]:
        """The fewest and most runs behind the points that have a value; (0, 0) if none has."""
        counts = [len(point.values) for point in self.points if point.values]
        return (min(counts), max(counts)) if counts else (0, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Panel:
    """The rows that may share one set of axes: one training length, one protocol, one stride rule.

    Attributes:
      train_len, protocol, stride: of the rows.
      curves: the curves of the rows.
      left_out: the rows of this protocol that are left out, of all runs of this training length.
      missing: {path of a run of the folder without results: why it failed}.
      longer: the panels of longer training lengths under the same rule, from the shortest on.
    """

    train_len: int
    protocol: str
    stride: int | None
    curves: tuple[Curve, ...]
    left_out: pd.DataFrame
    missing: Mapping[str, str]
    longer: tuple["Panel", ...] = ()

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        return pd.concat([curve.rows for curve in self.curves])

    @functools.cached_property
    def rule(self) -> tuple[str, int | None]:
        """The protocol, and the stride that all rows have if it does not follow from the window."""
        strides = {self.stride} if self.stride else {*chosen_strides(self.rows)} - {None}
        return self.protocol, strides.pop() if len(strides) == 1 else None


def panels(table: pd.DataFrame, missing: Mapping[str, str] | None = None) -> list[Panel]:
    """Return the rows by training length and protocol, and by stride if one length was slid with several.

    Rows by position without losses are left out. missing: {path of a run without results: why it failed}.
    """
    by_position = table.protocol == PER_POSITION
    rows = table[(table.left_out == "") & (~by_position | table.position_nll.astype(bool))]
    others = table[table.left_out != ""]
    seeds = seeds_of_curves(list_runs(rows))
    windows = _find_windows(seeds)
    plain = [n for n in range(len(seeds)) if n not in windows]
    looks = dict(zip(plain, _looks([seeds[n] for n in plain]), strict=True))
    looks |= {n: dataclasses.replace(looks[other], marker="") for n, other in windows.items()}
    numbers = pd.Series({run: n for n, own in enumerate(seeds) for run in own.run}, dtype="int64")
    made = []
    for (train_len, protocol), members in rows.groupby(["train_len", "protocol"]):
        runs = rows.run[rows.train_len == train_len]
        left_out = others[others.run.isin(runs) & (others.protocol == protocol)]
        gone = dict(missing or {})
        if protocol == PER_POSITION:  # the other figures have a place for these runs
            lost = table[by_position & (table.left_out == "") & table.status.isin([*FAILED])]
            ends = zip(lost.run, lost.status, lost.eval_len, strict=True)
            gone |= {run: f"{FAILED[why]} in windows of {length:,} tokens" for run, why, length in ends}
            gone |= diverged_runs(rows)
        for stride, chosen in members.groupby(stride_rule(members).fillna(0)):
            there = sorted(set(chosen.run.map(numbers)))
            own = [seeds[n][seeds[n].run.isin(chosen.run)] for n in there]
            whose = {there.index(n): there.index(m) for n, m in windows.items() if {n, m} <= {*there}}
            curves = _curves(own, [looks[n] for n in there], chosen, whose)
            made.append(Panel(int(train_len), protocol, int(stride) or None, curves, left_out, gone))
    rules = group_by_rule(made)
    return [
        dataclasses.replace(one, longer=tuple(p for p in rules[one.rule] if p.train_len > one.train_len))
        for one in made
    ]


def group_by_rule(panels: Iterable[Panel]) -> dict[tuple[str, int | None], list[Panel]]:
    """Return the panels of each rule, from the shortest training length on."""
    rules: dict[tuple[str, int | None], list[Panel]] = {}
    for panel in sorted(panels, key=lambda panel: panel.train_len):
        rules.setdefault(panel.rule, []).append(panel)
    return rules


def common_names(panels: Sequence[Panel]) -> dict[tuple[int, str], str]:
    """Return {(training length, label of a curve): name}. A name is the same at all training lengths.

    It leaves out the settings that follow from the training length. A curve under windows of L has the name of the
    curve of the same weights.
    """
    runs = [curve.runs for panel in panels for curve in panel.curves]
    of_runs = iter(labels(runs, ("train.length", *settings_by_length(firsts(runs)))))
    names = {(panel.train_len, curve.label): next(of_runs) for panel in panels for curve in panel.curves}
    whose = {(panel.train_len, one.label): one.window_of or one.label for panel in panels for one in panel.curves}
    return {key: names[key[0], label] for key, label in whose.items()}


def choose_places(places: Iterable[float], unit: int = 1) -> list[float]:
    """Return the abscissas that have a column: all, or if these are more than MOST_FACTORS the doublings of `unit`."""
    every = sorted(places)
    doublings = [place for place in every if math.log2(place / unit) % 1 == 0]
    return every if len(every) <= MOST_FACTORS else doublings or every


def curves_of_runs(runs: pd.DataFrame) -> tuple[Curve, ...]:
    """Return all runs of a folder as the curves of one figure, whatever lengths they were trained at."""
    seeds = seeds_of_curves(runs)
    return _curves(seeds, _looks(seeds, one_figure=True), runs[:0], _find_windows(seeds))


def _curves(
    seeds: Sequence[pd.DataFrame], looks: Sequence[Look], rows: pd.DataFrame, windows: Mapping[int, int]
) -> tuple[Curve, ...]:
    numbers, names = pd.Series({run: n for n, own in enumerate(seeds) for run in own.run}, dtype="int64"), labels(seeds)
    parts = dict(iter(rows.groupby(rows.run.map(numbers))))
    return tuple(
        Curve(label, look, own, parts.get(n, rows[:0]), window_of=names[windows[n]] if n in windows else "")
        for n, (label, look, own) in enumerate(zip(names, looks, seeds, strict=True))
    )


def _find_windows(seeds: Sequence[pd.DataFrame]) -> dict[int, int]:
    """Return {number of a curve: that of the curve of the same weights under causal masks} for all windows of L.

    Each of its runs has the weights of a run of that curve. All settings but masks are equal too.
    """
    plain: dict[str, list[int]] = {}
    windows: dict[int, str] = {}
    for n, (settings, length) in enumerate((own.settings.iloc[0], own.train_len.iloc[0]) for own in seeds):
        masks = settings.get(_MASKS, ["causal"])
        same = {name: value for name, value in settings.items() if not name.startswith((_MASKS, "parent.", *SEED))}
        key = json.dumps(same, sort_keys=True)
        if masks == ["causal"]:
            plain.setdefault(key, []).append(n)
        elif masks == [mask_text(window(int(length)))] and "parent.hash" in settings and "parent.step" not in settings:
            windows[n] = key
    known = [{*own.weights_of} for own in seeds]
    same = {n: [m for m in plain.get(key, []) if known[n] <= known[m]] for n, key in windows.items()}
    return {n: own[0] for n, own in same.items() if len(own) == 1}


def _looks(seeds: Sequence[pd.DataFrame], one_figure: bool = False) -> list[Look]:
    """Return a look for each curve, the same at all training lengths unless one figure shows them all."""
    runs = firsts(seeds)
    number = runs.groupby(["method", "around", "train_len"], dropna=False).cumcount()
    lengths = runs.train_len if one_figure else number * 0
    places = [*zip(runs.method, zip(runs.around, lengths, number, strict=True), strict=True)]
    looks = palette.looks(places)
    return [looks[place] for place in places]


def firsts(seeds: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the first run of each curve."""
    return pd.concat([own[:1] for own in seeds]) if seeds else list_runs(make_table([]))


def seeds_of_curves(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the runs of each curve, which differ in nothing but the seed.

    They were measured on one text at one step. A run without results is a seed of the largest such group of its
    settings. If runs at two paths have the same seed too, each folder of runs is a curve of its own, or else each run.
    """
    curves: list[pd.DataFrame] = []
    for _, alike in runs.groupby(["method", "kind"], sort=False):
        if len(alike) == 1:
            curves.append(alike)
            continue
        unknown = (alike.scored_text == "") & alike.scored_step.isna()
        alike = pd.concat([alike[~unknown], alike[unknown]])
        group = alike.groupby(["scored_text", "scored_step"], sort=False, dropna=False).ngroup()
        if not unknown.all():
            group = group.mask(alike.run.isin(alike.run[unknown]), group[~unknown].groupby(group).size().idxmax())
        for _, members in alike.groupby(group):
            curves += _group_seeds(members)
    return sorted(curves, key=lambda own: tuple(own.iloc[0][["method", "kind", "run"]]))


def _group_seeds(members: pd.DataFrame) -> list[pd.DataFrame]:
    """Return runs as one curve, else by folder, else each alone: the first in which no curve repeats a seed."""
    for key in (lambda run: "", os.path.dirname, lambda run: run):
        folders = members.run.map(key)
        if not members.assign(folder=folders).duplicated(["folder", "train_seed"]).any():
            break
    return [own for _, own in members.groupby(folders, sort=False)]


def labels(seeds: Sequence[pd.DataFrame], on_axes: Collection[str] = ()) -> list[str]:
    """Return a label for each curve: the encoding, then the settings in which curves differ but for those `on_axes`."""
    runs = firsts(seeds)
    values = _settings(runs)
    differ, common = _differing(runs, values, on_axes), common_settings(runs, on_axes)
    own = {
        method: _differing(members, values.loc[members.run], on_axes) if len(members) > 1 else []
        for method, members in runs.groupby("method")
    }
    named = []
    for method, (_, value) in zip(runs.method, values.iterrows(), strict=True):
        unlike = {n for n in differ if common.get(n) != value[n] and not n.startswith(OF_ENCODINGS)}
        names = [n for n in differ if pd.notna(value[n]) and n in unlike.union(own[method])]
        named.append(", ".join([method, *(f"{_short(name, differ)}={value[name]}" for name in names)]))
    for path in (lambda own: os.path.commonpath(list(own.run)) or own.run.iloc[0], lambda own: own.run.iloc[0]):
        shared = Counter(zip(named, runs.train_len, strict=True))
        pairs = zip(named, runs.train_len, seeds, strict=True)
        named = [f"{label}, {path(own)}" if shared[label, length] > 1 else label for label, length, own in pairs]
    return named


def common_settings(runs: pd.DataFrame, on_axes: Collection[str]) -> dict[str, str]:
    """Return {setting: value} of the settings in which a few of the curves differ from most of them.

    A label names the setting if its value is another one, or differs among the curves of its encoding.
    """
    values = _settings(runs)
    names = [name for name in _differing(runs, values, on_axes) if not name.startswith(OF_ENCODINGS)]
    most = {name: Counter(values[name].dropna()).most_common(1)[0] for name in names}
    return {name: value for name, (value, n) in most.items() if n > max(1, len(runs) / 2)}


def settings_by_length(runs: pd.DataFrame) -> dict[str, dict[int, str]]:
    """Return {setting: {training length: value}} of the settings that follow from the training length of a run."""
    values = _settings(runs)
    names = [name for name in _differing(runs, values, ("train.length",)) if not name.startswith(OF_ENCODINGS)]
    pairs = {name: {*zip(runs.train_len, values[name].fillna("None"), strict=True)} for name in names}
    return {name: dict(own) for name, own in pairs.items() if len(own) == runs.train_len.nunique()}


def _settings(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the settings of runs as texts, a column for each setting; None for one that a run does not have."""
    texts = [{name: _text(name, value) for name, value in settings.items()} for settings in runs.settings]
    names = sorted({name for own in texts for name in own})
    return pd.DataFrame({n: [own.get(n) for own in texts] for n in names}, index=runs.run, dtype="object")


def _differing(runs: pd.DataFrame, values: pd.DataFrame, on_axes: Collection[str]) -> list[str]:
    """Return the settings in which runs differ, but for those that follow from others.

    Texts differ if the settings of the data differ. If these are equal, or not known of all runs, the digests decide.
    """
    several = values.columns[values.nunique(dropna=False) > 1].difference([*SEED, *on_axes])
    differ = [name for name in several if _differs(name, runs, values)]
    named = {name for name in values if name.startswith("data.")} - {"data.text", *on_axes}
    telling = [name for name in differ if name in named]
    by_name = "data.text" in differ and telling and values[telling].notna().all(axis=None)
    return [name for name in differ if name not in ({"data.text"} if by_name else named)]


def _differs(name: str, runs: pd.DataFrame, values: pd.DataFrame) -> bool:
    """Tell whether runs differ in a setting although they agree in all settings that it may be resolved from."""
    if name == "train.position_lr_multiplier":  # an encoding has one unless the user sets another
        alike = [runs.method]
    elif name.startswith("parent."):  # it mostly follows from the run's own settings
        own = [other for other in values if not other.startswith(("parent.", *SEED))]
        alike = [runs.method, *(values[other] for other in own)]
    elif name.startswith(OF_ENCODINGS):
        alike = [runs.method, runs.around, runs.train_len]
    else:
        alike = [values[other] for other in _RESOLVED_FROM.get(name, ()) if other in values]
        alike, values = [column[values[name].notna()] for column in alike], values[values[name].notna()]
    pairs = {*zip(*alike, values[name].fillna("None"), strict=True)}
    return len(pairs) > len({pair[:-1] for pair in pairs})


def _text(name: str, value: Any) -> str:
    text = str(tuple(value) if isinstance(value, list) else value)
    return " ".join(word[:12] for word in text.split()) if name in ("data.text", SCORED_TEXT) else text


def _short(name: str, names: Iterable[str]) -> str:
    """Return the last word of a setting if no other of `names` ends so, else its path. `text` is that of training."""
    if name == SCORED_TEXT:
        return name
    last = "code" if name.startswith(("code.", "trained.code.")) else name.rpartition(".")[2]
    return name if sum(one.rpartition(".")[2] == last for one in names) > 1 else last
