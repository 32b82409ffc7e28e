"""JSON from outside, and files of JSON lines: one object a line, readable after any kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posx.errors import WorkdirError
from posx.lab.files.atomic import disk_errors, finite_json


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for every fault in it, excessive nesting too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_line(values: Mapping[str, Any]) -> str:
    """Return `values` as one line of JSON, with NaN and infinities as text."""
    return json.dumps(finite_json(values))


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line. The torn last line of a killed process is ended first. Raises OutOfMemoryError, WorkdirError."""
    line = json_line(row) + "\n"
    with disk_errors(path), open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of `path` in order, none if it is missing. Raises WorkdirError if it cannot be read.

    Broken lines are left out.
    """
    return [row for _, row in number_lines(path) if row is not None]


def number_lines(path: Path) -> list[tuple[int, dict[str, Any] | None]]:
    """Return (number from 1, object) of each line that is not blank. A line that holds no object has None.

    A missing file has no lines. Raises WorkdirError if it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise WorkdirError(f"{path} cannot be read: {error.strerror}") from None
    return [(number, _object(line)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def first_object(path: Path) -> dict[str, Any]:
    """Return the object on the first line of `path`, empty if there is none. Long files are not read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return _object(file.readline()) or {}
    except OSError:
        return {}


def _object(line: str) -> dict[str, Any] | None:
    """Return the object on a line, None if it is broken."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
