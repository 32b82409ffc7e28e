"""The `posx` command: it reads the words and runs one command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import posx
from posx.errors import ConfigError, nearest
from posx.lab.argv import SOURCES, presets, read_words
from posx.lab.commands import COMMANDS, run, work_folder
from posx.lab.exits import exit_code, prepare_process
from posx.notices import say


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A foreseen failure is one line on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(words), debug="--debug" in words)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(next((word for word in words[1:2] if word in COMMANDS), "")))
        return 0 if words else 2
    name, *words = words
    if name in ("--version", "version"):
        print(f"posx {posx.__version__}")
        return 0
    prepare_process()
    if name not in COMMANDS:
        raise ConfigError(
            f"command {name!r} is unknown. {nearest(name, COMMANDS)}The commands are: {', '.join(COMMANDS)}."
        )
    if {"-h", "--help", "--helpfull"} & {word.partition("=")[0] for word in words} or words == ["help"]:
        print(usage(name))
        return 0
    values, config = read_words(COMMANDS[name], words)
    if values["print_config"]:
        run_operand = values["operand"] if COMMANDS[name].sections else ""  # of posx autopsy RUN
        print(_settings(values | {"workdir": values["workdir"] or run_operand}, config, sweep=name == "sweep"))
    else:
        run(name, values, config)
    return 0


def _settings(values: dict[str, Any], config: Any, sweep: bool) -> str:
    """Return the text of `--print_config`: the settings of `config`, or those of the run in the work folder."""
    if config is None and not values["workdir"]:
        return "this command has no settings but its flags."
    from posx.lab.argv.settings import settings_text
    from posx.lab.runs.exported import unpack
    from posx.lab.runs.finding import find_runs

    if config is None:
        first, *others = find_runs(unpack(work_folder(values)))
        if others:
            say(f"notice: {first.path} has these settings; it is the first of {1 + len(others)} runs")
        config = first.read_config()
    return settings_text(config, sweep)


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
