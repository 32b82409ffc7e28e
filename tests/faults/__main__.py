"""Provokes the faults that users meet, each in real processes of the `posx` command, and checks what it answers.

    python -m tests.faults --seed=0 --out=faults.json     # all of them
    python -m tests.faults --only=1-20,46                 # some
    python -m tests.faults --quick                        # what takes seconds each
    python -m tests.faults --only=45 --kills=100

Checked for every process: the exit code, that the reason is one line which says what was wrong, that no traceback
reaches the user; where a run can go on, that it does and ends in the same bits as one that was left alone. `--seed`
decides at which moments signals come and which bytes are damaged, and is printed, so that a finding can be had again.

Prints a Markdown table: the fault, how it was provoked, what is owed, what happened. A fault that this machine cannot
provoke, or that posx has no part for which it could happen, stands in it with the reason. Exit code 1 if one was not
answered as owed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import rooms
from tests.faults.scene import Scene, Site
from tests.faults.table import FAULTS, Fault, Outcome, provoked, table


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    rooms.load()
    chosen = [fault for fault in FAULTS if fault.number in options.only and not (options.quick and fault.slow)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="posx-faults-") as folder:
        site = Site(Path(folder), seed=options.seed, kills=options.kills)
        outcomes = []
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for outcome in pool.map(lambda fault: shown(fault, site), chosen):
                outcomes.append(outcome)
    unmet = [outcome for outcome in outcomes if outcome.unmet]
    shown_all = merged(options.out, outcomes) if options.out else outcomes
    print(table(shown_all))
    print(
        f"\n{len(outcomes)} faults, {len(unmet)} not answered as owed; seed {options.seed}, "
        f"{time.monotonic() - began:.0f} s with {options.jobs} at a time"
    )
    if options.out:
        options.out.write_text(json.dumps([outcome._asdict() for outcome in shown_all], indent=1) + "\n")
    sys.exit(1 if unmet else 0)


def merged(path: Path, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """These outcomes in the place of older ones of the same faults in the file, with the others there."""
    found = {f"{o['number']} {o['what']}": Outcome(**o) for o in json.loads(path.read_text())} if path.exists() else {}
    found |= {f"{outcome.number} {outcome.what}": outcome for outcome in outcomes}
    return sorted(found.values(), key=lambda outcome: outcome.number)


def shown(fault: Fault, site: Site) -> Outcome:
    """The outcome of a fault, said on standard error as soon as it is known."""
    outcome = provoked(fault, Scene(site, fault.name))
    said = f"not as owed: {outcome.unmet}" if outcome.unmet else outcome.got
    print(f"F{fault.number} {fault.what}: {said}", file=sys.stderr, flush=True)
    return outcome


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=numbers, default=range(1, 86), help="numbers with commas, ranges: 1-20,46")
    parser.add_argument("--quick", action="store_true", help="leave out those that take more than some seconds")
    parser.add_argument("--kills", type=int, default=20, help="kill -9 at random moments, in all")
    parser.add_argument("--seed", type=int, default=0, help="of moments and of damaged bytes")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults provoked at a time")
    parser.add_argument("--out", type=Path, help="JSON file of the outcomes; those of other faults in it are kept")
    return parser.parse_args(words)


def numbers(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip("F").partition("-")
        try:
            found |= set(range(int(first), int(last.strip("F") or first) + 1))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is no number and no range of numbers") from None
    return found


if __name__ == "__main__":
    main()
