"""The settings that a command line names: a config file or a stored run, with single settings replaced."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import runpy
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from posx.errors import ConfigError, near_names
from posx.lab.config import SECTIONS, RunConfig, base_config
from posx.lab.config.data import PLACES
from posx.lab.config.overrides import override, setting_of, settings
from posx.lab.config.run import typed_sections
from posx.lab.files.lines import parsed
from posx.lab.words import SOURCES, Command, Words, listed, presets
from posx.notices import say

#: The __name__ of a config file while it is executed.
_EXECUTED = "posx_user_config"


def config_of(given: Words) -> ConfigDict:
    """Return the config that a command's flags name, with its overrides. Raises ConfigError."""
    config = load_config({name: given.values[name] for name in SOURCES if name in given.values}).lock()
    override(config, given.values["overrides"])
    return config


def set_anew(run: RunConfig, words: Sequence[str], sections: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return {section: {field: value}} of the `words` that replace settings in `sections` of a stored run.

    Raises:
      ConfigError: a setting is unknown or mistyped, or belongs to a section that the run was trained with.
    """
    names = [setting_of(word).partition(".") for word in words]
    for word, (section, _, _) in zip(words, names, strict=True):
        if section in {"encoding", "sweep", *SECTIONS} - set(sections):
            allowed = " and ".join(f"--config.{name}.*" for name in sections)
            raise ConfigError(f"{word}: a trained run keeps its {section} settings. This command takes {allowed}.")
    config = ConfigDict({name: dataclasses.asdict(getattr(run, name)) for name in sections})
    override(config, words)
    return {name: {field: config[name][field] for section, _, field in names if section == name} for name in sections}


def load_config(sources: Mapping[str, str]) -> ConfigDict:
    """Return the config of --config=FILE:ARGUMENT or --config_json=FILE. Raises ConfigError.

    A config file is executed twice: a run that differs each time could never be resumed.
    """
    if len(sources) == 2:
        raise ConfigError("--config and --config_json are both given. Give only one of them.")
    if not sources:
        raise ConfigError("no settings are named. Give --config=quick or --config_json=runs/x/config.json")
    if "config_json" in sources:
        return asked_before(earlier_run(sources["config_json"]))
    text, _, argument = sources["config"].partition(":")
    if not text:
        raise ConfigError(
            f"--config={sources['config']!r} names no preset and no file. The presets are: {', '.join(presets())}."
        )
    path = _config_file(text)
    config = _made_by(path, text, argument)
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"config file {text}: get_config must return a ConfigDict, not {type(config).__name__}.")
    missing = [name for name in ("encoding", *SECTIONS, "sweep") if name not in config]
    if missing:
        raise ConfigError(
            f"config file {text}: section {missing[0]!r} is missing. Start from posx.lab.config.base_config()."
        )
    if not isinstance(config.sweep.get("axes"), Mapping | ConfigDict):
        raise ConfigError(f"config file {text}: sweep.axes must map settings to their values. Write {{}} for no axes.")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        again = _made_by(path, text, argument)
    first, second = (settings(c) | {f"sweep.axes.{k}": v for k, v in c.sweep.axes.items()} for c in (config, again))
    for name in first.keys() | second.keys():
        one, other = first.get(name), second.get(name)
        if one != other and repr(one) != repr(other):  # NaN is not equal to itself
            raise ConfigError(
                f"config file {text}: {name} is {repr(one)[:60]} at one execution and {repr(other)[:60]} at the "
                "next, so no command could resume the run. Compute it from a fixed seed, or write the value into "
                "the file."
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


def _made_by(path: Path, text: str, argument: str) -> Any:
    """Return the result of the file's get_config. `text` names the file in messages. Raises ConfigError."""
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
    raise ConfigError(f"config file {text}{line}: {reason}")


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


def asked_before(run: RunConfig) -> ConfigDict:
    """Return the config that asks for the settings of `run` again. A sweep of it makes that run, until it has axes."""
    config = base_config(run.encoding)
    for name, section in typed_sections(run.asked).items():
        config[name].update(vars(section))
    config.data.update({name: getattr(run.data, name) for name in PLACES})  # the same from any directory
    own = (run.encoding,), (run.train.length,), (run.train.seed,)
    config.sweep.encodings, config.sweep.train_lens, config.sweep.seeds = own
    return config


def stray_word(word: str, command: Command, config: ConfigDict | None) -> str:
    """Return the message for a stray word or flag: the nearest of a command's flags and of its settings.

    The settings are those of its `config`, or some sections of a stored run's.
    """
    known = ["encoding", *settings(config or base_config())]
    known = [name for name in known if command.takes_config or name.partition(".")[0] in command.sections]
    flags = {name: f"--{name}" for name in command.flags}
    for name in known:
        flags.setdefault(name.rsplit(".", 1)[-1], f"--config.{name}")
    key, equals, value = word.partition("=")
    near = near_names(key.lstrip("-").removeprefix("config.").rsplit(".", 1)[-1].replace("-", "_"), flags, cutoff=0.6)
    hint = f"Settings are flags with two dashes; this command takes {listed(command.flags)}"
    if near:
        hint = f"Did you mean {flags[near[0]]}{equals}{value}?"
    return f"{f'{key}: this flag is unknown' if word.startswith('-') else f'word {word!r} belongs to no flag'}. {hint}"
