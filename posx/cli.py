"""The `posx` command: what its words mean, and how every foreseen failure ends in one line and an exit code."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from posx import interrupts
from posx.commands import COMMANDS, COMMON
from posx.errors import ConfigError, OutOfMemoryError, PosxError, nearest
from posx.progress import say


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; every foreseen failure is one line on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    debug = "--debug" in words
    interrupts.remember_interrupts()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every step of every save
    sys.path.append(str(Path.cwd()))  # so that "my_module:MyEncoding" finds a user's own file; last, to shadow nothing
    try:
        return _run(words)
    except PosxError as error:
        if debug:
            traceback.print_exc()
        say(f"posx: {' '.join(str(error).split())}")
        return error.exit_code
    except KeyboardInterrupt:
        say("posx: interrupted; the same command continues from the last checkpoint")
        return 130
    except MemoryError:
        say("posx: memory ran out; lower train.batch_size or eval.batch_tokens")
        return OutOfMemoryError.exit_code
    except BrokenPipeError:
        return 0


def _run(words: list[str]) -> int:
    command = COMMANDS.get(words[0])
    if command is None:
        raise ConfigError(
            f"unknown command {words[0]!r}; {nearest(words[0], list(COMMANDS))}known: {', '.join(COMMANDS)}"
        )
    if {"-h", "--help"} & set(words[1:]):
        print(usage(words[0]))
        return 0
    given = command.read(words[1:])
    from posx.commands import running  # not before: wrong words and help are told without JAX

    running.run(words[0], given)
    return 0


def usage(name: str = "") -> str:
    if not name:
        lines = [f"  posx {word:10} {command.text}" for word, command in COMMANDS.items()]
        return "\n".join(["posx: position encodings, trained short and tested long", "", *lines, "",
                          "posx COMMAND --help shows its flags; start with", "",
                          "  posx sweep --config configs/quick.py --workdir runs/quick"])  # fmt: skip
    command = COMMANDS[name]
    lines = [
        f"  --{flag:16} {text} (default: {default!r})" for flag, (default, text) in {**COMMON, **command.flags}.items()
    ]
    if command.takes_config:
        lines = [
            "  --config           a config file, with the encoding after a colon: configs/quick.py:rope",
            "  --config_json      the config.json of an earlier run instead",
            "  --config.A.B=V     overrides one setting; --print_config shows all",
            *lines,
        ]
    lines += [f"  --config.{section}.X=V   sets {section}.X of the run anew" for section in command.sections]
    return "\n".join([f"posx {f'{name} {command.operand}'.strip()}: {command.text}", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
