"""What a person sees while something runs: a bar on a terminal, plain lines in a log, always with the time left."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_SECONDS = 10.0


def duration(seconds: float) -> str:
    """ "1 h 02 min", "3 min 20 s", "12 s"."""
    whole = max(round(seconds), 0)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


class Meter:
    """Progress up to `total`; what was done at the `start`, by an earlier process, does not count for the time left."""

    def __init__(self, title: str, total: float, start: float = 0):
        self.title, self.total, self.start, self.done = title, total, start, start
        self.began = self.last_line = time.monotonic()
        self.console = Console(stderr=True)
        self.bar: Progress | None = None

    def __enter__(self) -> Meter:
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"))
            self.bar = Progress(*columns, console=self.console)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total, facts="")
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: float, facts: str) -> None:
        """Reports that `done` of the total are finished; a log gets a line every 10 s and at the end."""
        self.done = done
        text = f"{facts}  {self._left()}"
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=done, facts=text)
        elif now - self.last_line >= LINE_SECONDS or done >= self.total:
            self.last_line = now
            say(f"{self.title}  {text}")

    def print(self, text: str) -> None:
        """One line above the bar."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            say(text)

    def _left(self) -> str:
        spent, made = time.monotonic() - self.began, self.done - self.start
        if self.done >= self.total:
            return f"took {duration(spent)}"
        return f"{duration(spent / made * (self.total - self.done))} left" if made > 0 else ""


def say(text: str) -> None:
    """One line for the person; standard output stays free for results."""
    print(text, file=sys.stderr, flush=True)
