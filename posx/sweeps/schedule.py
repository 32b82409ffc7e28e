"""Choose how many runs go at once and on how many cores each: a pure function of the plan and the machine.

One run is fastest on all cores. Many runs are fastest on one core each: a process uses several cores less efficiently
than several processes do, and its start does not divide. Both effects are fixed numbers here, not measurements of
earlier runs, so that a sweep that is started again chooses the same schedule.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from posx.machine.cores import equal_parts

#: Seconds that a training step takes longer on several devices than its share of the work, as they wait for each other.
#: Measured on 4 cores at widths 96 to 256, where 4 devices reach 0.65 to 0.93 of the speed of 4 one-core processes.
SYNC_SECONDS = 0.015
#: Seconds from the start of a process to its second step, spent on one core by Python and the compiler. Each evaluated
#: length is one more program to compile.
START, COMPILING = 10.0, 3.0
#: FLOP/s of a run on one core, to express costs in seconds: half the speed of a matrix product.
CORE_SPEED = 4e10
#: The fraction of a core's time that is left if processes take turns on it, since each evicts the data of the last.
TURNS = 0.97
#: Bytes of an idle process with compiled programs, and the fraction of the memory that all processes may take.
PROCESS_MEMORY, MEMORY_SHARE = 600e6, 0.8


class Cost(NamedTuple):
    """The expected cost of a run.

    flops; lengths to evaluate; memory in bytes; steps of training; speed of one core in FLOP/s; start in seconds.

    The rows of a batch are sharded equally, 0 of them over any number of devices. If runs are equally long, lower seeds
    go first: runs that share programs then start apart, as only the first has to compile them.
    """

    flops: float
    lengths: int
    memory: float
    steps: int = 0
    rows: int = 0
    seed: int = 0
    speed: float = CORE_SPEED
    start: float = START

    def devices(self, cores: int) -> int:
        """Return how many of the cores a run can use, at least one."""
        return equal_parts(self.rows, max(cores, 1))

    def seconds(self, cores: int, part: float = 1.0) -> float:
        """Return the expected wall time on some cores, of the given part of the work."""
        alone = self.flops / self.speed
        computing = min(alone, alone / self.devices(cores) + SYNC_SECONDS * self.steps)
        return self.start + part * (computing + COMPILING * self.lengths)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The number of processes at once, and the cores of each run: widths, in the plan's order.

    More processes than cores take turns on all cores. A width of 0 binds the run to no cores. why: a reason to show.
    """

    costs: tuple[Cost, ...]
    cores: int
    at_once: int
    widths: tuple[int, ...]
    why: str = ""

    @property
    def sharing(self) -> int:
        """The most processes that start on one core."""
        return -(-self.at_once // self.cores)

    def seconds(self, run: int, part: float = 1.0) -> float:
        """Return the expected wall time of a part of a run that has its cores to itself."""
        return self.costs[run].seconds(self.widths[run], part)

    def wall_seconds(self, left: Sequence[float] = (), begun: Sequence[int] = ()) -> float:
        """Simulate the runs and return their expected wall time: free cores take the first run in order that fits.

        Args:
          left: seconds that each run still needs on its cores; all of it if not given.
          begun: the runs that are running already.
        """
        left = left or [self.seconds(run) for run in range(len(self.costs))]
        waiting = [run for run in dict.fromkeys([*begun, *longest_first(self.costs)]) if left[run] > 0]
        running: dict[int, float] = {}
        now = 0.0
        while waiting or running:
            free = self.cores * self.sharing - sum(self.widths[run] for run in running)
            for run in list(waiting):
                if not free or len(running) == self.at_once:
                    break
                if self.widths[run] <= free:
                    waiting.remove(run)
                    running[run] = left[run]
                    free -= self.widths[run]
            step, taken = min(running.values()), sum(self.widths[run] for run in running)
            now += step if taken <= self.cores else step * taken / (TURNS * self.cores)
            running = {run: seconds - step for run, seconds in running.items() if seconds > step}
        return now

    def __str__(self) -> str:
        said = [f"{one_or_more(self.at_once, 'run')} at a time"]
        groups = sorted(Counter(filter(None, self.widths)).items())
        if groups and min(self.at_once, len(self.costs)) > self.cores:
            said.append(f"taking turns on {one_or_more(self.cores, 'core')}")
        else:
            for width, count in groups:
                each = " each" if (count if groups[1:] else self.at_once) > 1 else ""
                said.append(f"{count} on " * (len(groups) > 1) + one_or_more(width, "core") + each)
        return ", ".join([*said, *filter(None, [self.why])])


def one_or_more(number: int, noun: str) -> str:
    """Return "one core" or "4 cores"."""
    return f"one {noun}" if number == 1 else f"{number} {noun}s"


def longest_first(costs: Sequence[Cost]) -> list[int]:
    """Return the numbers of the runs in the order in which they start."""
    return sorted(range(len(costs)), key=lambda run: (-costs[run].flops, costs[run].seed, run))


def choose(costs: Sequence[Cost], cores: int, memory: float, jobs: int = 0) -> Schedule:
    """Return the schedule of least expected wall time that fits into `memory` bytes, of `jobs` runs at once if given.

    Every number of runs at once is tried on equal parts of the cores, with and without widening the last, incomplete
    round to all cores. More runs than cores are tried too: they take turns, so that no core waits for the last run.
    """

    def schedule(at_once: int, last: int = 0) -> Schedule:
        """Build a schedule whose `last` runs have a round to themselves. Longer runs get the cores left over."""
        order, widths = longest_first(costs), [1] * len(costs)
        rounds = len(order) - last
        for place, run in enumerate(order):
            slot, slots = (place % at_once, at_once) if place < rounds else (place - rounds, last)
            widths[run] = max(1, -(-(cores - slot) // slots))
        return Schedule(tuple(costs), cores, at_once, tuple(widths))

    if jobs:
        return schedule(jobs)
    sizes = itertools.accumulate(sorted((cost.memory + PROCESS_MEMORY for cost in costs), reverse=True))
    most = max(1, sum(size <= MEMORY_SHARE * memory for size in sizes))
    apart = min(cores, len(costs), most)
    tried = [schedule(n, last) for n in range(max(1, apart), 0, -1) for last in sorted({0, len(costs) % n})]
    tried += [schedule(n) for n in range(cores + 1, min(2 * cores, len(costs) + 1, most + 1))]
    best = min(tried, key=lambda found: round(found.wall_seconds(), 3))
    short = f"as {one_or_more(most, 'run')} fit into {memory / 1e9:.1f} GB" if most < min(cores, len(costs)) else ""
    return dataclasses.replace(best, why=short)
