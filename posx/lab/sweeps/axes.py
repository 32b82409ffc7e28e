"""The axes of a sweep: its settings, their values, and the run of each combination of values."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from posx.encodings import encoding_class, spec_text
from posx.encodings.grammar import parse
from posx.errors import ConfigError
from posx.lab.argv.settings import axis_values, check_key, settings
from posx.lab.config import SECTIONS, RunConfig, Sections, encoding_fields, run_config
from posx.lab.config.sections import LISTS
from posx.lab.runs.folder import safe_name, short_digest
from posx.parsing import typed_fields

MOST_RUNS = 1000

#: A value on each axis: {"train.length": 64, "encoding": "rope(base=500000)", "train.seed": 0}.
Point = Mapping[str, Any]


def sweep_points(config: Sections) -> list[Point]:
    """Return every combination of the values on the axes of a sweep. Axes that `sweep.zip` joins are one axis.

    Training lengths vary slowest, then encodings, other settings and seeds.

    Raises:
      ConfigError: for an unknown setting, one without values or with a value named twice, axes that cannot be joined,
        or more than MOST_RUNS combinations.
    """
    axes = read_axes(config)
    groups = _groups(config, axes)
    rows = [_rows(group, axes) for group in groups]
    if (count := math.prod(map(len, rows))) > MOST_RUNS:
        raise ConfigError(f"this sweep has {count} runs, more than {MOST_RUNS}. Split it into several sweeps.")
    settings_ = [setting for group in groups for setting in group]
    values = [dict(zip(settings_, itertools.chain(*rows), strict=True)) for rows in itertools.product(*rows)]
    return [{setting: point[setting] for setting in axes} for point in values]


def read_axes(config: Sections) -> dict[str, tuple[Any, ...]]:
    """Return {setting: values}: training lengths first, then encodings, other settings, seeds.

    Raises ConfigError for a setting that is not known and for one without values.
    """
    given = {setting: (f"sweep.{name}", getattr(config.sweep, name)) for name, setting in LISTS.items()}
    given |= {setting: (f"sweep.axes.{setting}", values) for setting, values in sorted(config.sweep.axes.items())}
    values: Any
    axes = {}
    for setting in (*(s for s in given if s != "train.seed"), "train.seed"):
        name, values = given[setting]
        axes[setting] = axis_values(config, setting, values, name)
        if not axes[setting]:
            raise ConfigError(f"{name} is empty. Name at least one.")
        if setting == "encoding":
            axes[setting] = tuple(_encoding(value, config.encoding) for value in axes[setting])
    return axes


def _encoding(spec: Any, chosen: str) -> str:
    """Return the text of `spec`. The name alone of the encoding that the config has chosen stands for its fields."""
    by_name = isinstance(spec, str) and parse(spec) == {"name": encoding_fields(chosen)["name"]}
    return chosen if by_name else spec_text(spec)


def _groups(config: Sections, axes: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    """Return the settings that advance together, in the order of the axes; most advance alone. Raises ConfigError."""
    joined: dict[str, tuple[str, ...]] = {}
    for entry in config.sweep.zip:
        name = f"sweep.zip={entry}"
        group = tuple(LISTS.get(part.strip(), part.strip()) for part in entry.split("+"))
        if len(group) < 2:
            raise ConfigError(f"{name}: there is only one axis. Join two or more with +.")
        for setting in group:
            if setting not in axes:
                check_key(setting, settings(config), name)
                raise ConfigError(f"{name}: {setting} has no axis. Add --config.sweep.axes.{setting}=VALUES")
            if setting in joined or group.count(setting) > 1:
                raise ConfigError(f"{name}: {setting} is joined twice. Name each axis in one group, once.")
        counts = [f"{setting} has {len(axes[setting])} values" for setting in group]
        if len({len(axes[setting]) for setting in group}) > 1:
            raise ConfigError(f"{name}: {', '.join(counts)}. Axes that advance together need equally many values.")
        joined |= dict.fromkeys(group, group)
    return list(dict.fromkeys(joined.get(setting, (setting,)) for setting in axes))


def _rows(group: Sequence[str], axes: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the values of the settings of `group`, a tuple for each step. Raises ConfigError for two equal steps."""
    rows = list(zip(*(axes[setting] for setting in group), strict=True))
    texts = [tuple(map(setting_text, group, row)) for row in rows]
    for row in texts:
        if texts.count(row) > 1:
            raise ConfigError(f"the axis {'+'.join(group)} names a value twice: {' with '.join(row)}. Name it once.")
    return rows


def point_run(config: Sections, point: Point) -> RunConfig:
    """Return the run of a sweep at one combination of values. Raises ConfigError."""
    return run_config(point_config(config, point))


def point_config(config: Sections, point: Point) -> Sections:
    """Return a config at one combination of values. Raises ConfigError."""
    changes: dict[str, dict[str, Any]] = {name: {} for name in ("encoding", *SECTIONS)}
    for setting, value in point.items():
        section, _, name = setting.partition(".")
        if name:
            changes[section][name] = value
    encoding, fields = point["encoding"], changes.pop("encoding")
    if fields:
        every = encoding_fields(encoding)
        cls, what = encoding_class(every["name"]), f"encoding {every['name']!r}"
        every |= dict.fromkeys(fields, "auto") | typed_fields(cls, fields, what, "encoding.")
        encoding = spec_text(every)
    sections = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in changes.items()}
    return dataclasses.replace(config, encoding=encoding, **sections)


def varying_settings(points: Sequence[Point]) -> list[str]:
    """Return the settings that have several values."""
    return [s for s in points[0] if len({setting_text(s, point[s]) for point in points}) > 1]


def folder_names(points: Sequence[Point]) -> list[str]:
    """Return folder names: encoding, length, seed, then other axes: "rope-L64-s0-learning_rate=0.001"."""
    varying = [setting for setting in varying_settings(points) if setting not in LISTS.values()]
    ends = [setting.rpartition(".")[2] for setting in varying]
    shown = {s: end if ends.count(end) == 1 else s for s, end in zip(varying, ends, strict=True)}
    names = []
    for point in points:
        main = f"{setting_text('encoding', point['encoding'])}-L{point['train.length']}-s{point['train.seed']}"
        names.append("-".join([main, *(f"{shown[s]}={setting_text(s, point[s])}" for s in varying)]))
    safe = [safe_name(name) for name in names]
    return [
        short if safe.count(short) == 1 else f"{short}-{short_digest(name)}"
        for short, name in zip(safe, names, strict=True)
    ]


def setting_text(setting: str, value: Any) -> str:
    """Return a value as it can be typed. Equal values have equal texts."""
    if setting == "encoding":
        return spec_text(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(str, value))})"
    if setting.startswith("encoding.") and isinstance(value, str):  # typed by the encoding's class later
        for kind in (int, float):  # 1e-3, 0.001 and "0.001" are one value
            with contextlib.suppress(ValueError):
                value = kind(value)
                break
    return f"{value + 0.0:.12g}" if isinstance(value, float) else str(value)
