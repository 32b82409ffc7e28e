"""From words on a command line to settings: `posx.words` and `overrides` underneath, one clear line on top.

A wrong key, word or value raises ConfigError with what was given, where, and the nearest valid name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from posx.config import SECTIONS, RunConfig, base_config
from posx.config.overrides import initials, override, setting_of, settings
from posx.errors import ConfigError, nearest
from posx.fields import typed
from posx.files.parse import parsed
from posx.progress import say
from posx.words import Words, listed, presets

#: The __name__ of a config file while it is executed.
_EXECUTED = "posx_user_config"


def config_of(given: Words) -> ConfigDict:
    """The config that a command's words name, with what they set in it. Raises ConfigError."""
    config = load_config(given.config).lock()
    override(config, given.overrides)
    return config


def set_anew(run: RunConfig, words: Sequence[str], sections: Sequence[str]) -> dict[str, dict[str, Any]]:
    """{section: {field: value}} that `words` such as --config.data.source=PATH set of `sections` of a stored run.

    Raises ConfigError for what is unknown or mistyped, and for settings of other sections: the run was made with them.
    """
    keys = list(map(setting_of, words))
    for word, key in zip(words, keys, strict=True):
        if key.partition(".")[0] in {"encoding", "sweep", *SECTIONS} - set(sections):
            allowed = " and ".join(f"--config.{name}.*" for name in sections)
            raise ConfigError(f"{word}: a trained run keeps its {key.partition('.')[0]} settings; this takes {allowed}")
    config = ConfigDict({name: dataclasses.asdict(getattr(run, name)) for name in sections})
    override(config, words)
    found: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for key in keys:
        section, _, name = key.partition(".")
        found[section][name] = config[section][name]
    return found


def load_config(where: Mapping[str, str]) -> ConfigDict:
    """The ConfigDict of `--config=file.py:argument`, or of `--config_json=config.json`, which is not code."""
    if len(where) == 2:
        raise ConfigError("--config and --config_json are both given: name the settings with one of them")
    if not where:
        raise ConfigError("name the settings with one of --config=quick or --config_json=runs/x/config.json")
    if "config_json" in where:
        return asked_before(earlier_run(where["config_json"]))
    text, _, argument = where["config"].partition(":")
    if not text:
        raise ConfigError(f"--config={where['config']!r} names no preset and no file; presets: {', '.join(presets())}")
    path = _config_file(text)
    config = _made_by(path, text, argument)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        again = _made_by(path, text, argument)
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"config file {text}: get_config must return a ConfigDict, not {type(config).__name__}")
    missing = [name for name in ("encoding", "model", "data", "train", "eval", "sweep") if name not in config]
    if missing:
        raise ConfigError(f"config file {text}: section {missing[0]!r} is missing; start from posx.config.base_config")
    if not isinstance(config.sweep.get("axes"), Mapping | ConfigDict):
        raise ConfigError(f"config file {text}: sweep.axes must map settings to their values; {{}} is none")
    _check_the_same(text, config, again)
    return config


