"""The words of a command line, taken apart: flags, with absl underneath, and what is said about settings.

Imports no JAX: a wrong word is told at once, and help too.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from posx.errors import ConfigError
from posx.fields import typed

#: The value that each flag which names settings needs.
_EXAMPLES = {
    "config": "a preset or a file, for example --config=quick",
    "config_json": "a file, for example --config_json=runs/x/config.json",
}

#: {name: (default, help)}. A type in the place of a default stands for None, which is no value of the flag. A name that
#: ends with a dot stands for all that begin so: {the rest: text given}.
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
    """`words` taken apart. Whether there are such settings is not looked at.

    Raises:
      ConfigError: a flag is misspelt, is given twice, or cannot have its value.
    """
    config, words = _split_config(list(words))
    overrides = [word for word in words if is_override(word)]
    _check_words(words, known)
    families = {name: _family(words, name) for name in known if name.endswith(".")}
    words = [word for word in words if not word.startswith(tuple(f"--{name}" for name in families))]
    values = flags.FlagValues()
    for name, (default, text) in ((n, flag) for n, flag in known.items() if n not in families):
        flags.DEFINE_flag(_flag(name, default, text), values)
    stray = _parse(values, [word for word in words if word not in overrides])
    given = families | {name: values[name].value for name in known if name not in families}
    return Words(given, config, overrides, stray)


def _check_words(words: Sequence[str], known: Flags) -> None:
    """Raise ConfigError for what absl takes in silence: another flag as the value of one, and flags of its own."""
    takes_one = [name for name, (default, _) in known.items() if not isinstance(default, bool) and default is not bool]
    valued = {f"{dashes}{name}" for name in takes_one for dashes in ("-", "--")}
    for word, value in itertools.zip_longest(words, words[1:]):
        name = word.lstrip("-").partition("=")[0]
        if word.startswith("-") and name in ("flagfile", "undefok"):
            raise ConfigError(f"unknown flag --{name}; see posx --help")
        if word in valued and (value is None or value.startswith("--")):
            raise ConfigError(f"{word} has no value: write {word}=VALUE")


def _flag(name: str, default: Any, text: str) -> flags.Flag:
    kind = default if isinstance(default, type) else type(default)
    if kind is bool:
        flag: flags.Flag = flags.BooleanFlag(name, default, text)
        flag.parser = _Value(name, kind)
        return flag
    return flags.Flag(_Value(name, kind), None, name, None if default is kind else default, text)


class _Value(flags.ArgumentParser):
    """The value of a flag, read and refused as those of settings are."""

    def __init__(self, name: str, kind: type):
        super().__init__()
        self.name, self.kind = name, kind

    def parse(self, argument: Any) -> Any:
        return typed(argument, self.kind, f"--{self.name}")


def _parse(values: flags.FlagValues, words: Sequence[str]) -> list[str]:
    """Sets the flags of `values` that are among `words`. The other words come back, unknown flags too.

    Raises ConfigError, also for an unknown flag whose name is near that of one in `values`.
    """
    try:
        rest = values(["posx", *words], known_only=True)[1:]
    except flags.IllegalFlagValueError as error:
        raise ConfigError(str(error.__context__ or error)) from None
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from None
    for name in values:
        flag = values[name]
        if flag.present > 1 and not (flag.boolean and f"--no{name}" not in words):  # a switch twice loses nothing
            raise ConfigError(f"--{name} is given {flag.present} times: give it once")
    rest = [word for word in rest if word != "--"]
    for word in rest[:1] if "--" not in words else ():
        name = word.lstrip("-").partition("=")[0]
        near = difflib.get_close_matches(name, list(values), n=1, cutoff=0.7)
        if word.startswith("-") and near:
            raise ConfigError(f"unknown flag --{name}; did you mean --{near[0]}? see posx --help")
    return rest


def is_override(word: str) -> bool:
    """Whether a word of a command line sets one of the settings."""
    return word.startswith(("--config.", "-config.", "--noconfig."))


def listed(known: Flags) -> str:
    return ", ".join(f"--{name}" for name in known)


def presets() -> dict[str, Path]:
    """Return {name: file} of the presets: a wheel has them inside the package, a clone in `configs/` at its top."""
    package = Path(__file__).parent
    inside = package / "configs"
    folder = inside if inside.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def _family(words: Sequence[str], name: str) -> dict[str, str]:
    """{rest of the name: value} of the words `--NAME.rest=value`. Raises ConfigError for one without a value."""
    found = {}
    for word in words:
        if word.startswith(f"--{name}"):
            key, equals, value = word.removeprefix(f"--{name}").partition("=")
            if not (key and equals):
                raise ConfigError(f"{word} needs a name and a value, as --{name}X=V")
            if key in found:
                raise ConfigError(f"--{name}{key} is given twice: give it once")
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
                if position == len(words) or words[position].startswith("--"):
                    raise ConfigError(f"--{name} needs {_EXAMPLES[name]}")
                value = words[position]
            if name == "config" and not value:
                raise ConfigError(f"--config='' names no preset and no file; presets: {', '.join(presets())}")
            if name in taken:
                raise ConfigError(f"--{name} is given twice ({taken[name]} and {value}): give it once")
            taken[name] = value
        else:
            rest.append(words[position])
        position += 1
    return taken, rest
