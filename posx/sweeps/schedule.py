"""How many runs go at once, and on how many cores each: a pure function of the whole plan and the machine.

A run is fastest on all cores, many runs are on one core each: what one process computes on several cores it computes at
a smaller share of their speed, and its start does not divide. Both shares are fixed numbers and not what runs here have
measured, so that a sweep that is started again chooses the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from posx.machine.cores import equal_parts

#: Seconds by which a step takes longer on several devices than its part of the work: they wait for one another once.
#: Measured on 4 cores at widths 96 to 256, so 4 devices reach 0.65 to 0.93 of what four processes on a core each do.
MEETING = 0.015
#: Seconds from a process's start to its second step, which are Python's and the compiler's: one core's work. And of
#: each length that is evaluated, which is a program of its own.
START, COMPILING = 10.0, 3.0
#: FLOP/s of a run on one core, for costs in seconds: half of a matrix product's.
CORE_SPEED = 4e10
#: What is left of a core's time where processes take turns on the cores: they fetch one another's data anew.
TURNS = 0.97
#: Bytes of a process that does nothing yet, its programs compiled; and the part of the memory that all may take.
PROCESS_MEMORY, MEMORY_SHARE = 600e6, 0.8


class Cost(NamedTuple):
    """What a run takes.

    flops; lengths that it evaluates; memory, bytes; steps of training; rows: of a part of a batch, of which every
    device gets as many, 0 where any number of devices may share; speed: of one core, FLOP/s; start: seconds. Of runs
    that take as long, those of a lower turn go first: runs of the same programs start apart, for only the first has to
    compile them.
    """

    flops: float
    lengths: int
    memory: float
    steps: int = 0
    rows: int = 0
    turn: int = 0
    speed: float = CORE_SPEED
    start: float = START

    def devices(self, cores: int) -> int:
        """How many of some cores take part."""
        return equal_parts(self.rows, cores)

    def seconds(self, cores: int, part: float = 1.0) -> float:
        """Expected wall time on some cores, of a process that has this part of the work to do."""
        devices = self.devices(cores)
        alone = self.flops / self.speed
        computing = min(alone, alone / devices + MEETING * self.steps)
        return self.start + part * (computing + COMPILING * self.lengths)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """at_once: processes; widths: cores of each run, in the plan's order; costs: theirs; bound: whether to cores.

    More processes than cores take turns on all of them. why: it is not another, a few words, if there is a reason.
    """

    costs: tuple[Cost, ...]
    cores: int
    at_once: int
    widths: tuple[int, ...]
    bound: bool = True
    why: str = ""

    @property
    def sharing(self) -> int:
        """How many processes a core has at most when they start."""
        return -(-self.at_once // self.cores)

    def seconds(self, run: int, part: float = 1.0) -> float:
        """Expected wall time of a run that has this part of its work to do, and its cores for itself."""
        return self.costs[run].seconds(self.widths[run], part)

    def share(self, running: Iterable[int]) -> float:
        """The part of a core's time that each of these runs, side by side, has on each of its cores."""
        taken = sum(self.widths[run] for run in running)
        return 1.0 if taken <= self.cores else TURNS * self.cores / taken

    def wall_seconds(self, left: Sequence[float] = (), begun: Sequence[int] = ()) -> float:
        """Expected wall time of all runs; of those that have so many seconds `left`, if those `begun` go on.

        Whatever is free takes the first run of the order that fits.
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
            share, step = self.share(running), min(running.values())
            now += step / share
            running = {run: seconds - step for run, seconds in running.items() if seconds > step}
        return now

    def __str__(self) -> str:
        if not self.bound:
            return f"{runs(self.at_once)} at a time"
        groups = Counter(self.widths)
        cores = {width: "one core" if width == 1 else f"{width} cores" for width in groups}
        if min(self.at_once, len(self.costs)) > self.cores:
            told = f"taking turns on {'one core' if self.cores == 1 else f'{self.cores} cores'}"
        elif len(groups) == 1:
            (each,) = cores.values()
            told = each if self.at_once == 1 else f"{each} each"
        else:
            told = ", ".join(f"{n} on {cores[w]}{' each' * (n > 1)}" for w, n in sorted(groups.items()))
        return f"{runs(self.at_once)} at a time, {told}{f', {self.why}' if self.why else ''}"


def runs(number: int) -> str:
    return "one run" if number == 1 else f"{number} runs"


def longest_first(costs: Sequence[Cost]) -> list[int]:
    """The order of runs: numbers of `costs`."""
    return sorted(range(len(costs)), key=lambda run: (-costs[run].flops, costs[run].turn, run))


def choose(costs: Sequence[Cost], cores: int, memory: float, jobs: int = 0) -> Schedule:
    """The schedule of the least expected wall time that fits into `memory`, bytes; of `jobs` runs at once, if given.

    Tried are all numbers of runs at once, on equal parts of the cores, each also with the runs of the last, incomplete
    round on equal parts of all cores; and more runs than cores, which take turns, so that no core waits for the last.
    """
    if jobs:
        return Schedule(tuple(costs), cores, jobs, _widths(costs, cores, jobs, 0))
    most = _most_at_once(costs, memory)
    tried = [
        Schedule(tuple(costs), cores, n, _widths(costs, cores, n, last))
        for n in (
            *range(min(cores, len(costs), most), 0, -1),
            *range(cores + 1, min(2 * cores, len(costs) + 1, most + 1)),
        )
        for last in dict.fromkeys((0, len(costs) % n) if n <= cores else (0,))
    ]
    best = min(tried, key=lambda schedule: round(schedule.wall_seconds(), 3))
    short = most < min(cores, len(costs))
    return dataclasses.replace(best, why=f"as {runs(most)} fit into {memory / 1e9:.1f} GB" if short else "")


def _widths(costs: Sequence[Cost], cores: int, at_once: int, last: int) -> tuple[int, ...]:
    """Cores of each run: equal parts for `at_once`, and for the `last` runs of the order; the longer get the rest."""
    order, widths = longest_first(costs), [1] * len(costs)
    rounds = len(order) - last
    for place, run in enumerate(order):
        slot, slots = (place % at_once, at_once) if place < rounds else (place - rounds, last)
        widths[run] = max(1, cores // slots + (slot < cores % slots))
    return tuple(widths)


def _most_at_once(costs: Sequence[Cost], memory: float) -> int:
    """How many of the largest runs fit into memory side by side, at least one."""
    free, count = MEMORY_SHARE * memory, 0
    for taken in sorted((cost.memory + PROCESS_MEMORY for cost in costs), reverse=True):
        free, count = free - taken, count + (free >= taken)
    return max(1, count)