def _config_file(text: str) -> Path:
    """Return the file that `--config` names. The name of a preset is the preset; a path or NAME.py is a file.

    Raises ConfigError if there is neither, with the nearest file or preset.
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
    what = "is a folder" if os.path.isdir(path) else "is no file" if os.path.exists(path) else "does not exist"
    files = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1, cutoff=0.4)
    by_file = files and path.stem not in known
    near = f"did you mean {path.parent / files[0]}? " if by_file else nearest(path.stem, list(known))
    raise ConfigError(f"config file {text[:300]} {what}; {near}presets: {', '.join(known)}")


def _made_by(path: Path, text: str, argument: str) -> Any:
    """Return what get_config of the file gives; `text` names it in messages. Raises ConfigError."""
    module = _execute(path)
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(f"config file {text} defines no get_config(arg)")
    try:
        return module.get_config(argument) if argument else module.get_config()
    except ConfigError as error:
        if f"'{_EXECUTED}:" in str(error):
            raise ConfigError(
                f"config file {text}: an encoding is named by a module that can be imported, which a config file under "
                f"its __name__ is not. Name it {path.stem}:CLASS and run posx in the folder of {path.name}"
            ) from None
        raise ConfigError(f"config file {text}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"config file {text}, {_own_frame(error, path)}: {type(error).__name__}: {error}") from None


def _check_the_same(text: str, config: ConfigDict, again: ConfigDict) -> None:
    """Raises ConfigError if two executions of a config file differ: each call of posx would begin another run."""
    first, second = (settings(c) | {f"sweep.axes.{k}": v for k, v in c.sweep.axes.items()} for c in (config, again))
    for name in first.keys() | second.keys():
        one, other = (repr(found.get(name)) for found in (first, second))
        if one != other and first.get(name) != second.get(name):
            raise ConfigError(
                f"config file {text}: {name} is {one[:60]} at one execution and {other[:60]} at the next, so that no "
                "command could resume the run. Compute it from a fixed seed, or write the value into the file"
            )


def _execute(path: Path) -> Any:
    if path.suffix == ".json":
        raise ConfigError(f"config file {path} is not a Python file; did you mean --config_json {path}?")
    spec = importlib.util.spec_from_file_location(_EXECUTED, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"config file {path} is not a Python file")
    module = sys.modules[_EXECUTED] = importlib.util.module_from_spec(spec)  # where dataclasses look for its names
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"config file {path}, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"config file {path}, {_own_frame(error, path)}: {type(error).__name__}: {error}") from None
    finally:
        del sys.modules[_EXECUTED]
    return module


def _own_frame(error: BaseException, path: Path) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f"line {own[-1].lineno}" if own else "outside its own lines"


def earlier_run(path: str) -> RunConfig:
    """Return the run that the file of `--config_json` holds, resolved as it was. Raises ConfigError."""
    if not path:
        raise ConfigError("--config_json='' names no file, for example --config_json=runs/x/config.json")
    try:
        run = RunConfig.from_json(parsed(Path(path).read_text(encoding="utf-8")))
    except IsADirectoryError:
        raise ConfigError(f"config file {path} is a folder; did you mean {Path(path, 'config.json')}?") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config file {path}: {error}") from None
    if changes := run.code_changes():
        raise ConfigError(
            f"--config_json: {changes} since that file was written. Restore the code, or name the settings with "
            "--config to train with the code as it is now"
        )
    return dataclasses.replace(run, text="")


def asked_before(run: RunConfig) -> ConfigDict:
    """Return the config that asks for what `run` was once asked for. A sweep of it is that run, until it has axes."""
    config = base_config()
    for section in SECTIONS:
        config[section].update({k: tuple(v) if isinstance(v, list) else v for k, v in run.asked[section].items()})
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in run.asked["encoding"].items()}
    config.encoding = ConfigDict(fields, type_safe=False)
    own = (run.encoding,), (run.train.length,), (run.train.seed,)
    config.sweep.encodings, config.sweep.train_lens, config.sweep.seeds = own
    return config


def meant(word: str, names: Iterable[str], own: Mapping[str, Any]) -> str:
    """Return what a stray word or flag may have been, of the settings `names` and a command's `own` flags."""
    key, equals, value = word.partition("=")
    candidates = {f"--{name}": name for name in own} | {f"--config.{name}": name.rsplit(".", 1)[-1] for name in names}
    wanted = key.lstrip("-").removeprefix("config.").rsplit(".", 1)[-1].replace("-", "_")
    near = difflib.get_close_matches(wanted, list(candidates.values()), n=1, cutoff=0.6)
    near = near or [name for name in candidates.values() if wanted in (*name.split("_"), initials(name))][:1]
    if not near:
        return f"every setting is a flag with dashes: {listed(own)}"
    flag = next(flag for flag, name in candidates.items() if name == near[0])
    return f"did you mean {flag}{f'={value}' if equals else ''}?"


def setting_names(config: ConfigDict | None, sections: Sequence[str]) -> list[str]:
    """Return the settings that a command takes: those of its `config`, or those of some `sections` of a stored run."""
    if config is not None:
        return ["encoding", *settings(config)]
    return [name for name in settings(base_config()) if name.startswith(tuple(f"{section}." for section in sections))]


def tuple_of_ints(text: str, flag: str) -> tuple[int, ...]:
    """ "64,128" as (64, 128). Raises ConfigError."""
    return typed(text, tuple[int, ...], f"--{flag}")
