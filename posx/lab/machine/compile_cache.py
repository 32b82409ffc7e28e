"""Keep compiled programs on disk from one process to the next, and report the cost of a start.

JAX's own settings apply. JAX_ENABLE_COMPILATION_CACHE=false turns the cache off. JAX_COMPILATION_CACHE_DIR moves it to
a folder that is not pruned. JAX_COMPILATION_CACHE_MAX_SIZE bounds it in bytes, 2 GiB by default. The folder may be
deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import tempfile
import time
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jaxlib

from posx.lab.progress import process_seconds
from posx.machine.cores import cpu_facts
from posx.notices import say

#: Bytes that compiled programs may take together, unless JAX's own setting gives another bound.
MOST_BYTES = 2 << 30
#: Seconds after their last use until the programs of another jaxlib or another kind of CPU are deleted.
UNUSED_SECONDS = 30 * 24 * 3600.0

_events: Any = Counter()  # how often JAX's own events happened in this process, or the seconds that they took
jax.monitoring.register_event_listener(lambda event, **_: _events.update({event: 1}))
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: _events.update({event: duration_secs})
)


def use_compile_cache(root: Path) -> None:
    """Read and keep compiled programs under `root` from now on. Call it before anything is compiled.

    The folder is pruned first. A failure of the cache is a miss, not an error. A cache folder that is set already
    stays.
    """
    most, folder = most_bytes(), root / "compiled" / machine_key()
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if not enabled or jax.config.jax_compilation_cache_dir or not most:  # type: ignore[attr-defined]
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"the cache folder {folder} cannot be used ({error.strerror})"
        say(f"notice: {why}; this command stores no compiled programs")
        return
    prune(folder.parent, most, folder.name)
    jax.config.update("jax_compilation_cache_max_size", -1)  # see `prune`
    jax.config.update("jax_raise_persistent_cache_errors", False)
    _delete_torn(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default JAX keeps only programs that took a second to compile. A start here is made of many that take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def prune(root: Path, most_bytes: int, own: str) -> None:
    """Delete the programs in the folders of `root` that were used longest ago, down to `most_bytes` in all.

    Outside of the folder named `own` all that were unused for UNUSED_SECONDS go. A file that cannot be deleted stays.

    JAX can evict programs itself (jax_compilation_cache_max_size). Up to JAX 0.10.2 at least, a process that is killed
    between the two files of an entry then ends all writing for good. See jax issue 39880. Every write also lists the
    folder and reads a file for each entry under a lock, 17 ms a program with 200 of them. Here the folder is listed
    once a start, in a millisecond, without a lock: a program that is deleted under a reader is compiled again.
    """
    programs = []  # (whether it stays if there is room, last use in seconds, bytes, path)
    for path in root.glob("jaxlib-*/*"):
        with contextlib.suppress(OSError):  # deleted by another process meanwhile
            facts = path.stat()  # the time of reading is exact to the day on most systems
            used = max(facts.st_atime, facts.st_mtime)
            stays = path.parent.name == own or used > time.time() - UNUSED_SECONDS
            programs.append((stays, used, facts.st_size, path))
    total = sum(size for _, _, size, _ in programs)
    for stays, _, size, path in sorted(programs):
        if total > most_bytes or not stays:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                total -= size


#: JAX's warning that it can read or write no entry for the program of this name.
_UNREADABLE = re.compile("Error (?:reading|writing) persistent compilation cache entry for '([^']+)'")


def _delete_torn(folder: Path) -> None:
    """Delete each entry of `folder` that JAX cannot read from now on, instead of showing JAX's warning.

    A killed process or a full disk leaves an entry torn. JAX compiles its program again but never overwrites an entry,
    so every later start would compile it too. This process writes an entry that is deleted here anew.
    """
    shown = warnings.showwarning

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        """Show a warning, or delete the entry that it names."""
        if match := _UNREADABLE.match(str(message)):
            entries = [path for path in folder.glob("*-cache") if path.name.rsplit("-", 2)[0] == match[1]]
            for path in list(filter(_is_torn, entries)) or entries:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        else:
            shown(message, *where, **more)

    warnings.filterwarnings("always", message=_UNREADABLE.pattern)
    warnings.showwarning = show


def _is_torn(entry: Path) -> bool:
    """Return whether a file is incomplete. Entries packed with Zstandard count as torn, as Python cannot read them."""
    try:
        stream = zlib.decompressobj()
        stream.decompress(entry.read_bytes())
        return not stream.eof
    except (OSError, zlib.error):
        return True


def most_bytes() -> int:
    """Return the bytes that compiled programs may take together; 0 for no cache."""
    given = jax.config.jax_compilation_cache_max_size  # type: ignore[attr-defined]
    return MOST_BYTES if given < 0 else given


def machine_key() -> str:
    """Return a name for jaxlib's version and the kind of CPU, which compiled programs are bound to.

    JAX's own keys leave the CPU out: the code of another CPU is rejected, or worse, run.
    """
    facts = sorted(set(cpu_facts("model name", "flags", "Features", "CPU part"))) or [platform.processor()]
    digest = hashlib.sha256("\n".join([platform.machine(), *facts]).encode()).hexdigest()
    return f"jaxlib-{jaxlib.__version__}-{digest[:12]}"


def start_cost() -> dict[str, Any]:
    """Return the cost of this process so far, for the first metrics of a run.

    seconds: since the process started. compile_seconds: of XLA and of reading cached programs. cache_hits and
    cache_misses: programs.
    """
    return {
        "seconds": round(process_seconds(), 3),
        "compile_seconds": round(float(_events["/jax/core/compile/backend_compile_duration"]), 3),
        "cache_hits": _events["/jax/compilation_cache/cache_hits"],
        "cache_misses": _events["/jax/compilation_cache/cache_misses"],
    }
