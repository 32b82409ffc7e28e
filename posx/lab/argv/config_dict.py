"""The ConfigDict that a command line names: a config file or a stored run, with --config.A.B=V in it; and back.

Every key must be known. Values are read as the type of their setting. Encodings are texts
(--config.encoding="rope(base=500000)+alibi"). An axis of a sweep is named by the setting that it varies
(--config.sweep.axes.train.learning_rate=1e-3,2e-3).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import runpy
import shlex
import traceback
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from posx.encodings import CHAIN, encoding_class, spec_text
from posx.errors import ConfigError, near_names
from posx.fields import split, typed, typed_fields, unbracketed, unquoted
from posx.lab.argv import SOURCES, Command, Words, presets, setting_of
from posx.lab.config import SECTIONS, RunConfig, SweepConfig, base_config, encoding_section
from posx.lab.config.data import PLACES
from posx.lab.config.run import typed_sections
from posx.lab.config.sections import LISTS
from posx.lab.files.lines import parsed
from posx.notices import say

#: The __name__ of a config file while it is executed.
_EXECUTED = "posx_user_config"

_AXES = "sweep.axes."

_CLASSES: Mapping[str, type] = {**SECTIONS, "sweep": SweepConfig}

#: {"section.name": type} of all settings but the fields of encodings and the axes of a sweep.
_TYPES = {
    f"{section}.{name}": kind
    for section, cls in _CLASSES.items()
    for name, kind in typing.get_type_hints(cls).items()
    if name != "axes"
}


def config_of(given: Words) -> ConfigDict | RunConfig:
    """Return the config that the flags of a command name, with its overrides, or the run that --config_json repeats.

    Raises ConfigError.
    """
    source = load_config({name: given.values[name] for name in SOURCES if given.values[name] is not None})
    if isinstance(source, RunConfig) and not given.values["overrides"]:
        return source
    config = asked_before(source).lock()
    override(config, given.values["overrides"])
    return config


def load_config(sources: Mapping[str, str]) -> ConfigDict | RunConfig:
    """Return the config of --config=FILE:ARGUMENT, or the stored run of --config_json=FILE. Raises ConfigError.

    A config file is executed twice: a run that differs each time could never be resumed.
    """
    if len(sources) == 2:
        raise ConfigError("--config and --config_json are both given. Give only one of them.")
    if not sources:
        raise ConfigError("no settings are named. Give --config=quick or --config_json=runs/x/config.json")
    if "config_json" in sources:
        return earlier_run(sources["config_json"])
    text, _, argument = sources["config"].partition(":")
    if not text:
        raise ConfigError(
            f"--config={sources['config']!r} names no preset and no file. The presets are: {', '.join(presets())}."
        )
    path, where = _config_file(text), f"config file {text}"
    config = _made_by(path, where, argument)
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"{where}: get_config must return a ConfigDict, not {type(config).__name__}.")
    if missing := [name for name in ("encoding", *SECTIONS, "sweep") if name not in config]:
        raise ConfigError(f"{where}: section {missing[0]!r} is missing. Start from posx.lab.config.base_config().")
    if not isinstance(config.sweep.get("axes"), Mapping | ConfigDict):
        raise ConfigError(f"{where}: sweep.axes must map settings to their values. Write {{}} for no axes.")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        again = _made_by(path, where, argument)
    first, second = (settings(c) | {f"{_AXES}{k}": v for k, v in c.sweep.axes.items()} for c in (config, again))
    for name in first.keys() | second.keys():
        one, other = repr(first.get(name)), repr(second.get(name))
        if one != other and first.get(name) != second.get(name):
            raise ConfigError(
                f"{where}: {name} is {one[:60]} at one execution and {other[:60]} at the next, so no command could "
                "resume the run. Compute it from a fixed seed, or write the value into the file."
            )
    return config


def _config_file(text: str) -> Path:
    """Return the file that `--config` names. The name of a preset is the preset; a path or NAME.py is a file.

    Raises:
      ConfigError: neither exists. It names the nearest file or preset.
    """
    known = presets()
    if text in known:
        beside = Path(f"{text}.py")
        if os.path.isfile(beside) and not beside.samefile(known[text]):
            say(f"notice: --config={text} is the preset; the file in this folder is --config={beside}")
        return known[text]
    path = Path(text).expanduser()
    if os.path.isfile(path):
        return path
    problem = "is a folder" if os.path.isdir(path) else "is no file" if os.path.exists(path) else "does not exist"
    files = near_names(path.stem, [file.stem for file in path.parent.glob("*.py")] if path.stem not in known else [])
    near = [str(path.parent / f"{name}.py") for name in files] or [repr(name) for name in near_names(path.stem, known)]
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(f"config file {text[:300]} {problem}. {hint}The presets are: {', '.join(known)}.")


def _made_by(path: Path, where: str, argument: str) -> Any:
    """Return the result of the file's get_config. `where` names the file in messages. Raises ConfigError."""
    if path.suffix == ".json":
        raise ConfigError(f"config file {path} is not a Python file. Did you mean --config_json {path}?")
    line, reason = "", "it is not a Python file"
    try:
        if path.suffix == ".py":
            get_config = runpy.run_path(str(path), run_name=_EXECUTED).get("get_config")
            if callable(get_config):
                return get_config(argument) if argument else get_config()
            reason = "it defines no get_config(arg)"
    except ConfigError as error:
        reason = str(error)
        if f"'{_EXECUTED}:" in reason:
            reason = (
                "an encoding is named by a module that can be imported, but this __name__ is that of a config "
                f"file. Name it {path.stem}:CLASS and run posx in the folder of {path.name}"
            )
    except (Exception, SystemExit) as error:
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        number, reason = own[-1] if own else None, f"{type(error).__name__}: {error}"
        if isinstance(error, SyntaxError):
            number, reason = error.lineno, error.msg
        line = f", line {number}" if number else ", outside its own lines"
    raise ConfigError(f"{where}{line}: {reason}")


