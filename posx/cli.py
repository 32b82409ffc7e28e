"""The `posx` command: what its words mean, and how every foreseen failure ends in one line and an exit code."""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import posx
from posx import interrupts
from posx.commands import COMMANDS, COMMON, Command, function, work_folder
from posx.errors import ConfigError, OutOfMemoryError, PosxError, Stopped, nearest
from posx.files.atomic import disk_full
from posx.machine.backend import no_device, set_options
from posx.progress import say, unheard
from posx.words import Words, is_override, presets

#: What JAX says of an environment variable that it cannot read.
_NO_VALUE = re.compile(r"^(?:Invalid value .* for JAX flag|invalid truth value .* for environment) '?(jax_\w+)", re.I)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; every foreseen failure is one line on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):  # ASCII or Latin-1 lack signs that tables have
            stream.reconfigure(errors="backslashreplace")
    interrupts.remember_interrupts()
    for chatty in ("absl", "asyncio", "concurrent.futures"):  # Orbax logs every step of a save, and what it raises too
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    try:
        code = _run(words)
        sys.stdout.flush()  # while what goes wrong with it can still be said
        return code
    except BrokenPipeError:  # of results; those who read them have enough
        unheard(sys.stdout)
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except (Exception, KeyboardInterrupt) as error:
        interrupts.settle()
        foreseen = _foreseen(error)
        if foreseen is None:
            if processes := _several():
                traceback.print_exc()
                processes.end(error, 1, repr(error))
            raise
        if debug:
            traceback.print_exc()
        code, reason = foreseen
        _say_why(error, code, " ".join(reason.split()))
        return code
    finally:
        interrupts.settle()


def _say_why(error: BaseException, code: int, line: str) -> None:
    if processes := _several():
        processes.end(error, code, line)
    else:
        say(f"posx: {line}")


def _several() -> Any:
    """`posx.machine.processes` where this process is one of several; it is not loaded to find out."""
    processes = sys.modules.get("posx.machine.processes")
    return processes if processes is not None and processes.several() else None


def _foreseen(error: BaseException) -> tuple[int, str] | None:
    """The exit code and the line for a failure; None for one that nobody has thought of."""
    if isinstance(error, PosxError):
        return error.exit_code, str(error)
    if (processes := _several()) and (gone := processes.lost(error)):
        return gone.exit_code, str(gone)
    if isinstance(error, interrupts.Terminated) or (interrupts.terminated() and not interrupts.interrupted()):
        return Stopped.exit_code, str(Stopped())
    if isinstance(error, KeyboardInterrupt) or interrupts.interrupted():  # native code may make another error of it
        return 130, "interrupted; the same command continues from the last checkpoint"
    if isinstance(error, MemoryError):
        return OutOfMemoryError.exit_code, "memory ran out; lower the sizes, train.batch_size or eval.batch_tokens"
    if isinstance(error, OSError) and disk_full(error):
        unheard(sys.stdout)
        return OutOfMemoryError.exit_code, "no space left where the results of this command are written"
    if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("xla_bridge.py"):
        return ConfigError.exit_code, str(no_device(str(error)))
    if isinstance(error, ValueError) and (found := _NO_VALUE.search(str(error))):  # where JAX is imported
        name = found[1].upper()
        return ConfigError.exit_code, f"{name}={os.environ.get(name, '')}: JAX takes no such value. Correct or unset it"
    return None


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(next((word for word in words[1:2] if word in COMMANDS), "")))
        return 0 if words else 2
    if words[0] in ("--version", "version"):
        print(f"posx {posx.__version__}")
        return 0
    set_options()
    try:
        sys.path.append(str(Path.cwd()))  # so that "my_module:MyEncoding" finds a user's own file; last, to shadow none
    except FileNotFoundError:
        raise ConfigError("the current folder has been removed: change into another one") from None
    command = COMMANDS.get(words[0])
    if command is None:
        raise ConfigError(
            f"unknown command {words[0]!r}; {nearest(words[0], list(COMMANDS))}known: {', '.join(COMMANDS)}"
        )
    if {"-h", "--help", "--helpfull"} & {word.partition("=")[0] for word in words[1:]} or words[1:] == ["help"]:
        print(usage(words[0]))
        return 0
    given = command.read(words[1:])
    config = _config(command, given, words[1:])
    if given.values["print_config"]:
        print(_settings(given.values, config, sweep=words[0] == "sweep"))
    else:
        function(words[0])(given.values, config)
    return 0


