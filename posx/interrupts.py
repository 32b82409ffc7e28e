"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. Inside a destructor or a garbage collection's
callback (JAX has both) the exception is printed and dropped, and a long run would go on. So the signal is remembered,
and loops ask.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

_seen = False
_waits = False


def remember_interrupts() -> None:
    """From now on Ctrl-C is remembered as well as raised.

    Where it is ignored, as in a shell's background jobs, it stays so. Only the main thread can set this.
    """

    def interrupted(*_: Any) -> None:
        global _seen
        again, _seen = _seen, True
        if again or not _waits:
            raise KeyboardInterrupt

    global _seen
    _seen = False
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, interrupted)


def check() -> None:
    """Raises KeyboardInterrupt if one was seen since `remember_interrupts`."""
    if _seen:
        raise KeyboardInterrupt


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """A first Ctrl-C waits for the end of what is inside: a save has threads of its own, which would be torn down."""
    global _waits
    _waits = True
    try:
        yield
    finally:
        _waits = False
    check()


def end_with_stdin() -> None:
    """From now on this process ends when its standard input closes: those that a process starts end with it."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(143)

    threading.Thread(target=wait, daemon=True).start()
