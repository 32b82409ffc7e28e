"""The runs of a sweep, made by an engine: failures are named, one never stops the others."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from posx import interrupts
from posx.errors import PosxError, Stopped
from posx.progress import Meter
from posx.sweeps.clock import Clock
from posx.sweeps.schedule import Schedule, longest_first
from posx.sweeps.tasks import STARTS, Task, Worker

LOOK_SECONDS, WAIT_SECONDS = 2.0, 0.2


W = TypeVar("W", bound=Worker)


class Engine(Protocol[W]):
    """Where runs are made, by workers of its kind."""

    @property
    def schedule(self) -> Schedule:
        """Of all tasks of the plan, by their numbers."""

    def next(self, waiting: Sequence[int], running: Sequence[W]) -> list[tuple[int, tuple[int, ...]]]:
        """Which of `waiting` start now, and on which cores: none where the engine chooses them."""

    def start(self, number: int, task: Task, cores: tuple[int, ...]) -> W:
        """The task at work, or waiting for its place there. Raises PosxError."""

    def got_on(self, worker: W, running: Collection[W]) -> None:
        """Told when a worker has made some progress."""

    def stop(self, workers: Collection[W]) -> None:
        """Ends them, with the time to save what they have done."""


def run_all(
    engine: Engine[W], tasks: Sequence[Task], todo: Iterable[int], title: str,
    hear: Callable[[Meter, str], object] = lambda meter, line: None,
    ended: Callable[[Task], object] = lambda task: None,
) -> dict[int, str]:  # fmt: skip
    """Runs those of `tasks` that are `todo`, by their numbers, as planned for all; returns {number: why it failed}.

    A place that is free takes the longest run that fits there. Shown are the time left for all, one line a finished
    run, and what `hear` makes of their lines; `ended` is called with each that has ended well, and may raise PosxError.
    """
    asked = set(todo)
    waiting = [number for number in longest_first(engine.schedule.costs) if number in asked]
    failed, running, stopped = dict[int, str](), dict[int, W](), list[int]()
    clock = Clock(engine.schedule, [task.progress() if n in asked else 1.0 for n, task in enumerate(tasks)])
    looked = began = time.monotonic()
    try:
        with Meter(title, 1.0) as meter:
            while waiting or running:
                for number, why in _launch(engine, tasks, waiting, running).items():
                    failed[number] = why
                    clock.end(number, failed=True)
                    meter.print(f"{tasks[number].folder.path.name} failed: {why}")
                time.sleep(WAIT_SECONDS)
                interrupts.check()
                over = {worker: code for worker in running.values() if (code := worker.code()) is not None}
                now = time.monotonic()
                if not over and now - looked < LOOK_SECONDS:
                    continue
                begun = [number for number, worker in running.items() if worker.begun()]
                clock.tick(now - looked, begun)
                looked = now
                _look(engine, running.values(), clock, functools.partial(hear, meter))
                for worker, code in over.items():
                    del running[worker.number]
                    name = worker.task.folder.path.name
                    if _goes_on(worker, code, stopped):
                        waiting.insert(0, worker.number)
                        meter.print(f"{name} was stopped, and goes on")
                        continue
                    if why := _why_failed(worker, code, ended):
                        failed[worker.number] = why
                    meter.print(f"{name} failed: {why}" if why else f"{name} done: {worker.task.outcome()}")
                    clock.end(worker.number, bool(why))
                begun = [number for number in begun if number in running]
                states = ", ".join(running[number].task.state() for number in begun)
                told = f"{len(asked) - len(waiting) - len(running)} of {len(asked)} runs  {states}"
                meter.update(_part(now - began, clock.seconds_left(begun)), told)
    finally:
        with interrupts.saved_first():  # a second SIGTERM must not cost them their save
            engine.stop(running.values())
    return failed


def _launch(engine: Engine[W], tasks: Sequence[Task], waiting: list[int], running: dict[int, W]) -> dict[int, str]:
    """Moves from `waiting` to `running` what the engine starts now; {number: why it could not be started}."""
    failed = {}
    for number, cores in engine.next(waiting, list(running.values())):
        waiting.remove(number)
        try:
            running[number] = engine.start(number, tasks[number], cores)
        except PosxError as error:
            failed[number] = str(error)
    return failed


def _look(engine: Engine[W], running: Collection[W], clock: Clock, hear: Callable[[str], object]) -> None:
    """Hears what every worker has said since, and how far it is."""
    for worker in running:
        worker.listen(hear)
        if clock.see(worker.number, worker.task.progress()):
            engine.got_on(worker, running)


def _goes_on(worker: Worker, code: int, stopped: list[int]) -> bool:
    """Whether it was stopped from outside, as a scheduler does, and is to be started once more; `stopped` says how
    often that was."""
    if code != Stopped.exit_code or stopped.count(worker.number) + 1 >= STARTS:
        return False
    stopped.append(worker.number)
    return True


def _part(spent: float, left: float | None) -> float:
    """The finished part, from seconds spent and left; 0 where nobody knows."""
    return 0.0 if left is None else spent / (spent + left)


def _why_failed(worker: Worker, code: int, ended: Callable[[Task], object]) -> str:
    """One line, empty where it did not."""
    if code:
        return worker.why(code)
    try:
        ended(worker.task)
    except PosxError as error:
        return str(error)
    return ""
