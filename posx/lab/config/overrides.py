"""The words --config.A.B=V, which replace settings of a config.

Every key must be known. Values are read as the type of their setting. Encodings are texts
(--config.encoding="rope(base=500000)+alibi"). An axis of a sweep is named by the setting that it varies
(--config.sweep.axes.train.learning_rate=1e-3,2e-3).
"""

from __future__ import annotations

import shlex
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from posx.encodings import CHAIN, encoding_class, spec_text
from posx.errors import ConfigError, near_names
from posx.fields import split, typed, typed_fields, unbracketed, unquoted
from posx.lab.config.run import base_config, encoding_section
from posx.lab.config.sections import LISTS, SECTIONS, SweepConfig

_AXES = "sweep.axes."

#: {"section.name": type} of all settings but the fields of encodings.
TYPES = {
    f"{section}.{name}": kind
    for section, cls in {**SECTIONS, "sweep": SweepConfig}.items()
    for name, kind in typing.get_type_hints(cls).items()
}


def override(config: ConfigDict, words: Sequence[str]) -> None:
    """Replace settings of `config`, one for each word such as --config.train.steps=200.

    Raises:
      ConfigError: a key is unknown (the nearest are named), is given twice, or cannot have its value.
    """
    keys = {word: "encoding" if setting_of(word) == "encoding.name" else setting_of(word) for word in words}
    seen: dict[str, str] = {}
    for word in words:
        name = keys[word].removeprefix("sweep.")
        setting = f"axes.{LISTS[name]}" if name in LISTS else name  # a list and an axis are two names of one setting
        if setting in seen:
            raise ConfigError(f"{seen[setting]} and {word} are about the same setting. Give it once.")
        seen[setting] = word
    with config.unlocked(), config.ignore_type():
        for word in sorted(words, key=lambda word: keys[word] != "encoding"):  # its fields depend on the encoding
            _set(config, word, keys[word])


def _set(config: ConfigDict, word: str, key: str) -> None:
    known = settings(config)
    if key == "encoding":
        config.encoding = encoding_section(unquoted(_text(word, key, held="")))
        return
    if key.startswith(_AXES):
        setting = key.removeprefix(_AXES)
        config.sweep.axes[setting] = _axis(
            _text(word, key, ()), known.get(setting, "" if setting == "encoding" else ())
        )
        return
    check_key(key, known, repr(word))
    text = unquoted(_text(word, key, known[key]))
    section, _, name = key.partition(".")
    if section == "encoding":
        cls, owner = encoding_class(config.encoding.name), f"encoding {config.encoding.name!r}"
        config.encoding[name] = typed_fields(cls, {name: text}, owner, "--config.encoding.").get(name, "auto")
        return
    config[section][name] = _typed(key, text, f"--config.{key}")
    if section == "sweep" and LISTS.get(name) in config.sweep.axes:  # the axis of a config file would hide the list
        del config.sweep.axes[LISTS[name]]


def _text(word: str, key: str, held: Any) -> str:
    """Return the text of a word's value. --config.model.tied is true, --noconfig.model.tied is false."""
    name, equals, text = word.partition("=")
    without = name.lstrip("-").startswith("noconfig.")
    if isinstance(held, bool) and not equals:
        return str(not without)
    if without:
        raise ConfigError(f"{word} needs two dashes: write --config.{key}=VALUE")
    if not equals:
        raise ConfigError(f"{word} has no value. Write {name}=VALUE")
    return text


def _axis(text: str, held: Any) -> tuple[str, ...]:
    """Return the texts of an axis's values. `held` is a value that its setting has.

    Brackets around all belong to the list. If the setting itself holds several values, they belong to one value,
    unless there are brackets or quotes in them: (64,128) is one value of eval.lengths, ((64,128),(64,256)) are two.
    """
    inner = split(unbracketed(text.strip()))
    several = isinstance(held, tuple)
    nested = several and len(held) > 0 and isinstance(held[0], tuple)
    if unbracketed(text.strip()) and (not several or (not nested and any(item[0] in "([\"'" for item in inner))):
        return tuple(map(unquoted, inner))
    return tuple(map(unquoted, split(text)))


