"""What --config.A.B=V makes of a config: every key is known, and values are read as what they stand for.

Encodings are texts (--config.encoding="rope(base=500000)+alibi"), of which lists are made with commas; an axis of a
sweep is named by the setting that it varies (--config.sweep.axes.train.learning_rate=1e-3,2e-3).
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from posx.config.run import base_config, encoding_section
from posx.encodings import CHAIN, spec_text
from posx.encodings.grammar import parse_value, split
from posx.errors import ConfigError

_AXES = "sweep.axes."


def overridden(config: ConfigDict, words: Sequence[str]) -> list[str]:
    """Overrides as absl reads them, without those that are in `config` now: encodings and axes, which absl cannot read.

    Raises ConfigError for a key that is not known, with the nearest ones, and for a value that cannot be read.
    """
    named = {word: setting_of(word) for word in words}
    for word, key in named.items():  # first, as other words may be about its fields
        if key in ("encoding", "encoding.name"):  # the fields of another are not its own
            with config.unlocked():
                config.encoding = encoding_section(_value(word))
    return [kept for word in words if (kept := _kept(config, word, named[word])) is not None]


def printed(config: ConfigDict) -> str:
    """Every setting as the word that sets it, a line each: first what is not the default."""
    defaults = settings(base_config(config.encoding.name if config.encoding.name != CHAIN else "nope"))
    lines: dict[bool, list[str]] = {True: [_word("encoding", spec_text(config.encoding.to_dict()))], False: []}
    for key, value in settings(config).items():
        if key == "encoding.name":
            continue
        is_default = value == defaults.get(key)
        if is_default or not key.startswith("encoding."):  # the text above has the others
            lines[not is_default].append(_word(key, value))
    for name, values in config.sweep.axes.items():
        held = settings(config).get(name)
        if name == "encoding":
            values = map(spec_text, values)
        elif isinstance(held, tuple):
            values = (tuple_of(value, held, name) if isinstance(value, str) else value for value in values)
        lines[True].append(_word(f"{_AXES}{name}", tuple(values)))
    return "\n".join(["# chosen", *lines[True], "", "# defaults", *lines[False]])


def _word(key: str, value: Any) -> str:
    text = str(value)
    if isinstance(value, tuple):
        text = ",".join(map(_typable, value)) or "()"
        if text[0] == "(" and len(value) == 1 and not key.startswith(_AXES):
            text = f"({text},)"  # else its own brackets would count as those around all
    return shlex.quote(f"--config.{key}={text}")


def _typable(value: Any) -> str:
    """An item of a list, as `items_of` reads it."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_typable, value))}{',' if len(value) == 1 else ''})"
    text = str(value)
    return repr(text) if len(split(text)) > 1 else text


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


def items_of(text: str) -> list[str]:
    """The texts between the commas of `text`; brackets around all of it and quotes around one are no part of them."""
    text = text.strip()
    whole = text[:1] + text[-1:] in ("()", "[]") and len(split(text)) == 1
    return [item.strip("'\"") for item in split(text[1:-1] if whole else text)]


def tuple_of(text: str, old: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    """ "64,128" as (64, 128): values of the type of those in `old`. Raises ConfigError."""
    items = items_of(text)
    kind = type(old[0]) if old else int if all(item.lstrip("-").isdigit() for item in items) else str
    if kind in (bool, tuple):  # True, (1, 2): as they stand in the text of a spec
        return tuple(map(parse_value, items))
    try:
        return tuple(kind(item) for item in items)
    except ValueError:
        raise ConfigError(f"--config.{key}={text!r} must be {kind.__name__} values with commas between them") from None


def setting_of(word: str) -> str:
    """ "train.steps" of "--config.train.steps=5"."""
    return word.partition("=")[0].lstrip("-").removeprefix("noconfig.").removeprefix("config.")


def _value(word: str) -> str:
    name, _, value = word.partition("=")
    if not value:
        raise ConfigError(f"{word} has no value: write {name}=VALUE")
    return value


def _kept(config: ConfigDict, word: str, key: str) -> str | None:
    """`word` for absl, or None where it is in `config` now."""
    if key in ("encoding", "encoding.name"):
        return None
    known = settings(config)
    if key.startswith(_AXES):
        with config.unlocked():
            setting = key.removeprefix(_AXES)
            one_each = setting == "encoding" or not isinstance(known.get(setting, ()), tuple)
            config.sweep.axes[setting] = tuple((items_of if one_each else split)(_value(word)))
        return None
    check_key(key, known, repr(word))
    name, equals, value = word.partition("=")
    if key.startswith("encoding.") and value == "auto":
        config[key.partition(".")[0]][key.partition(".")[2]] = value
        return None
    if isinstance(known[key], tuple):
        return f"{name}={tuple_of(value, known[key], key)!r}"
    if not equals and not isinstance(known[key], bool):
        raise ConfigError(f"{word} has no value: write {name}=VALUE")
    return word
