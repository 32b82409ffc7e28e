"""Settings and the words that set them: --config.A.B=V on a command line, and back.

Every key must be known. Values are read as the type of their setting. Encodings are texts
(--config.encoding="rope(base=500000)+alibi"). An axis of a sweep is named by the setting that it varies
(--config.sweep.axes.train.learning_rate=1e-3,2e-3).
"""

from __future__ import annotations

import shlex
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from posx.encodings import CHAIN, encoding_class, spec_text
from posx.errors import ConfigError, near_names
from posx.lab.argv import setting_name
from posx.lab.config import SECTIONS, RunConfig, Sections, SweepConfig, base_config, encoding_fields, read_sections
from posx.lab.config.sections import LISTS
from posx.parsing import split, strip_brackets, strip_quotes, to_type, typed_fields

#: The beginning of the settings that are axes of a sweep.
AXES = "sweep.axes."

_CLASSES: Mapping[str, type] = {**SECTIONS, "sweep": SweepConfig}

#: {"section.name": type} of all settings but the fields of encodings and the axes of a sweep.
_TYPES = {
    f"{section}.{name}": kind
    for section, cls in _CLASSES.items()
    for name, kind in typing.get_type_hints(cls).items()
    if name != "axes"
}


def override(config: Sections, words: Collection[str]) -> Sections:
    """Return `config` with other settings, one for each word such as --config.train.steps=200.

    Raises:
      ConfigError: a key is unknown (the nearest are named), is given twice, or cannot have its value.
    """
    values = config.fields()
    values["sweep"]["axes"] = dict(config.sweep.axes)
    _replace(values, words)
    return read_sections(values) if words else config


def _replace(values: dict[str, dict[str, Any]], words: Collection[str]) -> None:
    """Replace settings among `values`, {section: {field: value}}. Raises ConfigError as `override`."""
    keys = {word: "encoding" if setting_name(word) == "encoding.name" else setting_name(word) for word in words}
    seen: dict[str, str] = {}
    for word in words:
        name = keys[word].removeprefix("sweep.")
        setting = f"axes.{LISTS[name]}" if name in LISTS else name  # a list and an axis are two names of one setting
        if setting in seen:
            raise ConfigError(f"{seen[setting]} and {word} are about the same setting. Give it once.")
        seen[setting] = word
    for word in sorted(words, key=lambda word: keys[word] != "encoding"):  # its fields depend on the encoding
        _set(values, word, keys[word])


