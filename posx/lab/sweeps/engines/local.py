"""Run tasks in processes on this machine, each on its own cores. A task that fails never stops the others.

Other engines differ in how they start a task: a `RemoteCommand` starts the same worker on another machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from posx.errors import PosxError, Stopped
from posx.lab import interrupts
from posx.lab.data.store import cache_folder
from posx.lab.files.atomic import disk_errors
from posx.lab.files.locks import holder
from posx.lab.progress import Meter, quantity
from posx.lab.runs.folder import RunFolder
from posx.lab.sweeps.schedule import Cost, Schedule, choose
from posx.lab.sweeps.tasks import Evaluation, Job, Task
from posx.machine.cores import bind_cores, release_process, usable_cores, usable_memory
from posx.machine.guard import uses_cpus
from posx.notices import say

#: How often a task is started if it is stopped from outside, as schedulers do.
STARTS = 3
#: Seconds between two checks of exit codes, and between two checks of the progress of tasks.
WAIT_SECONDS, LOOK_SECONDS = 0.2, 2.0
#: Seconds that tasks have to save and end. Schedulers give a job the same time between SIGTERM and SIGKILL.
STOP_SECONDS = 25.0
#: The meaning of a signal that ends a process before it can name a reason, by its exit code.
SIGNALS = {-9: "killed (often: out of memory)", -7: "a file that it reads was truncated, or memory failed (SIGBUS)"}
#: Measures the speed of matrix products and stores it in argv[1], for numbers of type argv[2], within the hour.
MEASURE = "import sys, pathlib as p, posx.lab.machine.ceiling as c; c.machine_ceiling(p.Path(sys.argv[1]), sys.argv[2])"
#: The first letters of environment variables that a run inherits from the sweep's process.
CARRIED = ("JAX_", "XLA_", "NPROC", "PYTHONPATH", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_", "HF_DATASETS_", "HF_ENDPOINT")
#: Seconds that a run waits for its folder. The system frees the lock of a lost machine when it notices, NFS after 90 s.
LOCK_SECONDS = 180.0


def log_file(task: Task) -> Path:
    """Return the log of a task, in a folder that exists by then. Raises PosxError if it cannot be written."""
    with disk_errors(task.folder.path):
        task.folder.path.mkdir(parents=True, exist_ok=True)
        task.folder.log_file.open("ab").close()
    return task.folder.log_file


def _process(
    words: Sequence[str], output: Path, log: Path, env: Mapping[str, str], cwd: str | Path | None = None
) -> subprocess.Popen[bytes]:
    """Start `posx.lab.sweeps.worker`, which ends with this process."""
    command = [sys.executable, "-P", "-m", "posx.lab.sweeps.worker", *words]
    with open(output, "ab") as out, open(log, "ab") as err:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=env, cwd=cwd)


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

    def kill_later(self, seconds: float) -> None:
        """Wait for the process to end, but end it after some seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def lines(self) -> list[str]:
        """Return the newly logged lines. The line of a failure becomes the `reason` instead."""
        lines: list[str] = []
        with contextlib.suppress(OSError), open(self.log, "rb") as log:  # not kept open: there may be a thousand
            log.seek(self.heard)
            new = log.read()
            self.heard += (whole := new.rfind(b"\n") + 1)
            lines = new[:whole].decode(errors="replace").split("\n")[:-1]
        for line in lines:
            if line.startswith("posx: "):
                self.reason = line.removeprefix("posx: ").removeprefix(f"{self.task.name}: ")
        return [line for line in lines if not line.startswith("posx: ")]

    def why(self, code: int) -> str:
        """Return the reason of a failure, in one line."""
        return self.reason or f"exit code {code}: {SIGNALS.get(code, 'it crashed')}; its output is in {self.log}"


