"""What --config.A.B=V makes of a config: every key is known, and values are read as what they stand for.

Encodings are texts (--config.encoding="rope(base=500000)+alibi"), of which lists are made with commas; an axis of a
sweep is named by the setting that it varies (--config.sweep.axes.train.learning_rate=1e-3,2e-3).
"""

from __future__ import annotations

import difflib
import shlex
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from posx.config.run import SECTIONS, base_config, encoding_section
from posx.config.sweep import LISTS, SweepConfig
from posx.encodings import CHAIN, encoding_class, spec_text
from posx.errors import ConfigError
from posx.fields import split, typed, typed_fields, unbracketed, unquoted

_AXES = "sweep.axes."


def override(config: ConfigDict, words: Sequence[str]) -> None:
    """Set in `config` what `words` such as --config.train.steps=200 say.

    Raises:
      ConfigError: a key is not known (the nearest are named), is given twice, or cannot have its value.
    """
    named = {word: setting_of(word) for word in words}
    _check_once(words)
    for word, key in named.items():  # first, as other words may be about its fields
        if key in _ENCODING:
            with config.unlocked():
                config.encoding = encoding_section(unquoted(_value(word)))
    for word, key in named.items():
        if key not in _ENCODING:
            _set(config, word, key)


def printed(config: ConfigDict, sweep: bool = True) -> str:
    """Return every setting as the word that sets it, a line each: first what is not the default.

    `sweep` tells whether the command that prints them makes one; others refuse those words. Raises ConfigError for axes
    that cannot be read.
    """
    defaults = settings(base_config(config.encoding.name if config.encoding.name != CHAIN else "nope"))
    lines: dict[bool, list[str]] = {True: [_word("encoding", spec_text(config.encoding.to_dict()))], False: []}
    for key, value in settings(config).items():
        if key == "encoding.name" or LISTS.get(key.removeprefix("sweep.")) in config.sweep.axes:
            continue
        if key.startswith("sweep.") and not sweep:
            continue
        is_default = value == defaults.get(key)
        if is_default or not key.startswith("encoding."):  # the text above has the others
            lines[not is_default].append(_word(key, value))
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
    """An item of a list, as `items_of` reads it."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_typable, value))}{',' if len(value) == 1 else ''})"
    text = str(value)
    return text if split(text) == [text] and unquoted(text) == text else _quoted(text)


def _quoted(text: str) -> str:
    quote = "'" if '"' in text else '"'
    return f"{quote}{text}{quote}"


def settings(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """{"section.name": value} of all settings but a sweep's axes, which are named by others."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if f"{prefix}{name}." == _AXES:
            continue
        found |= settings(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else {f"{prefix}{name}": value}
    return found


def check_key(key: str, known: Mapping[str, Any], what: str) -> None:
    """Raises ConfigError, with the nearest names, unless `key` is one of those `known`."""
    if key not in known:
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.3)
        end = key.rsplit(".", 1)[-1]
        last = [k for k in known if end in (k.rsplit(".", 1)[-1], initials(k.rsplit(".", 1)[-1]))]
        names = ", ".join(dict.fromkeys([*last[:2], *near])) or ", ".join(dict.fromkeys(k.split(".")[0] for k in known))
        raise ConfigError(f"unknown config key {key!r} in {what}; nearest: {names}")


def initials(name: str) -> str:
    """ "ml" of "max_len"."""
    return "".join(part[:1] for part in name.split("_"))


def setting_of(word: str) -> str:
    """ "train.steps" of "--config.train.steps=5"."""
    return word.partition("=")[0].lstrip("-").removeprefix("noconfig.").removeprefix("config.")


def axis_values(config: ConfigDict, setting: str, given: Any, name: str = "") -> tuple[Any, ...]:
    """Return the values of a sweep's axis, of the type of the setting that it varies.

    Encodings and their fields are typed by their own classes later. `name` is what messages call the axis.
    """
    name = name or f"{_AXES}{setting}"
    known = _of_runs(config)
    if not setting.startswith("encoding."):  # fields that some of the encodings have are theirs to know
        check_key(setting, known, "sweep.axes")
    if not isinstance(given, list | tuple | range):
        raise ConfigError(f"{name}={given!r}: an axis must be a tuple of values. Write ({given!r},) for one value")
    if setting.startswith("encoding"):
        return tuple(given)
    return tuple(_typed(setting, value, name) for value in given)