def _set(values: dict[str, dict[str, Any]], word: str, key: str) -> None:
    known, (section, _, name) = _flat(values), key.partition(".")
    if key == "encoding":
        values["encoding"] = encoding_fields(strip_quotes(_text(word, key, held="")))
    elif key.startswith(AXES):
        setting = key.removeprefix(AXES)
        held = "" if setting == "encoding" else known.get(setting, ())
        values["sweep"]["axes"][setting] = _axis(_text(word, key, held=()), held)
    else:
        check_key(key, known, repr(word))
        text = strip_quotes(_text(word, key, known[key]))
        cls = encoding_class(values["encoding"]["name"]) if section == "encoding" else _CLASSES[section]
        value = typed_fields(cls, {name: text}, f"config section {section!r}", f"--config.{section}.")
        values[section][name] = value.get(name, "auto")
        if section == "sweep":  # the axis of a config file would hide the list
            values["sweep"]["axes"].pop(LISTS.get(name), None)


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

    Brackets around all belong to the list. If the setting itself holds several values, they belong to one value
    unless they hold brackets or quotes. (64,128) is one value of eval.lengths, ((64,128),(64,256)) are two.
    """
    inner, several = strip_brackets(text.strip()), isinstance(held, tuple)
    nested = several and len(held) > 0 and isinstance(held[0], tuple)
    if several and (nested or not any(item[0] in "([\"'" for item in split(inner))):
        inner = ""
    return tuple(map(strip_quotes, split(inner or text)))


def axis_values(config: Sections, setting: str, given: Any, name: str = "") -> tuple[Any, ...]:
    """Return the values of a sweep's axis, of the type of the setting that it varies.

    Encodings and their fields are typed by their own classes later. `name` is the name of the axis in messages.
    """
    name = name or f"{AXES}{setting}"
    of_encoding = setting.partition(".")[0] == "encoding"
    if not of_encoding:
        check_key(setting, [key for key in settings(config) if not key.startswith("sweep.")], "sweep.axes")
    if not isinstance(given, list | tuple | range):
        raise ConfigError(f"{name}={given!r}: an axis must be a tuple of values. Write ({given!r},) for one value.")
    return tuple(given if of_encoding else (to_type(value, _TYPES[setting], name) for value in given))


def settings(config: Sections) -> dict[str, Any]:
    """Return {"section.name": value} of all settings but the axes of a sweep, whose names are those of settings."""
    return _flat(config.fields())


def _flat(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, fields in values.items()
        for name, value in fields.items()
        if section == "encoding" or f"{section}.{name}" in _TYPES
    }


def check_key(key: str, known: Iterable[str], place: str) -> None:
    """Raise ConfigError, with the nearest names, if `key` is not one of those `known`."""
    if key not in known:
        names = near_names(key, known, number=4, cutoff=0.3) or dict.fromkeys(name.split(".")[0] for name in known)
        raise ConfigError(f"config key {key!r} is unknown in {place}. Nearest: {', '.join(names)}")


def replace_settings(run: RunConfig, words: Mapping[str, str], sections: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return {section: {field: value}} of the `words` that replace settings in `sections` of a stored run.

    Raises:
      ConfigError: a setting is unknown or mistyped, or belongs to a section that the run was trained with.
    """
    for word, setting in words.items():
        if (section := setting.partition(".")[0]) in {"encoding", "sweep", *SECTIONS} - set(sections):
            allowed = " and ".join(f"--config.{name}.*" for name in sections)
            raise ConfigError(f"{word}: a trained run keeps its {section} settings. This command takes {allowed}.")
    values = {name: dict(vars(getattr(run, name))) for name in sections}
    _replace(values, words)
    return {s: {name: value for name, value in values[s].items() if f"{s}.{name}" in words.values()} for s in sections}


def settings_text(config: Sections | RunConfig, sweep: bool = True) -> str:
    """Return every setting as the word that sets it, a line each, first those that are not the default.

    `sweep` tells whether the command makes a sweep: others refuse its words. Raises ConfigError for unreadable axes.
    """
    config = config.as_given() if isinstance(config, RunConfig) else config
    known, axes = settings(config), config.sweep.axes if sweep else {}
    name = known["encoding.name"] if known["encoding.name"] != CHAIN else "nope"
    defaults = settings(read_sections(base_config(name)))
    lines: dict[bool, list[str]] = {True: [_word("encoding", config.encoding)], False: []}
    for key, value in known.items():
        of_sweep = key.startswith("sweep.") and (not sweep or LISTS.get(key.removeprefix("sweep.")) in axes)
        is_default = value == defaults.get(key)
        if key != "encoding.name" and not of_sweep and (is_default or not key.startswith("encoding.")):
            lines[not is_default].append(_word(key, value))  # the encoding's text has its other fields
    for setting, given in sorted(axes.items()):
        values = axis_values(config, setting, given)
        lines[True].append(
            _word(f"{AXES}{setting}", tuple(map(spec_text, values)) if setting == "encoding" else values)
        )
    return "\n".join(["# chosen", *lines[True], "", "# defaults", *lines[False]])


def _word(key: str, value: Any) -> str:
    """Return the word that sets a setting or an axis to `value`, for a shell."""
    if isinstance(value, tuple):
        text = ",".join(map(_item, value)) or "()"
        if len(value) == 1 and (text[0] == "(" or strip_quotes(text) != text) and not key.startswith(AXES):
            text = f"({text},)" if text[0] == "(" else f"{text},"  # its own brackets or quotes would be those of all
    else:
        text = str(value) if strip_quotes(str(value)) == str(value) else _quote(str(value))
    return shlex.quote(f"--config.{key}={text}")


def _item(value: Any) -> str:
    """Return an item of a list as `split_items` reads it."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_item, value))}{',' if len(value) == 1 else ''})"
    text = str(value)
    return text if split(text) == [text] and strip_quotes(text) == text else _quote(text)


def _quote(text: str) -> str:
    return f"'{text}'" if '"' in text else f'"{text}"'
