"""Runs in processes on this machine, each on its cores."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from posx.errors import ConfigError
from posx.files.atomic import disk_errors
from posx.machine.backend import on_cpus
from posx.machine.cores import let_go, on_cores, usable_cores, usable_memory
from posx.sweeps.schedule import Cost, Schedule, choose
from posx.sweeps.tasks import Task, Worker, log_file

#: How long runs have to save and end when the sweep does, as long as schedulers leave a job between SIGTERM and kill.
STOP_SECONDS = 25.0


class Process(Worker):
    """A child of this process, which ends with it: it watches its standard input."""

    def __init__(self, number: int, task: Task, cores: tuple[int, ...]):
        super().__init__(number, task, cores)
        words = [sys.executable, "-P", "-m", "posx.cli", *task.command(), "--stop_with_stdin"]
        log = log_file(task)
        with disk_errors(log.parent), open(log, "ab") as err, open(task.output or log, "ab") as out, on_cores(cores):
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment(task.cost, len(cores))
            )

    def code(self) -> int | None:
        return self.process.poll()


@dataclasses.dataclass(frozen=True)
class Here:
    """This machine. cores: those to bind runs to, or none where they are not to be bound to any."""

    schedule: Schedule
    cores: tuple[int, ...]

    def next(self, waiting: Sequence[int], running: Sequence[Process]) -> list[tuple[int, tuple[int, ...]]]:
        return starts(waiting, [worker.cores for worker in running], self.schedule, self.cores)

    def start(self, number: int, task: Task, cores: tuple[int, ...]) -> Process:
        return Process(number, task, cores)

    def got_on(self, worker: Process, running: Collection[Process]) -> None:
        """It works, so it has its devices: where there are more processes than cores, now they take turns."""
        if len(running) > len(self.cores) > 0:
            let_go(worker.process.pid, self.cores)

    def stop(self, workers: Collection[Process]) -> None:
        for worker in workers:
            worker.process.terminate()
        patience = time.monotonic() + STOP_SECONDS
        for worker in workers:
            try:
                worker.process.wait(max(patience - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def here(tasks: Sequence[Task], jobs: int) -> Here:
    """This machine for these tasks, of `jobs` runs at once unless that is 0.

    Accelerators serve one run at a time, and none is bound to cores. Raises ConfigError for a number below 0.
    """
    if jobs < 0:
        raise ConfigError(f"--jobs={jobs} must be at least 1, or 0 for as many as this machine is fastest with")
    costs = [task.cost for task in tasks]
    if on_cpus():
        cores = usable_cores()
        return Here(choose(costs, len(cores), usable_memory(), jobs), cores)
    at_once = jobs or 1
    return Here(Schedule(tuple(costs), at_once, at_once, (1,) * len(costs), bound=False), ())


def starts(
    waiting: Sequence[int], running: Sequence[Sequence[int]], schedule: Schedule, cores: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Which of `waiting` start now, and on which of the `cores`: those with the fewest processes.

    running: the cores of each process that is at work.
    """
    taken = [core for held in running for core in held]
    found: list[tuple[int, tuple[int, ...]]] = []
    for number in waiting:
        free = sorted((core for core in cores if taken.count(core) < schedule.sharing), key=taken.count)
        width = schedule.widths[number] if cores else 0
        if len(running) + len(found) == schedule.at_once or (cores and not free):
            break
        if width <= len(free):
            found.append((number, tuple(sorted(free[:width]))))
            taken += free[:width]
    return found


def environment(cost: Cost, cores: int) -> dict[str, str]:
    """Of a process that is bound to some cores, or to none.

    It is told how many devices to make where the system cannot bind it; a user's own setting wins.
    """
    if hasattr(os, "sched_setaffinity") or not cores or "device_count" in os.environ.get("XLA_FLAGS", ""):
        return dict(os.environ)
    return {"JAX_NUM_CPU_DEVICES": str(cost.devices(cores)), **os.environ}


def measure_ceilings(folder: Path, dtype: str, cores: Sequence[int], widths: Iterable[int]) -> None:
    """Measures the machine before runs compete, once for each number of cores that they get, within the hour.

    In processes of their own, on as many of the `cores`; where runs are not bound to any, there are none.
    """
    measure = "c.matmul_ceiling(pathlib.Path(sys.argv[1]), sys.argv[2], max_age=3600)"
    code = f"import sys, pathlib, posx.machine.ceiling as c; {measure}"
    for width in sorted(set(widths)) if cores else [0]:
        with on_cores(cores[:width]):
            subprocess.run(
                [sys.executable, "-P", "-c", code, str(folder), dtype], check=False, stdin=subprocess.DEVNULL
            )