class Engine:
    """A place to run tasks, as its schedule says, and the state of those that it runs.

    `left` holds the seconds that each task needs, as expected from its progress. `parts` holds the finished part of
    each task.
    """

    schedule: Schedule
    pace: float | None = None  # seconds that an expected second takes, None if that is not known

    def start(self, task: Task) -> Worker | None:
        """Start a task beside the `running` workers, or return None if it must wait. Raises PosxError."""
        raise NotImplementedError

    def follow_up(self, worker: Worker) -> None:
        """Follow up on some progress of a worker."""

    def close(self) -> None:
        """Leave the engine, which has no workers any more."""

    def run(
        self, tasks: Sequence[Task], title: str, echo: bool = False, ended: Callable[[Task], object] = lambda task: None
    ) -> dict[RunFolder, str]:
        """Run tasks, seed by seed and the longest first; return {folder: reason} of failures.

        Args:
          tasks: none of which has begun.
          title: of the meter.
          echo: print the lines that tasks log.
          ended: called with each task that ends well; may raise PosxError.
        """
        say(str(self))
        self.take(tasks, title)
        try:
            with self.meter:
                while self.waiting or self.running:
                    self.launch()
                    time.sleep(WAIT_SECONDS)
                    interrupts.raise_pending()
                    self.look(echo, ended)
        finally:
            with interrupts.save_first():  # a second SIGTERM must not cost them their save
                for worker in self.running:
                    worker.terminate()
                saving = [worker for worker in self.running if worker.begun]
                if saving and interrupts.was_interrupted():
                    runs = quantity(len(saving), "run")
                    say(f"notice: waiting up to {STOP_SECONDS:.0f} s for {runs} to save. Ctrl-C again ends at once")
                end = time.monotonic() + STOP_SECONDS
                for worker in self.running:
                    worker.kill_later(max(end - time.monotonic(), 0))
                self.close()
        return self.failed

    def take(self, tasks: Sequence[Task], title: str) -> None:
        """Take tasks, none of which has begun."""
        self.waiting, self.count = sorted(tasks, key=lambda task: task.cost.order), len(tasks)
        self.running, self.failed, self.starts = list[Worker](), dict[RunFolder, str](), Counter[RunFolder]()
        self.parts = {task.folder: task.progress() for task in self.waiting}
        self.left = {task.folder: self.seconds(task) for task in self.waiting}
        self.meter, self.looked = Meter(title, self.wall_seconds(), self.pace), time.monotonic()

    def seconds(self, task: Task) -> float:
        """Return the seconds that a task needs, its start among them."""
        return task.cost.seconds(self.schedule.width, 1 - self.parts[task.folder])

    def wall_seconds(self) -> float:
        """Return the seconds until all tasks have ended. Tasks at work go first."""
        begun = {worker.task.folder for worker in self.running if worker.begun}
        in_order = sorted(self.left, key=lambda folder: folder not in begun)
        return self.schedule.wall_seconds(self.left[folder] for folder in in_order)

    def launch(self) -> None:
        """Start the waiting tasks that there is a place for."""
        for task in list(self.waiting):
            try:
                worker = self.start(task)
                if worker is None:
                    continue
                self.running.append(worker)
            except PosxError as error:
                self.end(task, str(error))
            self.waiting.remove(task)
            self.starts[task.folder] += 1

    def look(self, echo: bool, ended: Callable[[Task], object]) -> None:
        """Read logs and progress from time to time, and as soon as a task ends."""
        codes = [(worker, code) for worker in self.running if (code := worker.code()) is not None]
        if not codes and time.monotonic() - self.looked < LOOK_SECONDS:
            return
        self.looked = time.monotonic()
        for worker in self.running:
            task = worker.task
            for line in worker.lines():
                if echo:
                    say(line)
            if (part := task.progress()) > self.parts[task.folder]:  # the start is over
                self.parts[task.folder] = part
                self.left[task.folder] = self.seconds(task) - task.cost.start
                self.follow_up(worker)
        for worker, code in codes:
            self.running.remove(worker)
            if code == Stopped.exit_code and self.starts[worker.task.folder] < STARTS:
                self.waiting.insert(0, worker.task)
                say(f"{worker.task.name} was stopped and resumes")
                continue
            why = worker.why(code) if code else ""
            try:
                if not code:
                    ended(worker.task)
            except PosxError as error:
                why = str(error)
            self.end(worker.task, why)
        told = f"{self.count - len(self.waiting) - len(self.running)} of {self.count} runs ended  "
        told += ", ".join(worker.task.state() for worker in self.running if worker.begun)
        self.meter.update(self.meter.total - self.wall_seconds(), told)

    def end(self, task: Task, why: str) -> None:
        """Report the end of a task. The work that a failed one leaves undone does not count as done."""
        before, self.left[task.folder] = self.wall_seconds(), 0.0
        if why:
            self.failed[task.folder] = why
            self.meter.total -= before - self.wall_seconds()
        say(f"{task.name} failed: {why}" if why else f"{task.name} done: {task.outcome()}")


