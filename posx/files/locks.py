"""What one process holds at a time.

The lock is the system's own, so it is free again as soon as its holder is gone, however it went; `filelock` knows how
each system has it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

#: Who looks whether a lock is held holds it for a moment: seconds that who wants it waits, and who looks at it too.
LOOKED_AT, LOOKS = 1.0, 0.2


def is_free(path: Path) -> bool:
    """Whether no process holds `path`, as far as this machine is told."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(path).acquire(timeout=LOOKS, poll_interval=LOOKS / 20):
            return True
    except (Timeout, OSError):
        return False


def holder(path: Path) -> str:
    """What the process says of itself that holds `path`; empty where none does."""
    return "" if not path.exists() or is_free(path) else _said(path)


def _said_by(path: Path) -> Path:
    """Where the holder of a lock says who it is: beside it, as a locked file cannot be read everywhere."""
    return path.with_name(f"{path.name}.holder")


def _said(path: Path) -> str:
    """What the last holder of a lock has said, if that can be read."""
    with contextlib.suppress(OSError):
        return _said_by(path).read_text(encoding="utf-8") or "another process"
    return "another process"


def lock(path: Path, busy: Callable[[str], object]) -> AbstractContextManager[object]:
    """`path` held by this process, until what comes back is left. Raises OSError where it cannot be written.

    Where another process has it, and does not just look, `busy` is called with what that one says of itself: it raises,
    or returns to wait.
    """
    from filelock import FileLock, Timeout  # and much of the standard library with it

    file = FileLock(path)
    try:
        held = file.acquire(timeout=LOOKED_AT)
    except Timeout:
        busy(_said(path))
        held = file.acquire()
    try:
        _said_by(path).write_text(
            f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}", encoding="utf-8"
        )
    except BaseException:
        file.release()
        raise
    return held
