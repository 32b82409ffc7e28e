"""Choose how many runs go at once and on how many cores each: a pure function of the plan and the machine.

One run is fastest on all cores. Many runs are fastest on one core each: a process uses several cores less efficiently
than several processes do, and its start does not divide. Both effects are fixed numbers here, not measurements of
earlier runs, so that a sweep that is started again chooses the same schedule.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from posx.lab.progress import quantity
from posx.lab.runs.cost import COMPILING
from posx.machine.cores import equal_parts

#: Seconds that a training step takes longer on several devices than its share of the work, as they wait for each other.
#: Measured on 4 cores at widths 96 to 256: 4 devices reach 0.65 to 0.93 of the speed of 4 one-core processes.
SYNC_SECONDS = 0.015
#: Seconds from the start of a process to its second step, spent on one core by Python and the compiler. Each evaluated
#: length is one more program to compile, see COMPILING.
START = 10.0
#: FLOP/s of a run on one core, to express costs in seconds: half the speed of a matrix product.
CORE_SPEED = 4e10
#: The fraction of a core's time that is left if processes take turns on it, since each evicts the data of the last.
TURNS = 0.97
#: The fraction of the memory that all processes may take.
MEMORY_SHARE = 0.8


class Cost(NamedTuple):
    """The expected cost of a run.

    The rows of a batch are sharded equally.

    Attributes:
      flops: of the whole run.
      lengths: windows to evaluate, each a program to compile.
      memory: bytes of the process.
      steps: of training.
      rows: of a batch; 0 can be sharded over any number of devices.
      seed: of the run.
      speed: of one core, in FLOP/s.
      start: seconds.
    """

    flops: float
    lengths: int
    memory: float
    steps: int = 0
    rows: int = 0
    seed: int = 0
    speed: float = CORE_SPEED
    start: float = START

    @property
    def order(self) -> tuple[int, float]:
        """A key that sorts runs in the order in which they start: lower seeds first, and the longest of a seed.

        A sweep that is stopped then has whole seeds. Runs that share programs start at different times, so that only
        the first has to compile them.
        """
        return self.seed, -self.flops

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
    """The number of processes at once, and the cores of each.

    Attributes:
      cores: of the machine.
      at_once: processes. If they are more than `cores`, they take turns on all cores.
      width: cores of each process; 0 binds processes to no cores.
      why: a reason to show.
    """

    cores: int
    at_once: int
    width: int
    why: str = ""

    def turns(self, running: int) -> float:
        """Return how many times longer each run takes if so many take turns on the cores."""
        return running / (TURNS * self.cores) if running > self.cores else 1.0

    def wall_seconds(self, seconds: Iterable[float]) -> float:
        """Return the expected wall time of runs that take these seconds each on their cores, in order of start."""
        waiting, running, now = [time for time in seconds if time > 0], list[float](), 0.0
        while waiting or running:
            places = self.at_once - len(running)
            running, waiting = running + waiting[:places], waiting[places:]
            step = min(running)
            now += step * self.turns(len(running))
            running = [time - step for time in running if time > step]
        return now

    def __str__(self) -> str:
        said = f"{quantity(self.at_once, 'run')} at a time"
        if self.width and self.at_once > self.cores:
            said += f", taking turns on {quantity(self.cores, 'core')}"
        elif self.width:
            said += f", {quantity(self.width, 'core')}" + " each" * (self.at_once > 1)
        return said + (f", {self.why}" if self.why else "")


def choose(costs: Sequence[Cost], cores: int, memory: float, jobs: int = 0) -> Schedule:
    """Return the schedule of least expected wall time that fits into `memory` bytes, of `jobs` runs at once if given.

    Every number of runs at once is tried, on equal parts of the cores. More runs than cores take turns, so that few
    cores wait for the last runs.
    """
    sizes = itertools.accumulate(sorted((cost.memory for cost in costs), reverse=True))
    most = max(1, sum(size <= MEMORY_SHARE * memory for size in sizes))
    short = f"as {quantity(most, 'run')} fit into {memory / 1e9:.1f} GB" if most < min(cores, len(costs)) else ""
    ordered = sorted(costs, key=lambda cost: cost.order)

    def equal_schedule(at_once: int) -> Schedule:
        return Schedule(cores, at_once, max(1, cores // at_once), "" if jobs else short)

    def wall_seconds(schedule: Schedule) -> float:
        return round(schedule.wall_seconds(cost.seconds(schedule.width) for cost in ordered), 3)

    numbers = [min(jobs, len(costs))] if jobs else range(min(2 * cores, len(costs), most), 0, -1)
    return min(map(equal_schedule, numbers), key=wall_seconds) if costs else equal_schedule(1)
