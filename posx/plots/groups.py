"""Which rows share axes, which runs are the seeds of one curve, and what each curve is called and looks like."""

import collections
import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from posx.plots import palette
from posx.plots.palette import Look
from posx.plots.rows import Row, as_rows, by_stride
from posx.plots.runs import Run


@dataclasses.dataclass(frozen=True)
class Group:
    """The runs of one curve: the same settings, each with a seed of its own."""

    label: str  # can be typed: "rope(base=500000)+alibi", then what else tells it from the others of its figure
    look: Look
    runs: tuple[Run, ...]
    rows: tuple[Row, ...] = ()

    @property
    def text(self) -> str:
        return self.runs[0].text


@dataclasses.dataclass(frozen=True)
class Panel:
    """The rows that may share one set of axes: one training length, one protocol, one stride rule."""

    train_len: int
    protocol: str
    stride: int | None
    groups: tuple[Group, ...]
    runs: tuple[Run, ...] = ()  # of this training length, those without a row here too

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for group in self.groups for row in group.rows)

    @property
    def seeds(self) -> int:
        """The most runs that any one curve has: the n that a figure states once."""
        return max((len(group.runs) for group in self.groups), default=0)


def panels(rows: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """Rows split by training length and protocol, and by stride where windows of one length were slid with several."""
    stored = as_rows(rows)
    curves = seeds_of_curves([row.run for row in stored])
    drawn = _drawn(curves)
    split: dict[tuple[int, str], list[Row]] = collections.defaultdict(list)
    runs: dict[int, dict[Run, None]] = collections.defaultdict(dict)
    for row in stored:
        split[row["train_len"], row["protocol"]].append(row)
        runs[row["train_len"]][row.run] = None
    found = []
    for (train_len, protocol), members in sorted(split.items()):
        for stride, chosen in sorted(by_stride(members).items(), key=lambda pair: (pair[0] is None, pair[0])):
            found.append(Panel(train_len, protocol, stride, _groups(chosen, curves, drawn), tuple(runs[train_len])))
    return found


def _groups(rows: Sequence[Row], curves: Sequence[Sequence[Run]], drawn: Sequence[Look]) -> tuple[Group, ...]:
    """The curves that `rows` make, each with the look it has in every figure of the folder."""
    there = {row.run for row in rows}
    own = [([run for run in runs if run in there], look) for runs, look in zip(curves, drawn, strict=True)]
    own = [(runs, look) for runs, look in own if runs]
    return tuple(
        Group(label, look, tuple(runs), tuple(row for row in rows if row.run in runs))
        for label, (runs, look) in zip(labels([runs for runs, _ in own]), own, strict=True)
    )


def groups_of_runs(runs: Iterable[Run]) -> list[Group]:
    """All runs of a folder as the curves of one figure, whatever lengths they were trained at."""
    curves = seeds_of_curves(runs)
    drawn = _drawn(curves, one_figure=True)
    return [Group(label, look, tuple(own)) for label, look, own in zip(labels(curves), drawn, curves, strict=True)]


def _drawn(curves: Sequence[Sequence[Run]], one_figure: bool = False) -> list[Look]:
    """A look for each curve, the same at all training lengths unless all of them stand in one figure."""
    counts: collections.Counter[Any] = collections.Counter()
    places: list[tuple[str, Any]] = []
    for runs in curves:
        others = (runs[0].asked, (runs[0].train_len or 0) if one_figure else 0)
        alike = (runs[0].text, *others, runs[0].train_len)
        places.append((runs[0].text, (*others, counts[alike])))
        counts[alike] += 1
    found = palette.looks(places)
    return [found[place] for place in places]


def seeds_of_curves(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs of each curve: those that differ in nothing but the seed.

    Of runs with the same seed too, at two paths, each is a curve of its own; whole sweeps of them stay together.
    """
    alike: dict[tuple[Any, ...], list[Run]] = collections.defaultdict(list)
    for run in dict.fromkeys(runs):
        alike[run.text, run.kind, run.train_len].append(run)
    found = []
    for members in alike.values():
        by_folder: dict[str, list[Run]] = collections.defaultdict(list)
        for run in members:
            by_folder[os.path.dirname(run.path)].append(run)
        if _seeds_differ(members):
            found.append(members)
        elif all(map(_seeds_differ, by_folder.values())):
            found += by_folder.values()
        else:
            found += [[run] for run in members]
    return sorted(found, key=lambda runs: (runs[0].text, runs[0].kind, str(runs[0].train_len), runs[0].path))


def _seeds_differ(runs: Sequence[Run]) -> bool:
    return len({str(run.seed) for run in runs}) == len(runs)


def _path(runs: Sequence[Run]) -> str:
    """Where a curve's runs lie."""
    return os.path.commonpath([run.path for run in runs]) or _first_path(runs)


def _first_path(runs: Sequence[Run]) -> str:
    return runs[0].path


def labels(curves: Sequence[Sequence[Run]], on_axes: Collection[str] = ()) -> list[str]:
    """Return a label for each curve of one figure: the encoding, then the settings in which the curves differ.

    Args:
        curves: the runs of each curve.
        on_axes: settings that the figure shows otherwise, such as "train.length"; no label names them.
    """
    runs = [own[0] for own in curves]
    differ, common = _differing(runs, on_axes), common_settings(runs, on_axes)
    found = []
    for run in runs:
        namesakes = [one for one in runs if one.text == run.text]
        own = [name for name in differ if name in run.settings and _differs(name, namesakes)]
        fields = [f"{name.partition('.')[2]}={_value(run, name)}" for name in own if name.startswith("encoding.")]
        others = [
            f"{_short(name, run.settings)}={_value(run, name)}"
            for name in differ
            if name in run.settings and not name.startswith("encoding.")
            if name in own or common.get(name) != _value(run, name)
        ]
        unnamed = not any(name.startswith("data.") for name in differ)
        if run.data and unnamed and len({one.data for one in runs if one.data}) > 1:
            others.append(f"text={run.data[:12]}")
        bare = re.fullmatch(r"[\w.:]+", run.text)
        text = [f"{run.text}({', '.join(fields)})"] if fields and bare else [run.text, *fields]
        found.append(", ".join([*text, *others]))
    for path in (_path, _first_path):
        shared = collections.Counter(zip(found, (run.train_len for run in runs), strict=True))
        pairs = zip(found, curves, strict=True)
        found = [f"{label}, {path(own)}" if shared[label, own[0].train_len] > 1 else label for label, own in pairs]
    return found


def common_settings(runs: Sequence[Run], on_axes: Collection[str] = ()) -> dict[str, str]:
    """Return {setting: value} of the settings in which a few of the curves differ from most of them.

    Labels name such a setting only where it differs from this value, or from that of a curve of the same encoding.
    """
    found = {}
    for name in _differing(runs, on_axes):
        counts = collections.Counter(_value(run, name) for run in runs if name in run.settings)
        value, most = counts.most_common(1)[0]
        if most > max(1, len(runs) / 2) and not name.startswith("encoding."):
            found[name] = value
    return found


def settings_by_length(runs: Sequence[Run]) -> dict[str, dict[int | None, str]]:
    """Return {setting: {training length: value}} of the settings that follow from the training length of a run."""
    found = {}
    for name in _differing(runs, ("train.length",)):
        pairs = {(run.train_len, _value(run, name)) for run in runs}
        known = all(name in run.settings for run in runs) and not name.startswith("encoding.")
        if known and len(pairs) == len({run.train_len for run in runs}):
            found[name] = dict(pairs)
    return found


def _differing(runs: Sequence[Run], on_axes: Collection[str]) -> list[str]:
    """Return the settings in which runs differ: fields of encodings among runs of one text, others among all runs.

    Equal digests of the data are equal data, whatever its settings are.
    """
    texts: dict[str, list[Run]] = collections.defaultdict(list)
    for run in runs:
        texts[run.text].append(run)
    same_data = len({run.data for run in runs}) == 1 and bool(runs[0].data)
    names = {name for run in runs for name in run.settings if name not in on_axes}
    return [
        name
        for name in sorted(names)
        if not (same_data and name.startswith("data."))
        if any(_differs(name, own) for own in (texts.values() if name.startswith("encoding.") else [runs]))
    ]


def _differs(name: str, runs: Sequence[Run]) -> bool:
    """Return whether a setting differs in what was asked for and in what it was resolved to."""
    known = [run for run in runs if name in run.settings or name.startswith("encoding.")]
    asked = {_spelt(run.settings.get(name)) for run in known}
    return len(asked) > 1 and len({_spelt(run.resolved.get(name, run.settings.get(name))) for run in known}) > 1


def _value(run: Run, name: str) -> str:
    """Return a setting as labels show it: resolved, but paths as they were typed."""
    asked = run.settings.get(name)
    return _spelt(asked if name.startswith("data.") else run.resolved.get(name, asked))


def _short(name: str, names: Iterable[str]) -> str:
    """A setting's own name where no other setting ends so, else its path."""
    last = name.rpartition(".")[2]
    return name if sum(other.rpartition(".")[2] == last for other in names) > 1 else last


def _spelt(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)
