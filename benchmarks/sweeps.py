"""Seconds of a whole sweep, from the command to its figures: posx without --jobs, an older commit with several.

The contestant `posx` is the present code with its own choice of how many runs at once. Beside it `jobs=N`, for each N
of --jobs, is posx at --baseline=COMMIT with N runs at once. The fastest of the older ones is the bar. Each run of the
command has a new work folder. With --cache=cold its cache folder (compiled programs, tokens, the machine's ceiling) is
new too. With --cache=warm an earlier run of the same contestant has filled it; that run is stored, and not in the
table. A config is that of the contestant's own checkout if it has one.

It may take hours. Runs that --out holds already, of the same command on the same cores, are not repeated, so the same
command resumes. A run that fails is stored with its reason and tried again the next time.

    python -m benchmarks sweep --config=configs/quick.py --baseline=3891e0e --jobs=1,2,4 --out=sweep.json
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure, report
from benchmarks.report import cell, quartiles, ratios
from benchmarks.workers import ROOT, checkout, worker_environment

OURS = "posx"
SETTINGS = ("config", "baseline", "cache", "words")


class Run(NamedTuple):
    """One run of the command. The first of a contestant with --cache=warm fills its cache."""

    contestant: str
    number: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_rounds(parser, 1)
    parser.add_argument("--config", required=True, help="of the sweep, relative to a checkout, or absolute")
    parser.add_argument("--baseline", required=True, metavar="COMMIT", help="the older state of posx")
    parser.add_argument("--jobs", type=measure.lengths, default=[1, 2, 4], help="of the baseline, with commas")
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold")
    parser.add_argument("--words", default="", help="more words for every contestant's command")
    parser.add_argument("--folder", type=Path, help="of work folders and caches; default: a temporary one")


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    settings = {**{name: getattr(options, name) for name in SETTINGS}, "cores": measure.cores()}
    earlier = measure.stored(options.out)
    had = earlier.get("runs", []) if all(earlier.get(name) == value for name, value in settings.items()) else []
    done = {Run(row["contestant"], row["number"]): row for row in had if "seconds" in row}

    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        baseline = stack.enter_context(checkout(options.baseline))
        for one in missing(options, done, folder):
            print(f"{one.contestant}, run {one.number + 1}", file=sys.stderr)
            done[one] = one._asdict() | timed(one, options, ROOT if one.contestant == OURS else baseline, folder)
            save({**settings, "runs": [*done.values()]})
    return {**settings, "runs": [*done.values()]}


def missing(options: argparse.Namespace, done: dict[Run, Any], folder: Path) -> Iterator[Run]:
    """Yield the missing runs, in rounds whose order flips. A warm cache that is gone is filled once more."""
    contestants = [OURS, *(f"jobs={jobs}" for jobs in options.jobs)]
    fills = options.cache == "warm"
    for number in range(options.rounds + fills):
        for contestant in contestants if number % 2 == 0 else contestants[::-1]:
            one = Run(contestant, number)
            wanted = any(Run(contestant, later) not in done for later in range(number + 1, options.rounds + 1))
            gone = fills and number == 0 and wanted and not warm_cache(folder, contestant).exists()
            if one not in done or gone:
                yield one


def warm_cache(folder: Path, contestant: str) -> Path:
    return folder / f"cache-{contestant}"


def timed(one: Run, options: argparse.Namespace, code: Path, folder: Path) -> dict[str, Any]:
    """Run the command: {"seconds", "rows"} of results, or {"why"} it failed."""
    own = code / options.config
    jobs = [] if one.contestant == OURS else [f"--{one.contestant}"]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    with tempfile.TemporaryDirectory(dir=folder) as fresh, open(log, "w+") as output:
        workdir = Path(fresh) / "runs"
        cache = Path(fresh) / "cache" if options.cache == "cold" else warm_cache(folder, one.contestant)
        words = [
            f"--config={own if own.exists() else Path(options.config).resolve()}", f"--workdir={workdir}",
            f"--config.data.cache_dir={cache}", *jobs, *options.words.split(),
        ]  # fmt: skip
        command = [sys.executable, "-P", "-m", "posx.lab.cli", "sweep", *words]
        start = time.perf_counter()
        code_of_exit = subprocess.run(
            command, env=worker_environment(code), stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        ).returncode
        seconds = time.perf_counter() - start
        rows = sum(len(path.read_text().splitlines()) for path in workdir.glob("*/eval.jsonl"))
    if code_of_exit:
        last = (log.read_text().strip().splitlines() or [""])[-1]
        return {"why": f"exit code {code_of_exit}: {last}"[:300]}
    return {"seconds": seconds, "rows": rows}


def summarise(stored: dict[str, Any]) -> dict[str, Any]:
    """Return {"seconds": {contestant: list}, "best": the fastest baseline, "ratio": its seconds over posx's}."""
    fills = stored["cache"] == "warm"
    seconds: dict[str, list[float]] = {}
    for row in sorted(stored["runs"], key=lambda row: row["number"]):
        if "seconds" in row and row["number"] >= fills:
            seconds.setdefault(row["contestant"], []).append(row["seconds"])
    baselines = [name for name in seconds if name != OURS]
    best = min(baselines, key=lambda name: statistics.median(seconds[name]), default=None)
    both = seconds.get(best or "", []), seconds.get(OURS, [])
    return {"seconds": seconds, "best": best, "ratio": ratios(*both) if len(both[0]) == len(both[1]) > 0 else None}


def table(stored: dict[str, Any]) -> str:
    """Format a row per contestant, the bar marked, then the failures and the ratio to the bar."""
    found = summarise(stored)
    rows = {row["contestant"]: row.get("rows") for row in stored["runs"]}
    body = [
        [
            name if name == OURS else f"{name} at {stored['baseline']}{', best' if name == found['best'] else ''}",
            cell(quartiles(seconds), ",.0f"), str(rows[name]), str(len(seconds)),
        ]
        for name, seconds in found["seconds"].items()
    ]  # fmt: skip
    lines = [
        f"posx sweep --config={stored['config']} {stored['words']}".strip() + f", compile cache {stored['cache']}; "
        f"{report.place(stored)}",
        "", *report.rows(["contestant", "seconds: median [quartiles]", "results", "runs"], body), "",
        f"the best baseline's seconds over posx's: {cell(found['ratio'], '.2f')}",
    ]  # fmt: skip
    return "\n".join(lines + [f"failed: {row['contestant']}: {row['why']}" for row in stored["runs"] if "why" in row])


def draw(stored: dict[str, Any], path: Path) -> None:
    """Draw a bar per contestant."""
    seconds = {name: quartiles(found) for name, found in summarise(stored)["seconds"].items()}
    groups = {name: [report.Bar(x, "#3A6EA5" if name == OURS else report.GREY)] for name, x in seconds.items()}
    sizes = f"{stored['config']}, {stored['cores']} cores, compile cache {stored['cache']}"
    lines = [sizes, f"jobs=N: posx at {stored['baseline']}"]
    report.bars(path, groups, "A sweep", lines, "seconds of the whole sweep")
