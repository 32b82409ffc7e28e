"""Progress for a person: a bar on a terminal, plain lines in a log, always with the time left."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posx import notices
from posx.notices import say

LINE_SECONDS = 10.0
#: The weight of the expected pace, as a part of the whole work, beside the pace of the finished work.
PRIOR = 0.05
#: A part of the whole work that is no progress: sums of the same times differ by as much.
ROUNDING = 1e-9
DAY, YEAR = 86400, 365.25 * 86400  # seconds


_IMPORTED = time.monotonic()


def duration(seconds: float) -> str:
    """Return seconds as text: "2.5 years", "3 d 04 h", "1 h 02 min", "3 min 20 s", "12 s"."""
    whole = max(round(seconds), 0)
    if whole >= YEAR:
        return f"{whole / YEAR:,.1f} years"
    if whole >= 2 * DAY:
        return f"{whole // DAY} d {whole % DAY // 3600:02d} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def quantity(number: int, noun: str) -> str:
    """Return "1 document" or "1,200 documents"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def group_by_reason(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each reason of (name of a run, reason): the name before it, or how many runs behind it."""
    groups: dict[str, list[str]] = {}
    for name, reason in pairs:
        groups.setdefault(reason, []).append(name)
    return [
        f"{reason.rstrip('.')} ({len(names)} runs, {names[0]} is the first)" if names[1:] else f"{names[0]}: {reason}"
        for reason, names in groups.items()
    ]


def size(count: float) -> str:
    """Return a number of bytes as text: "2.7 TB", "18.2 MB", "4 kB"."""
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= least:
            return f"{count / least:,.1f} {unit}"
    return f"{math.ceil(count / 1e3):,} kB"


class Meter:
    """Progress from 0 to `total`.

    On a terminal one line is drawn again all the time, so that its times move while nothing is reported. The lines of
    `say` appear above it. A log gets a line every 10 s at most. Between two steps of progress the time left only falls.

    pace: the expected seconds per unit of `total`. It gives the time left until something is finished, and then counts
    as PRIOR of the total. None: no time is shown until something is finished.
    """

    def __init__(self, title: str, total: float, pace: float | None = None):
        self.title, self.total, self.start, self.done = title, total, 0.0, 0.0  # start: from which time is counted
        self.pace = pace
        self.opened = self.began = self.reported = self.last_line = time.monotonic()
        self.facts = ""
        self.wait: tuple[str, float, float] | None = None  # for what, since when, until when as far as known
        self.bar: Any = None

    def __enter__(self) -> Meter:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        console = Console(stderr=True)
        # Not `console.is_terminal`: FORCE_COLOR asks for colours, not for a bar.
        if sys.stderr.isatty() and not notices.is_quiet():
            whole = Column(no_wrap=True, min_width=min(len(self.title), 40))
            title = TextColumn("{task.description}", markup=False, table_column=whole)
            line = TextColumn("{task.fields[meter]}", markup=False)
            self.bar = Progress(title, BarColumn(20), line, console=console, refresh_per_second=4)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total, completed=self.done, meter=self)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.live.transient = not self.facts  # nothing was reported: there was nothing to do
            self.bar.stop()

    def show_waiting(self, what: str, seconds: float | None = None) -> None:
        """Show that `what`, such as compiling, lasts until the next report and cannot be counted in parts.

        It is shown with its time so far, and with the rest of the `seconds` that it usually takes. Its time does not
        count for the time left.
        """
        now = time.monotonic()
        self.wait = what, now, now + (seconds or 0)

    def update(self, done: float, facts: str) -> None:
        """Report that `done` of the total are finished. If the number is the same as before, only `facts` change."""
        now = time.monotonic()
        if self.wait:  # neither the work done meanwhile nor its time counts
            waited, self.wait = now - self.wait[1], None
            self.start, self.began = self.start + done - self.done, self.began + waited
            self.reported += waited
        if done != self.done:
            self.reported = now
        self.done, self.facts = done, facts
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=self.total)
        elif now - self.last_line >= LINE_SECONDS or done >= self.total:
            self.last_line = now
            say(f"{self.title}  {self}")

    def __str__(self) -> str:
        """Return the present line: the time left first, as narrow terminals cut the end."""
        wait, now = self.wait, time.monotonic()
        if wait is None:
            return "  ".join(filter(None, (self._time_left(now), self.facts)))
        what, since, until = wait
        left = f", about {duration(until - now)} left" if until > now else ""
        return "  ".join(filter(None, (self._time_left(since), f"{what} {duration(now - since)}{left}")))

    def _time_left(self, now: float) -> str:
        """Return the time left for the whole, as it is `now`."""
        if self.done >= self.total:
            return f"took {duration(self.reported - self.opened)}"
        made, spent = self.done - self.start, self.reported - self.began
        if self.pace is not None:
            made, spent = made + PRIOR * self.total, spent + PRIOR * self.total * self.pace
        if made <= ROUNDING * self.total:
            return ""
        return f"{duration(spent / made * (self.total - self.done) - (now - self.reported))} left"


def process_seconds() -> float:
    """Return the seconds since this process started, or since this file was imported if the system does not tell."""
    try:
        facts = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(facts[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
