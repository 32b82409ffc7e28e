"""Run tasks on a Ray cluster. The runs of a lost machine resume elsewhere.

A task of Ray starts the run's own command and waits for it, so that XLA aborting the run's process does not end Ray's
worker. Folders are on a path that all machines share. Locks keep two processes out of one folder, and the run of a lost
machine resumes from its last checkpoint. Ray repeats a task whose machine is gone, posx one that was stopped (exit 75).
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posx.errors import ConfigError
from posx.lab import interrupts
from posx.lab.files.locks import holder
from posx.lab.progress import quantity
from posx.lab.runs.folder import RunFolder
from posx.lab.sweeps.engines.local import STOP_SECONDS, Engine, RemoteCommand, Worker, finish, stop
from posx.lab.sweeps.schedule import Schedule
from posx.lab.sweeps.tasks import Task
from posx.notices import say

#: File systems on which appended lines, locks or memory maps are known to fail, by their names in /proc/mounts.
UNFIT = {
    "fuse.s3fs", "fuse.goofys", "fuse.gcsfuse", "fuse.rclone", "fuse.mount-s3", "fuse.blobfuse", "fuse.sshfs", "9p",
}  # fmt: skip
#: How often Ray repeats a task whose machine was lost.
RETRIES = 5
#: Seconds that a cluster may take to answer.
CONNECT_SECONDS = 10.0


def run_remotely(command: RemoteCommand) -> tuple[int, str]:
    """Run a command as a task of Ray. Return its exit code and, if it could not be started, the reason."""
    here, sweep = platform.node(), command.folder.path.parent
    if not command.folder.asked_file.exists():
        return 4, f"{here} does not see {command.folder.path}. Sweeps on Ray need a folder that all machines share."
    if not holder(sweep / ".lock"):
        return 4, (
            f"{here} gets a lock that the sweep holds: on {sweep} locks do not hold between machines. Use a "
            "folder on NFS or Lustre."
        )
    with open(command.folder.log_file, "ab") as log:
        log.write(f"at work on {here}, process {os.getpid()}\n".encode())
    process = command.start()
    try:
        return finish(process), ""
    except KeyboardInterrupt:  # raised by ray.cancel
        stop(process, STOP_SECONDS)
        raise


class Remote(Worker):
    """A task of Ray."""

    def __init__(self, task: Task, ref: Any):
        super().__init__(task)
        self.ref, self.starts, self.begun = ref, 0, False

    def lines(self) -> list[str]:
        """Return the newly logged lines, and count the starts among them."""
        lines = super().lines()
        self.starts += sum(line.startswith("at work on ") for line in lines)
        self.begun = self.starts > 0
        return lines

    def code(self) -> int | None:
        """Return the exit code, None while the task waits or runs."""
        import ray

        if not ray.wait([self.ref], timeout=0)[0]:
            if self.starts <= RETRIES + 1:
                return None
            ray.cancel(self.ref, force=True)  # Ray counts lost machines, but not processes that ran out of memory
            self.reason = (
                f"it was started {self.starts} times and killed each time. Check the memory of its machine, and "
                "raise --cpus."
            )
            return 1
        try:
            code, why = ray.get(self.ref)
        except ray.exceptions.RayError as error:
            code, why = 1, " ".join(str(error).split())[:300]
        self.lines()
        self.reason = why or self.reason
        return code

    def terminate(self) -> None:
        """Cancel the task if it has begun. A waiting one ends with this process."""
        import ray

        self.lines()
        if self.begun:
            ray.cancel(self.ref)

    def kill_later(self, seconds: float) -> None:
        """Wait for the task to end, but end it after some seconds."""
        import ray

        if self.begun and not ray.wait([self.ref], timeout=seconds)[0]:
            ray.cancel(self.ref, force=True)


class RayEngine(Engine):
    """A Ray cluster, with `cpus` and `gpus` for each run.

    Args:
      address: as `ray.init` takes it. If it is empty, RAY_ADDRESS names the cluster. Without that, it is the cluster
        that was started here, else a new one of this machine alone.
      cpus: of a run.
      gpus: of a run, perhaps a fraction.
    """

    def __init__(self, address: str, cpus: int, gpus: float):
        self.address, self.cpus, self.gpus = address, cpus, gpus

    def run(self, tasks: Sequence[Task], *how: Any, **more: Any) -> dict[RunFolder, str]:
        """Connect to the cluster and run the tasks. Raises ConfigError if there is no cluster."""
        _warn_folder(tasks[0].folder.path.parent)
        self._connect()
        memory = max(int(task.cost.memory) for task in tasks)
        places = sum(self._places(node, memory) for node in self._nodes())
        if not places:
            asked = f"{self.cpus} CPUs, {self.gpus:g} GPUs and the {memory / 1e9:.1f} GB that the largest run needs"
            say(f"notice: no machine of the cluster has {asked}, so runs wait until one joins")
        at_once = max(1, places)
        self.schedule = Schedule(at_once, at_once, width=0)
        return super().run(tasks, *how, **more)

    def __str__(self) -> str:
        each = quantity(self.cpus, "CPU") + (f" and {self.gpus:g} GPUs" if self.gpus else "")
        return f"{self.schedule} on {len(self._nodes())} machines of Ray, {each} each"

    def start(self, task: Task) -> Worker:
        """Pass a task to Ray. Tasks without a place wait there: machines may join the cluster for them."""
        import ray

        options: dict[str, Any] = {
            "num_cpus": self.cpus, "num_gpus": self.gpus, "memory": int(task.cost.memory),
            "max_retries": RETRIES, "name": task.name,
        }  # fmt: skip
        worker = Remote(task, None)
        worker.ref = ray.remote(**options)(run_remotely).remote(RemoteCommand.from_task(task, self.cpus))
        return worker

    def close(self) -> None:
        """Disconnect from the cluster."""
        import ray

        ray.shutdown()

    def _connect(self) -> None:
        """Connect to the cluster. Raises ConfigError."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported anywhere
        import ray

        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        try:
            if host and port.isdecimal():  # Ray itself tries for minutes
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            with interrupts.keep_handlers():  # Ray takes SIGTERM for itself
                ray.init(
                    self.address or None, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
                )
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            told = " ".join(str(error).split())[:200]
            if Path("~/.ray/auth_token").expanduser().exists() and not os.environ.get("RAY_AUTH_MODE"):
                told += ". There is a token in ~/.ray: set RAY_AUTH_MODE=token for a cluster that needs it"
            raise ConfigError(f"--on ray:{self.address}: no Ray cluster there ({told})") from None

    def _nodes(self) -> list[dict[str, Any]]:
        """Return the machines of the cluster that are alive."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    def _places(self, node: dict[str, Any], memory: int) -> int:
        """Return how many runs of so much memory, in bytes, a machine has room for."""
        needs = {"CPU": self.cpus, "GPU": self.gpus, "memory": memory}
        return int(min(node["Resources"].get(name, 0) // need for name, need in needs.items() if need))


def _warn_folder(folder: Path) -> None:
    """Print a notice if a folder is on a file system that several machines cannot share safely."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    places = [line.split()[1:3] for line in mounts]
    inside = [(len(p), kind) for p, kind in places if folder.resolve().is_relative_to(p.replace("\\040", " "))]
    kind = max(inside, default=(0, ""))[1]
    if kind in UNFIT:
        say(f"notice: {folder} is on {kind}, which may not support appended lines and locks. Use NFS or Lustre.")
