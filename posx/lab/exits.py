"""The end of a process of posx: an exit code, and one line on standard error for every foreseen failure."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from posx.errors import ConfigError, OutOfMemoryError, PosxError, Stopped, at_failure
from posx.lab import interrupts
from posx.lab.files.atomic import disk_full
from posx.machine.guard import no_device, set_options
from posx.notices import discard_writes, say

#: The errors of JAX for an environment variable that it cannot read.
_NO_VALUE = re.compile(r"^(?:Invalid value .* for JAX flag|invalid truth value .* for environment) '?(jax_\w+)", re.I)


def exit_code(work: Callable[[], int], debug: bool = False) -> int:
    """Call `work` and return its exit code, or that of its failure, which is one line on standard error.

    Args:
      work: all that this process does. Signals are remembered while it runs.
      debug: show the traceback of a foreseen failure too.

    Raises:
      Exception: a failure that nobody has foreseen.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):  # ASCII and Latin-1 lack signs of the tables
            stream.reconfigure(errors="backslashreplace")
    interrupts.remember_interrupts()
    for chatty in ("absl", "asyncio", "concurrent.futures"):  # Orbax logs every step of a save and every error in it
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    try:
        code = work()
        sys.stdout.flush()  # while an error of it can still be reported
        return code
    except BrokenPipeError:  # nobody reads the results any more
        discard_writes(sys.stdout)
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except (Exception, KeyboardInterrupt) as error:
        interrupts.settle()
        code, reason = _foreseen(error) or (1, "")
        line = " ".join(reason.split())
        if line and debug:
            traceback.print_exc()
        for end in at_failure:
            end(error, code, line)
        if not line:
            raise
        say(f"posx: {line}")
        return code
    finally:
        interrupts.settle()


def prepare_process() -> None:
    """Give JAX the options of posx, and let Python find the user's own modules in the current folder.

    Raises ConfigError if the current folder is gone.
    """
    set_options()
    try:
        sys.path.append(str(Path.cwd()))  # "my_module:MyEncoding" is a file of the user's; last, so that it hides none
    except FileNotFoundError:
        raise ConfigError("the current folder has been removed. Change into another one: cd ~") from None


def _foreseen(error: BaseException) -> tuple[int, str] | None:
    """Return the exit code and the line of a failure, or None for an unknown failure."""
    if isinstance(error, PosxError):
        return error.exit_code, str(error)
    if isinstance(error, interrupts.Terminated) or (interrupts.was_terminated() and not interrupts.was_interrupted()):
        return Stopped.exit_code, str(Stopped())
    if (
        isinstance(error, KeyboardInterrupt) or interrupts.was_interrupted()
    ):  # native code may raise another error for it
        return 130, "interrupted; the same command resumes from the last checkpoint"
    if isinstance(error, MemoryError):
        return OutOfMemoryError.exit_code, "memory ran out. Lower the sizes, train.batch_size or eval.batch_tokens."
    if isinstance(error, OSError) and disk_full(error):
        discard_writes(sys.stdout)
        return OutOfMemoryError.exit_code, (
            "no space is left where the results of this command are written. Free space and run the same command again."
        )
    if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("xla_bridge.py"):
        return ConfigError.exit_code, str(no_device(str(error)))
    if isinstance(error, ValueError) and (known := _NO_VALUE.search(str(error))):  # JAX raises it when it is imported
        name = known[1].upper()
        return (
            ConfigError.exit_code,
            f"{name}={os.environ.get(name, '')}: JAX takes no such value. Correct it, or unset it: unset {name}",
        )
    return None