def axis_values(config: ConfigDict, setting: str, given: Any, name: str = "") -> tuple[Any, ...]:
    """Return the values of a sweep's axis, of the type of the setting that it varies.

    Encodings and their fields are typed by their own classes later. `name` is the name of the axis in messages.
    """
    name = name or f"{_AXES}{setting}"
    of_encoding = setting.partition(".")[0] == "encoding"
    if not of_encoding:
        check_key(setting, [key for key in settings(config) if not key.startswith("sweep.")], "sweep.axes")
    if not isinstance(given, list | tuple | range):
        raise ConfigError(f"{name}={given!r}: an axis must be a tuple of values. Write ({given!r},) for one value.")
    return tuple(given if of_encoding else (_typed(setting, value, name) for value in given))


def _typed(setting: str, value: Any, name: str) -> Any:
    """Return `value` of the type of its setting. `name` is its name in messages."""
    check_key(setting, TYPES, name)
    return typed(value, TYPES[setting], name)


def settings(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Return {"section.name": value} of all settings but the axes of a sweep, whose names are those of settings."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if f"{prefix}{name}." != _AXES:
            inner = isinstance(value, ConfigDict)
            found |= settings(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def check_key(key: str, known: Iterable[str], place: str) -> None:
    """Raise ConfigError, with the nearest names, if `key` is not one of those `known`."""
    if key not in known:
        names = near_names(key, known, number=4, cutoff=0.3) or dict.fromkeys(name.split(".")[0] for name in known)
        raise ConfigError(f"config key {key!r} is unknown in {place}. Nearest: {', '.join(names)}")


def setting_of(word: str) -> str:
    """Return "train.steps" for "--config.train.steps=5"."""
    return word.partition("=")[0].lstrip("-").removeprefix("noconfig.").removeprefix("config.")


def printed(config: ConfigDict, sweep: bool = True) -> str:
    """Return every setting as the word that sets it, a line each, first those that are not the default.

    `sweep` tells whether the command makes a sweep: others refuse its words. Raises ConfigError for unreadable axes.
    """
    defaults = settings(base_config(config.encoding.name if config.encoding.name != CHAIN else "nope"))
    lines: dict[bool, list[str]] = {True: [_word("encoding", spec_text(config.encoding.to_dict()))], False: []}
    for key, value in settings(config).items():
        of_sweep = key.startswith("sweep.") and (
            not sweep or LISTS.get(key.removeprefix("sweep.")) in config.sweep.axes
        )
        is_default = value == defaults.get(key)
        if key != "encoding.name" and not of_sweep and (is_default or not key.startswith("encoding.")):
            lines[not is_default].append(_word(key, value))  # the encoding's text has its other fields
    for setting, given in config.sweep.axes.items() if sweep else ():
        values = axis_values(config, setting, given)
        values = tuple(map(spec_text, values)) if setting == "encoding" else values
        lines[True].append(_word(f"{_AXES}{setting}", values))
    return "\n".join(["# chosen", *lines[True], "", "# defaults", *lines[False]])


def _word(key: str, value: Any) -> str:
    if not isinstance(value, tuple):
        text = str(value)
        return shlex.quote(f"--config.{key}={text if unquoted(text) == text else _quoted(text)}")
    text = ",".join(map(_typable, value)) or "()"
    if len(value) == 1 and (text[0] == "(" or unquoted(text) != text) and not key.startswith(_AXES):
        text = f"{text},"  # else its own brackets or quotes would count as those around all
        text = f"({text})" if text[0] == "(" else text
    return shlex.quote(f"--config.{key}={text}")


def _typable(value: Any) -> str:
    """Return an item of a list as `items_of` reads it."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_typable, value))}{',' if len(value) == 1 else ''})"
    text = str(value)
    return text if split(text) == [text] and unquoted(text) == text else _quoted(text)


def _quoted(text: str) -> str:
    quote = "'" if '"' in text else '"'
    return f"{quote}{text}{quote}"
