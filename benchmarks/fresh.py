"""A call in a fresh process, where nothing is compiled, cached or allocated yet; it may fail without harm.

Run as a script, this file is that process: `fresh.py module:function '[arguments]'` prints the result as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "MemoryError", "not enough memory", "bad_alloc")
POLL_SECONDS = 0.02


def call(
    function: Callable[..., Any], *arguments: Any, limit_bytes: float = float("inf"), limit_seconds: float = 3600
) -> dict[str, Any]:
    """{"status": "ok", "value": ...}, or "oom", "timeout" or "failed" with the reason in "why".

    The function is found by its module and name, arguments and result travel as JSON. A process that comes to hold more
    than `limit_bytes` is killed and counts as out of memory.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        words = [sys.executable, __file__, name, json.dumps(arguments)]
        child = subprocess.Popen(words, stdout=out, stderr=errors, env=environment)
        try:
            stopped = _watch(child, limit_bytes, limit_seconds)
        finally:
            child.kill()
            child.wait()
        if stopped:
            return stopped
        if child.returncode == 0:
            return {"status": "ok", "value": json.loads(_lines(out)[-1])}
        last = (_lines(errors) or [f"exit code {child.returncode}"])[-1]
        killed = child.returncode == -9  # by the kernel, as nobody else here would
        oom = killed or any(word in line for line in _lines(errors) for word in NO_MEMORY)
        return {"status": "oom" if oom else "failed", "why": last[:300]}


def _watch(child: subprocess.Popen[bytes], limit_bytes: float, limit_seconds: float) -> dict[str, Any] | None:
    """None once the child has ended by itself, else why it must be stopped."""
    deadline = time.monotonic() + limit_seconds
    while True:
        try:
            child.wait(POLL_SECONDS)
            return None
        except subprocess.TimeoutExpired:
            if _resident(child.pid) > limit_bytes:
                return {"status": "oom", "why": f"held more than {limit_bytes / 2**30:g} GiB"}
            if time.monotonic() > deadline:
                return {"status": "timeout", "why": f"took more than {limit_seconds:g} s"}


def _resident(pid: int) -> int:
    """Bytes a process holds now; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return [line.rstrip() for line in file if line.strip()]


def main(name: str, arguments: str) -> None:
    module, _, function = name.partition(":")
    print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
