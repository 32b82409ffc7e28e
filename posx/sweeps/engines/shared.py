"""What runs on other machines take along, and what they need of the folder that all of them share."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from posx.files.locks import is_free
from posx.progress import say

#: File systems on which appended lines, locks or memory maps are known not to hold, by their names in /proc/mounts.
UNFIT = (
    "fuse.s3fs",
    "fuse.goofys",
    "fuse.gcsfuse",
    "fuse.rclone",
    "fuse.mount-s3",
    "fuse.blobfuse",
    "fuse.sshfs",
    "9p",
)

#: Environment variables that a run has from whoever started the sweep, by how their names begin.
CARRIED = ("JAX_", "XLA_", "NPROC", "PYTHONPATH", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_", "HF_DATASETS_", "HF_ENDPOINT")

#: How long a run waits for its folder: the system frees a lost machine's lock when it notices, NFS after 90 s.
PATIENCE, LOOK_SECONDS = 180.0, 0.2


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a run is given wherever it is made: CPUs, and the settings that this process has."""

    cpus: int
    began: str
    settings: dict[str, str]

    @classmethod
    def like_this(cls, cpus: int) -> Machine:
        kept = {k: v for k, v in os.environ.items() if k.startswith(CARRIED) and "TOKEN" not in k}
        return cls(cpus, os.getcwd(), kept)

    def environment(self) -> dict[str, str]:
        """Of a process with as many devices and threads as CPUs, on a machine where nobody binds it to any."""
        devices = {"JAX_NUM_CPU_DEVICES": str(self.cpus), "NPROC": str(self.cpus)}
        return {**os.environ, **devices, **self.settings}

    def start(self, words: Sequence[str], folder: Path, out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
        """The command on the run in `folder`, in a process that stops when this one is gone. It starts where the sweep
        was started, if that is there too: a user's own modules are found from there."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "posx.cli", *words, "--stop_with_stdin"], stdin=subprocess.PIPE,
            stdout=out, stderr=err, env=self.environment(), cwd=self.began if os.path.isdir(self.began) else folder,
        )  # fmt: skip


def wait_for(folder: Path) -> None:
    """Until no process holds the folder of a run, or that has lasted longer than it can when nobody is there."""
    end, held = time.monotonic() + PATIENCE, folder / ".lock"
    while held.exists() and not is_free(held) and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)


def warn_of(folder: Path) -> None:
    """One line where `folder` lies on a file system that several machines cannot share safely."""
    kind = kind_of(folder)
    if kind in UNFIT:
        say(f"notice: {folder} is on {kind}, where appended lines and locks may not hold: use NFS, Lustre or the like")


def kind_of(folder: Path) -> str:
    """The kind of file system that `folder` lies on, empty where the system does not tell."""
    try:
        mounts = [
            line.split()[1:3]
            for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        ]
    except OSError:
        return ""
    whole = folder.resolve()
    inside = [(len(place), kind) for place, kind in mounts if whole.is_relative_to(place.replace("\\040", " "))]
    return max(inside, default=(0, ""))[1]
