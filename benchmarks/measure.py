"""What every bench shares: the machine, its ceiling, interleaved rounds, medians with quartiles."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from posx.encodings import Chain, Encoding, from_spec
from posx.machine.ceiling import matmul_ceiling

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "x-transformers")
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "XLA_FLAGS", "JAX_PLATFORMS")
TRAIN_LEN = 512  # the training length encodings are resolved for where a bench's text may be longer
Spread = tuple[float, float, float]
T = TypeVar("T")


def positive(text: str) -> int:
    """A command line's count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def lengths(text: str) -> list[int]:
    """A command line's increasing lengths in tokens."""
    return sorted({positive(word) for word in text.split(",")})


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--rounds", type=positive, default=default, help="turns of every contestant")


def at_any_length(text: str) -> Encoding:
    """The encoding that `text` names, with its fields open: tables that would end repeat their last row."""

    def repeating(part: Encoding) -> Encoding:
        ends = getattr(part, "beyond", None) == "error"
        return dataclasses.replace(part, beyond="clamp") if ends else part

    encoding = from_spec(text)
    return Chain(tuple(map(repeating, encoding.parts))) if isinstance(encoding, Chain) else repeating(encoding)


def stored(path: Path | None) -> dict[str, Any]:
    """The report that an earlier run left, {} for none."""
    return json.loads(path.read_text()) if path and path.exists() else {}


def cores() -> int:
    return len(core_list())


def core_list() -> list[int]:
    """The usable cores by number."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def use_cores(count: int | None) -> None:
    """From now on this process and those it starts run on the first so many usable cores. Raises SystemExit."""
    if count is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit(f"--cores={count} needs a system that binds processes to cores")
    if count > cores():
        raise SystemExit(f"--cores={count} is more than the {cores()} usable cores")
    os.sched_setaffinity(0, core_list()[:count])


def load() -> list[float]:
    """Load averages of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def environment() -> dict[str, Any]:
    """Versions, machine and load before anything ran."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return {
        "load_average": [load()],
        "versions": {"python": platform.python_version(), **{name: v for name in PACKAGES if (v := version(name))}},
        "cpu": names[0].split(":", 1)[1].strip() if names else platform.processor(),
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
    """A warning if other jobs were running when the bench started, else nothing."""
    before = machine["load_average"][0][0]
    if before < 0.25 * machine["cores"]:
        return ""
    return f"warning: load average {before} on {machine['cores']} cores before the start; ratios may be void\n"


def peak_rss() -> int:
    """Bytes this process has held at most. Linux hands ru_maxrss on from parent to child, so VmHWM goes before it."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def fresh_ceiling() -> float:
    """FLOP/s of a large float32 matrix product, measured now."""
    with tempfile.TemporaryDirectory() as empty:
        return matmul_ceiling(Path(empty), "float32")


def interleave(turns: Sequence[Callable[[], T]], rounds: int, before: Callable[[], Any] | None = None) -> list[list[T]]:
    """What every turn returns, per turn and round. `before` opens a round; the order rotates and flips."""
    results: list[list[T]] = [[] for _ in turns]
    for n in range(rounds):
        if before:
            before()
        order = [(n + place) % len(turns) for place in range(len(turns))]
        for turn in order if n % 2 == 0 else reversed(order):
            results[turn].append(turns[turn]())
        print(f"round {n + 1}/{rounds}", file=sys.stderr)
    return results


def quartiles(values: Iterable[float]) -> Spread:
    """Median, lower and upper quartile."""
    low, middle, high = np.quantile(list(values), (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


def ratios(top: Iterable[float] | None, bottom: Iterable[float] | None) -> Spread | None:
    """Quartiles of top / bottom, formed per round; None where one of them is missing."""
    if top is None or bottom is None:
        return None
    return quartiles(a / b for a, b in zip(top, bottom, strict=True))


def cell(value: Spread | None, form: str) -> str:
    """ "median [lower, upper]" for a table, "-" for nothing."""
    return "-" if value is None else f"{value[0]:{form}} [{value[1]:{form}}, {value[2]:{form}}]"


def place(report: dict[str, Any]) -> str:
    """Where and under what load a report was made, for the line over its table."""
    loads = report["load_average"]
    return f"{report['cpu']}, {report['cores']} cores, load {loads[0][0]} before and {loads[-1][0]} after"


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, its first column to the left."""
    return [f"| {' | '.join(line)} |" for line in (head, [":--", *["---:"] * (len(head) - 1)], *body)]
