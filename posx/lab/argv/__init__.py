"""From the words of a command line to the values of its flags, and to the settings that they name.

`read_words` is the entry, and absl reads the flags. Nothing imports JAX until settings are named, so that help and
wrong words cost no start of it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from posx.errors import ConfigError, near_names
from posx.lazy import module_getter
from posx.parsing import to_type

__getattr__ = module_getter(__name__)

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

    Attributes:
      text: its line of help.
      guide: its page of the docs, (title, path).
      flags: by name.
      takes_config: whether it takes SOURCES and --config.A.B=V.
      operand: how help calls the word after its name, or the words if it ends with "...".
      sections: the sections of a stored run's settings that --config.SECTION.NAME replaces.
    """

    text: str
    guide: tuple[str, str]
    flags: Flags = {}
    takes_config: bool = False
    operand: str = ""
    sections: tuple[str, ...] = ()


def read_words(command: Command, words: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """Return the values of the flags after a command's name, and what `files.read_config` makes of them.

    Among the values are "operand", a tuple if the command takes several, and "without_argument". That is a function for
    the settings of a config file without the argument that it was given, or None. The second is None if the command
    takes no config.

    Raises:
      ConfigError: the command does not take one of the words, or a setting is wrong.
    """
    values, stray = split_words(words, command.flags)
    several, operands = command.operand.endswith("..."), list[str]()
    while command.operand and stray and not stray[0].startswith("-") and (several or not operands):
        operands.append(stray.pop(0))
    values |= {"operand": tuple(operands) if several else "".join(operands), "without_argument": None}
    if stray:
        raise _unknown_word(stray[0], command, words, values)
    refused = [f"--{name}" for name in SOURCES if values[name] is not None and not command.takes_config]
    refused += values["overrides"] if not (command.takes_config or command.sections) else []
    if refused:
        raise ConfigError(f"{refused[0]}: this command takes no config. Its flags are: {_list_flags(command)}.")
    if (jobs := values.get("jobs", 0)) < 0:
        raise ConfigError(f"--jobs={jobs} must be at least 1, or 0 for the fastest number on this machine.")
    if not command.takes_config:
        return values, None
    from posx.lab.argv.files import read_config  # and JAX with it, which flags alone do not need

    return values, read_config(values)


def split_words(words: Sequence[str], known: Flags) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the flags that are `known`, and the words that nothing takes. Settings are not looked up.

    Among the values are "overrides", {word: setting} of the words that set a setting.

    Raises:
      ConfigError: a flag is given twice, or has no value or a wrong one.
    """
    usual = {name: default for name, (default, _) in {**SOURCES, **known}.items()}
    kinds = {name: default if isinstance(default, type) else type(default) for name, default in usual.items()}
    values = {name: None if kinds[name] is default else default for name, default in usual.items()}
    families = [name for name in kinds if name.endswith(".")]
    parsed = flags.FlagValues()
    for name in [name for name in kinds if name not in families]:
        parsed[name] = flags.Flag(flags.ArgumentParser(), None, name, None, "", boolean=kinds[name] is bool)
    for name in ("flagfile", "undefok"):  # absl's own
        if any(word.startswith("-") and word.lstrip("-").partition("=")[0] == name for word in words):
            raise ConfigError(f"--{name}: this flag is unknown. See posx --help")
    try:
        rest = [word for word in parsed(["posx", *words], known_only=True)[1:] if word != "--"]
    except flags.Error:
        raise ConfigError(f"{words[-1]} has no value. Write {words[-1]}=VALUE") from None
    except ValueError as error:  # --noFLAG=VALUE
        raise ConfigError(str(error)) from None
    for name in [name for name in parsed if parsed[name].present]:
        text, count = str(parsed[name].value), parsed[name].present
        word = words[words.index(text) - 1] if text.startswith("--") and text in words else ""
        if word in (f"-{name}", f"--{name}"):  # absl takes the next flag for the value
            raise ConfigError(f"{word} has no value. Write {word}=VALUE")
        values[name] = to_type(text, kinds[name], f"--{name}")  # as the value of a setting
        if count > 1 and (not parsed[name].boolean or f"--no{name}" in words):
            raise ConfigError(f"--{name} is given {count} times. Give it once.")
    for family in families:
        values[family] = _read_family([word for word in rest if word.startswith(f"--{family}")], family)
        rest = [word for word in rest if not word.startswith(f"--{family}")]
    overrides = [word for word in rest if _is_override(word)]
    values["overrides"] = {word: setting_name(word) for word in overrides}
    if twice := [word for word in overrides if overrides.count(word) > 1]:
        raise ConfigError(f"{twice[0]} and {twice[1]} are about the same setting. Give it once.")
    return values, [word for word in rest if word not in overrides]


def _read_family(words: Sequence[str], family: str) -> dict[str, str]:
    """Return {X: V} of the words `--FAMILY.X=V`. Raises ConfigError for one without a value, and for two of a name."""
    values: dict[str, str] = {}
    for word in words:
        key, _, value = word.removeprefix(f"--{family}").partition("=")
        if not (key and value):
            raise ConfigError(f"{word} needs a name and a value, as --{family}X=V")
        if key in values:
            raise ConfigError(f"--{family}{key} is given twice. Give it once.")
        values[key] = value
    return values


def _is_override(word: str) -> bool:
    return word.startswith(("--config.", "-config.", "--noconfig."))


def setting_name(word: str) -> str:
    """Return "train.steps" for "--config.train.steps=5"."""
    return word.partition("=")[0].lstrip("-").removeprefix("noconfig.").removeprefix("config.")


def presets() -> dict[str, Path]:
    """Return {name: file} of the presets: a wheel has them inside the package, a clone in `configs/` at its top."""
    package = Path(__file__).parents[2]
    inside = package / "configs"
    folder = inside if inside.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def _list_flags(command: Command) -> str:
    return ", ".join(f"--{name}" for name in command.flags)


def _unknown_word(word: str, command: Command, words: Sequence[str], values: dict[str, Any]) -> ConfigError:
    """Return the error of a word that nothing takes. It names the nearest flag, or else the nearest setting.

    Raises ConfigError if the config that the command was given is wrong.
    """
    key, equals, value = word.partition("=")
    problem, hint = f"word {word!r} belongs to no flag", ""
    if not word.startswith("-"):
        hint = _guess_meaning(word, command, values, words)
    elif "--" in words:
        hint = "Leave out the lone --."
    else:
        problem = f"{key}: this flag is unknown"
        near = near_names(key.lstrip("-"), command.flags, cutoff=0.7)
        hint = f"Did you mean --{near[0]}? See posx --help" if near else ""
    if not hint and not (command.takes_config or command.sections):
        hint = f"The flags of this command are: {_list_flags(command)}."
    elif not hint:
        from posx.lab.argv.files import command_settings

        known = {name: f"--{name}" for name in command.flags}
        for name in command_settings(command, values):
            known.setdefault(name.rpartition(".")[2], f"--config.{name}")
        end = key.lstrip("-").removeprefix("config.").rpartition(".")[2].replace("-", "_")
        near = near_names(end, known, cutoff=0.6)
        hint = f"Settings are flags with two dashes; this command takes {_list_flags(command)}"
        hint = f"Did you mean {known[near[0]]}{equals}{value}?" if near else hint
    return ConfigError(f"{problem}. {hint}")


def _guess_meaning(word: str, command: Command, values: Mapping[str, Any], words: Sequence[str]) -> str:
    """Say what a word without a flag may be: a preset, a file, a folder, or the end of the value before it."""
    name, has_source = word.partition(":")[0], any(values[name] is not None for name in SOURCES)
    if command.takes_config and not has_source and (name in presets() or name.endswith(".py")):
        return f"Did you mean --config {shlex.quote(word)}?"
    if "=" in word:  # a setting without its dashes
        return ""
    if "/" in word.strip(".") or os.path.exists(word):
        if values["workdir"]:
            return "Give one work folder at a time, in quotes if its path has spaces."
        return f"Did you mean --workdir {shlex.quote(word)}?"
    flag, value = ["", "", *words][(at := words.index(word)) : at + 2]
    if _is_override(value) and "=" not in value:
        return f"Did you mean {value}={shlex.quote(word)}?"
    if value.startswith("--") and "=" in value:
        flag, _, value = value.partition("=")
    if flag == "--config":
        return f"Did you mean --config {shlex.quote(f'{value}:{word}')}?"
    default = command.flags.get(flag.removeprefix("--"), (True, ""))[0]
    if _is_override(flag) or not isinstance(default, bool):
        return f"Did you mean {flag}={shlex.quote(f'{value} {word}')}?"
    return f"Give one {command.operand} at a time." if command.operand else ""
