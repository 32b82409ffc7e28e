"""Compiled programs kept on disk from one process to the next, and what a start costs.

JAX's own settings are the only ones: JAX_ENABLE_COMPILATION_CACHE=false turns it off, JAX_COMPILATION_CACHE_DIR puts it
elsewhere, where nothing is pruned, JAX_COMPILATION_CACHE_MAX_SIZE bounds it (bytes; 2 GiB unless given). The folder may
be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import tempfile
import time
import warnings
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jax
import jaxlib

from posx.machine.pruning import prune
from posx.progress import say

#: What compiled programs may take together, unless JAX's own setting says something else.
MOST_BYTES = 2 << 30

_IMPORTED = time.monotonic()
_happened: Counter[str] = Counter()  # JAX's own events in this process
_lasted: dict[str, float] = defaultdict(float)  # and, of those that take time, their seconds


def _count(event: str, **_: str | int) -> None:
    _happened[event] += 1


def _add(event: str, duration_secs: float, **_: str | int) -> None:
    _lasted[event] += duration_secs


jax.monitoring.register_event_listener(_count)
jax.monitoring.register_event_duration_secs_listener(_add)


def use_compile_cache(root: Path) -> None:
    """From now on this process reads and keeps compiled programs under `root`; what fails there is a miss, no error.

    What is too much there, or too old, is deleted first. To be called before anything is compiled. A folder that is set
    already stays.
    """
    if not jax.config.jax_enable_compilation_cache or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    most, folder = most_bytes(), root / "compiled" / machine_key()
    if not most:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"the cache folder {folder} cannot be used ({error.strerror})"
        say(f"notice: {why}; this command keeps no compiled programs")
        return
    prune(folder.parent, most, folder.name)
    jax.config.update("jax_compilation_cache_max_size", -1)  # see `pruning`
    jax.config.update("jax_raise_persistent_cache_errors", False)
    _delete_torn(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default only programs that took a second to compile are kept; here a start is made of many that take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


#: What JAX warns of if it can read or write no entry for the program of this name.
_UNREADABLE = re.compile("Error (?:reading|writing) persistent compilation cache entry for '([^']+)'")


def _delete_torn(folder: Path) -> None:
    """From now on delete each entry of `folder` that JAX cannot read, instead of warning of it.

    A killed process or a full disk leaves an entry torn. JAX compiles its program anew, but never writes over an entry:
    every later start would compile the program again. Deleted here, between JAX's reading and its writing, the entry is
    written whole in this very process.
    """
    shown = warnings.showwarning

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        if found := _UNREADABLE.match(str(message)):
            entries = [path for path in folder.glob("*-cache") if path.name.rsplit("-", 2)[0] == found[1]]
            for path in list(filter(_is_torn, entries)) or entries:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        else:
            shown(message, *where, **more)

    warnings.filterwarnings("always", message=_UNREADABLE.pattern)
    warnings.showwarning = show


def _is_torn(entry: Path) -> bool:
    """Whether a file is not whole; one that JAX has packed with Zstandard counts as torn, as Python cannot read it."""
    try:
        stream = zlib.decompressobj()
        stream.decompress(entry.read_bytes())
        return not stream.eof
    except (OSError, zlib.error):
        return True


def most_bytes() -> int:
    """What compiled programs may take together; 0 for none."""
    given = jax.config.jax_compilation_cache_max_size  # type: ignore[attr-defined]
    return MOST_BYTES if given < 0 else given


def machine_key() -> str:
    """Name of what compiled programs may not be carried across: jaxlib's version and the kind of CPU.

    JAX's own keys leave the CPU out: code made for another one is refused, or worse, run.
    """
    try:
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts = sorted({line for line in lines if line.startswith(wanted)})
    except OSError:
        facts = [platform.processor()]
    digest = hashlib.sha256("\n".join([platform.machine(), *facts]).encode()).hexdigest()
    return f"jaxlib-{jaxlib.__version__}-{digest[:12]}"


def start_cost() -> dict[str, Any]:
    """What this process spent so far, for the first metrics of a run.

    seconds: since the process started; compile_seconds: XLA's, with the time to read what was kept; how many programs
    the cache had (cache_hits) and how many it had not (cache_misses).
    """
    return {
        "seconds": round(process_seconds(), 3),
        "compile_seconds": round(_lasted["/jax/core/compile/backend_compile_duration"], 3),
        "cache_hits": _happened["/jax/compilation_cache/cache_hits"],
        "cache_misses": _happened["/jax/compilation_cache/cache_misses"],
    }


def process_seconds() -> float:
    """Seconds since this process started; where the system does not tell, since this file was imported."""
    try:
        started = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]) / os.sysconf(
            "SC_CLK_TCK"
        )
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