def earlier_run(path: str) -> RunConfig:
    """Return the run that the file of `--config_json` holds, resolved as it was. Raises ConfigError."""
    if not path:
        raise ConfigError("--config_json='' names no file. Give one, for example --config_json=runs/x/config.json")
    try:
        run = RunConfig.from_json(parsed(Path(path).read_text(encoding="utf-8")))
    except IsADirectoryError:
        raise ConfigError(f"config file {path} is a folder. Did you mean {Path(path, 'config.json')}?") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config file {path}: {error}") from None
    if changes := run.code_changes():
        raise ConfigError(
            f"--config_json: {changes} since that file was written. Restore the code. To train with the present "
            "code, name the settings with --config instead."
        )
    return run


def asked_before(run: ConfigDict | RunConfig) -> ConfigDict:
    """Return the config that asks for the settings of a stored run again; a config itself.

    A sweep of it makes that run, until it has axes.
    """
    if isinstance(run, ConfigDict):
        return run
    config = base_config(run.encoding)
    for name, section in typed_sections(run.asked).items():
        config[name].update(vars(section))
    config.data.update({name: getattr(run.data, name) for name in PLACES})  # the same from any directory
    config.sweep.update(encodings=(run.encoding,), train_lens=(run.train.length,), seeds=(run.train.seed,))
    return config


def override(config: ConfigDict, words: Collection[str]) -> None:
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
    known, (section, _, name) = settings(config), key.partition(".")
    if key == "encoding":
        config.encoding = encoding_section(unquoted(_text(word, key, held="")))
    elif key.startswith(_AXES):
        setting = key.removeprefix(_AXES)
        held = "" if setting == "encoding" else known.get(setting, ())
        config.sweep.axes[setting] = _axis(_text(word, key, held=()), held)
    else:
        check_key(key, known, repr(word))
        text = unquoted(_text(word, key, known[key]))
        cls = encoding_class(config.encoding.name) if section == "encoding" else _CLASSES[section]
        value = typed_fields(cls, {name: text}, f"config section {section!r}", f"--config.{section}.")
        config[section][name] = value.get(name, "auto")
        if section == "sweep" and LISTS.get(name) in config.sweep.axes:
            del config.sweep.axes[LISTS[name]]  # the axis of a config file would hide the list


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
    inner, several = unbracketed(text.strip()), isinstance(held, tuple)
    nested = several and len(held) > 0 and isinstance(held[0], tuple)
    if several and (nested or not any(item[0] in "([\"'" for item in split(inner))):
        inner = ""
    return tuple(map(unquoted, split(inner or text)))


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
    return tuple(given if of_encoding else (typed(value, _TYPES[setting], name) for value in given))


