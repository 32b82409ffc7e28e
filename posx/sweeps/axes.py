"""The axes of a sweep: settings, the values each takes, and the run that a combination of them is."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from posx.config import SECTIONS, RunConfig, encoding_section
from posx.config.overrides import check_key, settings, tuple_of
from posx.config.sweep import LISTS
from posx.encodings import spec_text
from posx.encodings.grammar import parse
from posx.errors import ConfigError
from posx.fields import typed_fields

MOST_LETTERS = 120  # of a folder's name

#: A value on each axis: {"train.length": 64, "encoding": "rope(base=500000)", "train.seed": 0}.
Point = Mapping[str, Any]


def axes_of(config: ConfigDict) -> dict[str, tuple[Any, ...]]:
    """{setting: values}: training lengths first, then encodings, other settings, seeds.

    Raises ConfigError for a setting that is not known, no value, or one that is named twice.
    """
    own = {name: _values(config, name, values) for name, values in config.sweep.axes.items()}
    lists = {setting: (f"sweep.{name}", config.sweep[name]) for name, setting in LISTS.items()}
    names = {**lists, **{setting: (f"sweep.axes.{setting}", values) for setting, values in own.items()}}
    found = {}
    for setting in (*(s for s in names if s != "train.seed"), "train.seed"):
        name, values = names[setting]
        if not values:
            raise ConfigError(f"{name} is empty: name at least one")
        if setting == "encoding":
            values = [_encoding(value, config.encoding.to_dict()) for value in values]
        texts = [text_of(setting, value) for value in values]
        if len(set(texts)) != len(texts):
            raise ConfigError(f"{name}={tuple(values)} names a value twice")
        found[setting] = tuple(values)
    return found


def _encoding(spec: Any, chosen: Mapping[str, Any]) -> str:
    """The text of `spec`; one that the config has chosen already, by its name alone, has the fields set there."""
    by_name = isinstance(spec, str) and parse(spec) == {"name": chosen["name"]}
    return spec_text(chosen if by_name else spec)


def _values(config: ConfigDict, setting: str, given: Any) -> tuple[Any, ...]:
    """The values of an axis; those of a setting that holds several are tuples."""
    known = {"encoding": ""} | {k: v for k, v in settings(config).items() if not k.startswith("sweep.")}
    if not setting.startswith("encoding."):  # fields that some of the encodings have are theirs to know
        check_key(setting, known, "sweep.axes")
    if not isinstance(given, list | tuple | range):
        raise ConfigError(f"sweep.axes.{setting}={given!r} must be a tuple of values")
    return tuple(_typed(setting, value, known.get(setting)) for value in given)


def _typed(setting: str, value: Any, held: Any) -> Any:
    """`value` of the type that its setting, which now is `held`, has; encodings and their fields know their own."""
    if isinstance(held, tuple) and isinstance(value, str):
        value = tuple_of(value, held, setting)
    section, _, name = setting.partition(".")
    if section == "encoding":
        return value
    return typed_fields(SECTIONS[section], {name: value}, f"config section {section!r}", f"{section}.")[name]


def run_at(config: ConfigDict, point: Point) -> RunConfig:
    """The run of a sweep at one combination of values. Raises ConfigError."""
    values = config.to_dict()
    values["encoding"] = encoding_section(point["encoding"]).to_dict()
    for setting, value in point.items():
        section, _, name = setting.partition(".")
        if name:
            values[section][name] = _typed(setting, value, values[section].get(name))
    return RunConfig.from_json(values)


def names_of(points: Sequence[Point]) -> list[str]:
    """A folder's name for each: encoding, length and seed, then what else varies: "rope-L64-s0-learning_rate=0.001"."""
    varying = [s for s in points[0] if s not in LISTS.values() and len({text_of(s, p[s]) for p in points}) > 1]
    ends = [setting.rpartition(".")[2] for setting in varying]
    shown = {s: end if ends.count(end) == 1 else s for s, end in zip(varying, ends, strict=True)}
    names = []
    for point in points:
        main = f"{text_of('encoding', point['encoding'])}-L{point['train.length']}-s{point['train.seed']}"
        names.append("-".join([main, *(f"{shown[s]}={text_of(s, point[s])}" for s in varying)]))
    safe = [_safe(name) for name in names]
    return [
        short if safe.count(short) == 1 and len(short) <= MOST_LETTERS else f"{short[:MOST_LETTERS]}-{_hash(name)}"
        for short, name in zip(safe, names, strict=True)
    ]


def _safe(text: str) -> str:
    """`text` as a name that no shell and no file system minds: rope(base=500000)+my:A is rope-base=500000+my.A."""
    text = re.sub(r"\(|, *", "-", text.replace("=(", "=").replace(":", "."))
    return re.sub(r"[^\w.+=-]", "", text, flags=re.ASCII)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def text_of(setting: str, value: Any) -> str:
    """A value as it can be typed, the same for equal ones."""
    if setting == "encoding":
        return spec_text(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(str, value))})"
    try:  # 1e-3, 0.001 and "0.001" are one value
        number = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return str(value)
    return f"{number:.12g}" if isinstance(number, float) else str(value)
