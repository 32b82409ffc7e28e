"""The words of a command line: those that a command takes, and those that it was given. absl reads the flags.

Nothing here imports JAX, so that help and wrong words cost no start of it.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from posx.errors import ConfigError, near_names
from posx.fields import typed

#: {name: (default, help)}. A type in place of a default means that the flag is None unless it is given. A name that
#: ends with a dot stands for all flags that begin with it. Its value is {rest of the name: text}.
Flags = Mapping[str, tuple[Any, str]]

#: The flags that name the settings, of which a command takes one.
SOURCES: Flags = {
    "config": (str, "a preset or a file, and the encoding after a colon: quick:rope, path/to/mine.py:rope"),
    "config_json": (str, "the config.json of an earlier run instead"),
}


class Command(NamedTuple):
    """The words that a command takes.

    text: its line of help. guide: its page of the docs, (title, path). flags: by name. operand: how help calls the word
    after its name, or the words if it ends with "...". sections: the sections of a stored run's settings that
    --config.SECTION.NAME replaces.
    """

    text: str
    guide: tuple[str, str]
    flags: Flags = {}
    takes_config: bool = False
    operand: str = ""
    sections: tuple[str, ...] = ()


class Words(NamedTuple):
    """The words that a command was given.

    values: {flag: value}, with "overrides", the words that set a setting. stray: the words that nothing takes.
    """

    values: dict[str, Any]
    stray: list[str]


def read(command: Command, words: Sequence[str]) -> Words:
    """Return the words after a command's name, with its "operand" among the values, a tuple if it takes several.

    Stray words come back only if the names of settings, which take long to load, may explain them.

    Raises:
      ConfigError: the command does not take one of the words.
    """
    values, stray = words_of(words, command.flags)
    several, operands = command.operand.endswith("..."), list[str]()
    while command.operand and stray and not stray[0].startswith("-") and (several or not operands):
        operands.append(stray.pop(0))
    if stray and (problem := _problem(stray[0], command, values, words)):
        raise ConfigError(problem)
    settings = [f"--{name}" for name in SOURCES if name in values and not command.takes_config]
    settings += values["overrides"] if not (command.takes_config or command.sections) else []
    if settings:
        raise ConfigError(f"{settings[0]}: this command takes no config. Its flags are: {listed(command.flags)}.")
    if (jobs := values.get("jobs", 0)) < 0:
        raise ConfigError(f"--jobs={jobs} must be at least 1, or 0 for the fastest number on this machine.")
    return Words(values | {"operand": tuple(operands) if several else "".join(operands)}, stray)


def words_of(words: Sequence[str], known: Flags) -> Words:
    """Return `words` taken apart. It does not check that the settings exist.

    Raises:
      ConfigError: a flag is given twice, or has no value or a wrong one.
    """
    families = [name for name in known if name.endswith(".")]
    found = flags.FlagValues()
    for name, (default, text) in {**SOURCES, **known}.items():
        if name not in families:
            kind = default if isinstance(default, type) else type(default)
            usual = None if default is kind else default
            found[name] = flags.Flag(_Value(name, kind), None, name, usual, text, boolean=kind is bool)
    _check_values(words, [name for name in found if not found[name].boolean])
    try:
        rest = [word for word in found(["posx", *words], known_only=True)[1:] if word != "--"]
    except (flags.Error, ValueError) as error:
        raise ConfigError(str(error.__context__ or error)) from None
    for name in found:
        if found[name].present > 1 and not (found[name].boolean and f"--no{name}" not in words):
            raise ConfigError(f"--{name} is given {found[name].present} times. Give it once.")
    values = {name: found[name].value for name in found if name not in SOURCES or found[name].present}
    values |= {name: _family(rest, name) for name in families}
    values["overrides"] = [word for word in rest if is_override(word)]
    taken = tuple(f"--{name}" for name in families)
    return Words(values, [word for word in rest if not is_override(word) and not word.startswith(taken)])


def _check_values(words: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for words that absl accepts: a flag as another flag's value, and flags of its own."""
    valued = {f"{dashes}{name}" for name in names for dashes in ("-", "--")}
    for word, value in itertools.zip_longest(words, words[1:]):
        name = word.lstrip("-").partition("=")[0]
        if word.startswith("-") and name in ("flagfile", "undefok"):
            raise ConfigError(f"--{name}: this flag is unknown. See posx --help")
        if word in valued and (value is None or value.startswith("--")):
            raise ConfigError(f"{word} has no value. Write {word}=VALUE")


