"""The `posx` command: it reads the words, runs one command, and ends every foreseen failure in one line."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import posx
from posx.errors import ConfigError, OutOfMemoryError, PosxError, Stopped, at_failure, nearest
from posx.lab import interrupts
from posx.lab.argv import SOURCES, presets, read
from posx.lab.commands import COMMANDS, run, work_folder
from posx.lab.files.atomic import disk_full
from posx.machine.guard import no_device, set_options
from posx.notices import say, unheard

#: The errors of JAX for an environment variable that it cannot read.
_NO_VALUE = re.compile(r"^(?:Invalid value .* for JAX flag|invalid truth value .* for environment) '?(jax_\w+)", re.I)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A foreseen failure is one line on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):  # ASCII and Latin-1 lack signs of the tables
            stream.reconfigure(errors="backslashreplace")
    interrupts.remember_interrupts()
    for chatty in ("absl", "asyncio", "concurrent.futures"):  # Orbax logs every step of a save and every error in it
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    try:
        code = _run(words)
        sys.stdout.flush()  # while an error of it can still be reported
        return code
    except BrokenPipeError:  # nobody reads the results any more
        unheard(sys.stdout)
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except (Exception, KeyboardInterrupt) as error:
        interrupts.settle()
        code, reason = _foreseen(error) or (1, "")
        line = " ".join(reason.split())
        if line and "--debug" in words:
            traceback.print_exc()
        for end in at_failure:
            end(error, code, line)
        if not line:
            raise
        say(f"posx: {line}")
        return code
    finally:
        interrupts.settle()


def _foreseen(error: BaseException) -> tuple[int, str] | None:
    """Return the exit code and the line of a failure, or None for an unknown failure."""
    if isinstance(error, PosxError):
        return error.exit_code, str(error)
    if isinstance(error, interrupts.Terminated) or (interrupts.terminated() and not interrupts.interrupted()):
        return Stopped.exit_code, str(Stopped())
    if isinstance(error, KeyboardInterrupt) or interrupts.interrupted():  # native code may raise another error for it
        return 130, "interrupted; the same command resumes from the last checkpoint"
    if isinstance(error, MemoryError):
        return OutOfMemoryError.exit_code, "memory ran out. Lower the sizes, train.batch_size or eval.batch_tokens."
    if isinstance(error, OSError) and disk_full(error):
        unheard(sys.stdout)
        return OutOfMemoryError.exit_code, (
            "no space is left where the results of this command are written. Free space and run the same command again."
        )
    if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("xla_bridge.py"):
        return ConfigError.exit_code, str(no_device(str(error)))
    if isinstance(error, ValueError) and (found := _NO_VALUE.search(str(error))):  # JAX raises it when it is imported
        name = found[1].upper()
        return (
            ConfigError.exit_code,
            f"{name}={os.environ.get(name, '')}: JAX takes no such value. Correct it, or unset it: unset {name}",
        )
    return None


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(next((word for word in words[1:2] if word in COMMANDS), "")))
        return 0 if words else 2
    name, *words = words
    if name in ("--version", "version"):
        print(f"posx {posx.__version__}")
        return 0
    set_options()
    try:
        sys.path.append(str(Path.cwd()))  # "my_module:MyEncoding" is a file of the user's; last, so that it hides none
    except FileNotFoundError:
        raise ConfigError("the current folder has been removed. Change into another one: cd ~") from None
    if name not in COMMANDS:
        raise ConfigError(
            f"command {name!r} is unknown. {nearest(name, COMMANDS)}The commands are: {', '.join(COMMANDS)}."
        )
    if {"-h", "--help", "--helpfull"} & {word.partition("=")[0] for word in words} or words == ["help"]:
        print(usage(name))
        return 0
    values, config = read(COMMANDS[name], words)
    if values["print_config"]:
        print(_settings(values, config, sweep=name == "sweep"))
    else:
        run(name, values, config)
    return 0


def _settings(values: dict[str, Any], config: Any, sweep: bool) -> str:
    """Return the text of `--print_config`: the settings of `config`, or those of the run in the work folder."""
    if config is None and not values["workdir"]:
        return "this command has no settings but its flags."
    from posx.lab.argv.config_dict import printed
    from posx.lab.runs.folder import runs_in
    from posx.lab.runs.load import unpacked

    if config is None:
        first, *others = runs_in(unpacked(work_folder(values)))
        if others:
            say(f"notice: {first.path} has these settings; it is the first of {1 + len(others)} runs")
        config = first.read_config()
    return printed(config, sweep)


def usage(name: str = "") -> str:
    """Return the help of posx, or of one command."""
    if not name:
        lines = [f"  posx {word:10} {command.text}" for word, command in COMMANDS.items()]
        return "\n".join(["posx: position encodings, trained short and tested long", "", *lines, "",
                          "posx COMMAND --help shows its flags; start with", "",
                          "  posx sweep --config quick --workdir runs/quick", "",
                          "Documentation: docs/index.md"])  # fmt: skip
    command = COMMANDS[name]
    lines = [f"posx {f'{name} {command.operand}'.strip()}: {command.text}", ""]
    if command.takes_config:
        config, config_json = (f"  --{flag:16} {text}" for flag, (_, text) in SOURCES.items())
        lines += [config, f"{'':21}presets: {', '.join(presets())}", config_json]
        lines += ["  --config.A.B=V     overrides one setting; --print_config shows all"]
    for flag, (default, text) in command.flags.items():
        usual = "" if isinstance(default, type) else f" (default: {default!r})"
        lines += [f"  --{flag}{text}" if flag.endswith(".") else f"  --{flag:16} {text}{usual}"]
    if name == "sweep":
        lines += [
            "  --config.sweep.axes.A.B=V,W    runs for each value of a setting, in every combination with other axes",
            "  --config.sweep.zip=A.B+C.D     these axes advance together: first value with first, second with second",
        ]
    lines += [f"  --config.{section}.X=V   replaces {section}.X of the run" for section in command.sections]
    return "\n".join([*lines, "", f"Guide: {', '.join(command.guide)}"])


if __name__ == "__main__":
    sys.exit(main())
