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


def lock(path: Path, busy: Callable[[str], object]) -> AbstractContextManager[object]:
    """`path` held by this process, until what comes back is left. Raises OSError where it cannot be written.

    Where another process has it, `busy` is called with what that one says of itself: it raises, or returns to wait.
    """
    from filelock import FileLock, Timeout  # and much of the standard library with it

    file, holder = FileLock(path), path.with_name(f"{path.name}.holder")
    try:
        held = file.acquire(timeout=0)
    except Timeout:
        said = ""
        with contextlib.suppress(OSError):
            said = holder.read_text()
        busy(said or "another process")
        held = file.acquire()
    try:  # beside the lock: a locked file cannot be read everywhere
        holder.write_text(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    except BaseException:
        file.release()
        raise
    return held
