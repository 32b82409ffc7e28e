"""Ctrl-C and SIGTERM, neither of which can get lost.

Python runs a signal's handler wherever the main thread happens to be. What it raises inside a destructor or a garbage
collection's callback (JAX has both) is printed and dropped, and a long run would go on. So the signal is remembered,
and loops ask. Ctrl-C stops where it is; SIGTERM, which a scheduler sends some seconds before it kills, leaves a run
the time to save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from posx.errors import Stopped

_seen = False
_terminated = False
_waits = False
_saves = False


def remember_interrupts() -> None:
    """From now on Ctrl-C and SIGTERM are remembered as well as raised.

    Where one is ignored, as Ctrl-C in a shell's background jobs, it stays so. Only the main thread can set this.
    """

    def interrupted(*_: Any) -> None:
        global _seen
        again, _seen = _seen, True
        if again or not _waits:
            raise KeyboardInterrupt

    def terminated(*_: Any) -> None:
        global _terminated
        _terminated = True
        if not (_waits or _saves):
            raise Stopped

    global _seen, _terminated
    _seen = _terminated = False
    for number, handler in ((signal.SIGINT, interrupted), (signal.SIGTERM, terminated)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            with contextlib.suppress(ValueError):
                signal.signal(number, handler)


def check() -> None:
    """Raises KeyboardInterrupt if there was a Ctrl-C since `remember_interrupts`, Stopped if there was a SIGTERM which
    nothing is to be saved for."""
    if _seen:
        raise KeyboardInterrupt
    if _terminated and not _saves:
        raise Stopped


def interrupted() -> bool:
    """Whether there was a Ctrl-C."""
    return _seen


def terminated() -> bool:
    """Whether there was a SIGTERM."""
    return _terminated


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """A first signal waits for the end of what is inside: a save has threads of its own, which would be torn down."""
    global _waits
    _waits = True
    try:
        yield
    finally:
        _waits = False
    check()


@contextlib.contextmanager
def saved_first() -> Iterator[None]:
    """A SIGTERM raises nothing inside: a loop there asks whether it was `terminated`, saves and raises Stopped."""
    global _saves
    _saves = True
    try:
        yield
    finally:
        _saves = False


def end_with_stdin() -> None:
    """From now on this process ends when its standard input closes: those that a process starts end with it."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(143)

    threading.Thread(target=wait, daemon=True).start()
