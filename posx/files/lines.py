"""JSON lines: one object a line, appended as they come, readable after any kill."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posx.files.atomic import disk_errors, finite


def append(path: Path, row: Mapping[str, Any]) -> None:
    """One more line; a torn last line of a killed process is closed first. Raises OutOfMemoryError, WorkdirError."""
    line = json.dumps(finite(row)) + "\n"
    with disk_errors(path), open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode())


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of `path`; torn lines are left out, a missing file is empty."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows
