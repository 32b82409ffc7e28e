"""Provoke the faults that users meet, each in real processes of the `posx` command, and check what it answers.

    python -m tests.faults --seed=0 --out=faults.json     # all of them
    python -m tests.faults --only=1-20,46                 # some
    python -m tests.faults --quick                        # those that take seconds each
    python -m tests.faults --only=45 --kills=100

Checked for every process: the exit code, that the reason is one line which says what was wrong, and that no traceback
reaches the user. If a run can resume, it must end in the same bits as an undisturbed run. `--seed` decides at which
moments signals come and which bytes are damaged. It is printed, so that a finding can be repeated.

Prints a Markdown table: the fault, how it was provoked, the expected answer, the answer. A fault that this machine
cannot provoke, or for which posx has no part, is in the table with the reason. Exit code 1 if an answer was not as
expected.
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

from tests.faults import folders, settings, sweeps, texts, training  # noqa: F401  they fill FAULTS
from tests.faults.table import FAULTS, Fault, Outcome, provoked, table
from tests.tiny import Scene, Site


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    chosen = [fault for fault in FAULTS if fault.number in options.only and not (options.quick and fault.slow)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="posx-faults-") as folder:
        site = Site(Path(folder), seed=options.seed, kills=options.kills)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(lambda fault: reported(fault, site), chosen))
    unmet = [outcome for outcome in outcomes if outcome.unmet]
    shown = merged(options.out, outcomes) if options.out else outcomes
    print(table(shown))
    print(
        f"\n{len(outcomes)} faults, {len(unmet)} not answered as expected; seed {options.seed}, "
        f"{time.monotonic() - began:.0f} s with {options.jobs} at a time"
    )
    if options.out:
        options.out.write_text(json.dumps([outcome._asdict() for outcome in shown], indent=1) + "\n")
    sys.exit(1 if unmet else 0)


def merged(path: Path, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Put these outcomes in the place of older ones of the same faults in the file, and keep the file's others."""
    found = {f"{o['number']} {o['what']}": Outcome(**o) for o in json.loads(path.read_text())} if path.exists() else {}
    found |= {f"{outcome.number} {outcome.what}": outcome for outcome in outcomes}
    return sorted(found.values(), key=lambda outcome: outcome.number)


def reported(fault: Fault, site: Site) -> Outcome:
    """Return the outcome of a fault, and print it on standard error as soon as it is known."""
    outcome = provoked(fault, Scene(site, fault.name))
    said = f"not as expected: {outcome.unmet}" if outcome.unmet else outcome.got
    print(f"F{fault.number} {fault.what}: {said}", file=sys.stderr, flush=True)
    return outcome


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__, formatter_class=form)
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