class LocalEngine(Engine):
    """This machine. It runs `jobs` of the `tasks` at once; 0 stands for the fastest number.

    An accelerator serves one task at a time unless `jobs` is given, and its tasks are bound to no cores.
    """

    def __init__(self, tasks: Sequence[Task], jobs: int):
        self.cores = usable_cores() if uses_cpus() else ()
        if self.cores:
            self.schedule = choose([task.cost for task in tasks], len(self.cores), usable_memory(), jobs)
            self.pace = 1.0 if all(isinstance(task, Evaluation) and task.cost.flops for task in tasks) else None
        else:
            self.schedule = Schedule(jobs or 1, jobs or 1, width=0)

    def __str__(self) -> str:
        return f"{self.schedule}; --jobs=N for another number"

    def run(self, tasks: Sequence[Task], *how: Any, **more: Any) -> dict[RunFolder, str]:
        """Run tasks. If they train, the matrix products are measured first, before tasks compete for the cores."""
        if tasks and isinstance(tasks[0], Job):
            words = [str(cache_folder(tasks[0].run.data) / "machine"), tasks[0].run.model.dtype]
            with bind_cores(self.cores[: self.schedule.width]):
                subprocess.run([sys.executable, "-P", "-c", MEASURE, *words], check=False, stdin=subprocess.DEVNULL)
        return super().run(tasks, *how, **more)

    def start(self, task: Task) -> Worker | None:
        """Start a task on the cores with the fewest processes, or return None if it must wait. Raises PosxError."""
        if len(self.running) == self.schedule.at_once:
            return None
        load = Counter(core for worker in self.running for core in worker.cores)
        cores = tuple(sorted(sorted(self.cores, key=load.__getitem__)[: self.schedule.width]))
        worker = Worker(task, cores)
        output, env = task.output or worker.log, core_variables(task.cost, len(cores))
        with disk_errors(output), bind_cores(cores):
            worker.process = _process(task.prepare_worker(), output, worker.log, env)
        return worker

    def follow_up(self, worker: Worker) -> None:
        """Spread a process over all cores once it has its devices, if there are more processes than cores."""
        if len(self.running) > len(self.cores) > 0:
            release_process(worker.process.pid, self.cores)


def core_variables(cost: Cost, cores: int) -> dict[str, str]:
    """Return the variables of a process on some cores. They name the number of devices if it cannot be bound to cores.

    A number of devices that the user has set stays.
    """
    if hasattr(os, "sched_setaffinity") or not cores or "device_count" in os.environ.get("XLA_FLAGS", ""):
        return dict(os.environ)
    return {"JAX_NUM_CPU_DEVICES": str(cost.devices(cores)), **os.environ}


@dataclasses.dataclass
class RemoteCommand:
    """The worker of a run, to be pickled and started on another machine.

    Attributes:
      words: the arguments of the worker.
      folder: of the run.
      settings: environment variables that the command gets.
      began: the working folder of the sweep.
    """

    words: list[str]
    folder: RunFolder
    settings: dict[str, str]
    began: str

    @classmethod
    def from_task(cls, task: Task, cpus: int, **more: Any) -> Self:
        """Return the command that runs a task with the settings of this process, on `cpus` CPUs. Raises PosxError."""
        devices = {"JAX_NUM_CPU_DEVICES": str(cpus), "NPROC": str(cpus)}
        kept = {k: v for k, v in os.environ.items() if k.startswith(CARRIED) and "TOKEN" not in k}
        return cls(task.prepare_worker(), task.folder, devices | kept, os.getcwd(), **more)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command once no process holds its folder. It ends with this process.

        It starts in the sweep's own working folder if that exists here, from which a user's own modules are found.
        """
        end, held = time.monotonic() + LOCK_SECONDS, self.folder.path / ".lock"
        while holder(held) and time.monotonic() < end:
            time.sleep(WAIT_SECONDS)
        cwd, log = self.began if os.path.isdir(self.began) else self.folder.path, self.folder.log_file
        return _process(self.words, log, log, {**os.environ, **self.settings}, cwd)


def finish(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process and return its exit code. Signal handlers that run meanwhile can see it end."""
    while process.poll() is None:  # not wait(), inside of which poll() finds the process locked
        time.sleep(WAIT_SECONDS)
    return process.returncode


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Tell a process to save and end, and wait for at most some seconds."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
