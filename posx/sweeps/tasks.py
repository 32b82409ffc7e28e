"""The tasks of a sweep, and how an engine runs them. A task that fails is named and never stops the others."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from posx import interrupts
from posx.errors import PosxError, Stopped
from posx.files.atomic import disk_errors
from posx.progress import Meter, say
from posx.runs.folder import RunFolder
from posx.sweeps.schedule import Schedule, longest_first

if TYPE_CHECKING:
    from posx.sweeps.evaluation import Evaluation
    from posx.sweeps.plan import Job

#: A command on the folder of a run. It logs to `log.txt` there, and prints results to its `output` if that is a path.
Task: TypeAlias = "Job | Evaluation"
#: A word of every task's command: its process runs alone, even if several processes were started together.
ALONE = "--processes=1"
#: How often a task is started if it is stopped from outside, as schedulers do.
STARTS = 3
#: Seconds from one look at exit codes to the next, and from one look at the progress of tasks to the next.
WAIT_SECONDS, LOOK_SECONDS = 0.2, 2.0
#: Seconds that tasks have to save and end. Schedulers leave a job as long between SIGTERM and SIGKILL.
STOP_SECONDS = 25.0
#: The meaning of a signal that ends a process before it can name a reason, by its exit code.
SIGNALS = {-9: "killed (often: out of memory)", -7: "a file that it reads was cut short, or memory failed (SIGBUS)"}


def log_file(task: Task) -> Path:
    """Return the log of a task, in a folder that exists by then. Raises PosxError if it cannot be written."""
    path = task.folder.path
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        open(path / "log.txt", "ab").close()
    return path / "log.txt"


class Worker:
    """A process at work on a task, by default a child of this one on some of its cores."""

    process: subprocess.Popen[bytes]
    begun = True  # at work, not waiting for a place

    def __init__(self, task: Task, cores: tuple[int, ...] = ()):
        self.task, self.cores, self.log = task, cores, log_file(task)
        self.heard, self.reason = self.log.stat().st_size, ""

    def code(self) -> int | None:
        """Return the exit code, None while the process runs."""
        return self.process.poll()

    def terminate(self) -> None:
        """Tell the process to save and end."""
        self.process.terminate()

    def kill_after(self, seconds: float) -> None:
        """Wait for the process to end, but end it after some seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def lines(self) -> list[str]:
        """Return the newly logged lines. The line of a failure becomes the `reason` instead."""
        with contextlib.suppress(OSError), open(self.log, "rb") as log:  # not kept open: there may be a thousand
            log.seek(self.heard)
            new = log.read()
            self.heard += (whole := new.rfind(b"\n") + 1)
            lines = new[:whole].decode(errors="replace").split("\n")[:-1]
            for line in lines:
                if line.startswith("posx: "):
                    self.reason = line.removeprefix("posx: ").removeprefix(f"{self.task.folder.path.name}: ")
            return [line for line in lines if not line.startswith("posx: ")]
        return []

    def why(self, code: int) -> str:
        """Return the reason of a failure, in one line."""
        return self.reason or f"exit code {code}: {SIGNALS.get(code, 'it crashed')}; its output is in {self.log}"


class Engine:
    """A place to run tasks. schedule: of all tasks, by their numbers."""

    schedule: Schedule

    def start(self, number: int, task: Task, running: Collection[Worker]) -> Worker | None:
        """Start a task beside the running workers, or return None if it must wait. Raises PosxError."""
        raise NotImplementedError

    def got_on(self, worker: Worker, running: Collection[Worker]) -> None:
        """Follow up on some progress of a worker."""

    def close(self) -> None:
        """Leave the engine, which has no workers any more."""

    def run(
        self, tasks: Sequence[Task], todo: Collection[Task], title: str, echo: bool = False,
        ended: Callable[[Task], object] = lambda task: None,
    ) -> dict[RunFolder, str]:  # fmt: skip
        """Run the tasks `todo`, as scheduled for all `tasks`, the longest first; return {folder: reason} of failures.

        echo: print the lines that tasks log. ended: called with each task that ends well; may raise PosxError.
        """
        say(str(self))
        work = RunningTasks(self, tasks, {task.folder for task in todo}, title)
        try:
            with work.meter:
                while work.waiting or work.running:
                    work.launch()
                    time.sleep(WAIT_SECONDS)
                    interrupts.check()
                    work.look(echo, ended)
        finally:
            with interrupts.saved_first():  # a second SIGTERM must not cost them their save
                work.stop()
                self.close()
        return work.failed


