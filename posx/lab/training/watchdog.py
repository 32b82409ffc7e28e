"""End a process whose step never ends, so that it can be started again from its last checkpoint."""

from __future__ import annotations

import faulthandler
import os
import threading
from pathlib import Path
from typing import Any

from posx.errors import Stopped
from posx.lab.progress import duration
from posx.notices import say

#: A process is ended after LEAST_SECONDS without a beat, or after LONGER times its longest time between two beats if
#: that is more.
LEAST_SECONDS, LONGER = 600.0, 20.0
#: Seconds until the process ends if its report hangs too, for example because the disk hangs.
REPORT_SECONDS = 30.0


class Watchdog:
    """A thread that ends the process with exit code 75 if no `beat` follows another for too long.

    Time is counted in ticks of its own thread, not read off a clock. While a process is stopped or a machine sleeps,
    there are no ticks. Compiling and saving may take any time: the watch starts with the first beat, and pauses. The
    stacks of all threads are left in the run's `stacks.txt`. Native code that hangs with Python's lock is not seen.

    steps: most steps of training from one beat to the next; the first beat comes after one.
    """

    def __init__(self, folder: Path, steps: int = 1, tick: float = 1.0):
        self.folder, self.tick = folder, tick
        self.longer = max(LONGER, 2.0 * steps)
        self.ticks, self.longest = 0, 0
        self.watching = False
        self.over = threading.Event()

    def beat(self) -> None:
        """Report that steps have ended."""
        self.longest = max(self.longest, self.ticks)
        self.ticks, self.watching = 0, True

    def pause(self) -> None:
        """Stop the watch until the next beat."""
        self.watching = False

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()

    def _watch(self) -> None:
        while not self.over.wait(self.tick):
            self.ticks += 1
            if self.watching and self.ticks * self.tick > max(LEAST_SECONDS, self.longer * self.longest * self.tick):
                self._give_up()

    def _give_up(self) -> None:
        last = threading.Timer(REPORT_SECONDS, os._exit, [Stopped.exit_code])
        last.daemon = True
        last.start()
        where = self.folder / "stacks.txt"
        try:
            with open(where, "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            stacks = f"; the stacks of all threads are in {where}"
        except OSError:
            stacks = ""
        silent = f"{self.folder.name}: no step ended for {duration(self.ticks * self.tick)}{stacks}"
        say(f"posx: {Stopped(silent)}")
        os._exit(Stopped.exit_code)
