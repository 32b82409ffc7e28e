"""Lines for a person on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

_quiet = False


def be_quiet() -> None:
    """Show nothing from now on, because another process of the same run shows all lines."""
    global _quiet
    _quiet = True


def is_quiet() -> bool:
    return _quiet


def say(text: str) -> None:
    """Print one line for a person on standard error. Standard output stays free for results.

    If no one reads any more, as behind a closed pipe or on a full disk, the work continues in silence.
    """
    if _quiet:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard_writes(sys.stderr)


def discard_writes(stream: TextIO) -> None:
    """Discard all writes to `stream` from now on, and the text that Python still holds for it."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