class RunningTasks:
    """The state of the tasks while they run. left: seconds that each task needs, as expected from its progress."""

    def __init__(self, engine: Engine, tasks: Sequence[Task], chosen: Collection[RunFolder], title: str):
        self.engine, self.tasks, self.schedule, self.count = engine, tasks, engine.schedule, len(chosen)
        self.waiting = [n for n in longest_first(self.schedule.costs) if tasks[n].folder in chosen]
        self.running, self.failed, self.starts = dict[int, Worker](), dict[RunFolder, str](), Counter[int]()
        self.parts = [task.progress() if task.folder in chosen else 1.0 for task in tasks]
        self.left = [self.schedule.seconds(n, 1 - part) if part < 1 else 0.0 for n, part in enumerate(self.parts)]
        self.meter, self.looked = Meter(title, self.schedule.wall_seconds(self.left)), time.monotonic()

    def launch(self) -> None:
        """Start the waiting tasks that the engine has a place for."""
        for number in list(self.waiting):
            try:
                worker = self.engine.start(number, self.tasks[number], self.running.values())
                if worker is None:
                    continue
                self.running[number] = worker
            except PosxError as error:
                self.end(number, str(error))
            self.waiting.remove(number)
            self.starts[number] += 1

    def look(self, echo: bool, ended: Callable[[Task], object]) -> None:
        """Read logs and progress from time to time, and as soon as a task ends."""
        codes = {number: code for number, worker in self.running.items() if (code := worker.code()) is not None}
        if not codes and time.monotonic() - self.looked < LOOK_SECONDS:
            return
        self.looked = time.monotonic()
        for number, worker in self.running.items():
            for line in worker.lines():
                if echo:
                    say(line)
            if (part := worker.task.progress()) > self.parts[number]:  # the start is over
                self.parts[number] = part
                self.left[number] = self.schedule.seconds(number, 1 - part) - self.schedule.costs[number].start
                self.engine.got_on(worker, self.running.values())
        for number, code in codes.items():
            worker, why = self.running.pop(number), ""
            if code == Stopped.exit_code and self.starts[number] < STARTS:
                self.waiting.insert(0, number)
                say(f"{worker.task.folder.path.name} was stopped, and goes on")
                continue
            try:
                if code:
                    why = worker.why(code)
                else:
                    ended(worker.task)
            except PosxError as error:
                why = str(error)
            self.end(number, why)
        begun = [number for number, worker in self.running.items() if worker.begun]
        told = f"{self.count - len(self.waiting) - len(self.running)} of {self.count} runs  "
        told += ", ".join(self.tasks[number].state() for number in begun)
        self.meter.update(self.meter.total - self.schedule.wall_seconds(self.left, begun), told)

    def end(self, number: int, why: str) -> None:
        """Report the end of a task. The work that a failed one leaves undone does not count as done."""
        task, name, before = self.tasks[number], self.tasks[number].folder.path.name, list(self.left)
        self.left[number] = 0.0
        if why:
            self.failed[task.folder] = why
            self.meter.total -= self.schedule.wall_seconds(before) - self.schedule.wall_seconds(self.left)
        say(f"{name} failed: {why}" if why else f"{name} done: {task.outcome()}")

    def stop(self) -> None:
        """End all workers, with the time to save."""
        for worker in self.running.values():
            worker.terminate()
        end = time.monotonic() + STOP_SECONDS
        for worker in self.running.values():
            worker.kill_after(max(end - time.monotonic(), 0))
