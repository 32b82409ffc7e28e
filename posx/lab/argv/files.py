"""The settings that a command line names: those of a config file or a stored run, with --config.A.B=V in them."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from posx.errors import ConfigError, near_names
from posx.lab.argv import SOURCES, Command, presets
from posx.lab.argv.settings import AXES, override, settings
from posx.lab.config import SECTIONS, RunConfig, Sections, base_config, read_sections
from posx.lab.files.lines import parse_json
from posx.notices import say

#: The __name__ of a config file while it is executed.
_EXECUTED = "posx_user_config"


class ConfigFile(NamedTuple):
    """A config file, which was executed once for this command.

    Attributes:
      path: of the file.
      name: how messages call it.
      get_config: its function.
    """

    path: Path
    name: str
    get_config: Callable[..., Any]

    def sections(self, argument: str = "") -> Sections:
        """Return the settings that the file gives for an argument, or without one. Raises ConfigError."""
        with _faults(self.path, self.name):
            config = self.get_config(argument) if argument else self.get_config()
        if not isinstance(config, ConfigDict):
            raise ConfigError(f"{self.name}: get_config must return a ConfigDict, not {type(config).__name__}.")
        if missing := [name for name in ("encoding", *SECTIONS, "sweep") if name not in config]:
            raise ConfigError(
                f"{self.name}: section {missing[0]!r} is missing. Start from posx.lab.config.base_config()."
            )
        if not isinstance(config.sweep.get("axes"), Mapping | ConfigDict):
            raise ConfigError(f"{self.name}: sweep.axes must map settings to their values. Write {{}} for no axes.")
        return read_sections(config)


def read_config(values: dict[str, Any]) -> Sections | RunConfig:
    """Return the settings that the flags of a command name, with its overrides, or the run that --config_json repeats.

    values: of `split_words`. Raises ConfigError.
    """
    named, words = [name for name in SOURCES if values[name] is not None], values["overrides"]
    if len(named) == 2:
        raise ConfigError("--config and --config_json are both given. Give only one of them.")
    if not named:
        raise ConfigError("no settings are named. Give --config=quick or --config_json=runs/x/config.json")
    if named == ["config_json"]:
        run = earlier_run(values["config_json"])
        return override(run.as_given(), words) if words else run
    text, _, argument = values["config"].partition(":")
    if not text:
        raise ConfigError(
            f"--config={values['config']!r} names no preset and no file. The presets are: {', '.join(presets())}."
        )
    file = read_config_file(text)
    if argument:
        values["without_argument"] = lambda: override(file.sections(), words)
    return override(fixed_sections(file, argument), words)


def read_config_file(text: str) -> ConfigFile:
    """Run the file that `--config` names, without its argument, and return it. Raises ConfigError."""
    path, name = _config_file(text), f"config file {text}"
    if path.suffix == ".json":
        raise ConfigError(f"config file {path} is not a Python file. Did you mean --config_json {path}?")
    if path.suffix != ".py":
        raise ConfigError(f"{name}: it is not a Python file")
    with _faults(path, name):
        get_config = runpy.run_path(str(path), run_name=_EXECUTED).get("get_config")
    if not callable(get_config):
        raise ConfigError(f"{name}: it defines no get_config(arg)")
    return ConfigFile(path, name, get_config)


def fixed_sections(file: ConfigFile, argument: str) -> Sections:
    """Return the settings that a file gives. Its function is called twice: no run that differs could be resumed.

    Raises ConfigError.
    """
    config = file.sections(argument)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        again = file.sections(argument)
    first, second = (settings(c) | {f"{AXES}{k}": v for k, v in c.sweep.axes.items()} for c in (config, again))
    for name in first.keys() | second.keys():
        one, other = repr(first.get(name)), repr(second.get(name))
        if one != other and first.get(name) != second.get(name):
            raise ConfigError(
                f"{file.name}: {name} is {one[:60]} at one execution and {other[:60]} at the next, so no command could "
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


@contextlib.contextmanager
def _faults(path: Path, name: str) -> Iterator[None]:
    """Express every error of a config file in one line, with the line of the file. Raises ConfigError."""
    try:
        yield
        return
    except ConfigError as error:
        line, reason = "", str(error)
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
    raise ConfigError(f"{name}{line}: {reason}")


def earlier_run(path: str) -> RunConfig:
    """Return the run that the file of `--config_json` holds, resolved as it was. Raises ConfigError."""
    if not path:
        raise ConfigError("--config_json='' names no file. Give one, for example --config_json=runs/x/config.json")
    try:
        run = RunConfig.from_json(parse_json(Path(path).read_text(encoding="utf-8")))
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


def command_settings(command: Command, values: dict[str, Any]) -> list[str]:
    """Return the settings that a command takes: all of its config, or those of some sections of a stored run."""
    if command.takes_config:
        config = read_config(values)
        return ["encoding", *settings(config.as_given() if isinstance(config, RunConfig) else config)]
    return [name for name in settings(read_sections(base_config())) if name.partition(".")[0] in command.sections]
