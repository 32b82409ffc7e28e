"""Ctrl-C and SIGTERM (or SIGHUP, SIGUSR1, SIGUSR2), neither of which can get lost.

Python runs a signal's handler wherever the main thread happens to be. While a library is being loaded nothing can be
raised, as native code that is left half-way crashes. An exception inside a destructor or a callback of garbage
collection (JAX has both) would be printed and dropped. A long run would then continue. In both cases the exception is
raised a moment later. If that is impossible, the signal is remembered and loops ask for it.

Both leave a run the time to save its last step; a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Terminated(KeyboardInterrupt):
    """A SIGTERM, which no `except Exception` on the way stops."""


#: Signals before the end of a process. SLURM sends one of the user's some time before, a closed terminal SIGHUP.
ENDING = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")

#: From one look whether a library is loaded to the next.
LATER_SECONDS = 0.02

_received: set[type[KeyboardInterrupt]] = set()
_shown: Callable[[Any], object] | None = None
_waits = False
_saves = False
_over = False


def remember_interrupts() -> None:
    """Remember Ctrl-C and the signals in ENDING from now on, and raise them. Only the main thread can call this.

    A signal that is ignored, as Ctrl-C in a shell's background jobs or SIGHUP under nohup, stays ignored.
    """
    global _shown, _over
    _received.clear()
    _over = False
    if _shown is None:  # once: others may have put theirs around it since
        _shown, sys.unraisablehook = sys.unraisablehook, _unraisable
    for number in [getattr(signal, name) for name in ("SIGINT", *ENDING) if hasattr(signal, name)]:
        if signal.getsignal(number) is not signal.SIG_IGN:
            with contextlib.suppress(ValueError):
                signal.signal(number, _receive)


def _receive(number: int, frame: FrameType | None) -> None:
    error = KeyboardInterrupt if number == signal.SIGINT else Terminated
    again = error in _received
    _received.add(error)
    if not (_waits or _saves) or (again and error is KeyboardInterrupt):
        _raise(error(), None if again else frame)
    elif _saves and error is KeyboardInterrupt:
        with contextlib.suppress(OSError):  # not by `print`, in which the signal may have come
            os.write(2, b"\nnotice: stopping after this step, to save it; Ctrl-C again ends at once\n")


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Restore the handlers of signals that a library inside replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(number, handler)


def _raise(error: BaseException, frame: FrameType | None) -> None:
    """Raise `error` at once, or as soon as the library is loaded that is being loaded in the frame."""
    if not ((_over or _is_loading(frame)) and _is_deferred(error)):
        raise error


def _is_deferred(error: BaseException) -> bool:
    if _over:  # Python takes its handlers down at its end: the alarm would kill it then
        return True
    if not hasattr(signal, "setitimer"):  # Windows
        return False
    signal.signal(signal.SIGALRM, lambda _, frame: _raise(error, frame))
    signal.setitimer(signal.ITIMER_REAL, LATER_SECONDS)
    return True


def _unraisable(report: Any) -> None:
    if not (isinstance(report.exc_value, KeyboardInterrupt) and _is_deferred(report.exc_value)) and _shown:
        _shown(report)


def settle() -> None:
    """End all raising, also of signals that come later: the command has ended already."""
    global _over
    _over = True
    if hasattr(signal, "setitimer"):
        with contextlib.suppress(ValueError):
            signal.setitimer(signal.ITIMER_REAL, 0)


def _is_loading(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False


def raise_pending() -> None:
    """Raise KeyboardInterrupt after a Ctrl-C and Terminated after a SIGTERM, except within `save_first`."""
    for error in (KeyboardInterrupt, Terminated):
        if error in _received and not _saves:
            raise error


def was_interrupted() -> bool:
    """Return whether there was a Ctrl-C."""
    return KeyboardInterrupt in _received


def was_terminated() -> bool:
    """Return whether there was a SIGTERM."""
    return Terminated in _received


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Raise a first signal only at the end of the block. A save has threads, which an exception would tear down."""
    global _waits
    _waits = True
    try:
        yield
    finally:
        _waits = False
    raise_pending()


@contextlib.contextmanager
def save_first() -> Iterator[None]:
    """Keep a first signal from being raised in the block.

    A loop in it asks whether there was a signal, saves and raises `Stopped`, or `Interrupted` after a Ctrl-C.
    """
    global _saves
    _saves = True
    try:
        yield
    finally:
        _saves = False


def end_with_stdin() -> None:
    """End this process when its standard input closes, as it does when the process that started it ends."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(143)

    threading.Thread(target=wait, daemon=True).start()
