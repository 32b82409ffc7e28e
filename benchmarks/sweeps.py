"""Seconds of a whole sweep, from the command to its figures: posx without --jobs, an older commit with several.

Contestants: `posx`, the present code with its own choice of how many runs at once; `jobs=N` for each N of --jobs,
posx at --baseline=COMMIT with so many; the fastest of these is the bar. Each run of the command has a fresh work
folder. With --cache=cold its cache folder (compiled programs, tokens, the machine's ceiling) is fresh too; with
--cache=warm it is one that an earlier run of the same contestant filled, untimed in the table and stored beside the
others. A config is that of the contestant's own checkout where it is there.

It may take hours. What --out holds already, of the same command on the same cores, is not measured again: one command
goes on where it was stopped. A run that fails is stored with its reason and tried again the next time.

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

from benchmarks import measure, targets
from benchmarks.checkout import checkout
from benchmarks.measure import cell, quartiles
from benchmarks.workers import ROOT, worker_environment
from posx.plots import look

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
    parser.add_argument("--folder", type=Path, help="where work folders and caches stand; default: a temporary one")


def run(options: argparse.Namespace, save: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    settings = {**{name: getattr(options, name) for name in SETTINGS}, "cores": measure.cores()}
    earlier = measure.stored(options.out)
    had = earlier.get("runs", []) if all(earlier.get(name) == value for name, value in settings.items()) else []
    done = {Run(row["contestant"], row["number"]): row for row in had if "seconds" in row}

    def report() -> dict[str, Any]:
        return {**settings, "runs": [*done.values()]}

    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        baseline = stack.enter_context(checkout(options.baseline))
        for one in missing(options, done, folder):
            print(f"{one.contestant}, run {one.number + 1}", file=sys.stderr)
            done[one] = one._asdict() | timed(one, options, ROOT if one.contestant == OURS else baseline, folder)
            save(report())
    return report()


def missing(options: argparse.Namespace, done: dict[Run, Any], folder: Path) -> Iterator[Run]:
    """Runs that are still to be made, in rounds whose order flips; a warm cache that is gone is filled once more."""
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
    """{"seconds", "rows"}: how long the command took and how many results it left; or {"why"} it failed."""
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
        command = [sys.executable, "-P", "-m", "posx.cli", "sweep", *words]
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


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    """{"seconds": {contestant: list}, "best": the fastest of the baseline's, "ratio" of it to posx, per round}."""
    fills = report["cache"] == "warm"
    seconds: dict[str, list[float]] = {}
    for row in sorted(report["runs"], key=lambda row: row["number"]):
        if "seconds" in row and row["number"] >= fills:
            seconds.setdefault(row["contestant"], []).append(row["seconds"])
    baselines = [name for name in seconds if name != OURS]
    best = min(baselines, key=lambda name: statistics.median(seconds[name]), default=None)
    both = (seconds.get(best or ""), seconds.get(OURS))
    complete = all(both) and len(both[0] or ()) == len(both[1] or ())
    return {"seconds": seconds, "best": best, "ratio": measure.ratios(*both) if complete else None}


def table(report: dict[str, Any]) -> str:
    """Markdown: a row per contestant, the bar marked, then what failed and the ratio to the bar."""
    found = summarise(report)
    rows = {row["contestant"]: row.get("rows") for row in report["runs"]}
    body = [
        [
            name if name == OURS else f"{name} at {report['baseline']}{', best' if name == found['best'] else ''}",
            cell(quartiles(seconds), ",.0f"), str(rows[name]), str(len(seconds)),
        ]
        for name, seconds in found["seconds"].items()
    ]  # fmt: skip
    lines = [
        f"posx sweep --config={report['config']} {report['words']}".strip() + f", compile cache {report['cache']}; "
        f"{measure.place(report)}",
        "", *measure.rows(["contestant", "seconds: median [quartiles]", "results", "runs"], body), "",
        f"the best baseline's seconds over posx's: {cell(found['ratio'], '.2f')}, target "
        f"{targets.shown(targets.SWEEP.get(report['cores']))}",
    ]  # fmt: skip
    return "\n".join(lines + [f"failed: {row['contestant']}: {row['why']}" for row in report["runs"] if "why" in row])


def draw(report: dict[str, Any], path: Path) -> None:
    """A bar per contestant, seconds, with quartiles."""
    seconds = summarise(report)["seconds"]
    with look.style():
        made = look.figure(7.5, 1.2 + 0.35 * len(seconds))
        ax = made.add_subplot()
        made.subplots_adjust(top=0.99, left=0.24)
        for place, (name, found) in enumerate(reversed(seconds.items())):
            middle, low, high = quartiles(found)
            color, spread = ("#3A6EA5" if name == OURS else "#C4C4C4"), [[middle - low], [high - middle]]
            ax.barh(place, middle, 0.7, color=color, xerr=spread, ecolor="#555555", capsize=2)
        ax.set_yticks(range(len(seconds)), list(reversed(seconds)))
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("seconds of the whole sweep (median; whiskers: quartiles)")
        sizes = f"{report['config']}, {report['cores']} cores, compile cache {report['cache']}"
        look.headings(made, "A sweep", [sizes, f"jobs=N: posx at {report['baseline']}"])
        look.save(made, path.parent, path.stem)
