"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. Inside a destructor or a garbage collection's
callback (JAX has both) the exception is printed and dropped, and a long run would go on. So the signal is remembered,
and loops ask.
"""

from __future__ import annotations

import contextlib
import signal
from typing import Any

_seen = False


def remember_interrupts() -> None:
    """From now on Ctrl-C is remembered as well as raised.

    Where it is ignored, as in a shell's background jobs, it stays so. Only the main thread can set this.
    """

    def interrupted(*_: Any) -> None:
        global _seen
        _seen = True
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
