"""The measuring of all benchmarks: their arguments, the machine, its ceiling, interleaved rounds."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from posx.encodings import Chain, Encoding, from_spec
from posx.lab.machine.ceiling import machine_ceiling
from posx.machine.cores import cpu_name
from posx.machine.platforms import is_on_cpu

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "x-transformers")
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "XLA_FLAGS", "JAX_PLATFORMS")
TRAIN_LEN = 512  # the training length that encodings are resolved for, if a benchmark's text may be longer
T = TypeVar("T")


def positive(text: str) -> int:
    """Parse a count of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def lengths(text: str) -> list[int]:
    """Parse lengths in tokens, and sort them."""
    return sorted({positive(word) for word in text.split(",")})


def add_names(parser: argparse.ArgumentParser, flag: str, known: Iterable[str]) -> None:
    """Add a flag that takes some of the known names, with commas."""

    def names(text: str) -> list[str]:
        for name in (chosen := text.split(",")):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; known: {', '.join(known)}")
        return chosen

    parser.add_argument(flag, type=names, help=f"names with commas, of: {', '.join(known)}")


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--rounds", type=positive, default=default, help="turns of every contestant")


def at_any_length(text: str) -> Encoding:
    """Return the encoding that `text` names, with its fields open. Tables that would end repeat their last row."""

    def repeating(part: Encoding) -> Encoding:
        ends = getattr(part, "beyond", None) == "error"
        return dataclasses.replace(part, beyond="clamp") if ends else part

    encoding = from_spec(text)
    return Chain(tuple(map(repeating, encoding.parts))) if isinstance(encoding, Chain) else repeating(encoding)


def stored(path: Path | None) -> dict[str, Any]:
    """Read the report of an earlier run; {} if there is none."""
    return json.loads(path.read_text()) if path and path.exists() else {}


def cores() -> int:
    return len(core_list())


def core_list() -> list[int]:
    """List the usable cores by number."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def use_cores(count: int | None) -> None:
    """Keep this process, and those it starts, on the first `count` usable cores. Raises SystemExit."""
    if count is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit(f"--cores={count} needs a system that binds processes to cores")
    if count > cores():
        raise SystemExit(f"--cores={count} is more than the {cores()} usable cores")
    os.sched_setaffinity(0, core_list()[:count])


def load() -> list[float]:
    """Return the load averages of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def environment() -> dict[str, Any]:
    """Return versions, machine and load before anything runs."""
    return {
        "load_average": [load()],
        "versions": {"python": platform.python_version(), **{name: v for name in PACKAGES if (v := version(name))}},
        "cpu": cpu_name(),
        "cores": cores(),
        "device": jax.devices()[0].device_kind,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def busy(machine: dict[str, Any]) -> str:
    """Return a warning if other jobs were running when the benchmark started, else ""."""
    before = machine["load_average"][0][0]
    if before < 0.25 * machine["cores"]:
        return ""
    return f"warning: load average {before} on {machine['cores']} cores before the start; ratios may be void\n"


def peak_rss() -> int:
    """Return the most bytes that this process has held.

    VmHWM is read if the system has it, because a child process on Linux starts with its parent's ru_maxrss.
    """
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return the encodings that are measured in turns: all of them on CPUs, parts of `size` on an accelerator.

    An accelerator is lent for minutes, and compiling takes most of them. A part is measured once it is compiled.
    """
    size = max(len(items), 1) if is_on_cpu() else size
    return [items[start : start + size] for start in range(0, len(items), size)]


def fresh_ceiling() -> float:
    """Measure the FLOP/s of a large float32 matrix product now."""
    with tempfile.TemporaryDirectory() as empty:
        return machine_ceiling(Path(empty), "float32")


def interleave(turns: Sequence[Callable[[], T]], rounds: int, before: Callable[[], Any] | None = None) -> list[list[T]]:
    """Call every turn once a round, and return the results by turn and round.

    `before` opens a round. The order rotates and flips.
    """
    last = collections.deque(interleaved(turns, rounds, before), maxlen=1)
    return last[0] if last else []


def interleaved(
    turns: Sequence[Callable[[], T]], rounds: int, before: Callable[[], Any] | None = None
) -> Iterator[list[list[T]]]:
    """Yield the results of `interleave` after each turn: those of finished rounds, or of the first one so far."""
    results: list[list[T]] = [[] for _ in turns]
    for n in range(rounds):
        if before:
            before()
        order = [(n + place) % len(turns) for place in range(len(turns))]
        for turn in order if n % 2 == 0 else reversed(order):
            results[turn].append(turns[turn]())
            finished = n + (n == 0 or min(map(len, results)) > n)
            yield [found[:finished] for found in results]
        print(f"round {n + 1}/{rounds}", file=sys.stderr)
