"""A step that never ends, seen and left: whoever started the run can start it again from its last checkpoint."""

from __future__ import annotations

import faulthandler
import os
import threading
from pathlib import Path
from typing import Any

from posx.errors import Stopped
from posx.progress import duration, say

#: A run is given up after this, or after so many times the longest that it ever took from one sign of life to the next.
LEAST_SECONDS, LONGER = 600.0, 20.0


class Watchdog:
    """Ends the process with exit code 75 where no `beat` follows another for too long.

    Time is counted in ticks of its own thread, not read off a clock: a process that was stopped, or a machine that
    slept, had none. Compiling takes what it takes: the first beat starts the watch. Where every thread stood is left in
    `stacks.txt` in the run's folder.
    """

    def __init__(self, folder: Path, tick: float = 1.0):
        self.folder, self.tick = folder, tick
        self.ticks, self.longest = 0, 0
        self.watching = False
        self.over = threading.Event()

    def beat(self) -> None:
        """A sign of life."""
        self.longest = max(self.longest, self.ticks)
        self.ticks, self.watching = 0, True

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()

    def _watch(self) -> None:
        while not self.over.wait(self.tick):
            self.ticks += self.watching
            if self.ticks * self.tick > max(LEAST_SECONDS, LONGER * self.longest * self.tick):
                self._give_up()

    def _give_up(self) -> None:
        where = self.folder / "stacks.txt"
        try:
            with open(where, "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            told = f"; where each thread stood is in {where}"
        except OSError:  # the disk may be what hangs
            told = ""
        silent = f"{self.folder.name}: no step ended for {duration(self.ticks * self.tick)}{told}"
        say(f"posx: {Stopped(silent)}")
        os._exit(Stopped.exit_code)
