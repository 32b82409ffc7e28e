"""The runs of a sweep, each in a process of its own on its cores: failures are named, one never stops the others."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import IO, Protocol

from posx import interrupts
from posx.errors import ConfigError, PosxError, Stopped
from posx.files.atomic import disk_errors
from posx.machine.backend import on_cpus
from posx.machine.cores import let_go, on_cores, usable_cores, usable_memory
from posx.progress import Meter
from posx.runs.folder import RunFolder
from posx.sweeps.clock import Clock
from posx.sweeps.schedule import Cost, Schedule, choose, longest_first

LOOK_SECONDS, WAIT_SECONDS = 2.0, 0.2
#: How long runs have to save and end when the sweep does, as long as schedulers leave a job between SIGTERM and kill.
STOP_SECONDS = 25.0
#: How often a run is started that was stopped from outside.
STARTS = 3

#: What an exit code of a run means, for the summary.
MEANINGS = {
    2: "bad config", 3: "data", 4: "work folder or checkpoint", 5: "non-finite loss", 6: "out of memory or disk",
    7: "some lengths failed", Stopped.exit_code: "stopped again and again", 130: "interrupted",
    -9: "killed (often: out of memory)", -7: "a file that it reads was cut short, or memory failed (SIGBUS)",
}  # fmt: skip


class Task(Protocol):
    """One command of posx on one run's folder. What it prints goes to `log.txt` there, or its results to `output`."""

    @property
    def folder(self) -> RunFolder: ...

    @property
    def cost(self) -> Cost: ...

    @property
    def output(self) -> Path | None: ...

    def command(self) -> list[str]:
        """Its words; whatever has to lie in the folder first is put there. Raises PosxError."""

    def progress(self) -> float:
        """The finished part, 0 to 1."""

    def state(self) -> str:
        """What it is at, a few words."""

    def outcome(self) -> str:
        """What came out of it, a few words."""


def schedule_here(tasks: Sequence[Task], jobs: int) -> tuple[Schedule, tuple[int, ...]]:
    """The schedule of tasks for this machine, of `jobs` runs at once unless that is 0, and the cores to bind runs to.

    Accelerators serve one run at a time, and none is bound to cores. Raises ConfigError for a number below 0.
    """
    if jobs < 0:
        raise ConfigError(f"--jobs={jobs} must be at least 1, or 0 for as many as this machine is fastest with")
    costs = [task.cost for task in tasks]
    if on_cpus():
        cores = usable_cores()
        return choose(costs, len(cores), usable_memory(), jobs), cores
    at_once = jobs or 1
    return Schedule(tuple(costs), at_once, at_once, (1,) * len(costs), bound=False), ()


@dataclasses.dataclass
class Child:
    """A process at work on the task of a number, on some cores: none where it is not bound to any."""

    number: int
    task: Task
    cores: tuple[int, ...]
    process: subprocess.Popen[bytes]
    log: IO[str]
    rest: str = ""
    reason: str = ""

    def listen(self, hear: Callable[[str], object]) -> None:
        """Passes on the lines it has logged since, but that of its failure, which becomes its `reason`."""
        *lines, self.rest = (self.rest + self.log.read()).split("\n")
        for line in lines:
            if line.startswith("posx: "):
                self.reason = line.removeprefix("posx: ")
            else:
                hear(line)


