"""Locks that one process holds at a time.

A lock is the system's own, so it is free again as soon as its holder is gone, however that ended. `filelock` knows how
each system does it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

#: Seconds that an acquirer waits before it reports the lock as busy. A probe that cannot share the lock waits less.
ACQUIRE_SECONDS, PROBE_SECONDS = 1.0, 0.2


def holder(path: Path) -> str:
    """Return a description of the process that holds `path`, empty if this machine sees none."""
    if not path.exists():
        return ""
    try:
        _probe(path)
    except OSError:  # also filelock's Timeout
        return _description(path)
    return ""


def _probe(path: Path) -> None:
    """Raise OSError if the lock at `path` is held. Probes share it where the system can, so none sees another."""
    try:
        import fcntl

        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (ImportError, OSError):  # Windows, or a file system without such locks: filelock knows another way
        from filelock import FileLock

        with FileLock(path).acquire(timeout=PROBE_SECONDS, poll_interval=PROBE_SECONDS / 20):
            pass


def _description_file(path: Path) -> Path:
    """Return the file that describes the holder of a lock, beside the lock: a locked file may be unreadable."""
    return path.with_name(f"{path.name}.holder")


def _description(path: Path) -> str:
    """Return the description of the last holder of a lock."""
    with contextlib.suppress(OSError):
        return _description_file(path).read_text(encoding="utf-8") or "another process"
    return "another process"


def lock(path: Path, busy: Callable[[str], object]) -> AbstractContextManager[object]:
    """Acquire `path` and return it as a context that releases it. Raises OSError if it cannot be written.

    If another process holds it, `busy` is called with its description. It raises, or returns to wait.
    """
    from filelock import FileLock, Timeout  # and much of the standard library with it

    file = FileLock(path)
    try:
        held = file.acquire(timeout=ACQUIRE_SECONDS)
    except Timeout:
        busy(_description(path))
        held = file.acquire()
    try:
        _description_file(path).write_text(
            f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}", encoding="utf-8"
        )
    except BaseException:
        file.release()
        raise
    return held