class _Value(flags.ArgumentParser):
    """The parser of a flag's value, which reads it as a setting's value is read."""

    def __init__(self, name: str, kind: type):
        super().__init__()
        self.name, self.kind = name, kind

    def parse(self, argument: Any) -> Any:
        return typed(argument, self.kind, f"--{self.name}")


def _family(words: Sequence[str], name: str) -> dict[str, str]:
    """Return {rest of the name: value} of the words `--NAME.rest=value`. Raises ConfigError for one without a value."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith(f"--{name}"):
            key, _, value = word.removeprefix(f"--{name}").partition("=")
            if not (key and value):
                raise ConfigError(f"{word} needs a name and a value, as --{name}X=V")
            if key in found:
                raise ConfigError(f"--{name}{key} is given twice. Give it once.")
            found[key] = value
    return found


def is_override(word: str) -> bool:
    """Return whether a word of a command line sets a setting."""
    return word.startswith(("--config.", "-config.", "--noconfig."))


def listed(known: Flags) -> str:
    return ", ".join(f"--{name}" for name in known)


def presets() -> dict[str, Path]:
    """Return {name: file} of the presets: a wheel has them inside the package, a clone in `configs/` at its top."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    folder = inside if inside.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def _problem(word: str, command: Command, values: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return a message that says which flag a stray word may belong to, or "" if only a setting may explain it."""
    if not word.startswith("-"):
        problem, hint = f"word {word!r} belongs to no flag", _near(word, command, values, words)
    elif "--" in words:
        problem, hint = f"word {word!r} belongs to no flag", "Leave out the lone --."
    else:
        flag = word.partition("=")[0]
        near = near_names(flag.lstrip("-"), command.flags, cutoff=0.7)
        problem, hint = f"{flag}: this flag is unknown", f"Did you mean --{near[0]}? See posx --help" if near else ""
    if not (command.takes_config or command.sections):
        hint = hint or f"The flags of this command are: {listed(command.flags)}."
    return f"{problem}. {hint}" if hint else ""


def _near(word: str, command: Command, values: Mapping[str, Any], words: Sequence[str]) -> str:
    """Say what a word without a flag may be: a preset, a file, a folder, or the end of the value before it."""
    name = word.partition(":")[0]
    if command.takes_config and not SOURCES.keys() & values.keys() and (name in presets() or name.endswith(".py")):
        return f"Did you mean --config {shlex.quote(word)}?"
    if "=" in word:  # a setting without its dashes
        return ""
    if "/" in word.strip(".") or os.path.exists(word):
        if values["workdir"]:
            return "Give one work folder at a time, in quotes if its path has spaces."
        return f"Did you mean --workdir {shlex.quote(word)}?"
    flag, value = ["", "", *words][(at := words.index(word)) : at + 2]
    if is_override(value) and "=" not in value:
        return f"Did you mean {value}={shlex.quote(word)}?"
    if value.startswith("--") and "=" in value:
        flag, _, value = value.partition("=")
    if flag == "--config":
        return f"Did you mean --config {shlex.quote(f'{value}:{word}')}?"
    default = command.flags.get(flag.removeprefix("--"), (True, ""))[0]
    if is_override(flag) or not isinstance(default, bool):
        return f"Did you mean {flag}={shlex.quote(f'{value} {word}')}?"
    return f"Give one {command.operand} at a time." if command.operand else ""
