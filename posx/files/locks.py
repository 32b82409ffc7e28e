"""What one process holds at a time.

The lock is the kernel's (flock), so it is free again as soon as its holder is gone, however it went.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO


def lock(path: Path, busy: Callable[[str], object]) -> IO[str]:
    """The file `path`, open and held by this process until it is closed. Raises OSError where it cannot be opened.

    Where another process has it, `busy` is called with what that one says of itself: it raises, or returns to wait.
    """
    file = open(path, "a+")
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            busy(file.read().strip() or "another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
    except BaseException:
        file.close()
        raise
    return file
