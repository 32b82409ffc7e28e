"""The cores and the memory a process may use, and starting others on some cores. Knows nothing of JAX."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

_SYSTEM, _PROCESS = Path("/sys"), Path("/proc/self")


@functools.cache
def usable_cores() -> tuple[int, ...]:
    """The cores this process may keep busy at once, each by the number of one of its hardware threads, in order.

    Of the hardware threads in the process's affinity one for each physical core, and no more than its control group's
    quota of processor time pays for, rounded up, at least one. Where the system tells none of it, all there are. What
    it was when first asked stays: JAX has made as many devices and threads, whatever `let_go` allows later.
    """
    threads = _affinity()
    cores: dict[str, int] = {}
    for thread in threads:
        cores.setdefault(_siblings(thread), thread)
    whole = min(_quota(), len(cores))
    return tuple(cores.values())[: max(1, math.ceil(whole))]


def cpu_name() -> str:
    """The processor as its maker calls it; its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def equal_parts(rows: int, most: int) -> int:
    """Into how many equal parts `rows` are cut, at most so many; 0 rows into any number."""
    return max(n for n in range(1, most + 1) if rows % n == 0)


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes started inside run on the hardware threads of these physical cores, where the system can see to it.

    A process takes over the affinity of the thread that starts it; this thread gets its own back.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _threads_of(cores) or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def let_go(process: int, cores: Sequence[int]) -> None:
    """Lets a process that runs on few cores take its turns on any of these, with the threads that it has by now."""
    if not hasattr(os, "sched_setaffinity"):
        return
    threads = _threads_of(cores)
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread), threads)


def usable_memory() -> float:
    """Bytes this process and those it starts may take together: of the machine, or of the tightest control group.

    What others take at the moment is not left out. Infinite where the system tells nothing.
    """
    names = ("memory.max", "memory.limit_in_bytes")
    told = [_read(folder / name) for folder in _groups("memory") for name in names]
    limits = [float(text) for text in told if text.isdecimal()]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    return min(limits, default=math.inf)


def own_memory() -> float:
    """Bytes this process may take: `usable_memory`, or less where the system limits each process (`ulimit -v`)."""
    limit = math.inf
    with contextlib.suppress(ImportError, OSError):
        import resource  # not on Windows

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        limit = math.inf if soft == resource.RLIM_INFINITY else float(soft)
    return min(usable_memory(), limit)


def _affinity() -> list[int]:
    """Hardware threads, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _threads_of(cores: Sequence[int]) -> set[int]:
    """Hardware threads of these physical cores, of those in this process's affinity."""
    wanted = {_siblings(core) for core in cores}
    return {thread for thread in os.sched_getaffinity(0) if _siblings(thread) in wanted}


def _siblings(thread: int) -> str:
    """A name for the physical core of a hardware thread: the list of its threads."""
    path = _SYSTEM / f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
    return _read(path) or str(thread)


def _quota() -> float:
    """Cores' worth of time that the tightest of the process's control groups allows; infinite without one."""
    return min([math.inf, *map(_limit, _groups("cpu"))])


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the process's control groups, and of those around them, in which `controller` may have a limit."""
    for line in _read(_PROCESS / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = _SYSTEM / "fs/cgroup"
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be the host's, of which only the root is mounted.
        group = root / controllers / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if root in (folder, *folder.parents))


def _limit(folder: Path) -> float:
    """The limit of one control group, of version 2 ("quota period" in cpu.max) or 1 (a file each)."""
    words = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    ]  # fmt: skip
    try:
        quota, period = (float(word) for word in words)
    except ValueError:  # "max", or nothing there
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
