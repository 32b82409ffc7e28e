"""The words of a command line, taken apart: flags, with absl underneath, and what is said about settings.

Imports no JAX: a wrong word is told at once, and help too.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from posx.errors import ConfigError

#: {name: (default, help)}. A name that ends with a dot stands for all that begin so: {the rest: text given}.
Flags = Mapping[str, tuple[Any, str]]


class Words(NamedTuple):
    """What a command was given.

    values: of all its flags. config: {"config": "file.py:argument"} or {"config_json": "path"}, whichever named the
    settings. overrides: the words that set one of them. stray: words that are none of these.
    """

    values: dict[str, Any]
    config: dict[str, str]
    overrides: list[str]
    stray: list[str]


def words_of(words: Sequence[str], known: Flags) -> Words:
    """`words` taken apart. Raises ConfigError for a flag that is not `known`, with the nearest, and for a wrong value.

    Whether there are such settings is not looked at.
    """
    config, words = _split_config(list(words))
    overrides = [word for word in words if is_override(word)]
    families = {name: _family(words, name) for name in known if name.endswith(".")}
    words = [word for word in words if not word.startswith(tuple(f"--{name}" for name in families))]
    values = flags.FlagValues()
    kinds: dict[type, Any] = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}
    for name, (default, text) in ((n, flag) for n, flag in known.items() if n not in families):
        kinds.get(type(default), flags.DEFINE_string)(name, default, text, flag_values=values)
    stray = parse_flags(values, [word for word in words if word not in overrides])
    given = families | {name: values[name].value for name in known if name not in families}
    return Words(given, config, overrides, stray)


def parse_flags(values: flags.FlagValues, words: Sequence[str]) -> list[str]:
    """Sets the flags of `values` that are among `words`; the other words come back. Raises ConfigError."""
    try:
        return values(["posx", *words])[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, [n for n in values if "." not in n], n=1, cutoff=0.4)
        meant = f"did you mean --{near[0]}? " if near else ""
        raise ConfigError(f"unknown flag --{error.flagname}; {meant}see posx --help") from None
    except (flags.Error, TypeError, ValueError, KeyError) as error:
        raise ConfigError(" ".join(str(error).split())) from None


def is_override(word: str) -> bool:
    """Whether a word of a command line sets one of the settings."""
    return word.startswith(("--config.", "-config.", "--noconfig."))


def listed(known: Flags) -> str:
    return ", ".join(f"--{name}" for name in known)


def _family(words: Sequence[str], name: str) -> dict[str, str]:
    """{rest of the name: value} of the words `--NAME.rest=value`. Raises ConfigError for one without a value."""
    found = {}
    for word in words:
        if word.startswith(f"--{name}"):
            key, equals, value = word.removeprefix(f"--{name}").partition("=")
            if not (key and equals):
                raise ConfigError(f"{word} needs a name and a value, as --{name}X=V")
            found[key] = value
    return found


def _split_config(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """--config and --config_json taken out of the words."""
    taken: dict[str, str] = {}
    rest = []
    position = 0
    while position < len(words):
        name, equals, value = words[position].lstrip("-").partition("=")
        if words[position].startswith("-") and name in ("config", "config_json"):
            if not equals:
                position += 1
                if position == len(words):
                    raise ConfigError(f"--{name} needs a file, for example --{name}=configs/quick.py")
                value = words[position]
            taken[name] = value
        else:
            rest.append(words[position])
        position += 1
    return taken, rest
