"""Start runs on other machines: the settings they take along, and the folder that all machines share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from posx.files.locks import holder
from posx.progress import say
from posx.sweeps.tasks import WAIT_SECONDS, Task

#: File systems on which appended lines, locks or memory maps are known to fail, by their names in /proc/mounts.
UNFIT = {
    "fuse.s3fs", "fuse.goofys", "fuse.gcsfuse", "fuse.rclone", "fuse.mount-s3", "fuse.blobfuse", "fuse.sshfs", "9p",
}  # fmt: skip
#: The first letters of environment variables that a run inherits from the sweep's process.
CARRIED = ("JAX_", "XLA_", "NPROC", "PYTHONPATH", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_", "HF_DATASETS_", "HF_ENDPOINT")
#: Seconds that a run waits for its folder. The system frees the lock of a lost machine when it notices, NFS after 90 s.
LOCK_SECONDS = 180.0


@dataclasses.dataclass
class Order:
    """The command of a run, with CPUs and environment variables, to be pickled and run on another machine."""

    words: list[str]
    folder: Path
    cpus: int
    settings: dict[str, str]
    began: str

    @classmethod
    def of(cls, task: Task, cpus: int, **more: Any) -> Self:
        """Return the order to run a task with the settings of this process. Raises PosxError."""
        kept = {k: v for k, v in os.environ.items() if k.startswith(CARRIED) and "TOKEN" not in k}
        return cls(task.command(), task.folder.path, cpus, kept, os.getcwd(), **more)

    @property
    def log(self) -> Path:
        """The log of the run."""
        return self.folder / "log.txt"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command once no process holds its folder. It ends with this process.

        It gets as many devices and threads as CPUs. It starts in the sweep's own working folder if that exists here,
        from which a user's own modules are found.
        """
        end, held = time.monotonic() + LOCK_SECONDS, self.folder / ".lock"
        while holder(held) and time.monotonic() < end:
            time.sleep(WAIT_SECONDS)
        devices = {"JAX_NUM_CPU_DEVICES": str(self.cpus), "NPROC": str(self.cpus)}
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "posx.cli", *self.words, "--stop_with_stdin"], stdin=subprocess.PIPE,
                stdout=log, stderr=log, env={**os.environ, **devices, **self.settings},
                cwd=self.began if os.path.isdir(self.began) else self.folder,
            )  # fmt: skip


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


def warn_of(folder: Path) -> None:
    """Print a notice if a folder is on a file system that several machines cannot share safely."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    places = [line.split()[1:3] for line in mounts]
    inside = [(len(p), kind) for p, kind in places if folder.resolve().is_relative_to(p.replace("\\040", " "))]
    kind = max(inside, default=(0, ""))[1]
    if kind in UNFIT:
        say(f"notice: {folder} is on {kind}, where appended lines and locks may not hold: use NFS, Lustre or the like")
