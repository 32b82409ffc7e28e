"""The folders of compiled programs, kept small.

JAX can evict programs itself (jax_compilation_cache_max_size), but a process that is killed between the two files of an
entry then ends all writing for good, up to JAX 0.10.2 at least (jax issue 39880), and every write lists the folder and
reads a file for each entry, under a lock: 17 ms a program with 200 of them there. Here the folder is listed once a
start, a millisecond, without a lock: a program that is deleted under a reader is compiled anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

#: How long programs for another jaxlib or another kind of CPU are kept after their last use.
UNUSED_SECONDS = 30 * 24 * 3600.0


class Program(NamedTuple):
    """A file, when it was last used (seconds, as `time.time`) and its size in bytes."""

    used: float
    size: int
    path: Path


def prune(root: Path, most_bytes: int, own: str) -> None:
    """Deletes of the folders in `root` those unused for UNUSED_SECONDS, but for the one named `own`, and then the least
    recently used programs beyond `most_bytes` in all. What cannot be deleted stays."""
    kept: list[Program] = []
    for folder in root.glob("jaxlib-*"):
        programs = programs_in(folder)
        last = max((program.used for program in programs), default=0.0)
        if folder.name != own and last < time.time() - UNUSED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            kept += programs
    total = sum(program.size for program in kept)
    for program in sorted(kept):
        if total <= most_bytes:
            break
        with contextlib.suppress(OSError):
            program.path.unlink(missing_ok=True)
            total -= program.size


def programs_in(folder: Path) -> list[Program]:
    """The files of `folder`. They count as used when they were read, to the day on most systems, or written."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # deleted by another process meanwhile
                facts = entry.stat()
                found.append(Program(max(facts.st_atime, facts.st_mtime), facts.st_size, Path(entry.path)))
    return found
