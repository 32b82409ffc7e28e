"""Write files as a whole: readers see the old one or the new one, never a part."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from posx.errors import OutOfMemoryError, WorkdirError

#: The end of the name of a file that is being written.
PART = ".part"


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new binary file that replaces `path` once it is complete and on the disk. Raises OSError.

    It is beside `path`, under a name of this process's own, and is removed if writing fails.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with open(new, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        with contextlib.suppress(OSError):  # a disk that takes nothing has nothing to give back
            new.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Delete the unfinished files that killed processes left in `folder`."""
    for left in folder.glob(f".*.[0-9]*{PART}"):
        if not is_alive(left.name.removesuffix(PART).rpartition(".")[2]):
            with contextlib.suppress(OSError):
                left.unlink()


def is_alive(pid: str) -> bool:
    """Return whether a process of this machine has the number. It may be writing a file without a lock, as a table."""
    if not pid.isdecimal():  # not a name made here
        return True
    if os.name != "posix":  # there os.kill would end the process
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return True


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`. Raises OSError."""
    with replace_file(path) as file:
        file.write(data)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as JSON. Raises OutOfMemoryError if the disk is full, WorkdirError for another fault of it."""
    with disk_errors(path):
        write_bytes(path, (json.dumps(finite_json(values), indent=1) + "\n").encode())


def finite_json(value: Any) -> Any:
    """Return `value` with NaN and infinities as text, which every JSON parser reads."""
    if isinstance(value, Mapping):
        return {k: finite_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Express a failed write in one line: a full disk is exit 6, any other fault exit 4."""
    try:
        yield
    except OSError as error:
        if disk_full(error):
            raise OutOfMemoryError(
                f"the disk is full, so {path} could not be written. Free space and run the same command again."
            ) from None
        raise WorkdirError(f"{path} could not be written: {error.strerror}") from None


def disk_full(error: OSError) -> bool:
    """Return whether a disk, a quota or a limit on the size of files (`ulimit -f`) has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