def run_all(
    tasks: Sequence[Task], todo: Iterable[int], schedule: Schedule, cores: Sequence[int], title: str,
    hear: Callable[[Meter, str], object] = lambda meter, line: None,
) -> dict[int, str]:  # fmt: skip
    """Runs those of `tasks` that are `todo`, by their numbers, as planned for all; returns {number: why it failed}.

    `cores`: which ones, or none where processes are not to be bound to any. A place that is free takes the longest run
    that fits there. Shown are the time left for all, one line a finished run, and what `hear` makes of their lines.
    """
    asked = set(todo)
    waiting = [number for number in longest_first(schedule.costs) if number in asked]
    failed, running, stopped = dict[int, str](), dict[int, Child](), list[int]()
    clock = Clock(schedule, [task.progress() if number in asked else 1.0 for number, task in enumerate(tasks)])
    looked = began = time.monotonic()
    try:
        with Meter(title, 1.0) as meter:
            while waiting or running:
                for number, places in starts(waiting, [child.cores for child in running.values()], schedule, cores):
                    waiting.remove(number)
                    try:
                        running[number] = _start(number, tasks[number], places)
                    except PosxError as error:
                        failed[number] = str(error)
                        clock.end(number, failed=True)
                        meter.print(f"{tasks[number].folder.path.name} failed: {error}")
                time.sleep(WAIT_SECONDS)
                interrupts.check()
                over = [child for child in running.values() if child.process.poll() is not None]
                now = time.monotonic()
                if not over and now - looked < LOOK_SECONDS:
                    continue
                clock.tick(now - looked, list(running))
                looked = now
                for number, child in running.items():
                    child.listen(functools.partial(hear, meter))
                    if clock.see(number, child.task.progress()) and len(running) > len(cores) > 0:
                        let_go(child.process.pid, cores)  # it works, so it has its devices: now they take turns
                for child in over:
                    del running[child.number]
                    if _goes_on(child, stopped, meter):
                        waiting.insert(0, child.number)
                    else:
                        _ended(child, failed, meter)
                        clock.end(child.number, child.number in failed)
                ended, states = len(asked) - len(waiting) - len(running), [c.task.state() for c in running.values()]
                left = clock.seconds_left(list(running))
                part = 0.0 if left is None else (now - began) / (now - began + left)
                meter.update(part, f"{ended} of {len(asked)} runs  {', '.join(states)}")
    finally:
        with interrupts.saved_first():  # a second SIGTERM must not cost them their save
            _stop(running.values())
    return failed


def _stop(children: Collection[Child]) -> None:
    """Ends them, with the time to save what they have done."""
    for child in children:
        child.process.terminate()
    patience = time.monotonic() + STOP_SECONDS
    for child in children:
        try:
            child.process.wait(max(patience - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.log.close()


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


def _start(number: int, task: Task, cores: tuple[int, ...]) -> Child:
    """The task as a command of its own, which ends with this process: it watches its standard input."""
    path = task.folder.path
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "posx.cli", *task.command(), "--stop_with_stdin"]
    with disk_errors(path), open(path / "log.txt", "ab") as log, open(task.output or path / "log.txt", "ab") as out:
        told = open(log.name, encoding="utf-8", errors="replace")
        told.seek(0, os.SEEK_END)
        with on_cores(cores):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=log, env=environment(task.cost, len(cores))
            )
    return Child(number, task, cores, process, told)


def environment(cost: Cost, cores: int) -> dict[str, str]:
    """Of a process that is bound to some cores, or to none.

    It is told how many devices to make where the system cannot bind it; a user's own setting wins.
    """
    if hasattr(os, "sched_setaffinity") or not cores or "device_count" in os.environ.get("XLA_FLAGS", ""):
        return dict(os.environ)
    return {"JAX_NUM_CPU_DEVICES": str(cost.devices(cores)), **os.environ}


def _goes_on(child: Child, stopped: list[int], meter: Meter) -> bool:
    """Whether it was stopped from outside, as a scheduler does, and is to be started once more; `stopped` says how
    often that was."""
    if child.process.returncode != Stopped.exit_code or stopped.count(child.number) + 1 >= STARTS:
        return False
    stopped.append(child.number)
    child.log.close()
    meter.print(f"{child.task.folder.path.name} was stopped, and goes on")
    return True


def _ended(child: Child, failed: dict[int, str], meter: Meter) -> None:
    child.log.close()
    name, code = child.task.folder.path.name, child.process.returncode
    if code:
        meaning = f"exit code {code}: {MEANINGS.get(code, 'it crashed')}; its output is in {child.log.name}"
        failed[child.number] = child.reason or meaning
        meter.print(f"{name} failed: {failed[child.number]}")
    else:
        meter.print(f"{name} done: {child.task.outcome()}")


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
