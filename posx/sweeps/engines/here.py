"""Run tasks in processes on this machine, each on its own cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from posx.data.store import cache_folder
from posx.files.atomic import disk_errors
from posx.machine.cores import let_go, on_cores, usable_cores, usable_memory
from posx.machine.guard import on_cpus
from posx.runs.folder import RunFolder
from posx.sweeps.schedule import Cost, Schedule, choose
from posx.sweeps.tasks import Engine, Task, Worker

#: Measures the speed of matrix products and stores it in argv[1], for numbers of type argv[2], within the hour.
MEASURE = (
    "import sys, pathlib, posx.machine.devices as d; d.machine_ceiling(pathlib.Path(sys.argv[1]), sys.argv[2], 3600)"
)


class Here(Engine):
    """This machine, for `jobs` tasks at once, or as many as are fastest if that is 0.

    An accelerator serves one task at a time unless `jobs` is given, and its tasks are bound to no cores. measured: the
    matrix products are measured before tasks compete for the cores.
    """

    def __init__(self, tasks: Sequence[Task], jobs: int, measured: bool = False):
        costs, self.measured = tuple(task.cost for task in tasks), measured
        self.cores = usable_cores() if on_cpus() else ()
        if self.cores:
            self.schedule = choose(costs, len(self.cores), usable_memory(), jobs)
        else:
            self.schedule = Schedule(costs, jobs or 1, jobs or 1, (0,) * len(costs))

    def __str__(self) -> str:
        return f"{self.schedule}; --jobs=N for another number"

    def run(self, tasks: Sequence[Task], todo: Collection[Task], *how: Any, **more: Any) -> dict[RunFolder, str]:
        """Measure the speed of each number of cores that a task gets, if asked to, then run the tasks."""
        chosen = {task.folder for task in todo}
        widths = {width for task, width in zip(tasks, self.schedule.widths, strict=True) if task.folder in chosen}
        for width in sorted(widths) if self.measured else ():
            run = tasks[0].run
            words = [str(cache_folder(run.data) / "machine"), run.model.dtype]
            with on_cores(self.cores[:width]):
                subprocess.run([sys.executable, "-P", "-c", MEASURE, *words], check=False, stdin=subprocess.DEVNULL)
        return super().run(tasks, todo, *how, **more)

    def start(self, number: int, task: Task, running: Collection[Worker]) -> Worker | None:
        """Start a task on the cores with the fewest processes, or return None if it must wait. Raises PosxError."""
        cores = self.free_cores(self.schedule.widths[number], [worker.cores for worker in running])
        if cores is None:
            return None
        worker = Worker(task, cores)
        words = [sys.executable, "-P", "-m", "posx.cli", *task.command(), "--stop_with_stdin"]
        log, output = worker.log, task.output or worker.log
        with disk_errors(output), open(log, "ab") as err, open(output, "ab") as out, on_cores(cores):
            worker.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment(task.cost, len(cores))
            )
        return worker

    def free_cores(self, width: int, taken: Collection[Sequence[int]]) -> tuple[int, ...] | None:
        """Return `width` cores for one more process, beside those on the cores `taken`; None if it must wait."""
        load = Counter(core for cores in taken for core in cores)
        free = sorted((core for core in self.cores if load[core] < self.schedule.sharing), key=load.__getitem__)
        return None if len(taken) == self.schedule.at_once or width > len(free) else tuple(sorted(free[:width]))

    def got_on(self, worker: Worker, running: Collection[Worker]) -> None:
        """Spread a process over all cores once it has its devices, if there are more processes than cores."""
        if len(running) > len(self.cores) > 0:
            let_go(worker.process.pid, self.cores)


def environment(cost: Cost, cores: int) -> dict[str, str]:
    """Return the variables of a process on some cores. They name the number of devices if it cannot be bound to cores.

    A number of devices that the user has set stays.
    """
    if hasattr(os, "sched_setaffinity") or not cores or "device_count" in os.environ.get("XLA_FLAGS", ""):
        return dict(os.environ)
    return {"JAX_NUM_CPU_DEVICES": str(cost.devices(cores)), **os.environ}
