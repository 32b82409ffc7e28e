"""What a sweep has to do, and a worker that is doing a part of it, wherever that is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from posx.errors import Stopped
from posx.files.atomic import disk_errors
from posx.runs.folder import RunFolder
from posx.sweeps.schedule import Cost

#: Among the words of every task: whatever started the sweep, its runs are no parts of one.
ALONE = "--processes=1"

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


def log_file(task: Task) -> Path:
    """Where a worker's lines go; its folder is made. Raises PosxError where it cannot be written."""
    path = task.folder.path
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        open(path / "log.txt", "ab").close()
    return path / "log.txt"


class Worker:
    """A process at work on the task of a number: on some cores of this machine, or on another one."""

    def __init__(self, number: int, task: Task, cores: tuple[int, ...] = ()):
        self.number, self.task, self.cores = number, task, cores
        self.log = log_file(task)
        self.heard = self.log.stat().st_size
        self.rest = self.reason = ""

    def begun(self) -> bool:
        """Whether it is at work, and does not wait for its place."""
        return True

    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        raise NotImplementedError

    def listen(self, hear: Callable[[str], object]) -> None:
        """Passes on the lines it has logged since, but that of its failure, which becomes its `reason`."""
        with contextlib.suppress(OSError), open(self.log, "rb") as log:  # not kept open: there may be a thousand
            log.seek(self.heard)
            new = log.read()
            self.heard += len(new)
            self.rest += new.decode(errors="replace")
        *lines, self.rest = self.rest.split("\n")
        for line in lines:
            if line.startswith("posx: "):
                self.reason = line.removeprefix("posx: ").removeprefix(f"{self.task.folder.path.name}: ")
            else:
                hear(line)

    def why(self, code: int) -> str:
        """Why it failed, one line."""
        meaning = f"exit code {code}: {MEANINGS.get(code, 'it crashed')}; its output is in {self.log}"
        return self.reason or meaning