def _of_runs(config: ConfigDict) -> dict[str, Any]:
    """{setting: value} of the settings that a run has, which are those that an axis may vary."""
    return {"encoding": ""} | {k: v for k, v in settings(config).items() if not k.startswith("sweep.")}


def _typed(setting: str, value: Any, name: str) -> Any:
    """Return `value` of the type of its setting. `name` is what messages call it."""
    section, _, field = setting.partition(".")
    sections = {**SECTIONS, "sweep": SweepConfig}
    check_key(section, sections, name)
    hints = typing.get_type_hints(sections[section])
    check_key(field, hints, name)
    return typed(value, hints[field], name)


#: The two keys that set a run's encoding.
_ENCODING = ("encoding", "encoding.name")


def _check_once(words: Sequence[str]) -> None:
    """Raises ConfigError for two words about one setting: either would be dropped."""
    lists = {f"sweep.{name}": f"{_AXES}{setting}" for name, setting in LISTS.items()}
    seen: dict[str, str] = {}
    for word in words:
        key = "encoding" if setting_of(word) in _ENCODING else setting_of(word)
        key = lists.get(key, key)
        if key in seen:
            raise ConfigError(f"{seen[key]} and {word} are about the same setting: give it once")
        seen[key] = word


def _value(word: str) -> str:
    name, _, value = word.partition("=")
    if not value:
        raise ConfigError(f"{word} has no value: write {name}=VALUE")
    return value


def _set(config: ConfigDict, word: str, key: str) -> None:
    """Set what one word says, which is not the encoding itself."""
    if key.startswith(_AXES):
        with config.unlocked():
            setting = key.removeprefix(_AXES)
            config.sweep.axes[setting] = _axis(_value(word), _of_runs(config).get(setting, ()))
        return
    known = settings(config)
    check_key(key, known, repr(word))
    section, _, name = key.partition(".")
    text = _text(word, key, known[key])
    if section == "encoding":
        of_class = encoding_class(config.encoding.name)
        given = typed_fields(of_class, {name: text}, f"encoding {config.encoding.name!r}", "--config.encoding.")
        config.encoding[name] = given.get(name, "auto")
        return
    with config.ignore_type():
        config[section][name] = _typed(key, text, f"--config.{key}")
    if section == "sweep" and LISTS.get(name) in config.sweep.axes:  # of a config file: it would override the list
        with config.unlocked():
            del config.sweep.axes[LISTS[name]]


def _text(word: str, key: str, held: Any) -> str:
    """Return the text of a word's value; --config.model.tied is true, --noconfig.model.tied is false."""
    name, equals, text = word.partition("=")
    without = name.lstrip("-").startswith("noconfig.")
    if isinstance(held, bool) and not equals:
        return str(not without)
    if without:
        raise ConfigError(f"{word}: write --config.{key}=VALUE")
    if not equals:
        raise ConfigError(f"{word} has no value: write {name}=VALUE")
    return unquoted(text)


def _axis(text: str, held: Any) -> tuple[str, ...]:
    """Return the texts of an axis's values; `held` is a value that its setting has.

    Brackets around all belong to the list. If the setting itself holds several values they belong to one value,
    unless there are brackets or quotes in them: (64,128) is one value of eval.lengths, ((64,128),(64,256)) are two.
    """
    inner = split(unbracketed(text.strip()))
    several = isinstance(held, tuple)
    nested = several and len(held) > 0 and isinstance(held[0], tuple)
    if unbracketed(text.strip()) and (not several or (not nested and any(item[0] in "([\"'" for item in inner))):
        return tuple(map(unquoted, inner))
    return tuple(map(unquoted, split(text)))
