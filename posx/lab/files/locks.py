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

#: Probing a lock acquires it briefly. Seconds that an acquirer waits before it reports the lock as busy, and a probe.
ACQUIRE_SECONDS, PROBE_SECONDS = 1.0, 0.2


def holder(path: Path) -> str:
    """Return a description of the process that holds `path`, empty if this machine sees none."""
    from filelock import FileLock, Timeout

    if not path.exists():
        return ""
    try:
        with FileLock(path).acquire(timeout=PROBE_SECONDS, poll_interval=PROBE_SECONDS / 20):
            return ""
    except (Timeout, OSError):
        return _description(path)


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
