"""Runs as tasks of Ray, on whatever machines a Ray cluster has: those of a node that is lost go on elsewhere.

A task starts the run's own command and waits for it, so that what a run does to its process (XLA may abort it) is no
matter of Ray's. Folders lie on a path that all machines share; locks keep two processes out of one, a lost node's run
resumes from its last checkpoint. Ray starts a task again whose machine is gone, posx one that was stopped (exit 75).
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from posx import interrupts
from posx.errors import ConfigError
from posx.files.locks import is_free
from posx.progress import say
from posx.sweeps.engines.shared import Machine, wait_for
from posx.sweeps.schedule import PROCESS_MEMORY, Schedule
from posx.sweeps.tasks import Task, Worker

#: How often Ray starts a task again whose machine was lost.
RETRIES = 5
#: How long runs have to save and end; and how often a task looks after its process.
STOP_SECONDS, LOOK_SECONDS = 25.0, 0.2
#: How long a cluster may take to answer.
CONNECT_SECONDS = 10.0


class Order:
    """What a task is to do, in words and paths: it is carried to the machine that does it."""

    def __init__(self, words: Sequence[str], folder: Path, output: Path | None, machine: Machine):
        self.words, self.folder, self.output, self.machine = list(words), folder, output, machine

    def __call__(self) -> tuple[int, str]:
        """Runs the command; its exit code, and why it could not be started. Stopped, it lets the run save."""
        here, log = platform.node(), self.folder / "log.txt"
        if not (self.folder / "asked.json").exists():
            return 4, f"{here} does not see {self.folder}: sweeps on Ray need a folder that all machines share"
        if is_free(self.folder.parent / ".lock"):
            return (
                4,
                f"{here} gets a lock that the sweep holds: on {self.folder.parent} locks do not hold between machines",
            )
        with open(log, "ab") as err, open(self.output or log, "ab") as out:
            err.write(f"at work on {here}, process {os.getpid()}\n".encode())
            err.flush()
            wait_for(self.folder)
            process = self.machine.start(self.words, self.folder, out, err)
            try:
                while process.poll() is None:
                    time.sleep(LOOK_SECONDS)
            except KeyboardInterrupt:  # what cancelling a task raises in it
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                raise
            return process.returncode, ""


def carry_out(order: Order) -> tuple[int, str]:
    return order()


class Remote(Worker):
    """A task of Ray."""

    def __init__(self, number: int, task: Task, options: dict[str, Any], machine: Machine):
        import ray

        super().__init__(number, task)
        order = Order(task.command(), task.folder.path, task.output, machine)
        self.starts = 0
        self.ref = ray.remote(**options)(carry_out).remote(order)

    def begun(self) -> bool:
        return self.starts > 0

    def listen(self, hear: Any) -> None:
        super().listen(lambda line: self._heard(line, hear))

    def _heard(self, line: str, hear: Any) -> None:
        if line.startswith("at work on "):
            self.starts += 1
        hear(line)

    def code(self) -> int | None:
        import ray

        if not ray.wait([self.ref], timeout=0)[0]:
            if self.starts <= RETRIES + 1:
                return None
            ray.cancel(self.ref, force=True)  # Ray counts lost machines, not those that ran out of memory
            self.reason = f"it was started {self.starts} times and killed each time: does it lack memory there?"
            return 1
        try:
            code, why = ray.get(self.ref)
        except ray.exceptions.RayError as error:
            code, why = 1, " ".join(str(error).split())[:300]
        self.listen(lambda line: None)
        self.reason = why or self.reason
        return code


def _memory(task: Task) -> int:
    """Bytes that a run's process takes."""
    return int(task.cost.memory + PROCESS_MEMORY)


def _check_there(address: str) -> None:
    """Raises ConfigError where nobody listens at HOST:PORT: Ray itself asks for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--on ray:{address}: no Ray cluster there ({error})") from None


class Cluster:
    """A Ray cluster, connected to for one sweep.

    address: as `ray.init` takes it, or nothing: the one that RAY_ADDRESS names or that was started here, else a new one
    of this machine alone. cpus, gpus: of a run. Raises ConfigError where there is no Ray, or none at the address.
    """

    def __init__(self, tasks: Sequence[Task], address: str, cpus: int, gpus: float):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported anywhere
        try:
            import ray
        except ImportError:
            raise ConfigError("--on ray needs Ray: pip install 'posx[ray]'") from None
        _check_there(address)
        try:
            with interrupts.kept():  # Ray takes SIGTERM for itself
                ray.init(address or None, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            told = " ".join(str(error).split())[:200]
            if Path("~/.ray/auth_token").expanduser().exists() and not os.environ.get("RAY_AUTH_MODE"):
                told += "; there is a token in ~/.ray: a cluster that wants it is reached with RAY_AUTH_MODE=token"
            raise ConfigError(f"--on ray:{address}: no Ray cluster there ({told})") from None
        self.machine, self.cpus, self.gpus = Machine.like_this(cpus), cpus, gpus
        memory = max(map(_memory, tasks))
        places = sum(self._room(node, memory) for node in ray.nodes() if node["Alive"])
        if not places:
            asked = f"{cpus} CPUs, {gpus:g} GPUs and the {memory / 1e9:.1f} GB that the largest run takes"
            say(f"notice: no machine of the cluster has {asked}: runs wait until one joins")
        costs = [task.cost._replace(rows=0) for task in tasks]
        at_once = max(1, places)
        self.schedule = Schedule(tuple(costs), at_once, at_once, (1,) * len(costs), bound=False)

    def _room(self, node: dict[str, Any], memory: int) -> int:
        """How many runs a machine holds that take so much memory, in bytes."""
        has, gpus = node["Resources"], self.gpus
        rooms = [has.get("CPU", 0) // self.cpus, *([has.get("GPU", 0) // gpus] if gpus else [])]
        rooms.append(has.get("memory", 0) // memory)
        return int(min(rooms))

    def __str__(self) -> str:
        import ray

        nodes = sum(node["Alive"] for node in ray.nodes())
        each = f"{self.cpus} CPUs" if self.cpus > 1 else "one CPU"
        return (
            f"{self.schedule} on {nodes} machines of Ray, {each}{f' and {self.gpus:g} GPUs' if self.gpus else ''} each"
        )

    def next(self, waiting: Sequence[int], running: Sequence[Remote]) -> list[tuple[int, tuple[int, ...]]]:
        """All: those for which there is no room wait with Ray, which may have machines join for them."""
        return [(number, ()) for number in waiting]

    def start(self, number: int, task: Task, cores: tuple[int, ...]) -> Remote:
        options = {
            "num_cpus": self.cpus, "num_gpus": self.gpus, "memory": _memory(task),
            "max_retries": RETRIES, "name": task.folder.path.name,
        }  # fmt: skip
        return Remote(number, task, options, self.machine)

    def got_on(self, worker: Remote, running: Collection[Remote]) -> None:
        """Ray chooses the machine, and posx no cores there."""

    def stop(self, workers: Collection[Remote]) -> None:
        import ray

        for worker in workers:
            worker.listen(lambda _: None)  # one may have begun since the last look
        refs = [worker.ref for worker in workers if worker.begun()]  # those that wait go when this process does
        for ref in refs:
            ray.cancel(ref)
        if refs:
            _, left = ray.wait(refs, num_returns=len(refs), timeout=STOP_SECONDS)
            for ref in left:
                ray.cancel(ref, force=True)
        ray.shutdown()