def settings(config: ConfigDict) -> dict[str, Any]:
    """Return {"section.name": value} of all settings but the axes of a sweep, whose names are those of settings."""
    return {
        f"{section}.{name}": value
        for section, fields in config.items()
        for name, value in (fields.items() if isinstance(fields, ConfigDict) else ())
        if section == "encoding" or f"{section}.{name}" in _TYPES
    }


def settings_of(command: Command, given: Words) -> list[str]:
    """Return the settings that a command takes: all of its config, or those of some sections of a stored run."""
    if command.takes_config:
        return ["encoding", *settings(asked_before(config_of(given)))]
    return [name for name in settings(base_config()) if name.partition(".")[0] in command.sections]


def check_key(key: str, known: Iterable[str], place: str) -> None:
    """Raise ConfigError, with the nearest names, if `key` is not one of those `known`."""
    if key not in known:
        names = near_names(key, known, number=4, cutoff=0.3) or dict.fromkeys(name.split(".")[0] for name in known)
        raise ConfigError(f"config key {key!r} is unknown in {place}. Nearest: {', '.join(names)}")


def set_anew(run: RunConfig, words: Mapping[str, str], sections: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return {section: {field: value}} of the `words` that replace settings in `sections` of a stored run.

    Raises:
      ConfigError: a setting is unknown or mistyped, or belongs to a section that the run was trained with.
    """
    for word, setting in words.items():
        if (section := setting.partition(".")[0]) in {"encoding", "sweep", *SECTIONS} - set(sections):
            allowed = " and ".join(f"--config.{name}.*" for name in sections)
            raise ConfigError(f"{word}: a trained run keeps its {section} settings. This command takes {allowed}.")
    config = ConfigDict({name: dataclasses.asdict(getattr(run, name)) for name in sections})
    override(config, words)
    return {s: {name: value for name, value in config[s].items() if f"{s}.{name}" in words.values()} for s in sections}


def printed(config: ConfigDict | RunConfig, sweep: bool = True) -> str:
    """Return every setting as the word that sets it, a line each, first those that are not the default.

    `sweep` tells whether the command makes a sweep: others refuse its words. Raises ConfigError for unreadable axes.
    """
    config = asked_before(config)
    encoding, axes = config.encoding.to_dict(), dict(config.sweep.axes) if sweep else {}
    defaults = settings(base_config(encoding["name"] if encoding["name"] != CHAIN else "nope"))
    lines: dict[bool, list[str]] = {True: [_word("encoding", spec_text(encoding))], False: []}
    for key, value in settings(config).items():
        of_sweep = key.startswith("sweep.") and (not sweep or LISTS.get(key.removeprefix("sweep.")) in axes)
        is_default = value == defaults.get(key)
        if key != "encoding.name" and not of_sweep and (is_default or not key.startswith("encoding.")):
            lines[not is_default].append(_word(key, value))  # the encoding's text has its other fields
    for setting, given in sorted(axes.items()):
        values = axis_values(config, setting, given)
        lines[True].append(
            _word(f"{_AXES}{setting}", tuple(map(spec_text, values)) if setting == "encoding" else values)
        )
    return "\n".join(["# chosen", *lines[True], "", "# defaults", *lines[False]])


def _word(key: str, value: Any) -> str:
    """Return the word that sets a setting or an axis to `value`, for a shell."""
    if isinstance(value, tuple):
        text = ",".join(map(_item, value)) or "()"
        if len(value) == 1 and (text[0] == "(" or unquoted(text) != text) and not key.startswith(_AXES):
            text = f"({text},)" if text[0] == "(" else f"{text},"  # its own brackets or quotes would be those of all
    else:
        text = str(value) if unquoted(str(value)) == str(value) else _quoted(str(value))
    return shlex.quote(f"--config.{key}={text}")


def _item(value: Any) -> str:
    """Return an item of a list as `items_of` reads it."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_item, value))}{',' if len(value) == 1 else ''})"
    text = str(value)
    return text if split(text) == [text] and unquoted(text) == text else _quoted(text)


def _quoted(text: str) -> str:
    return f"'{text}'" if '"' in text else f'"{text}"'
