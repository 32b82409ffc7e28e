"""Checksums of stored objects and files, and the places that damaged files are moved to.

An object of JSON carries the checksum of its other fields, whatever their order and the spaces between them. A file
that was cut, edited or changed by the disk is neither used nor deleted. It is renamed to `NAME.damaged-DATE`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from posx.errors import Damaged
from posx.lab.files.atomic import disk_errors, finite_json, write_bytes, write_json
from posx.lab.files.lines import parse_json

#: The field of an object that holds the checksum of all others.
CHECKSUM = "checksum"


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the checksum that they have once they are stored as JSON."""
    kept = finite_json({name: value for name, value in values.items() if name != CHECKSUM})
    return kept | {CHECKSUM: _checksum(kept)}


def checksum_problem(values: Mapping[str, Any]) -> str:
    """Return why the checksum of a stored object is wrong, "" if it is right."""
    if CHECKSUM not in values:
        return "it has no checksum"
    kept = {name: value for name, value in values.items() if name != CHECKSUM}
    return "" if values[CHECKSUM] == _checksum(kept) else "it does not match its checksum, so it was edited or damaged"


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def write_checked(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` and their checksum as JSON. Raises OutOfMemoryError, WorkdirError."""
    write_json(path, with_checksum(values))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Args:
      path: the file.

    Returns:
      The object, its checksum included if it has one: `checksum_problem` checks that.

    Raises:
      Damaged: the file is missing or unreadable, or holds no object.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise Damaged(f"{path} cannot be read: it holds no object")
    return values


def read_checked(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file that matches its checksum. Raises Damaged for a file that does not."""
    values = read_object(path)
    if problem := checksum_problem(values):
        raise Damaged(f"{path}: {problem}")
    return values


def read_verified(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file that matches its checksum, empty if there is none."""
    try:
        return read_checked(path)
    except Damaged:
        return {}


def file_checksum(path: Path) -> str:
    """Return the sha256 of the bytes of a file, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def set_aside(path: Path) -> Path:
    """Move a damaged file or folder to `NAME.damaged-DATE` and return that place. Raises WorkdirError."""
    place = damaged_path(path)
    with disk_errors(path):
        path.rename(place)
    return place


def damaged_path(path: Path) -> Path:
    """Return the place that a damaged file is moved to now, which is free."""
    place = path.with_name(f"{path.name}.damaged-{time.strftime('%Y-%m-%d')}")
    number = 1
    while place.exists():
        number += 1
        place = place.with_name(f"{path.name}.damaged-{time.strftime('%Y-%m-%d')}-{number}")
    return place


def set_lines_aside(path: Path, numbers: Collection[int]) -> Path:
    """Move the lines of these numbers, from 1, to a new file beside `path`, and return it. Raises WorkdirError."""
    with disk_errors(path):
        every = path.read_bytes().split(b"\n")
        taken = [line for number, line in enumerate(every, 1) if number in numbers]
        kept = [line for number, line in enumerate(every, 1) if number not in numbers and line.strip()]
        write_bytes(place := damaged_path(path), b"\n".join([*taken, b""]))
        write_bytes(path, b"\n".join([*kept, b""]) if kept else b"")
    return place
