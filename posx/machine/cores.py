"""The cores and the memory that a process may use, and processes bound to cores. Knows nothing of JAX."""

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
    """Return the cores this process may keep busy, each by the number of one of its hardware threads, in order.

    There is one for each physical core in the process's affinity. There are no more than the processor time that its
    control group pays for, rounded up. The first answer stays, whatever `release_process` allows later, because JAX has
    made its devices for it.
    """
    threads = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, int] = {}
    for thread in threads:
        cores.setdefault(_siblings(thread), thread)
    paid = min([math.inf, *map(_quota, _groups("cpu"))])
    return tuple(cores.values())[: max(1, math.ceil(min(paid, len(cores))))]


def cpu_name() -> str:
    """Return the maker's name of the processor, or its architecture if the system does not tell."""
    names = [line.partition(":")[2].strip() for line in cpu_facts("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def cpu_facts(*names: str) -> list[str]:
    """Return the system's lines about its processors that begin with one of `names`, none if it does not tell."""
    return [line for line in _read(Path("/proc/cpuinfo")).splitlines() if line.startswith(names)]


def equal_parts(rows: int, most: int) -> int:
    """Return the largest number of equal parts that `rows` split into, at most `most`; 0 rows split into any number."""
    return max(n for n in range(1, most + 1) if rows % n == 0)


@contextlib.contextmanager
def bind_cores(cores: Sequence[int]) -> Iterator[None]:
    """Start processes on the hardware threads of these physical cores, if the system can bind them.

    A process inherits the affinity of the thread that starts it. This thread gets its own affinity back.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _core_threads(cores) or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def release_process(process: int, cores: Sequence[int]) -> None:
    """Spread a process that is bound to few cores over these cores, with all its present threads."""
    with contextlib.suppress(OSError):  # it has ended, or the system has no such folder and binds no threads
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread), _core_threads(cores))


def usable_memory() -> float:
    """Return the bytes that this process and its children may take: of the machine, or of the tightest control group.

    Memory that others use at the moment is not subtracted. The result is infinite if the system gives no number.
    """
    names = ("memory.max", "memory.limit_in_bytes")
    told = [_read(folder / name) for folder in _groups("memory") for name in names]
    limits = [float(text) for text in told if text.isdecimal()]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    return min(limits, default=math.inf)


def own_memory() -> float:
    """Return the bytes that this process may take: `usable_memory`, or the limit of each process (`ulimit -v`)."""
    limit = math.inf
    with contextlib.suppress(ImportError, OSError):
        import resource  # not on Windows

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        limit = math.inf if soft == resource.RLIM_INFINITY else float(soft)
    return min(usable_memory(), limit)


def _core_threads(cores: Sequence[int]) -> set[int]:
    """Return the hardware threads of these physical cores that are in this process's affinity."""
    wanted = {_siblings(core) for core in cores}
    return {thread for thread in os.sched_getaffinity(0) if _siblings(thread) in wanted}


def _siblings(thread: int) -> str:
    """Return a name for the physical core of a hardware thread: the list of its threads."""
    path = _SYSTEM / f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
    return _read(path) or str(thread)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the process's control groups and their parents, in which `controller` may have a limit."""
    for line in _read(_PROCESS / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = _SYSTEM / "fs/cgroup"
        if not controllers or controller in controllers.split(","):
            # In a container the path may be the host's, of which only the root is mounted.
            group = root / controllers / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if root in (folder, *folder.parents))


def _quota(folder: Path) -> float:
    """Return the cores that a control group pays for, of version 2 ("quota period" in cpu.max) or 1 (a file each)."""
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = _read(folder / "cpu.max").split() or [_read(folder / name) for name in names]
    try:
        quota, period = map(float, words)
    except ValueError:  # "max", or nothing there
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _read(path: Path) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
