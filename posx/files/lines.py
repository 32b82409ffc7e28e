"""Read and append JSON lines: one object a line, readable after any kill."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posx.errors import WorkdirError
from posx.files.atomic import disk_errors, finite
from posx.files.parse import parsed


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line. The torn last line of a killed process is ended first. Raises OutOfMemoryError, WorkdirError."""
    line = json.dumps(finite(row)) + "\n"
    with disk_errors(path), open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode())


def read(path: Path, notice: Callable[[str], object] = lambda words: None) -> list[dict[str, Any]]:
    """Return the objects of `path` in order, none if it is missing. Raises WorkdirError if it cannot be read.

    Broken lines are left out. `notice` is told how many, a torn last line aside.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise WorkdirError(f"{path} cannot be read: {error.strerror}") from None
    rows, broken = [], 0
    for number, line in enumerate(lines, 1):
        try:
            row = parsed(line)
        except ValueError:
            broken += bool(line.strip()) and number < len(lines)
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    if broken:
        notice(f"{path}: {broken} broken line{'s' * (broken > 1)} left out")
    return rows


def first(path: Path) -> dict[str, Any]:
    """Return the object on the first line of `path`, empty if there is none. Long files are not read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            row = parsed(file.readline())
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
