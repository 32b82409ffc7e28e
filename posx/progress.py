"""What a person sees while something runs: a bar on a terminal, plain lines in a log, always with the time left."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_SECONDS = 10.0


def duration(seconds: float) -> str:
    """ "1 h 02 min", "3 min 20 s", "12 s"."""
    whole = max(round(seconds), 0)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


class Meter:
    """Progress up to `total`; what was done at the `start`, by an earlier process, does not count for the time left.

    On a terminal one line is drawn anew all the time, so that its times move while nothing is reported. A log gets a
    line every 10 s at most.
    """

    def __init__(self, title: str, total: float, start: float = 0):
        self.title, self.total, self.start, self.done = title, total, start, start
        self.opened = self.began = self.reported = self.last_line = time.monotonic()
        self.facts, self.wait = "", ""
        self.expected: float | None = None
        self.bar: Any = None

    def __enter__(self) -> Meter:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True)
        if console.is_terminal:
            title, line = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[meter]}"))
            self.bar = Progress(title, BarColumn(), line, console=console, refresh_per_second=4)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total, completed=self.done, meter=self)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def waiting(self, what: str, seconds: float | None = None) -> None:
        """Until the next report `what` goes on, no part of which can be counted, such as compiling: it is shown with
        the time that it takes, and with the `seconds` that it usually does, and does not count for the time left."""
        self.wait, self.expected, self.reported = what, seconds, time.monotonic()

    def update(self, done: float, facts: str) -> None:
        """Reports that `done` of the total are finished."""
        now = time.monotonic()
        if self.wait:  # what was done meanwhile counts no more than its time
            self.start, self.began, self.wait = self.start + done - self.done, self.began + now - self.reported, ""
        self.done, self.facts, self.reported = done, facts, now
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
        elif now - self.last_line >= LINE_SECONDS or done >= self.total:
            self.last_line = now
            say(f"{self.title}  {self}")

    def print(self, text: str) -> None:
        """One line above the bar."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            say(text)

    def __str__(self) -> str:
        """What the line says now."""
        since = time.monotonic() - self.reported
        if not self.wait:
            return f"{self.facts}  {self._left(since)}"
        usually = f" of about {duration(self.expected)}" if self.expected is not None else ""
        return f"{self.wait} {duration(since)}{usually}  {self._left(0.0)}"

    def _left(self, since: float) -> str:
        """The time left, `since` seconds after the last report."""
        if self.done >= self.total:
            return f"took {duration(self.reported - self.opened)}"
        made = self.done - self.start
        left = (self.reported - self.began) / made * (self.total - self.done) - since if made > 0 else None
        return "" if left is None else f"{duration(left)} left"


def say(text: str) -> None:
    """One line for the person; standard output stays free for results."""
    print(text, file=sys.stderr, flush=True)
