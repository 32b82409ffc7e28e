"""From words on a command line to settings: absl flags and ml_collections underneath, one clear line on top.

A wrong key, word or value raises ConfigError with what was given, where, and the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from posx.config import SECTIONS, RunConfig, base_config
from posx.config.overrides import initials, is_override, overridden, setting_of, settings
from posx.config.stored import ENCODINGS_BEFORE, from_stored
from posx.encodings import spec_text
from posx.errors import ConfigError
from posx.fields import typed_fields

#: Flags every command has.
COMMON: Mapping[str, tuple[Any, str]] = {
    "workdir": ("", "the work folder of a run or a sweep"),
    "print_config": (False, "print the settings this command would use, and stop"),
    "dry_run": (False, "say what would be done, and stop"),
    "debug": (False, "show the traceback of an error"),
}


def parse(
    words: Sequence[str], own: Mapping[str, tuple[Any, str]], takes_config: bool, sections: Sequence[str] = ()
) -> tuple[dict[str, Any], ConfigDict | None]:
    """Values of COMMON and a command's `own` flags, {name: (default, help)}, and the config with overrides applied.

    `config` or `config_json` is among the values, whichever named the config, and "overrides", the words about
    settings: for `set_anew` where a command takes no config but settings of some `sections` of a stored one.
    """
    config_words, words = split_config(list(words))
    if config_words and not takes_config:
        raise ConfigError(f"this command takes no --config; its flags: {_listed({**COMMON, **own})}")
    values = flags.FlagValues()
    for name, (default, text) in {**COMMON, **own}.items():
        kinds: dict[type, Any] = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}
        define = kinds.get(type(default), flags.DEFINE_string)
        define(name, default, text, flag_values=values)
    overrides = [word for word in words if is_override(word)]
    config = load_config(config_words) if takes_config else None
    if config is not None:
        words = ["posx", *overridden(config, words)]
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=words, lock_config=True)
    else:
        if overrides and not sections:
            raise ConfigError(f"{overrides[0]}: this command takes no config; its flags: {_listed({**COMMON, **own})}")
        words = ["posx", *(word for word in words if word not in overrides)]
    rest = _parse_flags(values, words)
    if rest:
        raise ConfigError(f"stray word {rest[0]!r}; {_meant(rest[0], config, {**COMMON, **own})}")
    found = {name: values[name].value for name in {**COMMON, **own}} | {"overrides": overrides}
    return found | config_words, values["config"].value if config is not None else None


def set_anew(run: RunConfig, words: Sequence[str], sections: Sequence[str]) -> dict[str, dict[str, Any]]:
    """{section: {field: value}} that `words` such as --config.data.source=PATH set of `sections` of a stored run.

    Raises ConfigError for what is unknown or mistyped, and for settings of other sections: the run was made with them.
    """
    keys = list(map(setting_of, words))
    for word, key in zip(words, keys, strict=True):
        if key.partition(".")[0] in {"encoding", "sweep", *SECTIONS} - set(sections):
            allowed = " and ".join(f"--config.{name}.*" for name in sections)
            raise ConfigError(f"{word}: a trained run keeps its {key.partition('.')[0]} settings; this takes {allowed}")
    values, config = flags.FlagValues(), ConfigDict({name: dataclasses.asdict(getattr(run, name)) for name in sections})
    read = ["posx", *overridden(config, words)]
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=read, lock_config=True)
    _parse_flags(values, read)
    found: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for key in keys:
        section, _, name = key.partition(".")
        given = {name: values.config[section][name]}
        found[section] |= typed_fields(SECTIONS[section], given, f"config section {section!r}", f"{section}.")
    return found


def split_config(words: list[str]) -> tuple[dict[str, str], list[str]]:
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


def load_config(where: Mapping[str, str]) -> ConfigDict:
    """The ConfigDict of `--config=file.py:argument`, or of `--config_json=config.json`, which is not code."""
    if len(where) != 1:
        raise ConfigError("name the settings with one of --config=configs/quick.py or --config_json=runs/x/config.json")
    if "config_json" in where:
        return asked_before(earlier_run(where["config_json"]))
    text, _, argument = where["config"].partition(":")
    path = Path(text).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1, cutoff=0.4)
        raise ConfigError(f"config file {text} {what}{f'; did you mean {path.parent / near[0]}?' if near else ''}")
    module = _execute(path)
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(f"config file {text} defines no get_config(arg)")
    try:
        config = module.get_config(argument) if argument else module.get_config()
    except ConfigError as error:
        raise ConfigError(f"config file {text}: {error}") from None
    except Exception as error:
        raise ConfigError(f"config file {text}, {_own_frame(error, path)}: {type(error).__name__}: {error}") from None
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"config file {text}: get_config must return a ConfigDict, not {type(config).__name__}")
    missing = [name for name in ("encoding", "model", "data", "train", "eval", "sweep") if name not in config]
    if missing:
        raise ConfigError(f"config file {text}: section {missing[0]!r} is missing; start from posx.config.base_config")
    if not isinstance(config.sweep.get("axes"), Mapping | ConfigDict):
        raise ConfigError(f"config file {text}: sweep.axes must map settings to their values; {{}} is none")
    return config


def _execute(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("posx_user_config", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"config file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"config file {path}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        raise ConfigError(f"config file {path}, {_own_frame(error, path)}: {type(error).__name__}: {error}") from None
    return module


def _own_frame(error: BaseException, path: Path) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f"line {own[-1].lineno}" if own else "outside its own lines"


def earlier_run(path: str) -> RunConfig:
    """The run that the file of `--config_json` holds. Raises ConfigError."""
    try:
        return from_stored(json.loads(Path(path).read_text()))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config file {path}: {error}") from None


def repeated_run(values: Mapping[str, Any]) -> RunConfig | None:
    """The run that a command repeats, if its settings were named by the config.json of one."""
    return earlier_run(values["config_json"]) if "config_json" in values else None


def asked_before(run: RunConfig) -> ConfigDict:
    """The config that asks for what `run` once asked for; a sweep of it is that run, until it is given axes."""
    config = base_config()
    for section in SECTIONS:
        config[section].update(vars(getattr(run, section)))
    asked = ENCODINGS_BEFORE.get(run.encoding["name"], {}) | dict(run.encoding)
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in asked.items()}
    config.encoding = ConfigDict(fields, type_safe=False)
    own = (spec_text(config.encoding.to_dict()),), (run.train.length,), (run.train.seed,)
    config.sweep.encodings, config.sweep.train_lens, config.sweep.seeds = own
    return config


def _parse_flags(values: flags.FlagValues, words: list[str]) -> list[str]:
    try:
        return values(words)[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, [n for n in values if "." not in n], n=1, cutoff=0.4)
        meant = f"did you mean --{near[0]}? " if near else ""
        raise ConfigError(f"unknown flag --{error.flagname}; {meant}see posx --help") from None
    except (flags.Error, TypeError, ValueError, KeyError) as error:
        raise ConfigError(" ".join(str(error).split())) from None


def _meant(word: str, config: ConfigDict | None, own: Mapping[str, Any]) -> str:
    key, equals, value = word.partition("=")
    candidates = {f"--{name}": name for name in own}
    if config is not None:
        candidates |= {f"--config.{name}": name.rsplit(".", 1)[-1] for name in settings(config)}
    wanted = key.removeprefix("config.").rsplit(".", 1)[-1]
    near = difflib.get_close_matches(wanted, list(candidates.values()), n=1, cutoff=0.6)
    near = near or [name for name in candidates.values() if wanted in (*name.split("_"), initials(name))][:1]
    if not near:
        return f"every setting is a flag with dashes: {_listed(own)}"
    flag = next(flag for flag, name in candidates.items() if name == near[0])
    return f"did you mean {flag}{f'={value}' if equals else ''}?"


def _listed(own: Mapping[str, Any]) -> str:
    return ", ".join(f"--{name}" for name in own)


def tuple_of_ints(text: str, flag: str) -> tuple[int, ...]:
    """ "64,128" as (64, 128). Raises ConfigError."""
    try:
        return tuple(int(item) for item in text.split(",") if item.strip())
    except ValueError:
        raise ConfigError(
            f"--{flag}={text!r} must be whole numbers with commas between them, for example 64,128"
        ) from None
