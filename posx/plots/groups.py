"""Which rows share axes, which runs are the seeds of one curve, and what each curve is called and looks like."""

import collections
import dataclasses
import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
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
    counts: collections.Counter[Hashable] = collections.Counter()
    places: list[tuple[str, Hashable]] = []
    for runs in curves:
        alike = (runs[0].text, runs[0].asked, None if one_figure else runs[0].train_len)
        places.append((runs[0].text, (runs[0].asked, counts[alike])))
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


def labels(curves: Sequence[Sequence[Run]]) -> list[str]:
    """A label for each curve of one figure: the encoding, then the settings in which it differs from its namesakes."""
    namesakes: dict[str, list[Run]] = collections.defaultdict(list)
    for runs in curves:
        namesakes[runs[0].text].append(runs[0])
    named = {
        run: label for rivals in namesakes.values() for run, label in zip(rivals, _told_apart(rivals), strict=True)
    }
    found = [named[runs[0]] for runs in curves]
    for path in (_path, _first_path):
        shared = collections.Counter(found)
        pairs = zip(found, curves, strict=True)
        found = [f"{label}, {path(runs)}" if shared[label] > 1 else label for label, runs in pairs]
    return found


def _told_apart(rivals: Sequence[Run]) -> list[str]:
    """Their encoding, its fields and the other settings, as far as not all of them agree."""
    asked = [{**run.settings, "train.length": run.train_len} for run in rivals]
    every = {name for settings in asked for name in settings}
    if len({run.data for run in rivals}) == 1:
        every -= {"data.source"}
    differ = [name for name in sorted(every) if len({_spelt(settings.get(name)) for settings in asked}) > 1]
    found = []
    for run, settings in zip(rivals, asked, strict=True):
        own = [name for name in differ if name in settings]
        fields = [f"{name.partition('.')[2]}={_spelt(settings[name])}" for name in own if name.startswith("encoding.")]
        others = [f"{_short(n, every)}={_spelt(settings[n])}" for n in own if not n.startswith("encoding.")]
        bare = re.fullmatch(r"[\w.:]+", run.text)
        text = [f"{run.text}({', '.join(fields)})"] if fields and bare else [run.text, *fields]
        found.append(", ".join([*text, *others]))
    return found


def _short(name: str, names: Iterable[str]) -> str:
    """A setting's own name where no other setting ends so, else its path."""
    last = name.rpartition(".")[2]
    return name if sum(other.rpartition(".")[2] == last for other in names) > 1 else last


def _spelt(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)