def _config(command: Command, given: Words, words: list[str]) -> Any:
    """The ConfigDict of a command that takes one. Raises ConfigError for wrong settings and for stray words."""
    if not (command.takes_config or given.stray):
        return None
    if given.stray and (near := _near(given.stray[0], command, given, words)):
        raise ConfigError(f"stray word {given.stray[0]!r}; {near}")
    from posx.config import flags  # and JAX with it, which words alone do not need

    config = flags.config_of(given) if command.takes_config else None
    if given.stray:
        word = given.stray[0]
        meant = flags.meant(word, flags.setting_names(config, command.sections), {**COMMON, **command.flags})
        what = f"unknown flag {word.partition('=')[0]}" if word.startswith("-") else f"stray word {word!r}"
        raise ConfigError(f"{what}; {meant}")
    return config


def _near(word: str, command: Command, given: Words, words: list[str]) -> str:
    """Say which flag a stray word may belong to: a preset, a file, a folder, or the end of another value; or ""."""
    if word.startswith("-"):
        return "leave out the -- that stands alone" if "--" in words else ""
    name = word.partition(":")[0]
    if command.takes_config and not given.config and (name in presets() or name.endswith(".py")):
        return f"did you mean --config {shlex.quote(word)}?"
    if "=" in word:  # a setting without its dashes
        return ""
    if "/" in word.strip(".") or os.path.exists(word):
        if given.values["workdir"]:
            return "one work folder at a time, in quotes if its path has spaces"
        return f"did you mean --workdir {shlex.quote(word)}?"
    flag, value = ["", "", *words][(at := words.index(word)) : at + 2]
    if is_override(value) and "=" not in value:
        return f"did you mean {value}={shlex.quote(word)}?"
    if value.startswith("--") and "=" in value:
        flag, _, value = value.partition("=")
    if flag == "--config":
        return f"did you mean --config {shlex.quote(f'{value}:{word}')}?"
    default = command.flags.get(flag.removeprefix("--"), (True, ""))[0]
    if is_override(flag) or not isinstance(default, bool):
        return f"did you mean {flag}={shlex.quote(f'{value} {word}')}?"
    return f"one {command.operand} at a time" if command.operand else ""


def _settings(values: dict[str, Any], config: Any, sweep: bool) -> str:
    """What `--print_config` shows: the settings of `config`, or those of the run in the work folder."""
    if config is None and not values["workdir"]:
        return "this command has no settings but its flags"
    from posx.config.flags import asked_before
    from posx.config.overrides import printed
    from posx.runs.export import unpacked
    from posx.runs.folder import runs_in

    if config is not None:
        return printed(config, sweep)
    first, *others = runs_in(unpacked(work_folder(values)))
    if others:
        say(f"notice: settings of {first.path}, the first of {1 + len(others)} runs")
    return printed(asked_before(first.read_config()), sweep)


def usage(name: str = "") -> str:
    if not name:
        lines = [f"  posx {word:10} {command.text}" for word, command in COMMANDS.items()]
        return "\n".join(["posx: position encodings, trained short and tested long", "", *lines, "",
                          "posx COMMAND --help shows its flags; start with", "",
                          "  posx sweep --config quick --workdir runs/quick"])  # fmt: skip
    command = COMMANDS[name]
    lines = [
        f"  --{flag}{text}"
        if flag.endswith(".")
        else f"  --{flag:16} {text}{'' if isinstance(default, type) else f' (default: {default!r})'}"
        for flag, (default, text) in {**COMMON, **command.flags}.items()
    ]
    if command.takes_config:
        lines = [
            "  --config           a preset or a file, and the encoding after a colon: quick:rope, path/to/mine.py:rope",
            f"                     presets: {', '.join(presets())}",
            "  --config_json      the config.json of an earlier run instead",
            "  --config.A.B=V     overrides one setting; --print_config shows all",
            *lines,
        ]
    if name == "sweep":
        lines += [
            "  --config.sweep.axes.A.B=V,W    runs for each value of a setting, in every combination with other axes",
            "  --config.sweep.zip=A.B+C.D     these axes advance together: first value with first, second with second",
        ]
    lines += [f"  --config.{section}.X=V   sets {section}.X of the run anew" for section in command.sections]
    return "\n".join([f"posx {f'{name} {command.operand}'.strip()}: {command.text}", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
